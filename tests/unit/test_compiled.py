"""The plain values of the torch ops, and names of meshes."""

import copy
import gc
import inspect
from dataclasses import dataclass, fields
from typing import Any, Literal

import pytest
import torch

import ds_usp
import ds_usp.attention.module as drop_in
from ds_usp import MeshError, SequenceMesh
from ds_usp.attention.custom_ops import (
    ATTENTION_ARGS,
    attention_call,
    attention_values,
    flatten,
    plain_values,
)
from ds_usp.attention.plan import AttentionOptions
from ds_usp.comm.mesh import MESH_REGISTRY
from ds_usp.training import RotaryPositions, rotate_projected

NOT_IN_OP = {
    ds_usp.MaskSpec: {"documents", "blocks", "parents", "areas"},  # break the graph
    ds_usp.Scores: {"sinks"},  # as a tensor
    # The mesh has the same; documents break the graph.
    ds_usp.TokenLayout: {"ulysses", "ring", "order", "documents", "parents"},
    ds_usp.Tuning: set(),
}


@pytest.mark.parametrize("part", NOT_IN_OP)
def test_an_op_has_every_field(part):
    left = {field.name for field in fields(part) if field.init} - {
        arg.path[-1] for arg in flatten(part)[0]
    }
    assert left == NOT_IN_OP[part]


def test_an_op_has_every_argument():
    parameters = set(inspect.signature(ds_usp.usp_attention).parameters)
    assert parameters - {"q", "k", "v"} == set(AttentionOptions._fields)
    assert {arg.path[1] for arg in ATTENTION_ARGS if arg.path[0] == "options"} == set(
        AttentionOptions._fields
    )


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_op_schemas_are_the_plain_values_in_order(op):
    schema = getattr(torch.ops.ds_usp, op).default._schema
    names = [x.name for x in schema.arguments[6:]]  # behind the tensors
    assert names == [arg.name for arg in ATTENTION_ARGS] and len(set(names)) == len(names)


@dataclass(frozen=True)
class Sizes:
    values: tuple[int, int]


@dataclass(frozen=True)
class SizesOrNone:
    values: tuple[int, int] | None


@dataclass(frozen=True)
class Names:
    values: Literal["a", "b"]


@pytest.mark.parametrize("part", [Sizes, SizesOrNone, Names])
def test_a_field_that_is_no_plain_value_is_refused(part):
    with pytest.raises(TypeError, match=rf"{part.__name__}.values: .* is no plain value"):
        flatten(part)


def test_a_call_of_plain_values_is_the_call():
    mesh = SequenceMesh(2, 1, 0)
    x = torch.randn(1, 8, 4, 8, requires_grad=True)
    options = AttentionOptions(
        mesh,
        mesh.layout("zigzag", 16),
        ds_usp.MaskSpec.window(3, 1),
        softmax_scale=0.5,
        return_lse=True,
        tuning=ds_usp.Tuning(chunks=2, gather=True),
        scores=ds_usp.Scores(softcap=3.0),
        kv_layout=mesh.layout("striped", 16),
    )
    values = attention_values(x, x, x, options, named=False, prefix="batch dim 0")
    assert values is not None
    made = attention_call(iter(values))
    assert made[1:] == (True, False, False, "batch dim 0")
    assert made.options._replace(scores=None) == options._replace(scores=None)  # which have no ==
    assert made.options.scores.static_values == options.scores.static_values
    assert plain_values(made) == values


def values_of(on: SequenceMesh, x: torch.Tensor, **changed: Any) -> list[Any] | None:
    tuning = ds_usp.Tuning(chunks=2, gather=True, copies=False)
    options = AttentionOptions(
        on, on.layout("zigzag", 16), ds_usp.MaskSpec.causal(), return_lse=True, tuning=tuning
    )
    return attention_values(x, x, x, options._replace(**changed))


