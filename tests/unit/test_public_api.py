"""What others may lean on: the names, the signatures, and an import without side effects."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ds_usp
from ds_usp import errors

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


def test_public_names_are_documented() -> None:
    assert len(ds_usp.__all__) == len(NAMES)
    for name in NAMES:
        assert getattr(ds_usp, name).__doc__, name


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_frozen(name: str) -> None:
    target = ds_usp
    for part in name.split("."):
        target = getattr(target, part)
    assert " ".join(inspect.signature(target).parameters) == PARAMETERS[name]


def test_every_error_is_public_and_a_value_error() -> None:
    own = {n: e for n, e in vars(errors).items() if getattr(e, "__module__", "") == errors.__name__}
    kinds = {n: e for n, e in own.items() if isinstance(e, type)}
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


def test_import_has_no_side_effects_and_needs_no_framework() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:ds_usp", "-c", PROBE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_names_that_need_torch_are_imported_on_access() -> None:
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
