"""What others may lean on: names, signatures, refused arguments, imports without side effects."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import Linear

import ds_usp
from ds_usp import ConfigError, DataError, errors, memory, training
from ds_usp.attention.rotary import check_local_rotary
from ds_usp.warn_once import warn_once

ROOT = Path(__file__).resolve().parents[2]

NAMES = set(ds_usp.__all__)  # frozen by the rows of test_door_table.py

# Parameters that callers write; a new one may only be added at the end, by keyword.
PARAMETERS = {
    "usp_attention": "q k v mesh layout mask softmax_scale dropout_p kernel return_lse tuning "
    "scores kv_layout",
    "usp_joint_attention": "q k v joint_q joint_k joint_v mesh layout mask joint_front "
    "softmax_scale dropout_p kernel tuning scores",
    "projected_attention": "x projection mesh layout mask rotary keep softmax_scale dropout_p "
    "kernel tuning scores plain why_plain",
    "USPSelfAttention": "qkv out heads kv_heads mesh layout mask order q_norm k_norm overlap keep "
    "softmax_scale kernel tuning scores",
    "USPSelfAttention.forward": "self x rotary mask",
    "Projection": "qkv out heads kv_heads qkv_bias out_bias order gathered",
    "USPAttention": "local_attention sequence_process_group scatter_idx gather_idx sp_stream "
    "num_kv_heads ulysses_degree mesh layout mask softmax_scale dropout_p kernel order tuning",
    "USPAttention.forward": "self query key value batch_dim_idx rotary_pos_emb args documents "
    "kwargs",
    "SequenceMesh.from_group": "group ulysses_degree order",
    "SequenceMesh.from_device_mesh": "device_mesh ulysses_degree order",
    "SequenceMesh.build": "grid",
    "SequenceMesh.gather": "self local layout dim",
    "SequenceMesh.single": "",
    "SequenceMesh.layout": "self kind seq_len documents",
    "SequenceMesh.agree": "self text error",
    "TokenLayout": "kind seq_len ulysses ring order documents",
    "TokenLayout.shard": "self x dim rank",
    "TokenLayout.gather": "self shards dim group",
    "TokenLayout.positions": "self rank like",
    "Tuning": "chunks gather copies inner_ring",
    "Scores": "softcap alibi_slopes sinks dropout_seed",
    "MaskSpec": "left right documents prefix",
    "MaskSpec.prefix_lm": "prefix",
    "MaskSpec.causal": "documents",
    "MaskSpec.full": "documents",
    "MaskSpec.window": "left right documents",
    "RankGrid": "sizes order",
    "RankGrid.groups": "self axes",
    "Degrees": "sp ulysses ring tp pp world heads kv_heads ffn",
    "USPConfig": "sp_degree ulysses_degree layout order kernel",
    "USPConfig.from_args": "args",
    "allocator_variables": "environment expandable_segments torch_header",
}


def test_public_names_are_documented():
    assert len(ds_usp.__all__) == len(NAMES)
    for name in NAMES:
        assert getattr(ds_usp, name).__doc__, name


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_frozen(name):
    target = ds_usp
    for part in name.split("."):
        target = getattr(target, part)
    assert " ".join(inspect.signature(target).parameters) == PARAMETERS[name]


def test_every_error_is_public_and_a_value_error():
    kinds = {n: e for n, e in vars(errors).items() if isinstance(e, type)}
    assert set(kinds) == {name for name in NAMES if name.endswith("Error")}
    assert ds_usp.USPError.__bases__ == (ValueError,)
    assert all(issubclass(kind, ds_usp.USPError) for kind in kinds.values())


# Printed by a fresh interpreter: what the import of ds_usp left behind, beyond torch's own.
PROBE = """
import os, random, sys, threading
import torch
import torch.distributed
def state():
    return (dict(os.environ), random.getstate(), torch.initial_seed(), torch.get_default_dtype(),
            torch.get_num_threads(), torch.get_rng_state().tolist(), threading.active_count(),
            torch.distributed.is_initialized(), torch.cuda.is_initialized(), list(sys.path))