@pytest.mark.parametrize(
    "changed",
    [
        {"mesh": None},
        {"layout": 16},
        {"layout": ds_usp.TokenLayout("zigzag", 16, ulysses=2)},
        {"layout": ds_usp.TokenLayout("zigzag", 16, order="ring-ulysses")},
        {"layout": ds_usp.TokenLayout("balanced", 16, documents=[0, 16])},
        {"kv_layout": 16},
        {"mask": ds_usp.MaskSpec.causal([0, 3, 16])},
        {"mask": None},
        {"softmax_scale": torch.tensor(0.5)},
        {"softmax_scale": True},
        {"dropout_p": "0"},
        {"kernel": None},
        {"return_lse": 1},
        {"tuning": 2},
        {"scores": None},
    ],
)
def test_calls_without_plain_values_break_the_graph(changed):
    mesh, x = SequenceMesh.single(), torch.randn(1, 16, 4, 8)
    assert values_of(mesh, x) is not None
    assert values_of(mesh, x[0]) is None
    assert values_of(mesh, x, **changed) is None


OTHER_VALUES: dict[str, Any] = {
    "mesh": SequenceMesh(2, 1, 0),
    "layout": ds_usp.TokenLayout("contiguous", 16),
    "mask": ds_usp.MaskSpec.full(),
    "softmax_scale": 1.0,
    "dropout_p": 0.5,
    "kernel": "eager",
    "return_lse": True,
    "tuning": ds_usp.Tuning(chunks=2),
    "scores": ds_usp.Scores(softcap=3.0),
    "kv_layout": ds_usp.TokenLayout("striped", 16),
    "label": "layer 1",
}


@pytest.mark.parametrize("name", AttentionOptions._fields)
def test_calls_that_differ_in_an_option_share_neither_plan_nor_graph(name):
    mesh, x = SequenceMesh.single(), torch.randn(1, 16, 4, 8)
    options = AttentionOptions(mesh, mesh.layout("zigzag", 16), ds_usp.MaskSpec.causal())
    changed = options._replace(**{name: OTHER_VALUES[name]})
    if name == "mesh":  # which has the plans, and the name in the graph
        assert changed.mesh.plans is not mesh.plans and changed.mesh.name != mesh.name
        return
    assert (changed.key == options.key) == (name == "label")  # layers share a plan
    values = attention_values(x, x, x, options)
    assert values is not None and attention_values(x, x, x, changed) != values


@pytest.mark.parametrize(
    "changed",
    [{"layout": []}, {"mask": []}, {"kernel": []}, {"tuning": []}, {"scores": []}],
    ids=str,
)
def test_an_option_that_cannot_be_hashed_is_refused_by_name(changed):
    mesh, x = SequenceMesh.single(), torch.randn(1, 16, 4, 8)
    options: dict[str, Any] = {"layout": "zigzag", "mask": ds_usp.MaskSpec.causal(), **changed}
    with pytest.raises(ds_usp.USPError, match=next(iter(changed))):
        ds_usp.usp_attention(x, x, x, mesh=mesh, **options)


def test_torch_finds_no_fault_with_the_op():
    mesh = SequenceMesh.single()
    q, k, v = (torch.randn(2, 16, 4, 8, requires_grad=True) for _ in range(3))
    values = values_of(mesh, q)
    assert values is not None
    op, given = torch.ops.ds_usp.attention.default, (q, k, v, None, torch.tensor(1))
    torch.library.opcheck(op, (*given, None, *values))
    options = AttentionOptions(mesh, mesh.layout("zigzag", 16), ds_usp.MaskSpec.causal())
    values = attention_values(q, k, v, options, lengths_in_tensor=True)
    assert values is not None and 16 not in values
    torch.library.opcheck(op, (*given, torch.tensor([16, 16]), *values))


def test_a_mesh_is_found_by_its_name_as_long_as_it_lives():
    first, second = SequenceMesh.single(), SequenceMesh.single()
    assert first.name != second.name
    assert MESH_REGISTRY.lookup(first.name) is first
    assert copy.deepcopy(first) is first
    other = copy.copy(first)
    assert MESH_REGISTRY.lookup(other.name) is other and other.name != first.name
    name = first.name
    del first
    gc.collect()
    with pytest.raises(MeshError, match="is gone"):
        MESH_REGISTRY.lookup(name)
    assert MESH_REGISTRY.lookup(second.name) is second


