"""Arguments of public functions that are not what they take are refused, with what would fit.

That such an error is raised on every rank: tests/distributed/test_errors.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sample_attentions import flash_attn
from torch.nn import Linear

import ds_usp
from ds_usp import (
    ConfigError,
    DataError,
    LayoutError,
    MaskSpec,
    Scores,
    TokenLayout,
    UnsupportedAttentionError,
    memory,
    training,
)
from ds_usp.compat import flash_attention_forward
from ds_usp.errors import USPError, require_package

QKV = torch.ones(96, 16)
MESH = ds_usp.SequenceMesh.single()
OPTIMIZER = torch.optim.SGD(Linear(2, 2).parameters())


def engine(optimizer: object, config: object) -> object:
    return training.initialize_deepspeed(Linear(2, 2), optimizer, config, None)


def usp_attention(value: object) -> object:
    q = torch.ones(1, 4, 2, 8)
    mask = ds_usp.MaskSpec.causal()
    return ds_usp.usp_attention(q, q, value, mesh=MESH, layout="zigzag", mask=mask)


def flash(tree: MaskSpec | None = None, **options: Any) -> object:
    q, function = torch.ones(1, 4, 2, 8), flash_attention_forward.flash_attention_forward(MESH)
    function.tree = tree
    given = {"position_ids": torch.arange(4)[None], "attention_mask": None, **options}
    return function(q, q, q, query_length=4, is_causal=True, **given)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "sparse": (lambda: usp_attention(torch.ones(1, 4, 2, 8).to_sparse()), "Tensor torch.sparse"),
    "an option that is gone": (lambda: Scores(dropout_seed=1), "there are softcap, sinks"),
    "a misspelt option": (lambda: ds_usp.Tuning(chunk=2), "did you mean chunks"),
    "a misspelt degree": (
        lambda: ds_usp.SequenceMesh.from_group(None, ulises_degree=1),
        "did you mean ulysses_degree",
    ),
    "a mesh before its loader": (
        lambda: training.SequenceParallelDataLoader(MESH, []),
        "mesh=.., and the mesh is the argument before it",
    ),
    "positions as a list": (lambda: flash(position_ids=[[0]]), "position_ids is a list"),
    "complex positions": (
        lambda: flash(position_ids=torch.ones(1, 4, dtype=torch.complex64)),
        "position_ids is complex",
    ),
    "a mask as text": (lambda: flash(attention_mask="x"), "attention_mask is a str"),
    "a tree with a window": (
        lambda: flash(MaskSpec.tree([(0, 2, None), (2, 3, 0), (3, 4, 0)], left=1)),
        "windows are of calls",
    ),
    "a sliding window in words": (lambda: flash(sliding_window="x"), "sliding_window='x'"),
    "no values": (lambda: usp_attention(None), "got Tensor, Tensor, NoneType"),
    "an array": (lambda: usp_attention(torch.ones(1, 4, 2, 8).numpy()), "Tensor, ndarray"),
    "no local attention": (lambda: ds_usp.USPAttention(None, mesh=MESH), "must be a module"),
    "chunks": (lambda: memory.in_chunks(Linear(4, 4), torch.ones(2, 4), 2.0), "whole number"),
    "layers": (lambda: memory.LayerMemory("full", checkpoint_layers=2.5), "whole number"),
    "no engine": (lambda: training.keep_states_on_host(Linear(2, 2)), "Linear is no engine"),
    "an odd dim": (lambda: training.rotary_frequencies(torch.arange(4), 7), "dim=7 even"),
    "positions": (lambda: training.rotary_frequencies(torch.ones(1, 4), 8), r"\[1, 4\]"),
    "labels": (
        lambda: training.chunked_token_losses(QKV, QKV, torch.ones(96), chunks=2),
        "expected token ids",
    ),
    "no optimizer": (lambda: engine(None, {}), "optimizer=None must be"),
    "a file": (lambda: engine(OPTIMIZER, "config.json"), "json.load"),
    "a flag": (lambda: engine(OPTIMIZER, {"zero_optimization": True}), "must be a dict"),
    "no groups": (lambda: engine(OPTIMIZER, {}), r"ParallelGroups.from_mesh\(mesh\)"),
    "a stage": (lambda: training.check_zero_stage(5, stages=1, bf16=False), "must be 0, 1, 2 or 3"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    call, message = CASES[name]
    with pytest.raises(ConfigError, match=message):
        call()


IDS = torch.arange(8)[None]


@pytest.mark.parametrize("name", ["input_ids", "labels", "shift_labels", "position_ids"])
@pytest.mark.parametrize("kind", [torch.float32, torch.complex64, torch.bool])
def test_tokens_labels_and_positions_are_whole_numbers(name, kind):
    batch = {"input_ids": IDS, name: IDS.to(kind)}
    with pytest.raises(DataError, match=f"{name} are {kind}, expected whole numbers"):
        next(iter(training.SequenceParallelDataLoader([batch], MESH)))


def test_settings_of_a_call_are_refused_where_it_is_made():
    make = flash_attention_forward.flash_attention_forward
    for option, value in {"kernel": "flsh", "layout": "zig", "tuning": 3}.items():
        with pytest.raises(USPError, match=repr(value)):
            make(MESH, **{option: value})


def test_a_missing_package_is_named_with_the_command_that_installs_it():
    require_package("torch", "this")
    with pytest.raises(ModuleNotFoundError) as caught:
        require_package("no_such_package", "this")
    text = (
        "this needs no_such_package, which is not installed: pip install 'ds-usp[no_such_package]'"
    )
    assert str(caught.value) == text and caught.value.name == "no_such_package"


def test_an_offload_takes_the_name_of_a_device():
    assert memory.Offload(0.5, "cpu").copier.device == torch.device("cpu")


def attend(
    q: Any = (1, 8, 8, 16),
    k: Any = (1, 8, 4, 16),
    v: Any = None,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 2,
    *,
    module: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Attention of tensors of these shapes; v has that of k, unless it is given."""
    shapes = zip((q, k, v or k), (dtypes[0], *dtypes), strict=True)
    tensors = [torch.ones(shape).to(dtype) for shape, dtype in shapes]
    given = {"mesh": MESH, "layout": "zigzag", "mask": MaskSpec.causal(), **options}
    if module:
        return ds_usp.USPAttention(torch.nn.Identity(), gather_idx=1, **given)(*tensors, 0)
    return ds_usp.usp_attention(*tensors, **given)


