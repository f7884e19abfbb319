"""What a layer of the trainer's GPT saves for backward, counted, against the planner's formula."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from harness import RankContext, fork_world
from trainer_runs import TRAINER

from ds_usp import MaskSpec, RankGrid, SequenceMesh, usp_attention
from ds_usp.memory import Offload
from ds_usp.memory.saved_attention import saved_tensors
from ds_usp.planner.formulas import layer_bytes

assert TRAINER.is_dir()  # trainer_runs has put it on the path
GPT = """
    --num-layers 1 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --bf16 --device cpu
    --micro-batch-size 1 --make-vocab-size-divisible-by 2
"""
GATED = "--swiglu --ffn-hidden-size 704 --disable-bias-linear --use-rotary-position-embeddings"
GROUPED = " --num-key-value-heads 2"
POLICIES = ("none", "gemm-last", "attention", "full")


def saved_bytes(parameters: Any, run: Callable[[], torch.Tensor]) -> int:
    """Bytes of all storages that autograd saves in a forward pass, once each, parameters aside."""
    ignored = {p.untyped_storage().data_ptr() for p in parameters}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            saved[storage.data_ptr()] = storage  # alive, so that no address comes twice
        return tensor

    with saved_tensors(pack, lambda tensor: tensor):
        y = run()
    total = sum(storage.nbytes() for storage in saved.values())
    y.sum().backward()
    return total


def over_formula(
    ctx: RankContext, *, ulysses: list[int], cases: list[tuple[str, int, str]]
) -> dict[str, tuple[float, float]]:
    """For each degree and each case of recomputation, chunks of the MLP and flags: counted bytes
    over the formula's, and the same of what an offload of one half counts."""
    from usp_trainer.arguments import parse, validated
    from usp_trainer.model import rotary_of
    from usp_trainer.step import new_model, planned_run

    ratios = {}
    for degree, (recompute, chunks, flags) in product(ulysses, cases):
        degrees = f"--ds-sequence-parallel-size {ctx.world} --ulysses-degree {degree}"
        memory = f"--usp-recompute {recompute} --usp-mlp-chunks {chunks}"
        args = validated(parse(f"{GPT} {degrees} {memory} {flags}".split()), ctx.world)
        grid = RankGrid({"ulysses": degree, "ring": args.ring_degree})
        mesh = SequenceMesh.build(grid)
        layout = mesh.layout("zigzag", args.seq_length)
        attention = partial(usp_attention, mesh=mesh, layout=layout, mask=MaskSpec.causal())
        model = new_model(args, 256, torch.device("cpu")).bfloat16()
        rotary = rotary_of(args, torch.arange(layout.length(mesh.rank)))
        layer = partial(model.layers[0], rotary=rotary, attention=attention)
        shape = (layout.length(mesh.rank), args.micro_batch_size, args.hidden_size)
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True).clone()
        run = planned_run(args)
        formula = layer_bytes(run.workload(), run.parallel_config())
        saved = saved_bytes(model.parameters(), lambda m=model, f=layer, x=x: m.memory.run(0, f, x))
        offload = Offload(0.5, torch.device("cpu"), min_bytes=1024)
        offloading = replace(model.memory, offload=offload)
        y = offloading.run(0, layer, x)
        offloading.run(1, layer, y).sum().backward()  # when the offload of the first is due
        assert offload.counts.offloaded == pytest.approx(0.5 * offload.counts.saved, rel=0.01)
        name = f"{degree} of {ctx.world}, {memory} {flags}"
        ratios[name] = saved / formula, offload.counts.saved / formula
    return ratios


@pytest.mark.parametrize(
    ("world", "ulysses", "policies", "chunks", "more"),
    [
        (1, [1], ("none",), (0,), GROUPED),
        (2, [2], POLICIES, (0, 3), ""),
        (4, [1], ("attention",), (0,), ""),
        (4, [4, 2], ("none", "attention"), (0,), GROUPED),
    ],
)
def test_every_policy_on_every_mesh_saves_what_the_formula_says(
    world, ulysses, policies, chunks, more
):
    cases = [*product(policies, chunks, ("", f"{GATED}{more}"))]
    for ratios in fork_world(over_formula, world, ulysses=ulysses, cases=cases):
        assert len(ratios) == len(ulysses) * len(cases)
        wrong = {
            name: counted
            for name, counted in ratios.items()
            if counted != pytest.approx((1.0, 1.0), abs=0.01)
        }
        assert not wrong
