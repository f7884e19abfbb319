"""Ranks whose models differ, from the start or later, raise an error that names in what."""

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy
import peft
import pytest
import tiny_diffusers
import tiny_models
import torch
import torch.distributed as dist
from cases import mesh_of
from harness import RankContext
from model_runs import IGNORED, plain_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

import ds_usp
from ds_usp.integrations import diffusers, digests, model_comparison, transformers
from ds_usp.integrations.digests import ArgumentsDigest
from ds_usp.integrations.model_comparison import ModelComparison

WAN = "WanTransformer3DModel"
Forward = Callable[[], Any]


def comparison(module: nn.Module) -> ModelComparison:
    return ModelComparison(ds_usp.SequenceMesh.single(), module)


def sampled(module: nn.Module) -> dict[str, list[float]]:
    sample = comparison(module).of_pass()["8 elements of weights"]
    return {name: x.tolist() for name, x in sample.items()}


def holding(*tensors: torch.Tensor) -> nn.Module:
    return nn.ParameterList(nn.Parameter(x, requires_grad=False) for x in tensors)


def test_a_sample_is_spread_over_each_weight_up_to_its_last_element():
    many, few = torch.arange(60.0).view(3, 20), torch.tensor([7.0, 8.0])
    spaced = [10.0, 17, 24, 31, 38, 45, 52, 59]
    assert sampled(holding(many, few)) == {"float32": [*spaced, 7, 8]}
    other = many.T.contiguous().T  # as it lies in memory makes no difference
    assert sampled(holding(other, few, torch.tensor(3.0))) == {"float32": [*spaced, 7, 8, 3]}
    one = torch.arange(16.0)
    assert sampled(holding(one)) == {"float32": [1, 3, 5, 7, 9, 11, 13, 15]}
    both = sampled(holding(few, few.bfloat16(), torch.ones(1, 2, 2, 1, dtype=torch.uint8)))
    assert both == {"float32": [7, 8], "bfloat16": [7, 8], "uint8": [1] * 4}


def test_all_elements_and_all_weights_have_their_turn():
    size = 16 * model_comparison._ELEMENTS
    compared = comparison(holding(torch.arange(float(size)), torch.arange(3.0)))
    seen: set[float] = set()
    with patch.object(model_comparison, "_IN_A_PASS", 1):
        for turn in range(400):
            elements = compared.of_pass()["8 elements of weights"]["float32"].tolist()
            assert len(elements) == ((11 if turn == 0 else 3) if turn % 2 or turn == 0 else 8)
            seen |= set(elements)
            compared.end_pass()
    assert seen == set(range(size))


def test_buffers_are_sampled_that_are_saved():
    model = nn.BatchNorm1d(2, affine=False)
    model.register_buffer("cache", torch.ones(5), persistent=False)
    assert sampled(model) == {"int64": [0], "float32": [0, 0, 1, 1]}


def test_what_ranks_hold_in_parts_is_left_out():
    marks = {"ds_id": 1, "_fsdp_flattened": True, "allreduce": False}
    marked = [nn.Parameter(torch.ones(3)) for _ in marks]
    for parameter, (name, value) in zip(marked, marks.items(), strict=True):
        setattr(parameter, name, value)
    nothing = nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(3, device="meta"))
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    assert sampled(nn.ParameterList([*marked, *nothing, sparse])) == {}
    assert sampled(nn.LazyLinear(3)) == {}


def of_fully_shard(ctx: RankContext) -> dict[str, list[float]]:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return sampled(model)


def test_shards_of_fsdp2_are_left_out(pool):
    assert pool.run(of_fully_shard, 2) == [{}, {}]


