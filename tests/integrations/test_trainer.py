"""Trainer and SFTTrainer on ulysses x ring against one process: losses, norms, weights, metrics."""

import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from golden_curves import STEPS as RECORDED
from harness import RankContext, WorkerPool, fork_world
from hf_trainer_runs import (
    STEPS,
    Documents,
    Record,
    Run,
    Split,
    arguments,
    finish,
    mesh_of,
    restored_environment,
    run_sft,
    run_trainer,
    run_trl,
    tiny_model,
    tokenizer,
)

import ds_usp
from ds_usp.errors import ConfigError, DataError, UnsupportedAttentionError
from ds_usp.integrations.transformers import attach, enable, replicate_batches, share_batches
from ds_usp.integrations.transformers.model import find_enabled
from ds_usp.integrations.transformers.own_losses import reads_tokens
from ds_usp.integrations.transformers.run import main as run_unedited
from ds_usp.integrations.transformers.whole_arguments import RowsAsTree
from ds_usp.training import prepare_deepspeed

PAGE = Path(ds_usp.__file__).parents[1] / "docs" / "usage" / "transformers.md"
ALONE = Split()
CLIP = {"max_grad_norm": 0.5}
SPLITS = [
    (Split(2, 1, "ddp"), {}),
    (Split(1, 2, "ddp"), CLIP),
    (Split(2, 2, "fsdp2"), {}),
    (Split(1, 2, "zero0"), CLIP),
    (Split(2, 2, "zero1"), CLIP),
    (Split(2, 1, "zero2"), {}),
    (Split(2, 2, "zero3"), CLIP),
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


@pytest.mark.parametrize(
    ("program", "run", "split", "options"),
    [
        ("transformers Trainer, 1x2", run_trainer, Split(1, 2), {}),
        ("TRL SFTTrainer, packed, 2x1", run_sft, Split(2, 1), {"packing": True}),
    ],
)
def test_twenty_steps_are_the_recorded_ones(golden, pool, program, run, split, options):
    options = {**options, **CLIP, "max_steps": RECORDED, "micro": 2}
    seen = pool.run(run, 2, split=split, **options)[0]
    golden.check(program, seen.losses, seen.norms)


def test_lora_made_by_the_sft_trainer_trains_as_one_process_does(pool):
    options = {"packing": True, "lora": True, "evaluate": True, "per_device_eval_batch_size": 1}
    want = one_process(pool, run_sft, tuple(options.items()))
    run = pool.run(run_sft, 4, split=Split(1, 2), **options)[0]
    assert run.losses == pytest.approx(want.losses, rel=1e-5)
    assert run.norms == pytest.approx(want.norms, rel=1e-5)
    assert run.evaluation["eval_loss"] == pytest.approx(want.evaluation["eval_loss"], rel=1e-5)


def assert_same_logs(logs: Any, want: Any, without: tuple[str, ...] = ()) -> None:
    assert len(logs) == len(want) > 0
    for log, expected in zip(logs, want, strict=True):
        assert log.keys() == expected.keys()
        for name in expected.keys() - set(without):
            assert log[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-6), name


# The page's table of TRL's trainers: what is exact.
EXACT = ["dpo", "kto", "orpo", "cpo", "tpo", "gkd", "reward"]


@pytest.mark.parametrize("name", EXACT)
def test_trls_trainers_train_as_one_process_does(pool, name):
    """Everything that they log. A reference or a teacher is given shards too."""
    options = {"name": name, "micro": 2, "max_steps": 1, "experts": name in ("dpo", "kto")}
    want, tokens = pool.run(run_trl, 1, **options)[0]
    engine = "zero3" if name == "dpo" else "ddp"  # where the reference is in an engine too
    logs, local_tokens = pool.run(run_trl, 2, split=Split(2, 1, engine), **options)[0]
    # These average logits of padding too, which is a document of its own.
    logits = ("logits/chosen", "logits/rejected") if name in ("orpo", "cpo") else ()
    assert_same_logs(logs, want, without=logits)
    assert (tokens > 0) == (name in ("dpo", "kto", "gkd"))
    assert local_tokens == (tokens + 1) // 2


def test_dpo_of_two_replicas_trains_as_one_process_does(pool):
    want, _ = pool.run(run_trl, 1, name="dpo", micro=2, max_steps=2)[0]
    logs, _ = pool.run(run_trl, 4, name="dpo", split=Split(2, 1), max_steps=2)[0]
    of_micro_batches = ("entropy", "mean_token_accuracy", "logits/chosen", "logits/rejected")
    assert_same_logs(logs, want, without=of_micro_batches)


class OwnLoss(transformers.Trainer):
    """Sums token losses and divides them by ``num_items_in_batch`` itself, as many examples do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return loss / kwargs["num_items_in_batch"]


class Penalty(transformers.Trainer):
    """Adds the mean of a value for each token, which the model returns beside its loss."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any):
        loss, out = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + out.logits.logsumexp(-1).square().mean()
        return (loss, out) if return_outputs else loss


class Focal(transformers.Trainer):
    """Weighs the losses of tokens, from logits beside which it has given labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any):
        out, labels = model(**inputs), inputs["labels"][:, 1:].flatten()
        logits = out["logits"][:, :-1].flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = ((1 - (-losses).exp()) * losses).sum() / (labels >= 0).sum()
        return (loss, out) if return_outputs else loss


def square_of_logits(out: Any) -> torch.Tensor:
    return logsumexp_of(out).square().mean()


def decorated(function: Any) -> Any:
    if function is None:
        unset = None
    return lambda out: function(out) if out else unset


@decorated
def logsumexp_of(out: Any) -> torch.Tensor:
    return out["logits"].logsumexp(-1)


class PenaltyByFunction(transformers.Trainer):
    """Gives what the model returns to a function."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any):
        loss, out = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + square_of_logits(out)
        return (loss, out) if return_outputs else loss


class PenaltyByMethod(transformers.Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any):
        loss, out = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        return self.with_penalty(loss, out)

    def with_penalty(self, loss: Any, out: Any) -> Any:
        return loss + sum(x.logits.mean() for x in [out])


class Mean:
    def __init__(self, weight: float) -> None:
        self.weight = weight

    @property
    def scaled(self) -> Any:
        return self._of

    def _of(self, out: Any) -> torch.Tensor:
        return self.weight * sum(x.logits.mean() for x in [out])

    @classmethod
    def once(cls, out: Any) -> torch.Tensor:
        return cls(1.0)._of(out)


class MeanModule(torch.nn.Module):
    def forward(self, out: Any) -> torch.Tensor:
        return out["logits"].mean()


class Nested:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def again(self, out: Any) -> torch.Tensor:
        return self.inner.once(out)


class Delegate:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __getitem__(self, key: str) -> Any:
        return self.inner.once


class Heads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Sequential(MeanModule())

    def forward(self, out: Any) -> torch.Tensor:
        return self.head(out)


class OwnModel(transformers.LlamaForCausalLM):
    """Has a forward pass that reads logits, and a method that does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        self.last = out.logits
        return out

    def mean(self, out: Any) -> torch.Tensor:
        return out.logits.mean()


MEAN, mean_of = Mean(2.0), functools.partial(square_of_logits)
TOKENS, MANY = "logits", {**dict.fromkeys(range(100)), "mean": Mean.once}


@functools.singledispatch
def dispatched(out: Any) -> torch.Tensor:
    return torch.zeros(())


@dispatched.register(dict)
def mean_of_outputs(out: Any) -> torch.Tensor:
    return out["logits"].mean()


def make_mean() -> Any:
    return Nested(Mean(1.0))


def second_of(self: Any, out: Any) -> torch.Tensor:
    _, logits = out[:2]
    return logits.mean()


def imported_inside(self: Any, out: Any) -> torch.Tensor:
    from loss_of_a_program import mean

    return mean(out)


class Raises:
    """An object that raises whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(out: Any) -> torch.Tensor:
        return function(out) + out.logits.mean()

    return call


@wrapped
def zero(out: Any) -> torch.Tensor:
    return torch.zeros(())


class PenaltyByObject(transformers.Trainer):
    """Gives what the model returns to the method of an object."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any):
        loss, out = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + MEAN.scaled(out)
        return (loss, out) if return_outputs else loss


def with_call(penalty: Any, **attributes: Any) -> transformers.Trainer:
    """A trainer whose loss adds ``penalty(trainer, out)``."""

    class WithCall(transformers.Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss, out = super().compute_loss(*args, **{**kwargs, "return_outputs": True})
            return loss + penalty(self, out)

    trainer = WithCall.__new__(WithCall)
    vars(trainer).update(attributes)
    return trainer


class Logged(transformers.Trainer):
    """Computes transformers' own loss."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def run_own_loss(
    ctx: RankContext, split: Split = ALONE, kind: type = OwnLoss, **options: Any
) -> Run:
    with restored_environment():
        replicas = ctx.world // (split.ulysses * split.ring)
        record = Record()
        evaluate, packed = (options.pop(x, False) for x in ("evaluate", "packed"))
        trainer = kind(
            tiny_model(),
            transformers.TrainingArguments(**arguments(split, replicas, **options)),
            train_dataset=Documents(),
            eval_dataset=Documents(3) if evaluate else None,
            data_collator=transformers.DataCollatorWithFlattening()
            if packed
            else transformers.DataCollatorForSeq2Seq(tokenizer()),
            callbacks=[record],
        )
        return finish(ctx, trainer, split, record, evaluate)


