"""One rank of a run: training with weights that depend on names alone, and a record of it."""

import hashlib
import importlib
import re
import runpy
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from mds_edits import Trace, edit
from programs import RankRequest

import megatron_patches
from megatron_patches import Patch, PatchSet, run
from megatron_patches.megatron_deepspeed.state import get_state

STD = 0.1


@dataclass(frozen=True)
class Request(RankRequest):
    """One run of Megatron-DeepSpeed's ``pretrain_gpt.py``.

    Args:
        without: a function of megatron_patches.megatron_deepspeed that does nothing, as
            ``file.name``.
        watch_dropout: record which elements the first dropouts drop.
        fake_flash: a stub of the flash-attn package, by torch.
        applied_before: apply the patches once before the run does.
        trace: record which lines of the checkout run.
        edited: a function of the checkout that raises, as ``package.module:Class.name``.
    """

    without: str = ""
    watch_dropout: bool = False
    fake_flash: bool = False
    applied_before: bool = False
    trace: bool = False
    edited: str = ""


@dataclass
class Recorder:
    """Losses, norms and evaluations, as this rank sees them."""

    seen: dict[str, Any] = field(
        default_factory=lambda: {"losses": [], "norms": [], "evaluations": []}
    )

    def run(self, request: Request) -> None:
        wraps = {
            "megatron.training:training_log": self._log,
            "megatron.training:evaluate": self._evaluate,
        }
        if not request.own_weights:
            wraps["megatron.training:get_model"] = set_weights
        if request.watch_dropout:
            self.seen["dropped"] = []
            wraps["torch.nn.functional:dropout"] = self._dropout
        if request.fake_flash:
            self.seen["flash_calls"] = 0
            self._install_flash()
        if request.without:
            file, name = request.without.split(".")
            module = importlib.import_module(f"megatron_patches.megatron_deepspeed.{file}")
            setattr(module, name, lambda original, *args: original(*args))
        if request.applied_before:
            megatron_patches.apply("megatron_deepspeed")
        pairs = (*wraps.items(), *request.extra)
        PatchSet("recorder", (Patch(target, fn, "wrap") for target, fn in pairs)).apply()
        if request.edited:
            self._edit(request)
        trace = Trace(str(Path(request.script).parent))
        self.seen["lines"] = trace.lines
        with trace if request.trace else nullcontext():
            self._train(request)

    def _edit(self, request: Request) -> None:
        file = edit(request.edited, Path(request.script).parent, request.folder)
        if file.name == Path(request.script).name:
            runs = run.run_as_main
            run.run_as_main = lambda _: runs(file)

    def _train(self, request: Request) -> None:
        if request.patched:
            run.main([request.script, *request.flags])
            self.seen["sent"] = sum(get_state().mesh.ledger.bytes.values())
        else:
            sys.argv = [request.script, *request.flags]
            runpy.run_path(request.script, run_name="__main__")

    def _dropout(self, original: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = original(x, *args, **kwargs)
        if len(self.seen["dropped"]) < 6:
            self.seen["dropped"].append(tuple((out == 0).flatten()[:512].tolist()))
        return out

    def _install_flash(self) -> None:
        """Megatron-DeepSpeed's imports of flash-attn 2, for sequences of one length."""
        import torch.nn.functional as F
        from megatron.model import transformer

        def flash_attn_varlen_func(
            q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, length: int, _: int, dropout_p: float,
            softmax_scale: float | None, causal: bool,
        ) -> torch.Tensor:  # fmt: skip
            self.seen["flash_calls"] += 1
            groups = q.shape[1] // k.shape[1]
            q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, None, dropout_p, causal)
            return out.transpose(1, 2).flatten(0, 1)

        package = ModuleType("flash_attn")
        package.__spec__ = ModuleSpec("flash_attn", None)
        sys.modules["flash_attn"] = package
        transformer.flash_attn_varlen_func = flash_attn_varlen_func
        transformer.FlashAttentionBuilder = None  # as it is on CUDA

    def _log(self, original: Any, losses: Any, *args: Any, **kwargs: Any) -> Any:
        engine = args[9][0]
        self.seen["losses"].append(float(losses["lm loss"]))
        norm = engine.get_global_grad_norm()
        self.seen["norms"].append(None if norm is None else float(norm))
        return original(losses, *args, **kwargs)

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if "lm loss" in result[0]:
            self.seen["evaluations"].append(float(result[0]["lm loss"]))
        return result


def set_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Initial weights that depend on a parameter's name alone, not on its sharding."""
    from megatron import get_args

    models = original(*args, **kwargs)
    for name, parameter in models[0].named_parameters():
        _set(plain_name(name, get_args().num_layers), parameter)
    return models


def plain_name(name: str, num_layers: int) -> str:
    """The parameter's name in a model without a pipeline."""
    name = name.removeprefix("module.")
    for prefix in ("language_model.embedding.", "language_model.encoder.", "language_model."):
        name = name.removeprefix(prefix)
    name = name.removeprefix("tied_modules.embed.")
    match = re.match(r"(\d+)\.(.*)", name)
    if not match:
        return name
    index, rest = int(match[1]) - 2, match[2]  # before the layers: a cast and the embedding
    if index < 0:
        return rest
    if index < num_layers:
        return f"layers.{index}.{rest}"
    return f"final_layernorm.{rest}" if index == num_layers else f"output_layer.{rest[8:]}"


def _set(name: str, parameter: torch.nn.Parameter) -> None:
    import deepspeed

    if "layernorm" in name:
        return
    context = deepspeed.zero.GatheredParameters(
        [parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")
    )
    with context, torch.no_grad():
        if parameter.numel():
            parameter.copy_(keyed_weight(name, parameter, STD))


def keyed_weight(name: str, parameter: torch.nn.Parameter, std: float) -> torch.Tensor:
    """This tensor-parallel rank's shard of a weight that its name alone decides."""
    from megatron import get_args
    from megatron.core import parallel_state

    args = get_args()
    split = getattr(parameter, "tensor_model_parallel", False)
    dim = parameter.partition_dim if split else 0
    shards, rank = (
        (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        if split
        else (1, 0)
    )
    shape = list(parameter.shape)
    shape[dim] *= shards
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    full = std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    sections = [shape[dim]]
    if "query_key_value" in name:
        kv = args.kv_channels * args.num_key_value_heads
        sections = [args.kv_channels * args.num_attention_heads, kv, kv]
    if "dense_h_to_4h" in name and args.swiglu:
        sections = [shape[dim] // 2] * 2
    return torch.cat([x.chunk(shards, dim)[rank] for x in full.split(sections, dim)], dim)