before = state()
import ds_usp
print([i for i, (a, b) in enumerate(zip(before, state())) if a != b])
heads = {name.split(".")[0] for name in sys.modules}
print(sorted(heads & {"deepspeed", "megatron", "flash_attn", "matplotlib", "einops"}))
"""


def test_import_has_no_side_effects_and_needs_no_framework():
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:ds_usp", "-c", PROBE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_names_that_need_torch_are_imported_on_access():
    """And submodules without an import of their own."""
    modules = ["memory", "planner", "profiling", "training"]
    probe = (
        "import sys, ds_usp; print('torch' in sys.modules, ds_usp.Tuning(), dir(ds_usp)); "
        f"print([getattr(ds_usp, name).__name__ for name in {modules} if name in dir(ds_usp)]); "
        "ds_usp.training.chunked_weighted_loss"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names, submodules = done.stdout.splitlines()
    assert names.startswith("False Tuning(") and all(name in names for name in NAMES)
    assert submodules == str([f"ds_usp.{name}" for name in modules])
    with pytest.raises(AttributeError, match="no attribute 'uspattention'"):
        ds_usp.uspattention  # noqa: B018


QKV, OUT = torch.ones(96, 16), torch.ones(16, 32)
MESH = ds_usp.SequenceMesh.single()
OPTIMIZER = torch.optim.SGD(Linear(2, 2).parameters())


def projection(**changed: object) -> object:
    arguments = {"qkv": QKV, "out": OUT, "heads": 4, "kv_heads": 4}
    return ds_usp.Projection(**{**arguments, **changed})


def attention(qkv: object = None, heads: int = 4, kv_heads: int = 4, **options: object) -> object:
    layers = qkv or Linear(16, 96)
    fixed = {"mesh": MESH, "layout": "zigzag", "mask": ds_usp.MaskSpec.causal()}
    block = ds_usp.USPSelfAttention(layers, Linear(32, 16), heads, kv_heads, **fixed, **options)
    return block(torch.ones(1, 4, 16))


def engine(optimizer: object, config: object) -> object:
    return training.initialize_deepspeed(Linear(2, 2), optimizer, config, None)


def projected(**options: object) -> object:
    arguments = {"mesh": MESH, "layout": "zigzag", "mask": ds_usp.MaskSpec.causal()}
    return ds_usp.projected_attention(torch.ones(1, 4, 16), **{**arguments, **options})


def usp_attention(value: object) -> object:
    q = torch.ones(1, 4, 2, 8)
    mask = ds_usp.MaskSpec.causal()
    return ds_usp.usp_attention(q, q, value, mesh=MESH, layout="zigzag", mask=mask)


CASES: dict[str, tuple[Callable[[], object], str]] = {
    "no values": (lambda: usp_attention(None), "got Tensor, Tensor, NoneType"),
    "an array": (lambda: usp_attention(torch.ones(1, 4, 2, 8).numpy()), "Tensor, ndarray"),
    "modules as weights": (lambda: projection(qkv=Linear(16, 96)), "takes the layers"),
    "two weights": (lambda: projection(qkv=(QKV, QKV)), "2 weights of queries"),
    "a bias as a number": (lambda: projection(out_bias=1.0), "out_bias is float"),
    "no projection": (lambda: projected(projection=None), "must be a Projection"),
    "unknown order": (lambda: attention(order="kqv", overlap=False), "must be one of qkv, grouped"),
    "two layers": (lambda: attention([Linear(16, 32)] * 2), "2 weights of queries"),
    "one table": (lambda: check_local_rotary(QKV, 4, 8), "two tables"),
    "no local attention": (lambda: ds_usp.USPAttention(None, mesh=MESH), "must be a module"),
    "other heads": (lambda: attention(heads=5, kv_heads=5), "5 query and 5 key/value heads"),
    "heads that share": (lambda: attention(kv_heads=3), "4 query heads are no multiple of 3"),
    "chunks": (lambda: memory.in_chunks(Linear(4, 4), torch.ones(2, 4), 2.0), "whole number"),
    "layers": (lambda: memory.LayerMemory("full", checkpoint_layers=2.5), "whole number"),
    "a group": (lambda: training.split_tokens(torch.ones(4, 3), None), "TensorParallelComm.build"),
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


def test_input_ids_are_whole_numbers():
    batches = [{"input_ids": torch.ones(1, 8)}]
    with pytest.raises(DataError, match=r"torch.float32, expected whole numbers"):
        next(iter(training.SequenceParallelDataLoader(batches, MESH)))


def test_an_offload_takes_the_name_of_a_device():
    assert memory.Offload(0.5, "cpu").copier.device == torch.device("cpu")


def test_a_bias_on_some_layers_takes_the_plain_path():
    layers = [Linear(16, 32), Linear(16, 32, bias=False), Linear(16, 32)]  # as Whisper has them
    plain, overlapped = attention(layers, overlap=False), attention(layers, overlap=True)
    assert isinstance(plain, torch.Tensor) and plain.shape == overlapped.shape


def test_a_line_is_said_once_and_on_rank_0_only(caplog):
    for text in ("no Triton, 100% torch", "no Triton, 100% torch", "no NVLink"):
        for rank in (1, 0, 0):
            warn_once(text, rank=rank)
    assert caplog.record_tuples == [
        ("ds_usp", 30, "no Triton, 100% torch"),
        ("ds_usp", 30, "no NVLink"),
    ]