@pytest.mark.parametrize("kind", [PenaltyByFunction, PenaltyByObject, Focal])
def test_a_loss_of_values_per_token_is_that_of_one_process(pool, kind):
    """Shards of a row of odd length have another mean than the row."""
    options = {"kind": kind, "packed": True, "evaluate": True, "prediction_loss_only": True}
    want = one_process(pool, run_own_loss, tuple(options.items()))
    for split in (Split(2, 1), Split(1, 2)):
        run = pool.run(run_own_loss, 2, split=split, micro=2, **options)[0]
        assert run.losses == pytest.approx(want.losses, rel=1e-5)
        for weight, wanted in zip(run.weights, want.weights, strict=True):
            torch.testing.assert_close(weight, wanted, rtol=1e-5, atol=1e-6)
        assert run.evaluation["eval_loss"] == pytest.approx(want.evaluation["eval_loss"], rel=1e-5)


def test_what_reads_no_values_per_token_makes_no_whole_logits():
    import trl

    for kind in (transformers.Trainer, trl.SFTTrainer, Logged):
        assert not reads_tokens(kind.__new__(kind)), kind
    for kind in (Focal, Penalty, PenaltyByFunction, PenaltyByMethod):
        assert reads_tokens(kind.__new__(kind)), kind
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    trainer.compute_loss = lambda model, inputs, **_: model(**inputs)["logits"].mean()
    assert reads_tokens(trainer)