def test_a_comparison_follows_weights_and_keeps_none():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    compared = comparison(model)
    compared.of_pass()
    compared.end_pass()
    old = weakref.ref(model[0].weight)
    model[0].weight = nn.Parameter(torch.full((2, 2), 5.0))
    gc.collect()
    assert old() is None

    def shard(weight: Any) -> None:
        weight.ds_id, weight.data = 1, torch.zeros(0)

    for change in (
        lambda: None,
        lambda: model.half(),
        lambda: setattr(model[0].weight, "data", torch.zeros(3, 1)),  # smaller
        lambda: shard(model[0].weight),  # as ZeRO-3
        lambda: model.insert(1, nn.Dropout(0.5)),
    ):
        change()
        every = comparison(model).of_pass()
        now = compared.of_pass()
        assert now["settings"] == every["settings"]
        compared.end_pass()


class Attributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps, self.local_rank, self.device_name, self._count = 1e-5, 3, "cuda:3", 3
        self.table: Any = None
        self.limit: Any = 1.0
        self.states: Any = torch.ones(3)


def test_settings_are_what_modules_have_from_the_start():
    model = nn.Sequential(Attributes(), nn.Dropout(0.5))
    compared = comparison(model)
    first = compared.of_pass()["settings"]
    module: Any = model[0]
    module.local_rank, module.device_name, module._count, module.calls = 0, "", 0, 7
    module.table, module.states = torch.ones(3), None  # states of a pass
    assert compared.of_pass()["settings"] == first
    module.eps = 1e-6
    second = compared.of_pass()["settings"]
    model.eval()
    third = compared.of_pass()["settings"]
    assert len({first, second, third}) == 3
    module.limit = torch.ones(3)  # no number any more
    assert compared.of_pass()["settings"] not in (first, second, third)
    del module.limit, module.calls
    module.table = None
    assert compared.of_pass()["settings"] == comparison(model).of_pass()["settings"]


def model_of(name: str) -> tuple[Any, dict[str, Any], Callable[..., Any], list[str]]:
    """With an adapter: it, arguments of its forward pass, ``enable``, and the adapter's target."""
    if name == WAN:
        model, given, target = tiny_diffusers.build(WAN), tiny_diffusers.arguments(WAN), ["to_q"]
        enable: Callable[..., Any] = diffusers.enable
    else:
        model, given, target = tiny_models.build("llama"), dict(plain_batch()), ["q_proj"]
        enable = transformers.enable
    return model, given, enable, target


def changed_model(name: str, change: Callable[[Any], Any] | None) -> Any:
    model = model_of(name)[0]
    if change is not None:
        change(model)
    return model


def adapt(model: nn.Module, target: list[str] | str, name: str) -> None:
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, target_modules=target, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model, name)


def adapters(model: nn.Module) -> list[Any]:
    return [x for x in model.modules() if isinstance(x, peft.tuners.lora.LoraLayer)]


def change_all_data(model: Any) -> None:
    for x in model.parameters():
        x.data.mul_(1.5)


def change_one_element(model: Any) -> None:
    with torch.no_grad():
        next(model.parameters()).view(-1)[3] += 1e-3


def swap_memory(model: Any) -> None:
    for x in model.parameters():
        x.data = x.data * 0.999


def load(model: Any) -> None:
    model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})


