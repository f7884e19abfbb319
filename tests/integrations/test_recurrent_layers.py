"""Layers that carry a state from token to token: exact on 4 ranks, what is planted is seen, and
what enable does to a model and takes back."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import hf_trainer_runs
import pytest
import tiny_models
import torch
import transformers
from accelerate import hooks
from cases import mesh_of
from harness import RankContext
from hf_trainer_runs import Split
from model_runs import (
    BOUND,
    Result,
    on_the_mesh,
    packed_batch,
    padded_batch,
    plain_batch,
    reference,
    relative,
    take_gradients,
    whole_model,
)
from programs import losses_of_first_program
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.models.bamba import modeling_bamba
from transformers.models.minimax import modeling_minimax

import ds_usp
from ds_usp import ConfigError, DataError
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.transformers import (
    attach,
    enable,
    recurrent_functions,
    recurrent_layers,
    refusals,
)
from ds_usp.recurrence import exchange, scan

PAGE = Path(ds_usp.__file__).parents[1] / "docs" / "usage" / "hybrid-models.md"
WORLD = 4
# One type a function; `slow` has the others.
FUNCTIONS = ("lfm2", "qwen3_next", "kimi_linear", "bamba", "jamba", "minimax", "recurrent_gemma")
OTHERS = (
    *("lfm2_moe", "lfm3", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "bailing_hybrid"),
    *("granitemoehybrid", "nemotron_h", "falcon_h1", "zamba2", "mamba2", "zamba", "mamba"),
    "falcon_mamba",
)
Batches = Mapping[str, Callable[[], dict[str, Tensor]]]
# Documents of one token, and others that lie on all ranks: chains of three pieces have an A.
FEW: Batches = {
    "mixed": lambda: packed_batch((1, 1, 36, 3), (30, 2, 8, 1)),
    "right": lambda: padded_batch("right"),
}
MANY: Batches = {
    **FEW,
    "plain": plain_batch,
    "packed": packed_batch,
    "left": lambda: padded_batch("left"),
    "fewer tokens than the halo": lambda: plain_batch(2, 11),
    "many": lambda: packed_batch((3, 1, 30, 2, 2, 17, 4, 4, 40, 5)),
}
SLOW = pytest.mark.slow


def build(model_type: str) -> Any:
    """With decays near 1: the default weights forget within a few tokens."""
    model = tiny_models.build(model_type)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(4.0)
            if name.endswith("recurrent_param"):
                parameter.sub_(3.0)
    return model


def at_splits(
    ctx: RankContext, model_type: str, batches: str, ulysses: tuple[int, ...], layouts: list[str]
) -> dict[str, float]:
    """Errors by layout, mesh and batch. Each rank has the reference of its share of the batches."""
    model, chosen, errors = build(model_type), {"few": FEW, "many": MANY}[batches], {}
    shares = list(enumerate(chosen.items()))
    want = {name: reference(model, batch()) for i, (name, batch) in shares if i % WORLD == ctx.rank}
    for degree in ulysses:
        for layout in layouts:
            with enable(model, mesh_of(degree), layout=layout, logits="whole"):
                for name, batch in chosen.items():
                    if layout == "balanced" and name not in ("packed", "many"):
                        continue
                    try:
                        have = on_the_mesh(model, mesh_of(degree), batch())
                    except DataError:  # positions that padding on the left contradicts
                        assert name == "left"
                        take_gradients(model)
                        continue
                    if name in want:
                        errors[f"{layout}, ulysses {degree}, {name}"] = have.error(want[name])
    return errors


def joined(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: error for part in parts for name, error in part.items()}


@pytest.mark.parametrize("model_type", FUNCTIONS)
def test_states_are_exact_on_four_ranks(pool, model_type):
    case = {"batches": "few", "ulysses": (2,), "layouts": ["zigzag"]}
    errors = joined(pool.run(at_splits, WORLD, model_type=model_type, **case))
    assert len(errors) == len(FEW)
    assert max(errors.values()) <= BOUND, errors


@SLOW
@pytest.mark.parametrize("model_type", [*FUNCTIONS, *OTHERS])
def test_states_are_exact_at_every_split(pool, model_type):
    case = {
        "batches": "many",
        "ulysses": (4, 2, 1),
        "layouts": ["contiguous", "zigzag", "balanced"],
    }
    errors = joined(pool.run(at_splits, WORLD, model_type=model_type, **case))
    assert len(errors) >= 3 * (2 * (len(MANY) - 1) + 2)
    assert max(errors.values()) <= BOUND, errors


# ------------------------------------------------------------------ what is planted


@contextmanager
def planted(what: str) -> Iterator[None]:
    """A mesh that hands on no halo, no states, or an A that is off by one percent."""
    sent, composed = exchange.ExchangeCall.exchange, scan.Recurrence.compose

    def nothing(self: Any, *args: Any) -> Tensor:
        return sent(self, *args) * (self.kind != what)

    def another(self: Any, later: Any, earlier: Any) -> Any:
        return composed(self, (later[0] * 1.01, later[1]), earlier)

    changes: dict[str, Any] = {
        "": mock.patch.object(exchange.ExchangeCall, "exchange", sent),
        "A": mock.patch.object(scan.Recurrence, "compose", another),
    }
    with changes.get(what, mock.patch.object(exchange.ExchangeCall, "exchange", nothing)):
        yield


def errors_of_planted(ctx: RankContext, model_type: str, what: list[str]) -> list[float]:
    model, batch = build(model_type), plain_batch()
    want = reference(model, batch)
    errors = []
    with enable(model, mesh_of(1), layout="contiguous", logits="whole"):
        for one in what:
            with planted(one):
                errors.append(on_the_mesh(model, mesh_of(1), batch).error(want))
    return errors


@pytest.mark.parametrize(
    ("model_type", "what"),
    [
        ("lfm2", ["halo"]),
        ("qwen3_next", ["halo", "states", "A"]),
        ("bamba", ["states", "A"]),
    ],
)
def test_what_is_planted_is_seen(pool, model_type, what):
    right, *wrong = pool.run(errors_of_planted, WORLD, model_type=model_type, what=["", *what])[0]
    assert right <= BOUND
    assert min(wrong) > 10 * BOUND, dict(zip(what, wrong, strict=True))


# ------------------------------------------------------------------ checkpoints and passes


def train(model: Any, seeds: tuple[int, ...] = (30, 41)) -> dict[str, Tensor]:
    """Two forward passes of other lengths before their backward passes."""
    losses = [model(**packed_batch((n - 12, 12))).loss for n in seeds]
    sum(losses).backward()
    return take_gradients(model)


def with_checkpoints(ctx: RankContext, model_type: str) -> dict[str, float]:
    """The largest difference of gradients from those without checkpoints."""
    model, found = build(model_type), {}
    with enable(model, mesh_of(2)):
        plain = train(model)
    scale = max(float(g.norm()) for g in plain.values())

    def note(name: str, have: dict[str, Tensor]) -> None:
        found[name] = max(float((have[n] - plain[n]).norm()) for n in plain) / scale

    with enable(model, mesh_of(2), recompute="attention", offload_ratio=0.5):
        note("ours", train(model))
    for reentrant in (True, False):
        with enable(model, mesh_of(2)):
            train(model)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # late
            note(f"reentrant={reentrant}", train(model))
        model.gradient_checkpointing_disable()
    return found


# Layers that hand their mixer no keyword arguments; that are given none; that hand them on.
@pytest.mark.parametrize("model_type", ["jamba", "mamba", "recurrent_gemma"])
def test_recomputed_layers_have_the_shard_of_their_pass(pool, model_type):
    for found in pool.run(with_checkpoints, 2, model_type=model_type):
        assert len(found) == 3 and max(found.values()) < BOUND, found


def attributes(model: nn.Module) -> dict[str, Any]:
    return {
        f"{path}.{name}": module.__dict__[name]
        for path, module in model.named_modules()
        for name in ("forward", "_rnn_scan", "_gradient_checkpointing_func", "_old_forward")
        if name in module.__dict__
    }


def left_copied_and_paused(ctx: RankContext, model_type: str) -> list[float]:
    """The error of passes after one that has raised in a layer, of a copy, of a model beside it,
    and of itself, paused and disabled."""
    mesh, batch = mesh_of(2), packed_batch((20, 21))
    model, beside = build(model_type), build(model_type)
    before = attributes(model)
    want = reference(model, batch)
    whole = reference(beside, plain_batch())
    results: list[tuple[Result, Result]] = []
    enabled = enable(model, mesh, logits="whole")
    handle = model.model.layers[-1].register_forward_hook(fails)
    for _ in range(2):
        with pytest.raises((RuntimeError, ds_usp.MeshError)):
            model(**batch)
        # Nothing of the pass is left: a model beside it, and a part of it, have no shard.
        results.append((reference(beside, plain_batch()), whole))
    handle.remove()
    with pytest.raises(ConfigError, match="without a sharded batch"):
        model.model(input_ids=batch["input_ids"])
    results.append((on_the_mesh(model, mesh, batch), want))
    twin = copy.deepcopy(model)
    results.append((on_the_mesh(twin, mesh, batch), want))
    with enabled.paused():
        assert attributes(model) == before
        results.append((reference(model, batch), want))
    results.append((on_the_mesh(model, mesh, batch), want))
    enabled.disable()
    assert attributes(model) == before
    results.append((reference(model, batch), want))
    results.append((on_the_mesh(twin, mesh, batch), want))
    return [have.error(right) for have, right in results]


def fails(*_: Any) -> None:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("model_type", ["jamba", "recurrent_gemma"])
def test_passes_that_raise_copies_and_disabled_models_leave_nothing(pool, model_type):
    for errors in pool.run(left_copied_and_paused, 2, model_type=model_type):
        assert len(errors) == 8 and max(errors) <= BOUND, errors


# ------------------------------------------------------------------ refusals


def meta(model_type: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return tiny_models.model_class(model_type)._from_config(
            tiny_models.config(model_type, **changes)
        )


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("inkling_text", "biases by position"),
        ("inkling2_text", "biases by position"),
        ("zaya", "convolutions and a delayed value"),
        ("rwkv", "running maximum"),
        ("xlstm", "running maximum"),
    ],
)
def test_types_are_refused_by_their_names(model_type, why, monkeypatch):
    model = meta(model_type)
    # Also where no flag and no kind of layer tells of a state.
    monkeypatch.setattr(type(model), "_is_stateful", False, raising=False)
    monkeypatch.setattr(model.config, "layer_types", None, raising=False)
    with pytest.raises(Unsupported, match=f"model type {model_type} are not served: .*{why}"):
        enable(model, ds_usp.SequenceMesh.single())


def zaya_without_refusal(ctx: RankContext) -> float:
    model, batch = tiny_models.build("zaya"), plain_batch()
    want = reference(model, batch)
    with (
        mock.patch.object(refusals, "check_model", lambda _: None),
        enable(model, mesh_of(2), logits="whole"),
    ):
        return on_the_mesh(model, mesh_of(2), batch).error(want)


def test_zaya_would_run_and_be_wrong(pool):
    assert min(pool.run(zaya_without_refusal, 2)) > 0.1


class OwnMixer(modeling_bamba.BambaMixer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().forward(*args, **kwargs)


def own_mixer(model: Any) -> None:
    model.model.layers[0].mamba.__class__ = OwnMixer


class OwnAttention(modeling_minimax.MiniMaxLightningAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


def own_attention(model: Any) -> None:
    """Of a layer whose forward a row replaces as a whole."""
    model.__class__ = modeling_minimax.MiniMaxForCausalLM
    small = meta("minimax")
    model.config, model.model = small.config, small.model
    for module in model.modules():
        if type(module) is modeling_minimax.MiniMaxLightningAttention:
            module.__class__ = OwnAttention


def own_code(model: Any) -> None:
    """As a checkpoint brings it."""
    kind = type(model.model)
    model.model.__class__ = type("RemoteModel", (transformers.PreTrainedModel,), dict(vars(kind)))
    model.model.__class__.__module__ = "transformers_modules.bamba.modeling_bamba"


def replaced(model: Any) -> None:
    model.model.layers[0].mamba.forward = lambda x, **_: x


def another_kind(model: Any) -> None:
    model.model.layers[0].mamba = nn.Identity()


def another_type(model: Any) -> None:
    model.config.model_type = "bamba2"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (own_mixer, "OwnMixer has a forward of its own around that of causal_conv1d_fn"),
        (own_attention, "OwnAttention has a forward of its own around that of forward"),
        (own_code, "RemoteModel is not transformers' own model of the type bamba"),
        (replaced, "the forward of BambaMixer was replaced"),
        (another_kind, "names 1 of them, and 0 call functions"),
        (another_type, "model type bamba2 are not served: they are not known"),
    ],
)
def test_layers_that_are_not_known_are_refused(change, text):
    model = meta("bamba")
    change(model)
    with pytest.raises(Unsupported, match=text):
        enable(model, ds_usp.SequenceMesh.single())


def test_numbers_of_documents_are_those_of_the_batch():
    """Dropped, they would leave a state in the next document, which mamba_ssm keeps apart."""
    model, ids = tiny_models.build("bamba"), plain_batch()["input_ids"][:1]
    lengths = 9, ids.shape[1] - 9
    numbers = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with enable(model, ds_usp.SequenceMesh.single()):
        both = model(ids, position_ids=positions, seq_idx=numbers, labels=ids).loss
        assert both == model(ids, position_ids=positions, labels=ids).loss
        with pytest.raises(DataError, match="seq_idx of row 0 has 2 documents"):
            model(ids, seq_idx=numbers, position_ids=positions.roll(1))


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(refusals.transformers, "__version__", "5.20.0")
    with pytest.raises(Unsupported, match=r"transformers>=5.23, and this is 5.20.0"):
        enable(meta("lfm2"), ds_usp.SequenceMesh.single())


def test_a_layer_that_does_not_call_its_functions_is_refused():
    model = tiny_models.build("lfm2")
    with (
        enable(model, ds_usp.SequenceMesh.single()),
        mock.patch.object(
            recurrent_layers, "_run_over_mesh", lambda _, __, f, *args, **kw: f(*args, **kw)
        ),
        pytest.raises(Unsupported, match="Lfm2ShortConv has not called causal_conv1d_fn"),
    ):
        model(**plain_batch())


def test_hooks_of_accelerate_stay():
    model = tiny_models.build("lfm2")
    conv = model.model.layers[0].conv
    outer, inner = (hooks.ModelHook() for _ in range(2))
    calls = []
    outer.pre_forward = lambda _, *args, **kwargs: (calls.append("outer"), (args, kwargs))[1]
    inner.pre_forward = lambda _: calls.append("inner")
    hooks.add_hook_to_module(conv, outer)
    conv.conv._hf_hook = inner  # whose weight the layer reads without calling it
    want = whole_model(model, plain_batch())
    with enable(model, ds_usp.SequenceMesh.single(), logits="whole"):
        have = model(**plain_batch(), use_cache=False)
    assert calls == ["outer", "inner"] * 2
    assert relative(have.logits, want.logits) < BOUND
    assert whole_model(model, plain_batch()).error(want) == 0
    assert calls == ["outer", "inner"] * 3


def test_every_type_of_the_tables_is_one_of_transformers():
    tables = {*recurrent_functions.SERVED, *recurrent_functions.NOT_SERVED}
    assert not tables.difference(transformers.CONFIG_MAPPING.keys())
    assert not recurrent_functions.SERVED & recurrent_functions.NOT_SERVED.keys()


# ------------------------------------------------------------------ trainers


def run_hybrid(ctx: RankContext, model_type: str, run: str, split: Split, **options: Any) -> Any:
    """A trainer of packed rows. On one rank it is attached too: transformers alone hands the state
    of a document on to the next one."""
    model, finish = tiny_models.build(model_type), hf_trainer_runs.finish

    def attached(ctx: RankContext, trainer: Any, split: Split, *args: Any, **kwargs: Any) -> Any:
        if ctx.world == 1:
            attach(trainer, hf_trainer_runs.mesh_of(ctx, split))
        return finish(ctx, trainer, split, *args, **kwargs)

    with (
        mock.patch.object(hf_trainer_runs, "tiny_model", lambda: model),
        mock.patch.object(hf_trainer_runs, "finish", attached),
    ):
        done = getattr(hf_trainer_runs, run)(ctx, split=split, max_steps=2, **options)
    unset_hf_deepspeed_config()  # models of the next case are whole
    return done.losses, done.weights


@SLOW
@pytest.mark.parametrize(
    ("model_type", "run", "split", "options"),
    [
        ("lfm2", "run_sft", Split(2, 2, "zero2"), {"packing": True}),
        ("bamba", "run_sft", Split(1, 2, "zero3"), {"packing": True}),
        ("qwen3_5_text", "run_sft", Split(2, 1, "fsdp2"), {"packing": True}),
        ("jamba", "run_trainer", Split(2, 2, "zero3"), {}),
        ("recurrent_gemma", "run_trainer", Split(2, 2, "zero1"), {}),
        ("mamba", "run_trainer", Split(1, 2, "fsdp2"), {}),
    ],
)
def test_trainers_train_as_on_one_rank(pool, model_type, run, split, options):
    case = {"model_type": model_type, "run": run, **options}
    losses, weights = pool.run(run_hybrid, 1, split=Split(), micro=2, **case)[0]
    have, moved = pool.run(run_hybrid, WORLD, split=split, **case)[0]
    assert have == pytest.approx(losses, rel=1e-5)
    start = [p.detach() for p in tiny_models.build(model_type).parameters()]
    scale = distance(start, weights)
    assert distance(moved, weights) < 1e-4 * scale


@SLOW
def test_a_hybrid_run_resumes_on_another_split(pool, tmp_path):
    case = {"model_type": "bamba", "run": "run_trainer", "output_dir": str(tmp_path)}
    saving = {"save_strategy": "steps", "save_steps": 1}
    losses, weights = pool.run(run_hybrid, WORLD, split=Split(2, 1), **case, **saving)[0]
    checkpoint = str(tmp_path / "checkpoint-1")
    have, moved = pool.run(run_hybrid, WORLD, split=Split(2, 2), resume=checkpoint, **case)[0]
    assert have == pytest.approx(losses[1:], rel=1e-5)
    loaded = tiny_models.model_class("bamba").from_pretrained(tmp_path / "checkpoint-2")
    saved = [p.detach() for p in loaded.parameters()]
    assert distance(moved, weights) < 1e-4 * distance(saved, [0 * w for w in saved])
    assert distance(saved, weights) < 1e-6


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return float(sum((a - b).double().pow(2).sum() for a, b in zip(one, other, strict=True)) ** 0.5)


SCALE = 1


def scaled(function: Callable[[], int]) -> Callable[[], int]:
    """A decorator that reads a global, as transformers' read what a program sets later."""

    @wraps(function)
    def call() -> int:
        return SCALE * function()

    return call


@scaled
def two() -> int:
    return 2


def test_a_wrapper_of_a_forward_reads_the_globals_of_its_module_as_they_are(monkeypatch):
    again = recurrent_layers.rebound(two, {})
    assert again is not two and again() == 2
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3)
    assert again() == 6


# ------------------------------------------------------------------ the page


def test_the_first_program_trains_on_four_ranks_as_on_one(pool):
    (one,) = pool.run(losses_of_first_program, 1, page=PAGE)
    assert one[-1] < one[0] - 0.1
    for losses in pool.run(losses_of_first_program, WORLD, page=PAGE):
        assert losses == pytest.approx(one, rel=1e-5)