@pytest.mark.parametrize(
    ("penalty", "attributes"),
    [
        (lambda self, out: MEAN.once(out), {}),
        (lambda self, out: Mean.once(out), {}),
        (lambda self, out: mean_of(out), {}),
        (lambda self, out: zero(out), {}),
        (lambda self, out: self.mean.once(out), {"mean": MEAN}),
        (lambda self, out: self.mean(out), {"mean": MeanModule()}),
        (lambda self, out: self.mean(out), {"mean": MEAN.once}),
        (lambda self, out: self.mean(out), {"mean": functools.partial(MEAN.once)}),
        (lambda self, out: self.nested.again(out), {"nested": Nested(MEAN)}),
        (lambda self, out: self.each[0].once(out), {"each": [MEAN]}),
        (lambda self, out: self.each["a"].once(out), {"each": {"a": (Mean,)}}),
        (lambda self, out: self.each[0](out), {"each": torch.nn.ModuleList([MeanModule()])}),
        (lambda self, out: sum(out[x].mean() for x in ("logits", "loss")), {}),
        (second_of, {}),
        (imported_inside, {}),
        (lambda self, out, mean=MEAN: mean.once(out), {}),
        (lambda self, out, *, mean=MEAN: mean.once(out), {}),
        (lambda self, out: out[TOKENS].mean(), {}),
        (lambda self, out, name="logits": out[name].mean(), {}),
        (lambda self, out: MANY["mean"](out), {}),
        (lambda self, out: dispatched(out), {}),
        (lambda self, out: make_mean().again(out), {}),
        (lambda self, out: self.model.mean(out), {"model": OwnModel.__new__(OwnModel)}),
        (lambda self, out: self.heads(out), {"heads": Heads()}),
        (lambda self, out: self.heads(out), {"heads": torch.compile(MeanModule())}),
        (lambda self, out: self.any.once(out), {"any": Delegate(MEAN)}),
        (lambda self, out: self.any["mean"](out), {"any": Delegate(MEAN)}),
        (lambda self, out: sum(x(out) for x in self.each), {"each": {Mean.once}}),
    ],
)
def test_values_per_token_that_an_object_of_the_program_reads_are_those_of_all(penalty, attributes):
    module = ModuleType("loss_of_a_program")
    module.mean = MEAN.once
    with mock.patch.dict(sys.modules, {"loss_of_a_program": module}):
        assert reads_tokens(with_call(penalty, **attributes))
    assert not reads_tokens(with_call(lambda self, out: self.mean, mean=1.0, other=MEAN))
    assert not reads_tokens(with_call(lambda self, out: self.mean(out), mean=Raises()))
    library = torch.nn.CrossEntropyLoss()
    assert not reads_tokens(with_call(lambda self, out: self.mean(1), mean=library, model=None))


def decorated_step(step: Any) -> Any:
    return lambda *args, **kwargs: step(*args, **kwargs)


