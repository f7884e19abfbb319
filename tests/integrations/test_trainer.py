"""Trainer and SFTTrainer on ulysses x ring against one process: losses, norms, weights, metrics."""

import functools
import json
from typing import Any

import pytest
import torch
import transformers
from harness import RankContext, WorkerPool
from hf_trainer_runs import (
    Documents,
    Run,
    Split,
    mesh_of,
    restored_environment,
    run_dpo,
    run_sft,
    run_trainer,
    tiny_model,
)

import ds_usp
from ds_usp.errors import ConfigError, DataError
from ds_usp.integrations.transformers import attach, enable, replicate_batches, share_batches

CLIP = {"max_grad_norm": 0.5}
SPLITS = [
    (Split(2, 1, "ddp"), {}),
    (Split(1, 2, "ddp"), CLIP),
    (Split(2, 1, "fsdp2"), CLIP),
    (Split(2, 2, "fsdp2"), {}),
    (Split(1, 2, "zero0"), CLIP),
    (Split(2, 2, "zero1"), CLIP),
    (Split(2, 1, "zero2"), {}),
    (Split(2, 2, "zero3"), CLIP),
    (Split(1, 2, "zero3"), {}),
]


def names(splits: list[Any]) -> list[str]:
    return [f"{split}{'-clipped' if options else ''}" for split, options in splits]


@functools.cache
def one_process(pool: WorkerPool, run: Any, options: tuple[tuple[str, Any], ...]) -> Run:
    return pool.run(run, 1, micro=2, **dict(options))[0]


def change(run: Run) -> list[torch.Tensor]:
    start = tiny_model().parameters()
    return [w - p.detach() for w, p in zip(run.weights, start, strict=True)]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return float(sum((a - b).double().pow(2).sum() for a, b in zip(one, other, strict=True)) ** 0.5)


def assert_same(run: Run, want: Run, norms: bool = True) -> None:
    assert run.losses == pytest.approx(want.losses, rel=1e-5)
    if norms:
        assert run.norms == pytest.approx(want.norms, rel=1e-5)
    zeros = [torch.zeros_like(w) for w in want.weights]
    moved = distance(change(want), zeros)
    assert distance(change(run), change(want)) < 1e-4 * moved


@pytest.mark.parametrize(("split", "options"), SPLITS, ids=names(SPLITS))
def test_a_trainer_trains_as_one_process_does(pool, split, options):
    """Packed rows, plain SGD, accumulation, with and without clipping."""
    options = {**options, "include_num_input_tokens_seen": "all"}
    want = one_process(pool, run_trainer, tuple(options.items()))
    run = pool.run(run_trainer, 4, split=split, **options)[0]
    # Clipping to a norm shows in the weights; not every engine reports the norm without it.
    assert_same(run, want, norms=split.engine not in ("zero0",) and bool(run.norms))
    engine = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPQwen3ForCausalLM"}
    assert run.state["engine"] == engine.get(split.engine, "DeepSpeedEngine")
    assert run.state["tokens"] == want.state["tokens"]
    assert run.state["batch"] == want.state["batch"] == 4
    assert run.state["epoch"] == want.state["epoch"]
    if split.engine != "zero3":  # where transformers counts a partition's parameters
        assert run.state["flos"] == want.state["flos"]


SFT = [
    (Split(2, 1, "ddp"), {"packing": True, **CLIP}),
    (Split(1, 2, "zero3"), {"packing": True}),
    (Split(2, 2, "zero2"), {"packing": False}),
    (Split(2, 1, "fsdp2"), {"packing": False, **CLIP}),
]


@pytest.mark.parametrize(("split", "options"), SFT, ids=names(SFT))
def test_an_sft_trainer_trains_as_one_process_does(pool, split, options):
    """Packed (best fit, decreasing) and padded rows, with gradient checkpointing."""
    want = one_process(pool, run_sft, tuple(options.items()))
    run = pool.run(run_sft, 4, split=split, **options)[0]
    assert_same(run, want)
    for log, expected in zip(run.state["logs"], want.state["logs"], strict=True):
        assert log["num_tokens"] == expected["num_tokens"]


