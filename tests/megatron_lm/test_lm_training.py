"""What the patches add to Megatron-LM's training, beside the degrees of ``test_lm_parity.py``."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_packed import PATCHES
from lm_runs import TrainingServer, flags, losses_of, relative_difference

LIMIT, EXACT = 1e-5, 1e-6
ROPE = "--position-embedding-type rope"
PACKED = f"{ROPE} --sft --data-path any --split 50,25,25 --eval-iters 1"
EXPERTS = f"{ROPE} --num-experts 4 --disable-bias-linear"
PER_TOKEN = "--calculate-per-token-loss"
DROPOUT = "--hidden-dropout 0.1"


@pytest.mark.parametrize(
    "more",
    [
        "--usp-recompute gemm-last",
        "--usp-recompute full",
        f"{ROPE} --mtp-num-layers 1 --eod-mask-loss",
        f"{ROPE} --mtp-num-layers 1 --eod-mask-loss --calculate-per-token-loss",
        f"{ROPE} --eod-mask-loss --calculate-per-token-loss",
        f"{EXPERTS} --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1",
    ],
)
def test_it_trains_as_one_rank_does(server: TrainingServer, more: str) -> None:
    two = server.run(2, flags(r=2, more=more))
    one = server.run(1, flags(more=more))
    assert relative_difference(losses_of(two), losses_of(one)) < LIMIT
    assert relative_difference(two[0]["norms"], one[0]["norms"]) < LIMIT


def mask_losses(original: Any, dataset: Any, index: int | None) -> Any:
    """``GPTDataset.__getitem__`` with 5 loss tokens, of which a rank may have none."""
    sample = original(dataset, index)
    mask = torch.zeros_like(sample["loss_mask"])
    start = (index or 0) % 3 * 16
    mask[start : start + 5] = 1
    return sample | {"loss_mask": sample["loss_mask"] * mask}


@pytest.mark.parametrize(
    ("ranks", "degrees"), [(2, {"r": 2}), (2, {"u": 2}), (4, {"u": 2, "pp": 2}), (4, {"r": 2})]
)
def test_ranks_with_other_numbers_of_loss_tokens_train_as_one_rank(
    server: TrainingServer, ranks: int, degrees: dict[str, int]
) -> None:
    more = f"{ROPE} --eod-mask-loss"
    masks = (("megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__", mask_losses),)
    several = server.run(ranks, flags(more=more, **degrees), extra=masks)
    one = server.run(1, flags(more=more), extra=masks, patched=False)
    assert relative_difference(losses_of(several), losses_of(one)) < EXACT
    assert relative_difference(several[0]["norms"], one[0]["norms"]) < EXACT
    assert relative_difference(several[-1]["evaluations"], one[0]["evaluations"]) < EXACT


@pytest.mark.parametrize("more", [PACKED, f"{PACKED} {PER_TOKEN}"])
@pytest.mark.parametrize("degrees", [{"r": 2}, {"u": 2}, {"u": 2, "r": 2}])
def test_packed_documents_train_as_on_one_rank(
    server: TrainingServer, degrees: dict[str, int], more: str
) -> None:
    ranks = degrees.get("u", 1) * degrees.get("r", 1)
    several = server.run(ranks, flags(more=more, **degrees), extra=PATCHES)
    one = server.run(1, flags(more=f"{more} --usp-recompute attention"), extra=PATCHES)
    assert relative_difference(losses_of(several), losses_of(one)) < LIMIT
    assert relative_difference(several[0]["norms"], one[0]["norms"]) < LIMIT
    assert relative_difference(several[0]["evaluations"], one[0]["evaluations"]) < LIMIT


def test_dropout_is_recomputed(server: TrainingServer) -> None:
    plain = server.run(2, flags(r=2, more=DROPOUT))
    recomputed = server.run(2, flags(r=2, more=f"{DROPOUT} --usp-recompute full"))
    assert losses_of(plain) == losses_of(recomputed)
    assert plain[0]["norms"] == recomputed[0]["norms"]


def test_ranks_with_other_tokens_draw_other_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    from megatron.core import tensor_parallel

    seeds: list[int] = []
    monkeypatch.setattr(
        tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed, *_: seeds.append(seed)
    )
    for step, pp, dp, cp in itertools.product(range(2), repeat=4):
        ranks = {"pipeline_model": pp, "data": dp, "context": cp}
        for axis, rank in ranks.items():
            name = f"get_{axis}_parallel_rank"
            monkeypatch.setattr(parallel_state, name, lambda rank=rank: rank)
        args = SimpleNamespace(
            seed=1234, curr_iteration=step, te_rng_tracker=False, inference_rng_tracker=False
        )
        step._seed(args)
    assert len(set(seeds)) == len(seeds) == 16