class CopiedStep(transformers.Trainer):
    """Has transformers' own step, copied."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()


class DecoratedStep(Logged):
    @decorated_step
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class ChecksModel(Logged):
    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(model, OwnModel)
        return super().compute_loss(model, *args, **kwargs)


def train(model: Any, inputs: Any) -> Any:  # a method of models has its name
    return model(**inputs).logits


@pytest.mark.parametrize("kind", [CopiedStep, DecoratedStep, ChecksModel])
@pytest.mark.parametrize("make", [object, Raises, mock.MagicMock, lambda: transformers])
def test_a_step_that_reads_no_values_per_token_makes_no_whole_logits(kind, make):
    trainer = kind.__new__(kind)
    trainer.model, trainer.accelerator = OwnModel.__new__(OwnModel), make()
    trainer.compute_loss_context_manager = make()
    assert not reads_tokens(trainer)


def test_a_program_that_asks_for_shards_gets_them_in_training(tmp_path):
    for options, is_joined in (({}, True), ({"logits": "shard"}, False)):
        arguments = transformers.TrainingArguments(tmp_path, use_cpu=True)
        trainer = Penalty(tiny_model(), arguments)
        attach(trainer, ds_usp.SequenceMesh.single(), **options)
        assert ("training_step" in vars(trainer)) == is_joined


def test_many_functions_that_name_the_same_objects_are_followed_in_time():
    scope: dict[str, Any] = {"Logged": Logged, "__name__": "program"}
    objects = ", ".join(f"o{i}.x" for i in range(20))
    lines = [f"class C{i}: x = 1\no{i} = C{i}()" for i in range(20)]
    lines += [f"def f{i}(): return f{i + 1}(), {objects}" for i in range(600)]
    lines += ["class Long(Logged):\n def compute_loss(self): return super().compute_loss(), f0()"]
    exec("\n".join(lines), scope)
    start = time.perf_counter()
    assert not reads_tokens(scope["Long"].__new__(scope["Long"]))
    assert time.perf_counter() - start < 5  # 0.4 s; it took 20 s


@pytest.mark.parametrize(("world", "share"), [(2, 1.0), (4, 0.5)])
def test_a_loss_that_a_trainer_divides_itself_is_that_of_one_process(pool, world, share):
    """With two replicas it is half, as DistributedDataParallel over two processes has it."""
    want = one_process(pool, run_own_loss, (("max_steps", 2),))
    run = pool.run(run_own_loss, world, split=Split(2, 1), micro=4 // world, max_steps=2)[0]
    # Of the first step: the second has moved half as far.
    assert run.losses[0] == pytest.approx(want.losses[0] * share, rel=1e-5)
    assert run.norms[0] == pytest.approx(want.norms[0] * share, rel=1e-5)


def test_token_counts_of_each_rank_train_one_mesh_as_one_process(pool):
    options = {"average_tokens_across_devices": False, "max_steps": 2, "learning_rate": 0.05}
    options |= {"lr_scheduler_type": "cosine", "warmup_steps": 1}
    want = one_process(pool, run_trainer, tuple(options.items()))
    run = pool.run(run_trainer, 2, split=Split(2, 1), micro=2, **options)[0]
    assert_same_logs(run.state["logs"], want.state["logs"])


@pytest.mark.parametrize("split", [Split(2, 1), Split(2, 2)], ids=str)
def test_evaluation_counts_every_sample_once(pool, split):
    """Seven samples for two replicas: the last batch is filled up, and cut off again."""
    options = {"packing": False, "evaluate": True, "per_device_eval_batch_size": 1, "max_steps": 1}
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


def evaluated_steps(ctx: RankContext) -> list[float]:
    """Steps of an evaluation and of a prediction of 7 rows, one a mesh, by their speed."""
    with restored_environment():
        args = transformers.TrainingArguments(**arguments(Split(), 1, micro=1))
        trainer = transformers.Trainer(
            tiny_model(), args, data_collator=transformers.DataCollatorWithFlattening()
        )
        trainer.remove_callback(transformers.PrinterCallback)
        attach(trainer, mesh_of(ctx, Split(2, 1)))
        loss = trainer.evaluate(Documents(7), metric_key_prefix="train")
        predicted = trainer.predict(Documents(7)).metrics
        found = [(loss, "train"), (predicted, "test"), (trainer.state.log_history[-1], "train")]
        return [x[f"{name}_steps_per_second"] * x[f"{name}_runtime"] for x, name in found]


@pytest.mark.parametrize(("world", "steps"), [(2, 7), (4, 4)])
def test_the_speed_of_an_evaluation_is_that_of_its_steps(pool, world, steps):
    assert pool.run(evaluated_steps, world)[0] == pytest.approx([steps] * 3, rel=0.01)


class Sampler(transformers.TrainerCallback):
    """Generates after each step."""

    def __init__(self, ctx: RankContext) -> None:
        self.texts: list[list[int]] = []
        self._rank = ctx.rank

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        enabled = find_enabled(model, model)
        prompt = torch.tensor([Documents().items[self._rank][:4]])
        with enabled.paused() if enabled else contextlib.nullcontext(model) as whole:
            ids = whole.generate(prompt, max_new_tokens=6, do_sample=False)
        for gradients_off in (torch.no_grad, torch.inference_mode):
            with gradients_off():
                again = model.generate(prompt, max_new_tokens=6, do_sample=False)
            assert again.tolist() == ids.tolist()
        if enabled:
            with pytest.raises(KeyError), enabled.paused():
                raise KeyError
            assert find_enabled(model, model) is enabled
        self.texts.append(ids[0].tolist())


def sampled(ctx: RankContext, split: Split) -> Any:
    """Training with samples between steps, then predictions."""
    with restored_environment():
        sampler, record = Sampler(ctx), Record()
        trainer = transformers.Trainer(
            tiny_model(),
            transformers.TrainingArguments(**arguments(split, 1, max_steps=2, learning_rate=1.0)),
            train_dataset=Documents(),
            data_collator=transformers.DataCollatorWithFlattening(),
            callbacks=[record, sampler],
        )
        run = finish(ctx, trainer, split, record)
        predictions = trainer.predict(Documents(2)).predictions
        return run.losses, torch.from_numpy(predictions), sampler.texts


def test_a_model_generates_between_steps(pool):
    """Each rank by itself, with a prompt of its own; training and evaluation go on sharded."""
    losses, predictions, texts = pool.run(sampled, 1, split=Split())[0]
    ranks = pool.run(sampled, 2, split=Split(1, 2))
    assert ranks[0][2] == texts
    assert ranks[1][2] != texts
    for got_losses, got, _ in ranks:
        assert got_losses == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(got, predictions, rtol=1e-4, atol=1e-5)


def test_ranks_of_a_mesh_read_a_stream_alike(pool):
    want = one_process(pool, run_trainer, (("stream", True),))
    assert_same(pool.run(run_trainer, 4, split=Split(2, 1), stream=True)[0], want, norms=False)


@pytest.mark.parametrize("split", [Split(2, 1), Split(2, 2)], ids=str)
def test_the_order_does_not_depend_on_the_ranks_random_states(pool, split):
    """Two epochs, by samplers that draw from the random state of their process."""
    config = {"use_seedable_sampler": False}
    options = {"count": 8, "extra_draws": 3, "max_steps": 4, "accelerator_config": config}
    run = pool.run(run_trainer, 4, split=split, **options)[0]
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
    options = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    whole = pool.run(run_trainer, 4, split=Split(2, 1), **options)[0]
    checkpoint = tmp_path / "checkpoint-1"
    assert "usp" not in json.loads((checkpoint / "config.json").read_text()).values()
    resumed = pool.run(
        run_trainer, 4, split=Split(2, 2), resume=str(checkpoint), output_dir=str(tmp_path)
    )[0]
    assert len(resumed.losses) == 1
    assert resumed.losses == pytest.approx(whole.losses[1:], rel=1e-5)
    assert distance(resumed.weights, whole.weights) < 1e-4 * distance(
        whole.weights, [p.detach() for p in tiny_model().parameters()]
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    saved = [p.detach() for p in loaded.parameters()]
    assert distance(saved, whole.weights) < 1e-6


# ------------------------------------------------------------------ refusals


def trainer_with(**options: Any) -> transformers.Trainer:
    args = transformers.TrainingArguments(use_cpu=True, report_to=[], **options)
    return transformers.Trainer(tiny_model(), args, train_dataset=Documents(8))


GENERATING = [
    "A2POTrainer",
    "AsyncDistillationTrainer",
    "AsyncGRPOTrainer",
    "DistillationTrainer",
    "GOLDTrainer",
    "IWOPDTrainer",
    "OnlineDPOTrainer",
    "SDFTTrainer",
    "SDPOTrainer",
    "ServerDistillationTrainer",
]


def test_every_trainer_of_trl_is_exact_or_refused_by_name():
    """Those of the installed version; the page says which."""
    from trl.trainer.base_trainer import _TELEMETRY_TRAINERS

    exact = {f"{name}Trainer".lower() for name in (*EXACT, "sft", "grpo", "gmpo", "rloo")}
    assert exact | {name.lower() for name in GENERATING} == {
        name.lower() for name in _TELEMETRY_TRAINERS
    }
    page = PAGE.read_text(encoding="utf-8")
    for name in _TELEMETRY_TRAINERS:
        assert re.search(rf"\b{name.removesuffix('Trainer')}\b", page), name


@pytest.mark.parametrize("name", GENERATING)
def test_trainers_that_generate_are_refused_by_name(name):
    # The class's name only: most are slow to import and to make.
    parent = {"ServerDistillationTrainer": "DistillationTrainer"}
    base: Any = transformers.Trainer
    if name in parent:
        base = type(parent[name], (base,), {})
    trainer = trainer_with()
    trainer.__class__ = type(name, (base,), {})
    with pytest.raises(ConfigError, match=rf"{name} generates completions.*enabled\.paused"):
        attach(trainer, ds_usp.SequenceMesh.single())


def set_on(name: str, value: Any) -> Callable[[Any], None]:
    """Set an attribute of the trainer, given by its path."""

    def change(trainer: Any) -> None:
        *owners, last = name.split(".")
        setattr(functools.reduce(getattr, owners, trainer), last, value)

    return change


def generates_in_a_callback(trainer: Any) -> None:
    trainer.add_callback(type("LogCompletionsCallback", (transformers.TrainerCallback,), {}))


def scores_with_rwkv(trainer: Any) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 8}
    trainer.value_model = transformers.RwkvModel(transformers.RwkvConfig(**sizes))


def refers_to_another_mesh(trainer: Any) -> None:
    trainer.ref_model = tiny_model(2)
    enable(trainer.ref_model, ds_usp.SequenceMesh.single())


def has_axes_of_accelerates(trainer: Any) -> None:
    from accelerate import ParallelismConfig

    trainer.accelerator.state.parallelism_config = ParallelismConfig(cp_size=2)


def attached(trainer: Any) -> None:
    attach(trainer, ONE_RANK)


def enabled_elsewhere(trainer: Any) -> None:
    enable(trainer.model, ds_usp.SequenceMesh.single())


ONE_RANK = ds_usp.SequenceMesh.single()
NO_GENERATION = "no generation over a mesh"
# Options of a trainer, or what was done to it, and the refusal of attach.
REFUSED: list[tuple[dict[str, Any] | Callable[[Any], None], str]] = [
    ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
    (set_on("args.lmbda", 0.5), NO_GENERATION),  # GKD's default
    (set_on("args.seq_kd", True), NO_GENERATION),
    (set_on("args.predict_with_generate", True), NO_GENERATION),
    (set_on("args.generate_during_eval", True), NO_GENERATION),
    (set_on("args.num_generations", 8), NO_GENERATION),
    (generates_in_a_callback, "LogCompletionsCallback generates completions"),
    (
        set_on("args.precompute_ref_log_probs", True),
        r"precompute_ref_log_probs=True.*shards ref_model too",
    ),
    (scores_with_rwkv, "the trainer's value_model would run whole"),
    (refers_to_another_mesh, "the trainer's ref_model is enabled for another mesh"),
    (has_axes_of_accelerates, r"ParallelismConfig\(cp_size=2\)"),
    (attached, "attach was called for this trainer before"),
    (enabled_elsewhere, "enabled for another mesh"),
]


@pytest.mark.parametrize(("how", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_would_not_train_alike_is_refused(how, text):
    trainer = trainer_with(**(how if isinstance(how, dict) else {}))
    if callable(how):
        how(trainer)
    is_model = how is scores_with_rwkv
    with pytest.raises(UnsupportedAttentionError if is_model else ConfigError, match=text):
        attach(trainer, ONE_RANK)


def test_loaders_that_keep_a_state_or_were_prepared_before_are_refused():
    trainer = trainer_with()
    trainer.get_train_dataloader()
    with pytest.raises(ConfigError, match="1 data loaders were prepared before"):
        share_batches(trainer.accelerator, ONE_RANK)
    trainer = trainer_with()
    trainer.accelerator.dataloader_config.use_stateful_dataloader = True
    with pytest.raises(ConfigError, match="use_stateful_dataloader=True"):
        share_batches(trainer.accelerator, ONE_RANK)


def test_a_model_that_is_enabled_before_keeps_its_options():
    trainer, mesh = trainer_with(), ds_usp.SequenceMesh.single()
    enabled = enable(trainer.model, mesh, layout="striped")
    with pytest.raises(ConfigError, match="attach is given share_prefixes"):
        attach(trainer, mesh, share_prefixes=True)
    assert attach(trainer, mesh) is enabled


# ------------------------------------------------------------------ share_batches


def accelerator_of(ctx: RankContext, split: Split, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **options)
    if split.ulysses * split.ring > 1:
        assert share_batches(accelerator, mesh_of(ctx, split)).size == accelerator.num_processes
    return accelerator


Scheduler = Callable[[torch.optim.Optimizer, Any, int], Any]


def linear(optimizer: Any, loader: Any, processes: int) -> Any:
    """Of the loader's length before it is prepared, as Accelerate's pages say."""
    steps = len(loader)
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)


def by_processes(optimizer: Any, loader: Any, processes: int) -> Any:
    """Of steps that each process takes, times the processes, as transformers' examples say."""
    total = len(loader) // processes * processes
    return transformers.get_cosine_schedule_with_warmup(optimizer, processes, total)


