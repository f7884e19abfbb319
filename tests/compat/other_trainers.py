"""Other projects' own sequence parallelism, with ds_usp's attention behind it as the page shows:
what ranks run in test_other_trainers.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist
from flash_forward_runs import (
    IGNORED,
    alone,
    batch_of,
    build,
    error_of,
    loss_of,
    numbers_of,
    runs_of,
    use_flash,
)
from harness import RankContext
from torch import Tensor

from ds_usp.compat import flash_attention_forward as compat
from ds_usp.compat.flash_attention_forward import patch_flash_attention

PAGE = Path(__file__).resolve().parents[2] / "docs" / "usage" / "other-trainers.md"


def block_of(heading: str) -> str:
    """The page's block of a section."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {heading}\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


@contextmanager
def shown(heading: str, **changes: str) -> Iterator[None]:
    """The block has run, with other constants; what it patches is restored in the end."""
    text = block_of(heading)
    for name, value in changes.items():
        text, found = re.subn(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.MULTILINE)
        assert found == 1
    patches = []

    def recorded(*args: Any) -> Any:
        patches.append(patch_flash_attention(*args))
        return patches[-1]

    with mock.patch.object(compat, "patch_flash_attention", recorded):
        exec(compile(text, str(PAGE), "exec"), {"__name__": heading})
        yield
    for patch in patches:
        patch.restore()
    assert len(patches) == 1


def with_labels(rows: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """A batch with each token's own label, as trainers give them."""
    batch = batch_of(rows)
    labels = batch["ids"].masked_fill(batch["real"] == 0, IGNORED)
    for row, (start, _, _) in runs_of(rows):
        labels[row, start] = IGNORED
    return {**batch, "labels": labels}


def llama_factory(
    ctx: RankContext, *, kind: str, rows: tuple[tuple[int, ...], ...], ulysses: int
) -> float:
    """The error of its loss and gradients against one process."""
    from llamafactory.v1.accelerator import interface
    from llamafactory.v1.plugins.model_plugins.parallelization import sequence_parallel

    config = {"cp_size": ctx.world, "cp_mode": "usp", "ulysses_degree": ulysses}
    with mock.patch.object(interface, "init_process_group"):
        interface.DistributedInterface(config)
    model, batch = use_flash(build(kind)), with_labels(rows)
    inputs = {
        "input_ids": batch["ids"],
        "labels": batch["labels"],
        "attention_mask": batch["real"],
        "position_ids": batch["positions"],
        "loss_weights": (batch["labels"] != IGNORED).float(),
    }
    # Its loss moves the batch to the GPU of this rank's number.
    on_cpu = SimpleNamespace(get_rank=lambda: "cpu", all_gather=dist.all_gather, nn=dist.nn)
    with shown("LLaMA-Factory"), mock.patch.object(sequence_parallel, "dist", on_cpu):
        sequence_parallel.SequenceParallelModelPlugin("usp")(model, config)
        loss = sequence_parallel.SequenceParallelLossPlugin("sequence_parallel_loss")(model, inputs)
        have = numbers_of(model, loss)
    for value in have.values():  # every rank has the whole loss, and its trainer takes the mean
        dist.all_reduce(value.div_(ctx.world), group=ctx.group)
    return error_of(have, alone(kind, rows))


def swift(ctx: RankContext, *, kind: str, rows: tuple[tuple[int, ...], ...], ulysses: int) -> float:
    """The error of a loss over its shards, and of the gradients, against one process."""
    from swift.sequence_parallel import SequenceParallel

    model, batch = use_flash(build(kind)), with_labels(rows)
    model.model_info = SimpleNamespace(is_moe_model=False)
    model.model_meta = SimpleNamespace(model_arch=None)
    parallel = SequenceParallel()
    replaced = ("_init_device_mesh", "_prepare_flash_attn")
    own = {name: getattr(SequenceParallel, name) for name in replaced}
    with (
        mock.patch.multiple(SequenceParallel, **own, _global_inited=False),
        shown("ms-swift", ULYSSES_DEGREE=str(ulysses)),
    ):
        parallel.prepare(ctx.world, model, SimpleNamespace(pad_token_id=0), padding_free=True)
        inputs = {
            "input_ids": batch["ids"],
            "labels": batch["labels"],
            "position_ids": batch["positions"],
        }
        parallel.prepare_inputs(inputs)
        labels = inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits
        count = (batch["labels"] != IGNORED).sum()
        have = numbers_of(model, loss_of(logits, labels) / count)
    for value in have.values():
        dist.all_reduce(value, group=ctx.group)
    return error_of(have, alone(kind, rows))
