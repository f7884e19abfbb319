"""What a layer of the trainer's GPT saves for backward, counted, against the planner's formula."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world
from torch.utils.checkpoint import checkpoint
from trainer_runs import TRAINER

import megatron_patches
from ds_usp import TokenLayout
from ds_usp.memory import Offload
from ds_usp.memory.saved_attention import saved_tensors
from ds_usp.planner.formulas import layer_bytes
from ds_usp.training import prepare_deepspeed

assert TRAINER.is_dir()  # trainer_runs has put it on the path
GPT = """
    --num-layers 1 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --bf16 --device cpu
    --micro-batch-size 2 --make-vocab-size-divisible-by 2
"""
GATED = "--swiglu --ffn-hidden-size 704 --disable-bias-linear"
Degrees = tuple[int, int, int]  # tp, ulysses, ring
MESHES: dict[int, list[Degrees]] = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (1, 1, 2), (2, 1, 1)],
    4: [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)],
}


def saved_over_formula(ctx: RankContext, degrees: list[Degrees]) -> list[float]:
    """Counted bytes over the formula's, for all degrees, without and with recomputation, with and
    without a gate."""
    prepare_deepspeed()
    cases = [
        (*tp_ulysses_ring, recompute, mlp)
        for tp_ulysses_ring in degrees
        for recompute in ("none", "full")
        for mlp in ("", GATED)
    ]
    return [_counted(*case) / _predicted(*case) for case in cases]


def _flags(tp: int, ulysses: int, ring: int) -> list[str]:
    degrees = f"--tensor-model-parallel-size {tp} --ds-sequence-parallel-size {ulysses * ring}"
    return [*GPT.split(), *degrees.split(), "--ulysses-degree", str(ulysses)]


def validated(tp: int, ulysses: int, ring: int, flags: str = "") -> Any:
    from usp_trainer.arguments import parse
    from usp_trainer.validate_args import validate_and_derive

    line = [*_flags(tp, ulysses, ring), *flags.split()]
    args = validate_and_derive(parse(line), tp * ulysses * ring)
    args.padded_vocab_size = 256
    return args


def _predicted(tp: int, ulysses: int, ring: int, recompute: str, flags: str) -> float:
    from usp_trainer.auto_args import planned_run

    run = planned_run(validated(tp, ulysses, ring, flags))
    return layer_bytes(run.workload(), replace(run.parallel_config(), recompute=recompute))


def _counted(tp: int, ulysses: int, ring: int, recompute: str, flags: str) -> int:
    """Bytes of all storages that autograd saves, once each, parameters aside."""
    layer, x = layer_and_input(validated(tp, ulysses, ring, flags))

    def run() -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False) if recompute == "full" else layer(x)

    return _saved_bytes(layer, run)


def layer_and_input(args: Any) -> tuple[torch.nn.Module, torch.Tensor]:
    """The trainer's first layer in bf16, and what goes into it, on this rank."""
    from megatron.core import parallel_state
    from usp_trainer.model import Layer, build_model

    from megatron_patches.megatron_core import cpu_fallbacks_patch_set
    from megatron_patches.megatron_core.groups import initialize_groups

    tp, ulysses, ring = args.tensor_model_parallel_size, args.ulysses_degree, args.ring_degree
    parallel_state.destroy_model_parallel()
    megatron_patches.restore()
    cpu_fallbacks_patch_set().apply()
    layout = TokenLayout("zigzag", args.seq_length, ulysses, ring)
    mesh, groups = initialize_groups(
        tensor=tp, sequence=ulysses * ring, pipeline=1, ulysses=ulysses
    )
    device = torch.device("cpu")
    args.transformer_impl = "local"
    model = build_model(args, mesh, layout, groups, device).bfloat16()
    layer = next(part for part in model.layers if isinstance(part, Layer))
    shape = (layout.length(mesh.rank), args.micro_batch_size, args.hidden_size)
    return layer, torch.randn(shape, dtype=torch.bfloat16, requires_grad=True).clone()


def _saved_bytes(layer: torch.nn.Module, run: Callable[[], torch.Tensor]) -> int:
    """Bytes of all storages that autograd saves in a forward pass, once each, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage  # alive, so that no address comes twice
        return tensor

    with saved_tensors(pack, lambda tensor: tensor):
        y = run()
    total = sum(storage.nbytes() for storage in saved.values())
    y.sum().backward()
    return total


def policies_over_formula(ctx: RankContext) -> dict[str, tuple[float, float]]:
    """For every recomputation, without and with an MLP in chunks: counted bytes over the formula's,
    and the same of what an offload of one half counts."""
    from usp_trainer.auto_args import planned_run

    prepare_deepspeed()
    ratios = {}
    policies = ("none", "gemm-last", "attention", "full")
    for recompute, chunks, mlp in product(policies, (0, 3), ("", GATED)):
        args = validated(1, 2, 1, f"--usp-recompute {recompute} --usp-mlp-chunks {chunks} {mlp}")
        run = planned_run(args)
        formula = layer_bytes(run.workload(), run.parallel_config())
        layer, x = layer_and_input(args)
        saved = _saved_bytes(layer, lambda layer=layer, x=x: layer(x))
        offload = Offload(0.5, torch.device("cpu"), min_bytes=1024)
        layer.memory = replace(layer.memory, offload=offload)
        with torch.enable_grad():
            y = layer(x)
            layer.number += 1  # the next layer, at which the offload of the first is due
            layer(y).sum().backward()
        assert offload.counts.offloaded == pytest.approx(0.5 * offload.counts.saved, rel=0.01)
        ratios[f"{recompute}, {chunks} {mlp}"] = saved / formula, offload.counts.saved / formula
    return ratios


@pytest.mark.parametrize("world", MESHES)
def test_saved_bytes_of_the_trainers_layer_are_the_formula(world):
    for ratios in fork_world(saved_over_formula, world, degrees=MESHES[world]):
        assert ratios == pytest.approx([1.0] * len(ratios), abs=0.01)


def test_every_policy_with_and_without_mlp_chunks_saves_what_the_formula_says():
    for ratios in fork_world(policies_over_formula, 2):
        wrong = {
            policy: counted
            for policy, counted in ratios.items()
            if counted != pytest.approx((1.0, 1.0), abs=0.01)
        }
        assert len(ratios) == 16 and not wrong