def one_cycle(optimizer: Any, loader: Any, processes: int) -> Any:
    """Raises an error where it steps on after its end."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(loader))


def plateau(optimizer: Any, loader: Any, processes: int) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def rates(
    ctx: RankContext, split: Split, schedule: Scheduler, accumulation: int = 1, **options: Any
) -> list[float]:
    """The learning rates after each batch of a loop on Accelerate."""
    with restored_environment():
        accelerator = accelerator_of(
            ctx, split, gradient_accumulation_steps=accumulation, **options
        )
        model = torch.nn.Linear(4, 4)
        loader = torch.utils.data.DataLoader([torch.ones(4)] * 16, batch_size=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = schedule(optimizer, loader, accelerator.num_processes)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        found = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(scheduler.get_last_lr()[0])
        return found


@pytest.mark.parametrize("schedule", [linear, by_processes, one_cycle, plateau])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_schedulers_step_once_for_each_mesh(pool, schedule, accumulation):
    """As of Accelerate with as many processes as there are meshes."""
    options = {"schedule": schedule, "accumulation": accumulation}
    for replicas in (1, 2):
        want = pool.run(rates, replicas, split=Split(), **options)[0]
        assert len(want) == 8 // replicas
        for got in pool.run(rates, 2 * replicas, split=Split(1, 2), **options):
            assert got == pytest.approx(want)


@pytest.mark.parametrize("option", ["split_batches", "step_scheduler_with_optimizer"])
def test_schedulers_that_step_once_step_once(pool, option):
    from accelerate import DataLoaderConfiguration

    options: dict[str, Any] = {"schedule": linear, "step_scheduler_with_optimizer": False}
    if option == "split_batches":
        config = DataLoaderConfiguration(split_batches=True)
        options = {"schedule": linear, "dataloader_config": config}
    want = pool.run(rates, 2, split=Split(), **options)[0]
    assert pool.run(rates, 4, split=Split(2, 1), **options)[3] == pytest.approx(want)


def counts(ctx: RankContext, split: Split) -> Any:
    """What a program makes of an accelerator's count of a batch that its replica has."""
    with restored_environment():
        accelerator = accelerator_of(ctx, split)
        replica = ctx.rank // (split.ulysses * split.ring)
        tokens = torch.tensor(5 + replica)
        rows = torch.full((2, 3), float(replica))
        return {
            "processes": accelerator.num_processes,
            "tokens": accelerator.gather(tokens).sum().item(),
            "sum": accelerator.reduce({"x": rows})["x"].tolist(),
            "mean": accelerator.reduce(rows, "mean").tolist(),
            "max": accelerator.reduce(tokens, "max").item(),
            "rows": accelerator.gather((rows, tokens))[0].tolist(),
            "texts": accelerator.gather_for_metrics([f"of {replica}"]),
            "bfloat16": accelerator.gather(rows.bfloat16()).dtype,
        }


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_a_program_counts_is_counted_once_for_each_mesh(pool, replicas):
    want = pool.run(counts, replicas, split=Split())[0]
    want["tokens"] = sum(5 + x for x in range(replicas))  # one process gathers a number as it is
    assert pool.run(counts, 2 * replicas, split=Split(2, 1)) == [want] * 2 * replicas


