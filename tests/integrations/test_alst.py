"""Scripts of DeepSpeed's ALST with two lines changed, against one process."""

import functools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RankContext
from hf_trainer_runs import restored_environment, tiny_model, weights_of
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ds_usp import TokenLayout
from ds_usp.errors import DataError, USPError
from ds_usp.integrations.transformers import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
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
    (4, 1, 3, "packed"),
    (2, 2, 2, "packed"),
    (2, 1, 3, "padded"),
    (4, None, 2, "prompted"),
]


@pytest.mark.parametrize(("sp", "degree", "stage", "kind"), CASES)
def test_a_script_with_two_lines_changed_trains_as_one_rank_does(
    pool, tmp_path, sp, degree, stage, kind
):
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


# ------------------------------------------------------------------ refusals


def register(**options: Any) -> Any:
    arguments = {"core_attn_implementation": "sdpa", "micro_batch_size": 1, **options}
    return UlyssesSPAttentionHF.register_with_transformers(
        "tiny", sequence_parallel_size=2, **arguments
    )


def balanced_layout() -> None:
    register(layout="balanced")


def model_outside_of_the_engine() -> None:
    register()
    tiny_model()(**packed())


def adapter_without_registration() -> None:
    UlyssesSPDataLoaderAdapter([packed()], 0, torch.distributed.group.WORLD, 4, "cpu")


def other_size() -> None:
    register()
    UlyssesSPAttentionHF.register_with_transformers("tiny", "sdpa", 4, 1)


def test_a_loaders_batch_stays_as_it_is():
    """A group of one rank sends nothing: its batches are the loader's own."""
    adapter = object.__new__(UlyssesSPDataLoaderAdapter)
    adapter.sp_rank = 0
    adapter._registration = SimpleNamespace(layout=lambda n: TokenLayout("contiguous", n))  # type: ignore[assignment]
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    given = dict(batch)
    assert adapter._shard(batch)["shift_labels"].tolist() == [[*range(1, 8), -100]]
    assert batch.keys() == given.keys() and all(batch[name] is given[name] for name in given)


def engine_with(stage: int, **zero: Any) -> Any:
    import deepspeed

    model = tiny_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return deepspeed.initialize(
        config=config, model=model, optimizer=optimizer, mpu=register(ulysses_degree=1)
    )[0]


def whole_batches() -> None:
    """Rows that the adapter has not sharded, of other lengths on each rank."""
    length = 30 + torch.distributed.get_rank() % 2
    engine_with(0)(input_ids=torch.ones(1, length, dtype=torch.long))


def sums_and_means() -> None:
    engine_with(3, reduce_scatter=False)(**packed())


def one_rank_cannot_read() -> None:
    """The second rank of each mesh fails; the first one would wait for its batch."""

    def broken() -> Any:
        yield packed()
        if torch.distributed.get_rank(group):
            raise DataError("no such shard")
        yield packed()

    group = register().get_sequence_parallel_group()
    rank = torch.distributed.get_rank(group)
    adapter = UlyssesSPDataLoaderAdapter(broken(), rank, group, 2, "cpu")
    assert sum(next(adapter)["input_ids"].shape[1] for _ in range(2)) >= 60
    next(adapter)


CASES_REFUSED = {
    balanced_layout: "layout='balanced' must be auto or one of",
    model_outside_of_the_engine: "runs before, or outside of, the engine",
    adapter_without_registration: "no model was registered for this group",
    other_size: "DeepSpeed has groups of 2 ranks already",
    whole_batches: r"were given \[30, 31\] tokens, zigzag shards of 61 are",
    sums_and_means: "reduce_scatter=false",
    one_rank_cannot_read: "no such shard",
}


def refusals(ctx: RankContext) -> list[str]:
    """The error of each case on this rank; ranks that have imported transformers are dear."""
    import deepspeed.comm

    prepare_deepspeed()
    deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
    texts = []
    for case in CASES_REFUSED:
        try:
            with pytest.raises(USPError) as error:
                case()
            texts.append(str(error.value))
        finally:
            UlyssesSPAttentionHF.unregister_from_transformers()
    return texts


def test_what_alst_cannot_do_exactly_is_refused_on_every_rank(pool):
    for texts in pool.run(refusals, 4):
        for text, want in zip(texts, CASES_REFUSED.values(), strict=True):
            assert re.search(want, text), text


def test_one_rank_needs_nothing():
    assert UlyssesSPAttentionHF.register_with_transformers("tiny", "sdpa", 1, 1) is None