def load_assigned(model: Any) -> None:
    state = {name: x + 1 for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def change_epsilon(model: Any) -> None:
    norm = next(x for x in model.modules() if "Norm" in type(x).__name__)
    name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
    setattr(norm, name, 1e-2)


def change_class(model: Any) -> None:
    norm = next(x for x in model.modules() if "Norm" in type(x).__name__)
    norm.__class__ = type("Other", (type(norm),), {})


def inner(model: Any) -> nn.Module:
    return next(x for x in model.modules() if isinstance(x, nn.Linear))


def each_adapter(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def change_each(model: Any) -> None:
        for layer in adapters(model):
            change(layer)

    return change_each


def hook(model: Any) -> None:
    inner(model).register_forward_hook(lambda *given: given[2])


def replace_method(model: Any) -> None:
    stock = inner(model).forward
    inner(model).forward = lambda *args, **kwargs: stock(*args, **kwargs)


def replace_forward(model: Any) -> None:
    mlp = next(x for x in model.modules() if type(x).__name__ == "LlamaMLP")
    mlp.__class__ = type("LlamaMLP", (type(mlp),), {"forward": lambda self, x: 2 * x})


def change_config(model: Any) -> None:
    if isinstance(model.config, dict):
        model.register_to_config(theta=5)
    else:
        model.config.final_logit_softcapping = 30.0


def change_buffer(model: Any) -> None:
    next(model.buffers()).mul_(2)


LOAD, SETTINGS = r"weights of the model differ\. Load checkpoints", r"settings of the model differ"
CHANGES: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "data": (change_all_data, LOAD),
    "element": (change_one_element, rf"(?s)on rank 1.*\n1 of .*{LOAD}"),
    "memory": (swap_memory, LOAD),
    "load": (load, LOAD),
    "assign": (load_assigned, LOAD),
    "scaling": (each_adapter(lambda x: x.set_scale("style", 0.2)), rf"(?s)\.scaling.*{SETTINGS}"),
    "disabled": (each_adapter(lambda x: x.enable_adapters(False)), "(?s)_disable_adapters: .*True"),
    "active": (
        each_adapter(lambda x: x.set_adapter([])),
        r"(?s)_active_adapter\S*: .*style on rank 0",
    ),
    "merged": (each_adapter(lambda x: x.merge()), "(?s)merged_adapters"),
    "eval": (lambda model: model.eval(), "(?s)training: .*False on rank 1"),
    "dtype": (lambda model: model.bfloat16(), r"(?s)bfloat16 on rank 1"),
    "new adapter": (lambda model: adapt(model, r".*(to_q|q_proj)", "style"), SETTINGS),
    "class": (change_class, r"(?s)norm\w*: .*Other on rank 1"),
    "hook": (hook, r"(?s)forward_hooks\.0: .*<lambda> on rank 1.*hook\.ds_usp_observes = True"),
    "backward hook": (
        lambda model: inner(model).register_full_backward_hook(hook),
        r"(?s)backward_hooks\.0: .*hook on rank 1",
    ),
    "method": (replace_method, r"(?s)forward: .*<lambda> on rank 1"),
    "config": (change_config, r"(?s)config\.\w+: .*(30|5) on rank 1"),
    "buffer": (change_buffer, r"(?s)(inv_freq|freqs_cos): elements with the digest"),
    "table": (lambda model: inner(model).table.mul_(2), r"\.table: elements with the digest"),
    "forward of a class": (replace_forward, r"(?s)MLP on rank 0, .*MLP with .*<lambda> on rank 1"),
    "frozen": (
        lambda model: inner(model).weight.requires_grad_(not inner(model).weight.requires_grad),
        r"weight\.requires_grad: ",
    ),
    "precision": (
        lambda model: torch.set_float32_matmul_precision("high"),
        r"(?s)fp32 matmuls: .*tf32 on rank 1",
    ),
}


# What `mesh.check()` finds, and passes do not look for.
SETTINGS_ALONE: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "table": (lambda model: inner(model).tables[1].mul_(2), r"tables\.1: elements with the digest"),
    "none": (lambda model: setattr(inner(model), "limit", 0.5), r"(?s)limit: .*0\.5 on rank 1"),
    "epsilon": (change_epsilon, r"(?s)eps\w*: .*0\.01 on rank 1"),
    "list": (
        lambda model: inner(model).sizes.append(3),
        r"(?s)sizes\.1: .*3 on rank 1.*differ\. G",
    ),
    "order": (
        lambda model: inner(model).kinds.reverse(),
        r"(?s)kinds\.0: .*b on rank 1.*\. \S*kinds has the same 3 values .* PYTHONHASHSEED=0, or",
    ),
}


SEEN = ["hook", "backward hook", "method", "config", "buffer", "frozen", "precision"]
SEEN += ["table", "forward of a class"]


