"""Every memory policy of the trainer trains as the plain one does, on every kind of grid."""

import pytest
from harness import RankContext, fork_world
from trainer_runs import PLAIN_SGD, degrees, relative_difference, start, train

from ds_usp.memory import RECOMPUTE
from ds_usp.memory.saved_attention import saved_tensors

LIMIT = 2e-5
GRIDS = {
    "sp4": {"sp": 4, "u": 2, "zero": 1},
    "zero3": {"sp": 4, "u": 2, "zero": 3},
    "pp2-sp2": {"sp": 2, "u": 1, "pp": 2, "zero": 1},
    "tp2-sp2": {"sp": 2, "u": 2, "tp": 2, "zero": 2},
}

WAIT, CHUNKS, MLP = "--usp-offload-ratio 0.6", "--usp-loss-chunks 3", "--usp-mlp-chunks 5"
SOME = ["--usp-recompute gemm-last", f"--usp-recompute attention {WAIT} {CHUNKS} {MLP}", WAIT]
# Each recomputation with each offload, and with chunks of the loss or of the MLP.
PAIRS = [
    f"--usp-recompute {recompute} {offload} {CHUNKS if (i + j) % 2 else MLP}"
    for i, recompute in enumerate(RECOMPUTE)
    for j, offload in enumerate(("", WAIT))
]
CASES = [("sp4", PAIRS), *((grid, SOME) for grid in GRIDS if grid != "sp4")]


@pytest.mark.parametrize(("grid", "policies"), CASES)
def test_every_policy_trains_alike(grid, policies, tmp_path):
    flags = degrees(**GRIDS[grid]) + PLAIN_SGD + " --global-batch-size 2"
    runs = [f"{flags} {policy}" for policy in ("", *policies)]
    plain, *others = train(4, *runs, output_dir=tmp_path, steps=2)
    for policy, numbers in zip(policies, others, strict=True):
        limit = 0.0 if policy in (WAIT, f"--usp-recompute none {WAIT}") else LIMIT
        assert relative_difference(numbers, plain) <= limit, policy


GROUPED = {
    "zero3": ["full", f"full {WAIT}", f"attention {WAIT}"],
    "pp2-sp2": [f"full {MLP}", f"full {MLP}"],
}


@pytest.mark.parametrize("grid", GROUPED)
def test_one_checkpoint_for_several_layers_trains_bitwise_alike(grid, tmp_path):
    """Five layers; under the pipeline three and two, and a batch for each stage."""
    batches = GRIDS[grid].get("pp", 1)
    flags = f"{degrees(**GRIDS[grid])}{PLAIN_SGD} --global-batch-size {batches} --num-layers 5"
    first, *grouped = GROUPED[grid]
    runs = [f"{flags} --usp-recompute {first}"]
    runs += [f"{flags} --usp-recompute {policy} --usp-checkpoint-layers 3" for policy in grouped]
    each, *others = train(4, *runs, output_dir=tmp_path, steps=2)
    assert all(numbers == each for numbers in others)


def test_biases_layernorm_and_a_tied_output(tmp_path):
    more = " --normalization layernorm --no-swiglu --no-disable-bias-linear"
    tied = " --no-untie-embeddings-and-output-weights"
    runs = [
        degrees(sp=2, u=1, zero=1) + PLAIN_SGD + more + tied + policy
        for policy in (
            "",
            " --usp-recompute gemm-last --usp-loss-chunks 2",
            " --usp-mlp-chunks 32",  # a token each
        )
    ]
    plain, *others = train(2, *runs, output_dir=tmp_path)
    for numbers in others:
        assert relative_difference(numbers, plain) < LIMIT


def counted(
    ctx: RankContext, *, policies: list[str], flags: str, output_dir: str
) -> list[tuple[int, int]]:
    """FLOP of the backward pass and bytes kept for it, of one megatron-core layer."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    results = []
    for policy in policies:
        run = start(f"{flags} --usp-recompute {policy}", output_dir)
        layer = run.trainer.engine.module.layers[1]
        hidden = torch.randn(64 // run.mesh.sp_degree, 1, 32).requires_grad_()
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, saved: dict = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with saved_tensors(pack, lambda tensor: tensor):
            out = layer(hidden)
        size = sum(storage.nbytes() for storage in saved.values())
        with FlopCounterMode(display=False) as flops:
            out.sum().backward()
        results.append((flops.get_total_flops(), size))
    return results


def test_megatrons_linear_layers_multiply_as_often_as_without(tmp_path):
    """Those of megatron-core are autograd functions, of which torch's checkpoint runs one twice."""
    flags = degrees(sp=2, u=2, tp=2) + PLAIN_SGD
    policies = ["none", "gemm-last", "attention", "full", "none --usp-mlp-chunks 4"]
    for rank in fork_world(counted, 4, policies=policies, flags=flags, output_dir=str(tmp_path)):
        (*flop, in_chunks), (*kept, kept_in_chunks) = zip(*rank, strict=True)
        assert flop[0] == flop[1] < flop[2] == flop[3]  # the CPU's attention is not counted
        assert kept[0] > kept[1] > kept[2] > kept[3]
        tokens, h, ffn = 32, 32, 64 // 2  # of this rank
        forward = 2 * tokens * h * 3 * ffn
        assert flop[0] < in_chunks <= flop[0] + forward
        # The norm's input stays. What it divides and scales, its statistic, both halves of fc1's
        # result, the activation and fc2's input go.
        assert kept[0] - kept_in_chunks == 4 * tokens * (2 * h + 1 + 4 * ffn)
