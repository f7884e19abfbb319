"""Scripts of DeepSpeed's ALST with two lines changed, against one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankContext, WorkerPool
from torch import Tensor
from trainer_runs import restored_environment, tiny_model, weights_of

from ds_usp.training import prepare_deepspeed

SCRIPT = Path(__file__).with_name("alst_script.py")
STOCK = "from deepspeed.runtime.sequence_parallel.ulysses_sp import"
OURS = "from ds_usp.integrations.transformers import"
LR = 0.5
# The other way in which scripts weigh the ranks' losses.
ALL_REDUCE = """
    good = (shift_labels != -100).sum()
    total = torch.distributed.nn.functional.all_reduce(loss * good, group=sp_group)
    loss = total / torch.distributed.nn.functional.all_reduce(good, group=sp_group)
"""


def edited(degree: int | None, world: int, sp: int) -> str:
    """The script with its import changed, and a degree in its call."""
    text = SCRIPT.read_text()
    if sp < world:  # torch's all_gather over gloo has no backward in groups without rank 0
        start, stop = text.index("    losses_per_rank ="), text.index("    losses.append(")
        text = text[:start] + ALL_REDUCE + text[stop:]
    assert text.count(STOCK) == 1
    text = text.replace(STOCK, OURS)
    if degree is not None:
        line = "    seq_length_is_variable=True,\n"
        assert text.count(line) == 1
        text = text.replace(line, line + f"    ulysses_degree={degree},\n")
    return text


def packed() -> dict[str, Tensor]:
    """One row of 61 tokens: documents of 23, 1, 30 and 7; a third does not count."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(3, 97, (1, 61), generator=draw)
    positions = torch.cat([torch.arange(n) for n in (23, 1, 30, 7)])[None]
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)
    labels[positions == 0] = -100
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def padded() -> dict[str, Tensor]:
    """Two rows of 48 and 35 tokens, padded on the right."""
    draw = torch.Generator().manual_seed(6)
    ids = torch.randint(3, 97, (2, 48), generator=draw)
    mask = torch.ones_like(ids)
    mask[1, 35:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def prompted() -> dict[str, Tensor]:
    """A row of 52 tokens of which the last 13 count."""
    batch = padded()
    ids = torch.cat([batch["input_ids"][:1], batch["input_ids"][1:, :4]], 1)
    labels = ids.clone()
    labels[:, :39] = -100
    return {"input_ids": ids, "labels": labels}


BATCHES = {"prompted": prompted, "packed": packed, "padded": padded}


@functools.cache
def one_rank(kind: str, steps: int) -> tuple[list[float], list[Tensor]]:
    """Losses and weights of the same steps on one rank, document by document where packed."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    batch = BATCHES[kind]()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model)


def run_script(
    ctx: RankContext, text: str, path: str, sp: int, stage: int, kind: str
) -> tuple[list[float], list[Tensor]]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ds_usp.integrations.transformers import UlyssesSPAttentionHF

    prepare_deepspeed()
    batch = BATCHES[kind]()
    settings = {
        "path": path,
        "sp": sp,
        "stage": stage,
        "lr": LR,
        "rows": len(batch["input_ids"]),
        "data": [batch],
    }
    names: dict[str, Any] = {"settings": settings, "losses": [], "__name__": "script"}
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with restored_environment():
        try:
            exec(compile(text, str(SCRIPT), "exec"), names)
            return names["losses"], weights_of(names["model"].module)
        finally:
            UlyssesSPAttentionHF.unregister_from_transformers()
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is stock


CASES = [
    (4, None, 0, "packed"),
    (4, 2, 1, "packed"),
    (4, 1, 3, "packed"),
    (2, 2, 2, "packed"),
    (2, 1, 3, "padded"),
    (4, 2, 2, "padded"),
    (4, None, 2, "prompted"),
]


@pytest.mark.parametrize(("sp", "degree", "stage", "kind"), CASES)
def test_a_script_with_two_lines_changed_trains_as_one_rank_does(
    pool: WorkerPool, tmp_path: Path, sp: int, degree: int | None, stage: int, kind: str
) -> None:
    """Each rank reads the same batch here, as in the tutorial: it is trained sp times."""
    tiny_model().save_pretrained(tmp_path)
    ranks = pool.run(
        run_script, 4, text=edited(degree, 4, sp), path=str(tmp_path), sp=sp, stage=stage, kind=kind
    )
    want_losses, want = one_rank(kind, sp)
    start = [p.detach() for p in tiny_model().parameters()]
    moved = sum((a - b).double().pow(2).sum() for a, b in zip(want, start, strict=True))
    for losses, weights in ranks:
        assert losses == pytest.approx(want_losses, rel=1e-5)
        off = sum((a - b).double().pow(2).sum() for a, b in zip(weights, want, strict=True))
        assert (off / moved) ** 0.5 < 1e-4