def changed_on_one_rank(ctx: RankContext, name: str, known: bool, keys: list[str]) -> None:
    """``known``: values on CPUs; else they are compared when a pass ends, as on GPUs."""
    for key in keys:
        change, message = CHANGES[key]
        model, given, enable, target = model_of(name)
        if key != "new adapter":
            adapt(model, target, "style")
        inner(model).table = torch.ones(2)
        with enable(model, mesh_of(2)) as enabled, patch.object(ArgumentsDigest, "is_known", known):
            for _ in range(2):
                model(**given)
            if ctx.rank:
                change(model)
            for _ in range(2):
                with pytest.raises(ds_usp.MeshError, match=message):
                    model(**given)
                with pytest.raises(ds_usp.MeshError, match=message):
                    enabled.mesh.check()
            if not ctx.rank:
                change(model)
            if key != "dtype":  # of which the arguments would be too
                model(**given)
                enabled.mesh.check()
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("name", "known", "keys"),
    [
        (
            "llama",
            True,
            ["data", "element", "load", "scaling", "disabled", "active", "dtype", "class", *SEEN],
        ),
        (
            WAN,
            True,
            ["memory", "assign", "scaling", "merged", "eval", "new adapter", "config", "buffer"],
        ),
        (WAN, False, ["data", "element"]),
    ],
)
def test_what_one_rank_changes_is_refused_in_the_next_pass(pool, name, known, keys):
    pool.run(changed_on_one_rank, 2, name=name, known=known, keys=keys)


def changed_before_a_check(ctx: RankContext, name: str, keys: list[str]) -> None:
    for key in keys:
        change, message = SETTINGS_ALONE[key]
        model, given, enable, _ = model_of(name)
        inner(model).sizes, inner(model).kinds = [2], ["a", "c", "b"]
        inner(model).tables, inner(model).limit = [torch.ones(2), torch.ones(2)], None
        names = ("x", "y") if ctx.rank else ("y", "x")
        inner(model).of_kinds = dict.fromkeys(names, 1)  # their order is none of the settings
        with enable(model, mesh_of(2)) as enabled:
            with patch.object(ModelComparison, "difference", None):  # nothing differs
                model(**given)
                enabled.mesh.check()
            if ctx.rank:
                change(model)
            for _ in range(2):
                with pytest.raises(ds_usp.MeshError, match=message):
                    enabled.mesh.check()
            if not ctx.rank:
                change(model)
            enabled.mesh.check()
            want = next(iter(model(**given).values()))
            # Hooks that observe, on one rank alone.
            calls: list[object] = []

            def vouched(calls: list[object], *_: Any) -> None:
                calls.append(calls)

            vouched.ds_usp_observes = True  # type: ignore[attr-defined]
            if not ctx.rank:
                inner(model).register_forward_hook(partial(vouched, calls))
            with nullcontext() if ctx.rank else FlopCounterMode(display=False) as counter:
                assert torch.equal(next(iter(model(**given).values())), want)
                enabled.mesh.check()
            assert ctx.rank or (calls and counter.get_total_flops() > 0)
    for change, message in (CHANGES[key] for key in ("hook", "config", "buffer")):
        with pytest.raises(ds_usp.MeshError, match=message):
            enable(changed_model(name, change if ctx.rank else None), mesh_of(2))


@pytest.mark.parametrize("name", ["llama", WAN])
def test_settings_that_one_rank_changes_are_refused_by_check_and_enable(pool, name):
    pool.run(changed_before_a_check, 2, name=name, keys=list(SETTINGS_ALONE))


def from_the_start(ctx: RankContext, known: bool) -> None:
    """Of a model whose last row is other, as of a table that was enlarged; and after a pass that
    failed of another reason before values on GPUs were compared."""
    model, given, enable, _ = model_of(WAN)
    layer, equal = model.blocks[1].attn1.to_q, model.blocks[1].attn1.to_q.weight.detach().clone()

    def fail(*_: Any) -> None:
        raise MemoryError

    mesh = mesh_of(2)
    with enable(model, mesh), patch.object(ArgumentsDigest, "is_known", known):
        for failing in (False, True, False):
            if failing:
                handle = layer.register_forward_pre_hook(fail)
                with pytest.raises(MemoryError):
                    model(**given)
                handle.remove()
            with torch.no_grad():
                layer.weight[-1] += ctx.rank
            with pytest.raises(ds_usp.MeshError, match=r"to_q\.weight: .* on rank 0, .* on rank 1"):
                model(**given)
            for x in (*model.parameters(), *model.buffers()):  # as the error advises
                torch.distributed.broadcast(x.data, group=mesh.sp_group, group_src=0)
            assert torch.equal(layer.weight, equal)
        model(**given)


