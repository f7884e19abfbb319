"""``auto`` of projections under the exchanges: in the trainer, in Megatron-DeepSpeed and in
``USPSelfAttention``."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_usp
from ds_usp.attention import projection_choice
from ds_usp.attention.projection_choice import overlap_pays
from ds_usp.errors import PatchError
from ds_usp.planner import Cluster, load_cluster
from megatron_patches.megatron_deepspeed import arguments, startup

sys.path.insert(0, str(Path(__file__).parents[2] / "examples_deepspeed" / "sequence_parallel"))

from usp_trainer import auto_args
from usp_trainer.arguments import parse

H200 = "NVIDIA H200"
# Degrees, order, all-to-alls inside a node, ring ranks of a node; tokens, batch, width, heads,
# KV heads, head dim, bytes of an element.
ULYSSES = (2, 1, "ulysses-ring")
CALL = (16384, 1, 4096, 32, 32, 128, 2)


@pytest.mark.parametrize(
    ("gpu", "in_node", "overlap", "why"),
    [
        (H200, True, False, " longer with projections under the exchanges on h200"),
        (H200, False, True, "shorter with projections under the exchanges on h200"),
        ("", True, False, "the planner has no forecast for CPUs"),
        ("", False, True, "the planner has no forecast for CPUs"),
        ("NVIDIA T4", False, True, "the planner has no forecast for NVIDIA T4"),
    ],
)
def test_a_module_asks_the_planner(gpu: str, in_node: bool, overlap: bool, why: str) -> None:
    decided, reason = projection_choice._decided(gpu, *ULYSSES, in_node, 1, *CALL)
    assert decided is overlap and why in reason


def test_the_first_rank_logs_the_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.empty(1, 8, 32)
    with caplog.at_level(logging.INFO, "ds_usp"):
        for rank in (1, 0, 0):
            mesh = ds_usp.SequenceMesh(2, 1, rank)
            assert not overlap_pays(mesh, x, 16, 4, 4, 8)
        assert not overlap_pays(ds_usp.SequenceMesh.single(), x, 16, 4, 4, 8)
    assert len([line for line in caplog.messages if "no forecast for CPUs" in line]) <= 1


def use_cluster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster that ranks find themselves on: of h800 each node has one; "": an unknown one."""

    def this_cluster(*_: object, **__: object) -> Cluster:
        if not name:
            raise ds_usp.ConfigError("no built-in cluster")
        return load_cluster(name).with_gpus_per_node(1 if name == "h800" else 2)

    monkeypatch.setattr("ds_usp.training.this_cluster", this_cluster)


@pytest.mark.parametrize(
    ("cluster", "more", "resolved", "line"),
    [
        ("h200", "", "off", " longer with projections"),
        ("h800", "", "on", " shorter with projections"),
        ("h800", "--usp-recompute gemm-last", "off", None),  # it replaces the projections
        ("h800", "--usp-projection-overlap recompute", "recompute", None),
        ("", "", "auto", None),  # no forecast: by the mesh's nodes
    ],
)
def test_the_trainer_asks_the_planner_and_prints_why(
    cluster: str, more: str, resolved: str, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(compute: Any) -> Any:
        return compute()

    use_cluster(cluster, monkeypatch)
    monkeypatch.setattr(auto_args, "broadcast_from_rank0", run)
    flags = f"""--ds-sequence-parallel-size 2 --ulysses-degree 2 --seq-length 16384 --bf16
        --hidden-size 4096 --num-attention-heads 32 --transformer-impl local {more}"""
    parsed = parse(flags.split())
    parsed.device = "cuda"
    args, why = auto_args.resolve_auto_args(parsed, 2)
    assert args.usp_projection_overlap == resolved
    assert len(why) == (line is not None)
    assert line is None or line in why[0]


@pytest.mark.parametrize(
    ("cluster", "given", "resolved", "line"),
    [
        ("h200", {}, "off", " longer with projections"),
        ("h800", {}, "on", " shorter with projections"),
        ("h800", {"use_flash_attn": True}, "off", ""),
        ("h800", {"edited": True}, "off", ""),
        ("", {}, "auto", ""),  # no forecast: by the mesh's nodes
        ("h800", {"usp_projection_overlap": "recompute"}, "recompute", ""),
    ],
)
def test_megatron_deepspeed_asks_the_planner_and_prints_why(
    cluster: str,
    given: dict[str, Any],
    resolved: str,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def verify(flag: str) -> None:
        if flag == "--usp-projection-overlap" and given.get("edited"):
            raise PatchError("RowParallelLinear.forward: its source is another")

    use_cluster(cluster, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (arguments, startup):
        monkeypatch.setattr(module, "verify_flag", verify)
    flags = """--ds-sequence-parallel-size 2 --ulysses-degree 2 --seq-length 16384 --bf16
        --hidden-size 4096 --num-attention-heads 32 --transformer-impl local"""
    args = Namespace(**vars(parse(flags.split())))
    sizes = {"ffn_hidden_size": 16384, "num_key_value_heads": 32, "global_batch_size": 1}
    more = {"deepspeed_config": {}, "use_flash_attn": False, "enable_zbh1_pipeline": False}
    vars(args).update(sizes | more | {"rank": 0, "world_size": 2} | given)
    arguments._choose_projections(arguments.planned_run(args))
    assert args.usp_projection_overlap == resolved
    printed = capsys.readouterr().out
    assert printed.count("\n") == bool(line) and line in printed
