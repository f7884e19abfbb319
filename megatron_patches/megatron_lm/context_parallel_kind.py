"""Who computes context parallelism: ``--cp-comm-type``, ``--ulysses-degree`` and their defaults.

| ``--cp-comm-type`` | ``--ulysses-degree`` | context parallelism |
|---|---|---|
| not given, or ``usp`` | given or not | USP in all layers |
| one entry a layer, some ``usp`` | given or not | USP in those layers |
| others alone | not given | TransformerEngine's own, unpatched |
| others alone | given | refused |

With one context-parallel rank the flag has no effect, as in Megatron-LM. After :func:`resolve` any
code may ask the other functions; nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_usp.errors import ConfigError
from megatron_patches.megatron_core.context_parallel import USP

TRANSFORMER_ENGINE_KINDS = ("p2p", "a2a", "all_gather", "a2a+p2p")
_FIX = f"Leave --cp-comm-type out, or set it to {USP}"


class NotGiven(list[str]):
    """The default of ``--cp-comm-type``, of another type than a list that the user gives."""


def resolve(args: Any) -> None:
    """Set ``args.cp_comm_type`` to what the layers are built with.

    Raises:
        ConfigError: kinds that are unknown, that contradict other flags, or that are not one a
            layer.
    """
    was_given = not isinstance(args.cp_comm_type, NotGiven)
    args.cp_comm_type = list(args.cp_comm_type)  # plain, because checkpoints pickle the arguments
    if args.context_parallel_size == 1:
        return
    if not was_given:
        args.cp_comm_type = [USP]
    kinds = args.cp_comm_type
    _refuse_unknown(kinds)
    _refuse_wrong_number(kinds, args.num_layers)
    others = [kind for kind in kinds if kind != USP]
    if not others:
        return
    text = f"--cp-comm-type {' '.join(kinds)}"
    if args.transformer_impl != "transformer_engine":
        raise ConfigError(
            f"{text}: {others[0]} is TransformerEngine's context parallelism, and "
            f"--transformer-impl is {args.transformer_impl}. {_FIX}"
        )
    if USP in kinds:
        return
    usp_flags = {
        f"--ulysses-degree {args.ulysses_degree}": args.ulysses_degree is not None,
        f"--usp-kernel {args.usp_kernel}": args.usp_kernel != "auto",
    }
    for flag, is_given in usp_flags.items():
        if is_given:
            raise ConfigError(
                f"{text} is TransformerEngine's own context parallelism, and {flag} is for USP. "
                f"{_FIX}, or leave {flag.split()[0]} out"
            )


def uses_usp(args: Any) -> bool:
    """Whether some layer computes attention over context-parallel ranks by USP."""
    return args.context_parallel_size > 1 and USP in args.cp_comm_type


def attends_on_one_rank(args: Any) -> bool:
    """Whether USP computes attention although one rank holds a sequence: to keep its results."""
    return bool(args.context_parallel_size == 1 and args.usp_recompute == "attention")


def is_mixed(args: Any) -> bool:
    """Whether other layers keep TransformerEngine's context parallelism."""
    return uses_usp(args) and any(kind != USP for kind in args.cp_comm_type)


def _refuse_unknown(kinds: Sequence[str]) -> None:
    all_kinds = (USP, *TRANSFORMER_ENGINE_KINDS)
    for kind in kinds:
        if kind not in all_kinds:
            raise ConfigError(f"--cp-comm-type {kind} is unknown; there are {', '.join(all_kinds)}")


def _refuse_wrong_number(kinds: Sequence[str], layers: int | None) -> None:
    if layers is not None and len(kinds) not in (1, layers):
        raise ConfigError(
            f"--cp-comm-type has {len(kinds)} entries, and the model {layers} layers. Give one "
            "entry for all layers, or one a layer"
        )