@pytest.mark.parametrize("known", [True, False])
def test_other_weights_are_refused_until_they_are_equal(pool, known):
    pool.run(from_the_start, 2, known=known)


def without_memory(ctx: RankContext) -> list[str]:
    """What is said where rank 1 has no memory for what it compares: by a check, which then goes on;
    and by the pass that names a weight that differs."""
    model, given, enable, _ = model_of("llama")

    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    said = []
    with enable(model, mesh_of(2)) as enabled:
        model(**given)
        for place in ("ArgumentsDigest", "digest_of_bits"):
            if place == "digest_of_bits" and ctx.rank:
                change_all_data(model)
            action = enabled.mesh.check if place == "ArgumentsDigest" else lambda: model(**given)
            stock = getattr(digests, place)
            errors = ds_usp.MeshError, torch.OutOfMemoryError
            with (
                patch.object(model_comparison, place, fail if ctx.rank else stock),
                pytest.raises(errors) as raised,
            ):
                action()
            said.append(f"{raised.typename}: {raised.value}")
            if place == "ArgumentsDigest":
                enabled.mesh.check()
                model(**given)
    return said


def test_a_rank_without_memory_for_its_comparison_leaves_nobody_waiting(pool):
    first, second = pool.run(without_memory, 2, timeout=30)
    for one, other in zip(first, second, strict=True):
        assert one.startswith("MeshError") and other == "OutOfMemoryError: no memory"
        assert "no memory" in one


def changed_and_changed_back(ctx: RankContext) -> None:
    """On one rank, as of an average that is swapped in and out: nothing differs."""
    model, given, enable, _ = model_of("llama")
    with enable(model, mesh_of(2)) as enabled, torch.no_grad():
        model(**given)
        for turn in range(5):
            before = model.state_dict()
            if ctx.rank == turn % 2:
                saved = {name: x.clone() for name, x in before.items()}
                load(model)
                model.load_state_dict(saved)
            wanted = model(**given).loss
            enabled.mesh.check()
        if ctx.rank:
            given["input_ids"] = given["input_ids"].flip(0)
            next(model.parameters()).mul_(1)
        with pytest.raises(ds_usp.MeshError, match=r"input_ids[^;]*\n(.*\n)?.*replicate_batches"):
            model(**given)
        if ctx.rank:
            given["input_ids"] = given["input_ids"].flip(0)
            next(model.parameters()).data.mul_(2)
        with pytest.raises(ds_usp.MeshError, match=r"1 of .* weights"):
            model(**given)
        if ctx.rank:
            next(model.parameters()).data.div_(2)
        assert model(**given).loss == wanted


def test_weights_that_were_swapped_back_are_not_refused(pool):
    pool.run(changed_and_changed_back, 2)


def with_notes(ctx: RankContext) -> None:
    """Passes of a model that notes its tokens, a shard's, in attributes of its own."""
    model, batch = tiny_models.build("llama"), plain_batch(15)
    layer = model.model.layers[0]
    layer.last_len = layer.longest = 8  # which is what rank 0 notes

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        module.last_len = args[0].shape[1]
        module.longest = max(module.longest, args[0].shape[1])

    layer.register_forward_pre_hook(note)
    with transformers.enable(model, mesh_of(1)) as enabled:
        for _ in range(3):
            model(**batch)
            enabled.mesh.check()
        if ctx.rank == 0:
            layer.post_attention_layernorm.variance_epsilon *= 2
        with pytest.raises(ds_usp.MeshError, match="variance_epsilon"):
            enabled.mesh.check()


