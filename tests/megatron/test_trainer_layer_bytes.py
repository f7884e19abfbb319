"""What a layer of the trainer's GPT saves for backward, counted, against the planner's formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world
from torch.utils.checkpoint import checkpoint
from trainer_runs import TRAINER

import megatron_patches
from ds_usp import TokenLayout
from ds_usp.planner.formulas import layer_bytes
from ds_usp.training import prepare_deepspeed

assert TRAINER.is_dir()  # trainer_runs has put it on the path
GPT = """
    --num-layers 1 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16 --device cpu
    --micro-batch-size 2 --make-vocab-size-divisible-by 2
"""
Degrees = tuple[int, int, int]  # tp, ulysses, ring
MESHES: dict[int, list[Degrees]] = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
    4: [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)],
}


def saved_over_formula(ctx: RankContext, degrees: list[Degrees]) -> list[float]:
    """Counted bytes over the formula's, for all degrees, without and with recomputation."""
    prepare_deepspeed()
    return [
        _counted(*tp_ulysses_ring, recompute) / _predicted(*tp_ulysses_ring, recompute)
        for tp_ulysses_ring in degrees
        for recompute in ("none", "full")
    ]


def _flags(tp: int, ulysses: int, ring: int) -> list[str]:
    degrees = f"--tensor-model-parallel-size {tp} --ds-sequence-parallel-size {ulysses * ring}"
    return [*GPT.split(), *degrees.split(), "--ulysses-degree", str(ulysses)]


def _validated(tp: int, ulysses: int, ring: int) -> Any:
    from usp_trainer.arguments import parse
    from usp_trainer.validate_args import validate_and_derive

    args = validate_and_derive(parse(_flags(tp, ulysses, ring)), tp * ulysses * ring)
    args.padded_vocab_size = 256
    return args


def _predicted(tp: int, ulysses: int, ring: int, recompute: str) -> float:
    from usp_trainer.auto_args import planned_run

    run = planned_run(_validated(tp, ulysses, ring))
    return layer_bytes(run.workload(), replace(run.parallel_config(), recompute=recompute))


def _counted(tp: int, ulysses: int, ring: int, recompute: str) -> int:
    """Bytes of all storages that autograd saves, once each, parameters aside."""
    from megatron.core import parallel_state
    from usp_trainer.model import Layer, build_model

    from megatron_patches.megatron_core import cpu_fallbacks_patch_set
    from megatron_patches.megatron_core.groups import initialize_groups

    args = _validated(tp, ulysses, ring)
    parallel_state.destroy_model_parallel()
    megatron_patches.restore()
    cpu_fallbacks_patch_set().apply()
    layout = TokenLayout("zigzag", args.seq_length, ulysses, ring)
    mesh, groups = initialize_groups(
        tensor=tp, sequence=ulysses * ring, pipeline=1, ulysses=ulysses
    )
    model = build_model(args, mesh, layout, groups, torch.device("cpu")).bfloat16()
    layer = next(part for part in model.layers if isinstance(part, Layer))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shape = (layout.length(mesh.rank), args.micro_batch_size, args.hidden_size)
    x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True).clone()
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage  # alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = checkpoint(layer, x, use_reentrant=False) if recompute == "full" else layer(x)
    total = sum(storage.nbytes() for storage in saved.values())
    y.sum().backward()
    return total


@pytest.mark.parametrize("world", MESHES)
def test_saved_bytes_of_the_trainers_layer_are_the_formula(world: int) -> None:
    for ratios in fork_world(saved_over_formula, world, degrees=MESHES[world]):
        assert ratios == pytest.approx([1.0] * len(ratios), abs=0.01)