def test_lora_made_by_the_sft_trainer_trains_as_one_process_does(pool):
    options = {"packing": True, "lora": True, "evaluate": True, "per_device_eval_batch_size": 1}
    want = one_process(pool, run_sft, tuple(options.items()))
    run = pool.run(run_sft, 4, split=Split(1, 2), **options)[0]
    assert run.losses == pytest.approx(want.losses, rel=1e-5)
    assert run.norms == pytest.approx(want.norms, rel=1e-5)
    assert run.evaluation["eval_loss"] == pytest.approx(want.evaluation["eval_loss"], rel=1e-5)


def test_a_dpo_trainer_trains_as_one_process_does(pool):
    """Its loss is made of per-token log-probabilities; the reference model is not enabled."""
    want = pool.run(run_dpo, 1, micro=2)[0]
    run = pool.run(run_dpo, 4, split=Split(2, 1))[0]
    assert len(run) == len(want) == 4
    for step, expected in zip(run, want, strict=True):
        assert step == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("split", [Split(2, 1), Split(2, 2)], ids=str)
def test_evaluation_counts_every_sample_once(pool, split):
    """Seven samples for two replicas: the last batch is filled up, and cut off again."""
    options = {"packing": False, "evaluate": True, "per_device_eval_batch_size": 1}
    want = one_process(pool, run_sft, tuple(options.items()))
    run = pool.run(run_sft, 4, split=split, **options)[0]
    assert run.evaluation["eval_loss"] == pytest.approx(want.evaluation["eval_loss"], rel=1e-5)


def predict(ctx: RankContext, split: Split) -> Any:
    with restored_environment():
        args = transformers.TrainingArguments(
            use_cpu=True, report_to=[], per_device_eval_batch_size=1, disable_tqdm=True
        )
        collator = transformers.DataCollatorWithFlattening()
        trainer = transformers.Trainer(tiny_model(), args, data_collator=collator)
        if split.ring > 1:
            attach(trainer, mesh_of(ctx, split))
        out = trainer.predict(Documents(3))
        return torch.from_numpy(out.predictions), out.label_ids.tolist(), out.metrics["test_loss"]


def test_predictions_are_the_whole_batchs(pool):
    want, labels, loss = pool.run(predict, 1, split=Split())[0]
    for got, got_labels, got_loss in pool.run(predict, 4, split=Split(2, 2)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert got_labels == labels
        assert got_loss == pytest.approx(loss, rel=1e-5)


def test_ranks_of_a_mesh_read_a_stream_alike(pool):
    want = one_process(pool, run_trainer, (("stream", True),))
    assert_same(pool.run(run_trainer, 4, split=Split(2, 1), stream=True)[0], want, norms=False)


@pytest.mark.parametrize("split", [Split(2, 1), Split(2, 2)], ids=str)
def test_the_order_does_not_depend_on_the_ranks_random_states(pool, split):
    """Two epochs, by samplers that draw from the random state of their process."""
    config = {"use_seedable_sampler": False}
    run = pool.run(run_trainer, 4, split=split, count=8, accelerator_config=config, extra_draws=3)[
        0
    ]
    assert run.state["epoch"] == 2.0


def worker_rank(ctx: RankContext) -> int:
    with restored_environment():
        args = transformers.TrainingArguments(use_cpu=True, report_to=[], dataloader_num_workers=1)
        trainer = transformers.Trainer(tiny_model(), args, train_dataset=Documents(8))
        attach(trainer, mesh_of(ctx, Split(2, 1)))
        return trainer.get_train_dataloader().worker_init_fn.keywords["rank"]


def test_workers_of_a_mesh_are_seeded_alike(pool):
    """By default they are seeded by rank, and what collators draw would differ in a mesh."""
    assert pool.run(worker_rank, 4) == [0, 0, 1, 1]


def test_a_run_resumes_on_another_split(pool, tmp_path):
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 2}
    whole = pool.run(run_trainer, 4, split=Split(2, 1), **options)[0]
    checkpoint = tmp_path / "checkpoint-2"
    assert "usp" not in json.loads((checkpoint / "config.json").read_text()).values()
    resumed = pool.run(
        run_trainer, 4, split=Split(2, 2), resume=str(checkpoint), output_dir=str(tmp_path)
    )[0]
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-5)
    assert distance(resumed.weights, whole.weights) < 1e-4 * distance(
        whole.weights, [p.detach() for p in tiny_model().parameters()]
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    saved = [p.detach() for p in loaded.parameters()]
    assert distance(saved, whole.weights) < 1e-6


# ------------------------------------------------------------------ refusals


def trainer_with(**options: Any) -> transformers.Trainer:
    args = transformers.TrainingArguments(use_cpu=True, report_to=[], **options)
    return transformers.Trainer(tiny_model(), args, train_dataset=Documents(8))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
    ],
)
def test_options_that_would_not_train_alike_are_refused(options, text):
    with pytest.raises(ConfigError, match=text):
        attach(trainer_with(**options), ds_usp.SequenceMesh.single())