def test_what_a_forward_pass_notes_itself_is_no_setting(pool):
    pool.run(with_notes, 2)


def of_other_configurations(ctx: RankContext, name: str) -> None:
    _, _, enable, _ = model_of(name)
    if name == WAN:
        model: Any = tiny_diffusers.build(WAN, eps=1e-3 if ctx.rank else 1e-6)
    else:
        model = tiny_models.build("llama", rms_norm_eps=1e-3 if ctx.rank else 1e-6)
    model.train(ctx.rank == 0)  # as a checkpoint's are not and others are
    model.config.local_rank = ctx.rank if name == "llama" else None
    enable(model, mesh_of(2))


@pytest.mark.parametrize(("name", "field"), [("llama", "rms_norm_eps"), (WAN, "eps")])
def test_other_configurations_are_refused_by_enable(pool, name, field):
    errors = pool.errors(of_other_configurations, 2, name=name)
    expected = f"config.{field}: 1e-06 on rank 0, 0.001 on rank 1"
    for error in errors:
        assert isinstance(error, ds_usp.MeshError) and expected in str(error), errors


def digest(batch: Mapping[str, torch.Tensor]) -> str:
    return ArgumentsDigest(batch).text()


def test_digests_tell_batches_apart():
    batch = plain_batch()
    same = digest(batch)
    assert digest({name: x.clone() for name, x in batch.items()}) == same
    swapped = batch["input_ids"].clone()
    swapped[1, [2, 3]] = swapped[1, [3, 2]]
    others = (
        {**batch, "input_ids": swapped},
        {**batch, "labels": batch["labels"].masked_fill(batch["labels"] == IGNORED, -99)},
        {**batch, "input_ids": batch["input_ids"].T},
        {"input_ids": batch["input_ids"]},
        {"input_ids": batch["input_ids"].double(), "labels": batch["labels"]},
        *({**batch, "num_items_in_batch": numpy.int64(count)} for count in (50, 51)),
        {**batch, "num_items_in_batch": numpy.array([50, 52])},
    )
    assert len({same, *map(digest, others)}) == 1 + len(others)
    assert digest({}) == digest({})
    shapes = {ArgumentsDigest(x).text(values=False) for x in (batch, *others)}
    assert len(shapes) == 1 + len(others) - 2  # of the values of tensors
    assert not dist.is_initialized()


NEGATED = torch.tensor([-1.0, -1.0, 1.0])  # the top bits of an even number of elements


def test_digests_sum_without_rounding():
    """So that the order of a sum, another one on unlike GPUs, makes no difference."""
    noise = torch.tensor([1e30, 1.0, 2.0])
    assert digest({"noise": noise}) != digest({"noise": noise[[0, 2, 1]]})
    assert digest({"noise": noise.double()}) != digest({"noise": noise.double() * NEGATED})


def test_digests_compare_values_of_any_device_and_dtype():
    given = {
        "scale": torch.ones(2),
        "latents": torch.zeros(3, device="meta"),
        "mask": torch.tensor([[True] * 3 + [False] * 5, [True] * 6 + [False] * 2]),
        "rotary": torch.view_as_complex(torch.randn(3, 2)).conj(),
        "small": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 3),
    }
    same = ArgumentsDigest(given).text()
    with patch.object(digests, "_CHUNK", 3):  # a sum of pieces is that of the whole
        assert ArgumentsDigest(dict(given)).text() == same
    others = {
        "latents": torch.zeros(4, device="meta"),
        "mask": torch.tensor([[True] * 6 + [False] * 2, [True] * 5 + [False] * 3]),
        "rotary": given["rotary"].conj(),
        "small": given["small"].bfloat16(),
        "none": torch.zeros(0, 3, dtype=torch.bool),
    }
    texts = {ArgumentsDigest({**given, name: value}).text() for name, value in others.items()}
    assert len(texts - {same}) == len(others)