def number_at_the_end(ctx: RankContext) -> float:
    with restored_environment():
        torch.distributed.destroy_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE"):
            del os.environ[name]
        accelerator = accelerator_of(ctx, Split())
        share_batches(accelerator, ds_usp.SequenceMesh.single())
        state = mock.Mock(end_of_dataloader=True, remainder=1)  # a last batch that was filled up
        with mock.patch.object(accelerator, "gradient_state", state):
            return accelerator.gather_for_metrics(torch.tensor(0.5)).item()


def test_one_process_gathers_a_number_as_it_is():
    assert fork_world(number_at_the_end, 1) == [0.5]


def gathered_shards(ctx: RankContext) -> list[str]:
    with restored_environment():
        accelerator = accelerator_of(ctx, Split(2, 1))
        shard = torch.full((2,), 1.0 + 0.1 * ctx.rank)
        texts = []
        for call in (accelerator.gather, accelerator.reduce, accelerator.gather_for_metrics):
            with pytest.raises(DataError) as error:
                call({"loss": shard})
            texts.append(str(error.value))
        gradient = accelerator.reduce(shard, "mean")  # of all ranks, as DistributedDataParallel's
        assert gradient.tolist() == pytest.approx([1 + 0.1 * (ctx.world - 1) / 2] * 2)
        # Kernels may add in any order.
        rounded = torch.tensor([1.0, float("nan"), 1e-3 * ctx.rank])
        assert len(accelerator.gather(rounded)) == 3 * ctx.world // 2
        return texts


