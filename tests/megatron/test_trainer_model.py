"""What the trainer computes is the same model on every mesh, layout and precision."""

import pytest
import torch
from harness import RankContext, fork_world
from trainer_runs import ADAM, PLAIN_SGD, Numbers, degrees, relative_difference, start, train

LIMIT = 1e-5
LAYOUTS = ("zigzag", "contiguous", "striped", "context_parallel")
VARIANTS = {
    "learned positions, layernorm, gelu": (
        " --no-use-rotary-position-embeddings --no-swiglu --normalization layernorm"
        " --no-disable-bias-linear"
    ),
    "tied": " --no-untie-embeddings-and-output-weights",
    "mqa": " --num-key-value-heads 1",
    "uneven sequence": " --seq-length 67",
}
GRIDS = {
    "sp4 zero3": degrees(sp=4, u=2, zero=3),
    "sp4 ring zero1": degrees(sp=4, u=1, zero=1),
    "pp2-sp2 zero1": degrees(sp=2, u=2, pp=2, zero=1),
    "pp2-sp2 zero0": degrees(sp=2, u=2, pp=2, zero=0),
}
# Each variant without a pipeline and with one; what two stages share each ZeRO stage sums its way.
GRIDS_OF = {
    name: [list(GRIDS)[at % 2], list(GRIDS)[2 + at % 2]] for at, name in enumerate(VARIANTS)
}
GRIDS_OF["tied"] = list(GRIDS)


@pytest.fixture(scope="module")
def of_variants(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Numbers, list[Numbers]]]:
    """Numbers of one rank of each variant, and of its grids: two starts of ranks for all."""
    folder = tmp_path_factory.mktemp("variants")
    flags = {x: f"{PLAIN_SGD}{more} --global-batch-size 2" for x, more in VARIANTS.items()}
    ones = train(1, *(degrees() + flags[x] for x in VARIANTS), output_dir=folder)
    runs = [GRIDS[grid] + flags[x] for x in VARIANTS for grid in GRIDS_OF[x]]
    numbers = iter(train(4, *runs, output_dir=folder))
    return {
        x: (one, [next(numbers) for _ in GRIDS_OF[x]])
        for x, one in zip(VARIANTS, ones, strict=True)
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_the_model_equals_one_rank(variant, of_variants):
    one, of_grids = of_variants[variant]
    for grid, numbers in zip(GRIDS_OF[variant], of_grids, strict=True):
        assert relative_difference(numbers, one) < LIMIT, grid


def test_bf16_stays_near_fp32(tmp_path):
    bf16 = ADAM + " --bf16"
    (fp32,) = train(1, degrees() + ADAM, output_dir=tmp_path)
    runs = [
        degrees(**grid) + bf16
        for grid in (
            {"sp": 4, "u": 2, "zero": 1},
            {"sp": 4, "u": 2, "zero": 3},
            {"sp": 2, "tp": 2, "zero": 1},
            {"sp": 2, "pp": 2, "zero": 1},
        )
    ]
    for numbers in train(4, *runs, output_dir=tmp_path):
        assert relative_difference(numbers, fp32) < 2e-2


def token_losses_on_rank(ctx: RankContext, *, runs: list[str], folder: str) -> list[list]:
    """Loss of every token of two sequences that differ in one token, for each run."""
    from usp_trainer.model import token_losses

    losses_of_runs = []
    for flags in runs:
        run = start(flags + PLAIN_SGD, folder)
        layout = run.mesh.layout(run.args.usp_layout, seq_len=run.args.seq_length)
        tokens = torch.arange(64).remainder(50)[None]
        labels, changed = tokens.roll(-1, dims=1), tokens.clone()
        changed[0, CHANGED] = 200
        losses = []
        for full in (tokens, changed):
            hidden, local_labels = (layout.shard(x, dim=1, rank=ctx.rank) for x in (full, labels))
            with torch.no_grad():
                for call in run.trainer.engine.module.calls:
                    hidden = call(hidden)
                losses.append(token_losses(hidden, local_labels))
        losses_of_runs.append(losses)
    return losses_of_runs


CHANGED = 37


def test_no_token_changes_the_loss_of_an_earlier_position(tmp_path):
    from ds_usp import TokenLayout

    cases = [(u, kind) for u in (1, 2, 4) for kind in LAYOUTS]
    runs = [degrees(sp=4, u=u) + f" --usp-layout {kind}" for u, kind in cases]
    ranks = fork_world(token_losses_on_rank, 4, runs=runs, folder=str(tmp_path))
    (((one_rank, _),),) = fork_world(
        token_losses_on_rank, 1, runs=[degrees()], folder=str(tmp_path)
    )
    for index, (u, kind) in enumerate(cases):
        layout = TokenLayout(kind, seq_len=64, ulysses=u, ring=4 // u)
        before, after = (
            layout.gather([rank[index][which] for rank in ranks], dim=1) for which in (0, 1)
        )
        assert torch.equal(before[:, :CHANGED], after[:, :CHANGED]), (u, kind)
        assert (before[:, CHANGED:] != after[:, CHANGED:]).all(), (u, kind)
        torch.testing.assert_close(before, one_rank, rtol=1e-5, atol=1e-6)
