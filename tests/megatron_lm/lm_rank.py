"""One rank of a run: training with weights that depend on names alone, and a record of it."""

import hashlib
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from programs import RankRequest

from megatron_patches import Patch, PatchSet, run
from megatron_patches.megatron_core.cpu_patch_table import training_without_gpu, without_gpu
from megatron_patches.megatron_lm import missing

STD = 0.1


@dataclass(frozen=True)
class Request(RankRequest):
    """One run of Megatron-LM's ``pretrain_gpt.py``; not patched it gets what CPUs need alone."""


@dataclass
class Recorder:
    """Losses, norms and evaluations, as this rank sees them."""

    seen: dict[str, Any] = field(
        default_factory=lambda: {"losses": [], "norms": [], "evaluations": []}
    )

    def run(self, request: Request) -> None:
        wraps = {
            "megatron.training.training:training_log": self._log,
            "megatron.training.training:evaluate": self._evaluate,
        }
        if not request.own_weights:
            wraps["megatron.training.training:get_model"] = set_weights
        pairs = (*wraps.items(), *request.extra)
        PatchSet("recorder", (Patch(target, fn, "wrap") for target, fn in pairs)).apply()
        if request.patched:
            run.main([request.script, *request.flags])
        else:
            run_unpatched(request)

    def _log(self, original: Any, losses: Any, *args: Any, **kwargs: Any) -> Any:
        if "lm loss" in losses:
            loss = losses["lm loss"]
            self.seen["losses"].append(float(loss[0] / loss[1] if loss.numel() == 2 else loss))
        norm = args[6]
        self.seen["norms"].append(None if norm is None else float(norm))
        return original(losses, *args, **kwargs)

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if "lm loss" in result[0]:
            self.seen["evaluations"].append(float(result[0]["lm loss"]))
        return result


def run_unpatched(request: Request) -> None:
    """Run the script as it is, on CPUs."""
    helpers = Patch("megatron.core.datasets.utils:compile_helpers", missing.compile_helpers, "wrap")
    PatchSet("cpu", (*without_gpu(), *training_without_gpu(), helpers)).apply()
    sys.argv = [request.script, *request.flags]
    run.run_as_main(Path(request.script))


def set_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Initial weights that depend on a parameter's name alone, not on its sharding."""
    chunks = original(*args, **kwargs)
    for chunk in chunks:
        layers = {
            name: module.layer_number - 1
            for name, module in chunk.named_modules()
            if type(module).__name__ == "TransformerLayer"
        }
        for name, parameter in chunk.named_parameters():
            with torch.no_grad():
                parameter.copy_(keyed_weight(plain_name(name, layers), parameter))
    return chunks


def plain_name(name: str, layers: dict[str, int]) -> str:
    """The parameter's name in a model without a pipeline and without expert parallelism.

    Args:
        name: as ``named_parameters`` gives it.
        layers: the number of each layer in the whole model, from 0, by its name in this one.
    """
    from megatron.core import parallel_state
    from megatron.training import get_args

    held = (get_args().num_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first = held * parallel_state.get_expert_model_parallel_rank()
    name = re.sub(r"(?<=local_experts\.)\d+", lambda number: str(first + int(number.group())), name)
    for layer, number in layers.items():
        if name.startswith(f"{layer}."):
            return f"decoder.layers.{number}{name[len(layer) :]}"
    name = re.sub(r"^(module\.)*", "", name)
    if name == "output_layer.weight" and not get_args().untie_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return name


def keyed_weight(name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This tensor-parallel rank's shard of a weight that its name alone decides."""
    from megatron.core import parallel_state
    from megatron.training import get_args

    args = get_args()
    split = getattr(parameter, "tensor_model_parallel", False) or "softmax_offset" in name
    dim = parameter.partition_dim if getattr(parameter, "partition_dim", -1) >= 0 else 0
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    shards, rank = (group.size(), group.rank()) if split else (1, 0)
    shape = list(parameter.shape)
    shape[dim] *= shards
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")
    full = STD * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "norm" in name and name.endswith("weight"):
        full += 1
    if name.endswith("A_log"):
        full -= 4  # decays near 1: with those of the initialization states are soon forgotten
    halves = 2 if args.swiglu and "linear_fc1" in name else 1
    parts = full.chunk(halves, dim)  # the gate and the other half are cut for themselves
    return torch.cat([part.chunk(shards, dim)[rank] for part in parts], dim)