def test_shards_are_no_numbers_of_a_replica(pool):
    for texts in pool.run(gathered_shards, 4):
        for text in texts:
            assert "[1, 2] torch.float32 differs between ranks 0 and 1" in text or "[2]" in text
            assert "enabled.whole(x); accelerate.utils.gather" in text


def local_sgd(ctx: RankContext) -> str:
    from accelerate.local_sgd import LocalSGD

    with restored_environment():
        accelerator = accelerator_of(ctx, Split(2, 1))
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        local = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=1)
        with pytest.raises(ConfigError) as error, local:
            local.step()
        return str(error.value)


def test_local_sgd_is_refused(pool):
    assert all("LocalSGD lets ranks step" in text for text in pool.run(local_sgd, 2))


def total_steps(ctx: RankContext, split: Split) -> Any:
    """Of a scheduler that DeepSpeed makes, of 8 batches in all."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DummyScheduler

    with restored_environment():
        prepare_deepspeed()
        import deepspeed.comm

        deepspeed.comm.init_distributed(dist_backend="gloo", dist_init_required=False)
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True, backend="gloo")
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        auto = dict.fromkeys(
            ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"
        )
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "train_batch_size": "auto",
            "zero_optimization": {"stage": 0},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "scheduler": {"type": "WarmupDecayLR", "params": auto},
        }
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        replicas = share_batches(accelerator, mesh_of(ctx, split))
        model = tiny_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dummy = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
        loader = torch.utils.data.DataLoader([torch.ones(4)] * 16, batch_size=2)
        *_, loader, scheduler = accelerator.prepare(model, optimizer, loader, dummy)
        made = scheduler.scheduler.total_num_steps
        return replicas.size, len(loader), made, dummy.total_num_steps


def test_schedulers_of_deepspeed_end_with_the_loader(pool):
    assert pool.run(total_steps, 4, split=Split(2, 1)) == [(2, 4, 4, 8)] * 4


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


PROGRAM = """
import json, sys
import transformers
from hf_trainer_runs import Documents, Record, Split, arguments, tiny_model

