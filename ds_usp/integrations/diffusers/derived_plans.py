"""Plans for classes that ds_usp has none for, from the plans of diffusers' own parallelism; made
by ``enable``, compared after the first pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.diffusers.pass_state import ATTENTION_KWARGS
from ds_usp.integrations.diffusers.plans import Kind, Plan, TokenDim, parameters_of

_LOCAL = ("attn2", "cross", "refiner")  # in paths of attention that stays on each rank
NO_PLAN = (
    "ds_usp has no plan for {}, and has made one from diffusers' own parallelism. Give one of your "
    "own (plan=...)"
)


class DerivedPlan(Plan):
    """A plan whose first pass ``ShardedTransformer`` compares with that of one process."""


# Note [plans of diffusers]
# diffusers' plan says which tensors are split and gathered, along which dims. It does not say which
# of them are text, which attention modules have all tokens, and which text that stays whole. Names
# decide that, and each rank computes its first pass as one process does, too, and compares.
def plan_of_diffusers(transformer: nn.Module) -> DerivedPlan | None:
    """The plan of a class by its ``_cp_plan``; None where it has none, or one that gathers nothing,
    or along another dim than 1, or splits a list."""
    entries: Mapping[str, Any] = getattr(type(transformer), "_cp_plan", None) or {}
    joined = [path for path, entry in entries.items() if not isinstance(entry, Mapping)]
    if not joined or not all(_is_served(entry) for entry in entries.values()):
        return None
    attention = [name for name, x in transformer.named_modules() if hasattr(x, "processor")]
    local = tuple(
        path
        for path in attention
        if any(part in path for part in _LOCAL)
        or getattr(transformer.get_submodule(path), "is_cross_attention", False)
    )
    is_cross = any("refiner" not in path for path in local)  # its text stays whole
    inputs: dict[str, dict[str, TokenDim]] = {}
    outputs: dict[str, tuple[TokenDim, ...]] = {}
    for path, entry in entries.items():
        # By the name of an argument, or by the index of an output.
        for key, split in entry.items() if isinstance(entry, Mapping) else ():
            is_text = "text" in str(key) or "txt" in str(key) or "encoder_hidden" in str(key)
            kind: Kind = "text" if is_text else "image"
            kind = "audio" if "audio" in path or "audio" in str(key) else kind
            dim = TokenDim(kind, split.split_dim, split.expected_dims)
            if split.split_output:
                outputs[path] = (*outputs.get(path, ()), dim)
            elif not ("mask" in str(key) or (is_text and is_cross)):
                inputs.setdefault(path, {})[str(key)] = dim
    kinds = {x.kind for entry in inputs.values() for x in entry.values()}
    order: tuple[Kind, ...] = ("text", "image") if "text" in kinds else ("image",)
    sharded = [path for path in attention if path not in local]
    names = parameters_of(transformer)
    return DerivedPlan(
        inputs=inputs,
        outputs=outputs,
        attention=dict.fromkeys(sharded, order),
        local=local,
        whole=tuple(x for x in names if x not in ATTENTION_KWARGS and x not in inputs.get("", ())),
        joined=joined[0],
        also_joined=dict.fromkeys(joined[1:], "image"),
    )


def _is_served(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return isinstance(entry, ContextParallelOutput) and entry.gather_dim == 1
    return all(isinstance(x, ContextParallelInput) for x in entry.values())


def check_first_pass(name: str, outputs: Any, expected: Any) -> None:
    """UnsupportedAttentionError if whole ``outputs`` of the mesh are not those ``expected`` of one
    process, which this rank has computed; ``name`` is the transformer's class."""
    for x, y in zip(tree_leaves(outputs), tree_leaves(expected), strict=True):
        if not isinstance(x, Tensor):
            continue
        limit = 1e-4 if x.element_size() >= 4 else 2e-2
        error = float((x.detach().double() - y.double()).norm() / y.double().norm())  # relative
        if not error <= limit:
            raise UnsupportedAttentionError(
                f"{NO_PLAN.format(name)}: its outputs are {error:.1e} off one process, more than "
                f"{limit:g}. Where dropout is on make the first pass after eval()"
            )