def test_accelerates_own_parallel_axes_are_refused():
    from accelerate import ParallelismConfig

    trainer = trainer_with()
    trainer.accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)
    with pytest.raises(ConfigError, match=r"ParallelismConfig\(cp_size=2\)"):
        attach(trainer, ds_usp.SequenceMesh.single())


def test_loaders_that_were_prepared_before_are_refused():
    trainer = trainer_with()
    trainer.get_train_dataloader()
    with pytest.raises(ConfigError, match="1 data loaders were prepared before"):
        share_batches(trainer.accelerator, ds_usp.SequenceMesh.single())


def test_a_model_of_another_mesh_is_refused():
    trainer = trainer_with()
    enable(trainer.model, ds_usp.SequenceMesh.single())
    with pytest.raises(ConfigError, match="enabled for another mesh"):
        attach(trainer, ds_usp.SequenceMesh.single())


def test_a_model_that_is_enabled_before_keeps_its_options():
    trainer, mesh = trainer_with(), ds_usp.SequenceMesh.single()
    enabled = enable(trainer.model, mesh, layout="striped")
    assert attach(trainer, mesh) is enabled


# ------------------------------------------------------------------ replicate_batches


class Broken:
    def __iter__(self) -> Any:
        yield {"input_ids": torch.arange(3)}
        raise OSError("no such shard")


def read_alike(ctx: RankContext) -> Any:
    mesh = mesh_of(ctx, Split(1, 2))
    dp = ds_usp.training.data_parallel_ranks(mesh)
    sampler = torch.utils.data.DistributedSampler(range(10), dp.size, dp.rank, shuffle=True)
    loader = torch.utils.data.DataLoader(range(10), batch_size=2, sampler=sampler)
    batches = replicate_batches(loader if mesh.rank == 0 else None, mesh)
    first = [x.tolist() for x in batches]
    batches.set_epoch(1)
    return dp.rank, len(batches), first, [x.tolist() for x in batches]


def read_broken(ctx: RankContext) -> str:
    batches = iter(replicate_batches(Broken(), mesh_of(ctx, Split(2, 2))))
    assert next(batches)["input_ids"].tolist() == [0, 1, 2]
    with pytest.raises(OSError if ctx.rank == 0 else DataError) as error:
        next(batches)
    return str(error.value)


def read_by_all_ranks(ctx: RankContext) -> str:
    sampler = torch.utils.data.DistributedSampler(range(8), ctx.world, ctx.rank)
    loader = torch.utils.data.DataLoader(range(8), sampler=sampler)
    with pytest.raises(ConfigError) as error:
        replicate_batches(loader, mesh_of(ctx, Split(1, 2)))
    return str(error.value)


def test_the_first_rank_of_a_mesh_reads_for_the_others(pool):
    found = pool.run(read_alike, 4)
    replicas: dict[int, Any] = {}
    for replica, length, first, second in found:
        assert replicas.setdefault(replica, (first, second)) == (first, second)
        assert length == len(first) == 3
        assert first != second
    seen = sorted(x for first, _ in replicas.values() for batch in first for x in batch)
    assert seen == list(range(10))


def test_an_error_in_reading_reaches_every_rank(pool):
    assert all("no such shard" in text for text in pool.run(read_broken, 4))


def test_a_sampler_for_all_ranks_is_refused(pool):
    for text in pool.run(read_by_all_ranks, 4):
        assert "out to 4 replicas, and there are 2 meshes" in text