def test_meshes_of_one_name_are_alike():
    assert SequenceMesh(2, 1, 0).name != SequenceMesh(1, 2, 0).name
    assert SequenceMesh(2, 1, 0).name != SequenceMesh(2, 1, 1, ulysses_rank=1).name
    assert SequenceMesh(2, 1, 0).name != SequenceMesh(2, 1, 0, order="ring-ulysses").name


def of_both(
    run: Any, x: torch.Tensor, dtype: torch.dtype | None = None, fullgraph: bool = True
) -> None:
    """Results and gradients without a compiler and with one are the same bits."""
    results = []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=fullgraph)):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            y = call(given)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), given)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_attention_rotated_by_positions_is_one_graph(dtype):
    rotary = RotaryPositions(torch.arange(8), torch.tensor([1.0, 0.1]))
    layer = torch.nn.Linear(12, 3 * 2 * 8)
    fixed: Any = {"mesh": SequenceMesh.single(), "layout": "contiguous"}

    def run(x: torch.Tensor) -> torch.Tensor:
        qkv = rotate_projected(layer(x).transpose(0, 1), rotary, 2, 8)  # [s, b, g n D]
        q, k, v = qkv.transpose(0, 1).unflatten(2, (2, 3, 8)).unbind(3)
        return ds_usp.usp_attention(q, k, v, mask=ds_usp.MaskSpec.causal(), **fixed)

    of_both(run, torch.randn(1, 8, 12), dtype)


def test_autocast_under_a_compiler_is_that_of_its_calls():
    mesh, mask = SequenceMesh.single(), ds_usp.MaskSpec.causal()
    x, local = torch.randn(1, 8, 2, 8), ds_usp.USPAttention(lambda q, k, v: q * k + v, mesh=mesh)
    doors = (
        (lambda x: ds_usp.usp_attention(x, x, x, mesh=mesh, layout="contiguous", mask=mask), True),
        (lambda x: local(x, x.bfloat16(), x, 0), False),  # which breaks the graph
    )
    for run, fullgraph in doors:
        of_both(run, x, torch.bfloat16, fullgraph)
        with torch.autocast("cpu", torch.float16):
            assert run(x).dtype == torch.float16


def test_what_torch_refuses_under_autocast_is_refused():
    mesh, mask = SequenceMesh.single(), ds_usp.MaskSpec.causal()
    x = torch.randn(1, 8, 2, 8)

    def call(*qkv: torch.Tensor) -> torch.Tensor:
        return ds_usp.usp_attention(*qkv, mesh=mesh, layout="contiguous", mask=mask)

    with pytest.raises(ds_usp.ConfigError, match="one floating dtype"):
        call(x, x, x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x.double(), x.double(), x.double()).dtype == torch.float64
        assert call(x.half(), x, x.bfloat16()).dtype == torch.bfloat16
        for other in (x.double(), x.long(), x.to("meta")):
            with pytest.raises(ds_usp.ConfigError, match="one floating dtype"):
                call(x, x, other)
        with torch.autocast("cpu", enabled=False):
            assert call(x, x, x).dtype == torch.float32
        with pytest.raises(ds_usp.ConfigError, match="must be dense tensors"):
            call(None, x, x)


def test_tensors_of_another_stream_are_cast_after_it(monkeypatch):
    waited = []
    monkeypatch.setattr(drop_in, "_wait_for_stream", lambda _, *tensors: waited.extend(tensors))
    x, seen = torch.randn(1, 8, 2, 8), []

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        seen.extend(qkv)
        return qkv[2]

    local = ds_usp.USPAttention(attend, mesh=SequenceMesh.single())
    with torch.autocast("cpu", torch.bfloat16):
        local(x, x, x.bfloat16(), 0)
        assert [y.dtype for y in waited] == [torch.float32, torch.float32, torch.bfloat16]
        assert [y.dtype for y in seen] == [torch.bfloat16] * 3
        seen.clear()
        local(x, x, x, 0)  # a local attention that is called is under autocast itself
        assert [y.dtype for y in seen] == [torch.float32] * 3