out, replicas, trains = sys.argv[1:]
record, args = Record(), transformers.TrainingArguments(**arguments(Split(), int(replicas)))
trainer = transformers.Trainer(
    model=tiny_model(), args=args, train_dataset=Documents(), callbacks=[record],
    data_collator=transformers.DataCollatorWithFlattening(),
)
if trains == "yes":
    trainer.train()
    json.dump([log["loss"] for log in record.logs if "loss" in log], open(out, "w"))
    sys.exit()
"""


def run_program(ctx: RankContext, arguments: list[str], folder: str, sharded: bool) -> Any:
    """The losses of an unedited program on this rank, or what refused it."""
    path, out = Path(folder, "program.py"), Path(folder, f"{ctx.world} {ctx.rank}")
    words = [*arguments[:-2], str(path), str(out), *arguments[-2:]]
    # A rank of the pool goes on after the program.
    with (
        restored_environment(),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(RowsAsTree, "read", side_effect=RowsAsTree.read) as as_tree,
        contextlib.suppress(SystemExit),
    ):
        try:
            if sharded:
                run_unedited(words)
            else:
                sys.argv = words
                exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
        except ds_usp.USPError as error:
            return str(error)
    assert as_tree.called == ("--usp-share-prefixes" in words)
    return json.loads(out.read_text())


def test_an_unedited_program_trains_as_on_one_process(pool, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (want,) = pool.run(run_program, 1, arguments=["1", "yes"], folder=str(tmp_path), sharded=False)
    flags = ["--ulysses-degree", "2", "--sequence-parallel-size", "2", "--usp-loss-chunks", "2"]
    flags += ["--usp-share-prefixes"]
    for losses in pool.run(
        run_program, 4, arguments=[*flags, "2", "yes"], folder=str(tmp_path), sharded=True
    ):
        assert losses == pytest.approx(want, rel=1e-5) and len(losses) == STEPS
    for flags, trains, text in (
        (["--ulysses-degree", "2"], "no", "nothing was sharded"),
        (["--ulysses-degree", "3"], "yes", "--ulysses-degree 3 must divide it"),
    ):
        arguments = [*flags, "1", trains]
        for said in pool.run(
            run_program, 4, arguments=arguments, folder=str(tmp_path), sharded=True
        ):
            assert text in said


# Programs of TRL's trainers through the same door: their line that makes the trainer.
_GENERATES = "tiny_model(), Reward(), record, split=Split(), replicas=1, beta=0.0"
TRL_PROGRAMS = {
    "grpo": f"rl_trainer('grpo', {_GENERATES})",
    "rloo": f"rl_trainer('rloo', {_GENERATES})",
    "kto": "trl_trainer('kto', arguments(Split(), 1, micro=2), record)",
    "orpo": "trl_trainer('orpo', arguments(Split(), 1, micro=2), record)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRL_PROGRAMS)
def test_an_unedited_program_of_trl_trains_as_on_one_process(pool, tmp_path, name):
    begin, end = PROGRAM.index("record, args ="), PROGRAM.index("if trains ==")
    lines = f"""
from hf_trainer_runs import trl_trainer
sys.path.append({str(Path(__file__).parent)!r})
from rl_runs import Reward, rl_trainer
record = Record()
trainer = {TRL_PROGRAMS[name]}
"""
    program = PROGRAM[:begin] + lines + PROGRAM[end:].replace("loss", "grad_norm")
    (tmp_path / "program.py").write_text(program)
    options = {"folder": str(tmp_path), "arguments": ["1", "yes"]}
    (want,) = pool.run(run_program, 1, sharded=False, **options)
    for world, ulysses in ((2, "1"), (4, "2")):
        options["arguments"] = ["--ulysses-degree", ulysses, "1", "yes"]
        for norms in pool.run(run_program, world, sharded=True, **options):
            assert norms == pytest.approx(want, rel=1e-5) and len(norms) >= STEPS