# What tensors are refused: their shapes and dtypes, and the numbers of the message.
TENSORS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "kv heads": ({"k": (1, 8, 3, 16)}, ("8 query heads", "3 key/value heads")),
    "more kv heads": ({"k": (1, 8, 9, 16)}, ("8 query heads", "9 key/value heads")),
    "3-D": ({"q": (1, 8, 128)}, ("[1, 8, 128]",)),
    "2-D keys": ({"k": (8, 16)}, ("[8, 16]",)),
    "batch": ({"k": (2, 8, 4, 16)}, ("[1, 8, 8, 16]", "[2, 8, 4, 16]")),
    "tokens": ({"v": (1, 7, 4, 16)}, ("[1, 8, 4, 16]", "[1, 7, 4, 16]")),
    "key dim": ({"k": (1, 8, 4, 8)}, ("[1, 8, 8, 16]", "[1, 8, 4, 8]")),
    "nothing": ({"q": (0, 8, 8, 16), "k": (0, 8, 4, 16)}, ("[0, 8, 8, 16]",)),
    "mixed dtypes": ({"dtypes": (torch.float32, torch.bfloat16)}, ("float32", "bfloat16")),
    "integers": ({"dtypes": (torch.int32,) * 2}, ("int32",)),
}


@pytest.mark.parametrize("module", [False, True], ids=["usp_attention", "USPAttention"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused(name, module):
    given, numbers = TENSORS[name]
    with pytest.raises(ConfigError) as caught:
        attend(**given, module=module)
    assert all(number in str(caught.value) for number in numbers), caught.value


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "tokens of another layout": (
        {"layout": TokenLayout("zigzag", 9)},
        LayoutError,
        ("holds 8", "gives it 9"),
    ),
    "layout of another mesh": (
        {"layout": TokenLayout("zigzag", 8, 2, 1)},
        LayoutError,
        ("2 x ring 1", "1 x 1"),
    ),
    "unknown layout": ({"layout": "zig"}, LayoutError, ("'zig'", "zigzag, striped")),
    "no mask": ({"mask": None}, ConfigError, ("mask=None",)),
    "dropout": ({"dropout_p": 0.1}, UnsupportedAttentionError, ("0.1", "1 x ring 1")),
    "dropout in words": ({"dropout_p": "some"}, UnsupportedAttentionError, ("dropout some",)),
    "no dropout": ({"dropout_p": None}, UnsupportedAttentionError, ("dropout None",)),
    "unknown kernel": ({"kernel": "cuda"}, UnsupportedAttentionError, ("'cuda'", "eager")),
    "kernel of a GPU": ({"kernel": "flash2"}, UnsupportedAttentionError, ("cuda, not cpu", "16")),
    "no scale": ({"softmax_scale": 0.0}, ConfigError, ("softmax_scale=0.0",)),
    "negative scale": ({"softmax_scale": -1.0}, ConfigError, ("softmax_scale=-1.0",)),
    "endless scale": ({"softmax_scale": float("inf")}, ConfigError, ("softmax_scale=inf",)),
    "scale in words": ({"softmax_scale": "half"}, ConfigError, ("softmax_scale='half'",)),
    "no scores": ({"scores": 50.0}, ConfigError, ("scores=50.0", "softcap=50.0")),
    "sinks of too few heads": (
        {"scores": Scores(sinks=torch.zeros(4))},
        ConfigError,
        ("[4]", "8 query heads"),
    ),
    "whole sinks": (
        {"scores": Scores(sinks=torch.zeros(8, dtype=torch.int64))},
        ConfigError,
        ("int64",),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_cannot_be_computed_are_refused(name):
    given, kind, numbers = OPTIONS[name]
    with pytest.raises(kind) as caught:
        attend(**given)
    assert all(number in str(caught.value) for number in numbers), caught.value


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        *(({"softcap": x}, repr(x)) for x in (0.0, -1.0, float("nan"), "50", True)),
        ({"sinks": [0.5]}, "[0.5]"),
    ],
    ids=str,
)
def test_scores_are_numbers_and_tensors(given, numbers):
    with pytest.raises(ConfigError) as caught:
        Scores(**given)
    assert numbers in str(caught.value)


def with_documents(local: torch.nn.Module) -> torch.Tensor:
    """What the package's kernels compute in place of a local attention of this class."""
    q = torch.ones(1, 8, 2, 16)
    return ds_usp.USPAttention(local, mesh=MESH)(q, q, q, 0, documents=[0, 3, 8])


# Doors of other packages have such rows in their own tables.
@pytest.mark.parametrize(
    ("door", "text"),
    [
        (lambda q: attend(dropout_p=0.1), "attention dropout 0.1"),
        (
            lambda q: ds_usp.usp_joint_attention(
                q, q, q, q, q, q, mesh=MESH, layout="zigzag", mask=MaskSpec.full(), dropout_p=0.1
            ),
            "attention dropout 0.1",
        ),
        (lambda q: with_documents(flash_attn(dropout=0.1)), "attention dropout 0.1"),
        (lambda q: with_documents(flash_attn(alibi=torch.ones(2))), "alibi_slopes"),
        (lambda q: with_documents(flash_attn(dropout=0.1).eval()), ""),
    ],
)
def test_attention_dropout_and_alibi_are_refused_at_each_door(door, text):
    q = torch.ones(1, 8, 2, 16)
    if not text:
        assert torch.isfinite(door(q)).all()
        return
    with pytest.raises(UnsupportedAttentionError, match=text) as caught:
        door(q)
    assert "\n" not in str(caught.value)
