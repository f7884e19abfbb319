"""The flags that the patches add to Megatron-LM, and what becomes of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lm_start import LOCAL, Starts

CP4 = f"{LOCAL} --context-parallel-size 4"
TE = "2.20.2"


@pytest.mark.parametrize(
    ("flags", "ulysses"),
    [
        ("", None),
        ("--ulysses-degree 2", 2),
        ("--ulysses-degree 1 --cp-comm-type usp", 1),
        ("--cp-comm-type usp usp", None),
        ("--hierarchical-context-parallel-sizes 2 2", None),
        ("--hierarchical-context-parallel-sizes 2 2 --ulysses-degree 2", 2),
    ],
)
def test_context_parallelism_is_usp(starts: Starts, flags: str, ulysses: int | None) -> None:
    answer = starts.start(f"{CP4} {flags}")
    assert set(answer["args"]["cp_comm_type"]) == {"usp"}
    expected = {
        "ulysses_degree": ulysses,
        "layout": "context_parallel",
        "kernel": "auto",
        "everywhere": False,
    }
    assert answer["settings"] == expected


def test_the_settings_of_apply_are_defaults_of_the_flags(starts: Starts) -> None:
    defaults = {"ulysses_degree": 2, "kernel": "sdpa"}
    given = starts.start(f"{CP4} --ulysses-degree 1", settings=defaults)["settings"]
    left_out = starts.start(CP4, settings=defaults)["settings"]
    assert (given["ulysses_degree"], given["kernel"]) == (1, "sdpa")
    assert (left_out["ulysses_degree"], left_out["kernel"]) == (2, "sdpa")


def test_transformer_engines_own_context_parallelism_is_left_alone(starts: Starts) -> None:
    answer = starts.start("--context-parallel-size 4 --cp-comm-type p2p", installed=TE)
    assert answer["settings"] is None
    assert answer["args"]["cp_comm_type"] == ["p2p"]
    assert "--cp-comm-type p2p: context parallelism is TransformerEngine's own" in answer["printed"]
    other = starts.start("--context-parallel-size 4 --cp-comm-type p2p", installed=TE, rank=1)
    assert "TransformerEngine's own" not in other["printed"]


def test_layers_may_differ(starts: Starts) -> None:
    flags = "--context-parallel-size 4 --cp-comm-type usp p2p --ulysses-degree 4"
    answer = starts.start(f"{flags} --attention-backend fused", installed=TE)
    assert answer["args"]["cp_comm_type"] == ["usp", "p2p"]
    assert answer["settings"]["ulysses_degree"] == 4


def test_one_rank_a_sequence_is_megatron_lms_own(starts: Starts) -> None:
    answer = starts.start(f"{LOCAL} --usp-kernel sdpa --attention-dropout 0.1 --ulysses-degree 1")
    assert answer["args"]["cp_comm_type"] == ["p2p"]
    assert "--usp-kernel sdpa has no effect with --context-parallel-size 1" in answer["printed"]
    kept = starts.start(f"{LOCAL} --usp-recompute attention --usp-kernel sdpa")
    assert kept["settings"]["everywhere"]
    assert "has no effect" not in kept["printed"]


def test_the_planner_chooses_a_degree_and_rank_0_says_why(starts: Starts) -> None:
    flags = f"{CP4} --ulysses-degree auto --usp-cluster h100 --bf16 --use-distributed-optimizer"
    answer = starts.start(f"{flags} --sequence-parallel --tensor-model-parallel-size 2")
    assert answer["settings"]["ulysses_degree"] in (1, 2, 4)
    assert f"planner: ulysses {answer['settings']['ulysses_degree']} x ring" in answer["printed"]
    other = starts.start(flags, rank=3)
    assert "planner:" not in other["printed"]
    assert starts.start(f"{LOCAL} --ulysses-degree auto")["settings"]["ulysses_degree"] is None


def test_one_hardware_queue_is_demanded_under_tensor_parallelism_alone(starts: Starts) -> None:
    tp2 = f"{CP4} --tensor-model-parallel-size 2"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in starts.error(tp2, hopper=True)
    p2p = "--context-parallel-size 4 --cp-comm-type p2p"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in starts.error(p2p, hopper=True, installed=TE)
    assert starts.start(CP4, hopper=True)["settings"]


def test_no_dense_mask_is_made(starts: Starts) -> None:
    assert not starts.start(CP4)["args"]["create_attention_mask_in_dataloader"]
    assert starts.start(LOCAL)["args"]["create_attention_mask_in_dataloader"]


@pytest.fixture(scope="module")
def copy(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout, to be edited."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    for name in ("megatron", "pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        source, target = checkout / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy(source, target)
    subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("megatron/training/arguments.py", "def parse_args(", "def parse_args(  # same\n", ""),
        (
            "megatron/core/utils.py",
            "index[0].fill_(cp_rank)",
            "index[0].fill_(2 * cp_rank)",
            "megatron.core.utils:get_batch_on_this_cp_rank: its source is another",
        ),
        (
            "pretrain_gpt.py",
            "loss = torch.sum(losses * loss_mask)",
            "loss = torch.mean(losses * loss_mask)",
            "pretrain_gpt:loss_func: its source is another",
        ),
        (
            "megatron/core/transformer/dot_product_attention.py",
            "matmul_result = torch.baddbmm(",
            "matmul_result = 2 * torch.baddbmm(",
            "An edit has no effect: USPCoreAttention computes scores",
        ),
        (
            "megatron/core/package_info.py",
            "MINOR = 16",
            "MINOR = 17",
            "needs megatron-core >=0.16,<0.17, found 0.17.1",
        ),
    ],
)
def test_check_names_an_edit(copy: Path, file: str, old: str, new: str, message: str) -> None:
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new), encoding="utf-8")
    try:
        checked = subprocess.run(
            [sys.executable, "-m", "megatron_patches", "--framework", "megatron_lm", "--check"],
            env={**os.environ, "MEGATRON_LM_PATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        (copy / file).write_text(text, encoding="utf-8")
    assert checked.returncode == bool(message), checked.stderr
    assert message in checked.stderr
    assert message or f"megatron_lm at {copy} matches" in checked.stdout


def test_projections_are_overlapped_where_they_are_asked_for(starts: Starts) -> None:
    served = f"{CP4} --no-gradient-accumulation-fusion"

    def wanted(flags: str) -> str:
        return str(starts.start(flags)["args"]["usp_projection_overlap"])

    assert wanted(f"{served} --usp-projection-overlap recompute") == "recompute"
    assert wanted(served) == "off"
    one_rank = f"{LOCAL} --no-gradient-accumulation-fusion --usp-projection-overlap recompute"
    assert "has no effect with --context-parallel-size 1" in starts.start(one_rank)["printed"]


def test_an_edited_linear_layer_is_not_bypassed(copy: Path) -> None:
    file = copy / "megatron/core/tensor_parallel/layers.py"
    text = file.read_text(encoding="utf-8")
    old = "output_ = output_parallel"
    assert old in text
    file.write_text(text.replace(old, "output_ = 2 * output_parallel"), encoding="utf-8")
    starts = Starts(copy)
    try:
        served = f"{CP4} --no-gradient-accumulation-fusion"
        message = starts.error(f"{served} --usp-projection-overlap recompute")
        off = starts.start(served)
    finally:
        file.write_text(text, encoding="utf-8")
        starts.close()
    assert "PatchError" in message and "RowParallelLinear.forward: its source" in message
    assert off["args"]["usp_projection_overlap"] == "off"


PACKED = """
import sys
from pathlib import Path
import torch
import megatron_patches
from ds_usp.errors import LayoutError
megatron_patches.prepare("megatron_lm", Path(sys.argv[1]))
megatron_patches.apply("megatron_lm")
import megatron.training
from types import SimpleNamespace
megatron.training.get_args = lambda: SimpleNamespace(
    context_parallel_size=2, cp_comm_type=["usp"], usp_recompute="none"
)
from megatron.core.utils import get_thd_batch_on_this_cp_rank
offsets, longest = torch.tensor([[0, 8, 12]], dtype=torch.int32), torch.tensor([8])
for rank in range(2):
    batch = {"tokens": torch.arange(12)[None], "attention_mask": None}
    batch, params = get_thd_batch_on_this_cp_rank(batch, offsets, None, longest, 2, rank)
    print(*batch["tokens"][0].tolist(), *params.cu_seqlens_q_padded.tolist())
try:
    offsets[0, 1] = 7
    batch = {"tokens": torch.arange(12)[None]}
    get_thd_batch_on_this_cp_rank(batch, offsets, None, longest, 2, rank)
except LayoutError as error:
    print(error)
"""


def test_every_packed_document_is_sharded_for_itself(checkout: Path) -> None:
    """As --sft gives them: offsets [1, n], without padded ones; no TransformerEngine."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PACKED, str(checkout)],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, refused = ran.stdout.splitlines()[-3:]
    assert first == "0 1 6 7 8 11 0 8 12"
    assert second == "2 3 4 5 9 10 0 8 12"
    assert "document" in refused and "7" in refused
