"""Forward passes whose samples are dealt to groups of ranks: loss, outputs and gradients of one."""

import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from harness import RankContext
from hf_trainer_runs import WORDS, Split, arguments, restored_environment, tiny_model
from torch import Tensor

from ds_usp import ConfigError, DataError, MeshError, SequenceMesh, UnsupportedAttentionError
from ds_usp.integrations.transformers import attach, enable
from ds_usp.integrations.transformers.dealing import Places

WORLD = 4
LENGTHS = (37, 20, 9, 8, 5)


def padded(left: bool = False) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, WORDS, (len(LENGTHS), max(LENGTHS)), generator=draw)
    mask = torch.stack([torch.arange(max(LENGTHS)) < length for length in LENGTHS]).long()
    mask = mask.flip(1) if left else mask
    labels = tokens.masked_fill(mask == 0, -100)
    if left:  # of the first real token, which padding would predict
        labels[:, 1:][(mask[:, 1:] == 1) & (mask[:, :-1] == 0)] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def packed() -> dict[str, Tensor]:
    tokens = padded()["input_ids"]
    positions = torch.cat([torch.arange(x) for x in LENGTHS])[None]
    row = torch.cat([x[:n] for x, n in zip(tokens, LENGTHS, strict=True)])[None]
    return {"input_ids": row, "position_ids": positions, "labels": row.clone()}


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x for name, x in batch.items() if name != "labels"}


ROUTERS = {"output_router_logits": True}
CASES = [  # batch, options of enable, experts, longest row of a rank, arguments
    (padded(), {"logits": "whole"}, False, 24, {}),
    (padded(left=True), {"recompute": "full"}, False, 24, {}),
    (packed(), {"logits": "whole"}, False, 24, {}),
    (without_labels(padded()), {}, False, 24, {}),
    (padded(), {}, True, 24, ROUTERS),
    (packed(), {}, True, 24, ROUTERS),
    ({name: x[-1:, :5] for name, x in padded().items()}, {"loss_chunks": 3}, True, 24, ROUTERS),
]


def gradients(model: Any, out: Any) -> list[Tensor]:
    loss = out.logits.float().square().sum() if out.loss is None else out.loss
    loss.backward()
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


def no_faster_in_groups(tokens: int, ranks: int) -> float:
    """So that samples take as many ranks as memory asks for."""
    return tokens


def dealt(ctx: RankContext) -> list[Any]:
    """Of each case the groups' sizes, the output, the mean gradients; with an error planted too."""
    mesh, found = SequenceMesh.from_group(ctx.group, 2), []
    labels = Places.labels

    def one_left_out(places: Places, targets: Tensor) -> Tensor:
        own = labels(places, targets)
        return own.masked_fill(places.index == 3, -100)

    for batch, options, experts, max_tokens, more in [*CASES, CASES[0]]:
        planted = one_left_out if len(found) == len(CASES) else labels
        with mock.patch.object(Places, "labels", planted):
            model = tiny_model(experts=experts)
            enabled = enable(model, mesh, **options)
            enabled.deal(max_tokens, cost=no_faster_in_groups)
            out = model(**batch, **more)
            grads = gradients(model, out)
        for x in grads:
            dist.all_reduce(x, group=ctx.group)
        size = enabled._running.shard.call.mesh.sp_degree
        logits = out.get("logits") if "labels" not in batch or options.get("logits") else None
        found.append((size, out.loss, logits, [x / WORLD for x in grads]))
        enabled.disable()
    return found


def difference(got: Any, want: Any, batch: dict[str, Tensor]) -> float:
    """The largest, relative to the largest element; of logits at real tokens."""
    pairs = [(x, y) for x, y in zip(got[3], want[3], strict=True)]
    if want[1] is not None:
        pairs.append((got[1], want[1]))
    if got[2] is not None:
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
        pairs.append((got[2][real], want[2][real]))
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1e-30)).item() for x, y in pairs)


def plain(batch: Any, options: Any, experts: bool, max_tokens: int, more: Any) -> Any:
    model = tiny_model(experts=experts)
    out = model(**batch, **more, use_cache=False)  # with a cache it looks for no documents
    if out.loss is None:  # padding is zero where outputs are joined
        mask = batch["attention_mask"] == 1
        out.logits = out.logits * mask[:, :, None]
    return None, out.loss, out.logits, gradients(model, out)


def test_dealt_passes_are_those_of_one_rank(pool):
    ranks = pool.run(dealt, WORLD)
    for number, case in enumerate(CASES):
        want = plain(*case)
        for rank in ranks:
            assert difference(rank[number], want, case[0]) <= 1e-5, number
    sizes = [[rank[number][0] for rank in ranks] for number in range(len(CASES))]
    assert set(sizes[0]) == {1, 2} and sizes[-1] == [1] * WORLD
    # A label that a group leaves out is found.
    assert difference(ranks[0][-1], plain(*CASES[0]), CASES[0][0]) > 1e-3


def refusals(ctx: RankContext) -> list[Exception]:
    mesh, errors = SequenceMesh.from_group(ctx.group, 2), []

    def refused(call: Any) -> None:
        with pytest.raises((ConfigError, DataError, MeshError, UnsupportedAttentionError)) as found:
            call()
        errors.append(found.value)

    with enable(model := tiny_model(), mesh) as enabled:
        refused(lambda: enabled.deal(0))
        enabled.deal(9)
        refused(lambda: model(**padded()))
        enabled.deal(10)
        refused(lambda: model(**padded()))
        enabled.deal(20)
        batch = padded()
        batch["input_ids"][2, 1] += ctx.rank == 3
        refused(lambda: model(**batch))
        assert model(**padded()).loss > 0  # all ranks go on
    rewards = transformers.Qwen3ForSequenceClassification(tiny_model().config)
    with enable(rewards, mesh) as enabled:
        refused(lambda: enabled.deal(20))
    with restored_environment():
        args = transformers.TrainingArguments(**arguments(Split(2, 2), 1))
        trainer = transformers.Trainer(tiny_model(), args)
        refused(lambda: attach(trainer, mesh, max_tokens=20))
    return errors


def test_what_cannot_be_dealt_is_refused_on_every_rank(pool):
    texts = [
        "max_tokens=0 must be",
        "sample 0 of the step has 37 tokens: 4 ranks, .* hold 36 .*max_tokens=10",
        "5 samples of 79 tokens do not fit .*40 tokens.*lower per_device_train_batch_size",
        "input_ids|differ",
        "Qwen3ForSequenceClassification computes its loss of whole rows",
        "max_tokens=20 and cost are of dealt samples: give deal=True",
    ]
    for errors in pool.run(refusals, WORLD):
        for text, error in zip(texts, errors, strict=True):
            assert re.search(text, str(error)), error
