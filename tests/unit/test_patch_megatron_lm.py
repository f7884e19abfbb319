"""The patches of Megatron-LM, as far as they need no checkout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ds_usp.errors import ConfigError
from megatron_patches.megatron_core.context_parallel import check_degrees
from megatron_patches.megatron_lm import connections, memory, projections, unsupported
from megatron_patches.megatron_lm.context_parallel_kind import NotGiven, is_mixed, resolve, uses_usp
from megatron_patches.megatron_lm.planned import key_value_heads, planned_run
from megatron_patches.refusals import Refusal

DEFAULT = NotGiven(["p2p"])


def arguments(**changes: Any) -> SimpleNamespace:
    """Validated arguments of a GPT with 4 ranks a sequence."""
    values = SimpleNamespace(
        num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=8, kv_channels=8,
        group_query_attention=False, num_query_groups=1, swiglu=False, vocab_size=None,
        untie_embeddings_and_output_weights=False, add_bias_linear=True, seq_length=64,
        position_embedding_type="rope", global_batch_size=4, micro_batch_size=1, bf16=True,
        fp16=False, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, context_parallel_size=4, world_size=8, rank=0,
        sequence_parallel=False, use_distributed_optimizer=True, overlap_grad_reduce=True,
        recompute_granularity=None, transformer_impl="transformer_engine", cp_comm_type=DEFAULT,
        ulysses_degree=None, usp_kernel="auto", usp_recompute="none", usp_cluster=None,
        usp_mlp_chunks=0, usp_projection_overlap="off",
        use_torch_fsdp2=False, use_megatron_fsdp=False,
    )  # fmt: skip
    return SimpleNamespace(**(vars(values) | changes))


@pytest.mark.parametrize(
    ("given", "usp", "mixed", "kinds"),
    [
        ({}, True, False, ["usp"]),
        ({"cp_comm_type": ["usp"], "ulysses_degree": 2}, True, False, ["usp"]),
        ({"cp_comm_type": ["usp", "a2a"], "ulysses_degree": 2}, True, True, ["usp", "a2a"]),
        ({"cp_comm_type": ["p2p"]}, False, False, ["p2p"]),
        ({"context_parallel_size": 1}, False, False, ["p2p"]),
        ({"context_parallel_size": 1, "cp_comm_type": ["a2a"]}, False, False, ["a2a"]),
    ],
)
def test_who_computes_context_parallelism(
    given: dict[str, Any], usp: bool, mixed: bool, kinds: list[str]
) -> None:
    args = arguments(**given)
    resolve(args)
    assert (uses_usp(args), is_mixed(args)) == (usp, mixed)
    assert (args.cp_comm_type, type(args.cp_comm_type)) == (kinds, list)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cp_comm_type": ["p2p"], "ulysses_degree": 4}, "--ulysses-degree 4 is for USP"),
        ({"cp_comm_type": ["p2p"], "usp_kernel": "sdpa"}, "--usp-kernel sdpa is for USP"),
        ({"cp_comm_type": ["usp", "p2p"], "transformer_impl": "local"}, "is local. Leave"),
        ({"cp_comm_type": ["ring"]}, "--cp-comm-type ring is unknown"),
        ({"cp_comm_type": ["usp"] * 3}, "has 3 entries, and the model 2 layers"),
    ],
)
def test_a_contradiction_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(arguments(**given))


def test_the_degree_follows_from_what_is_given() -> None:
    assert check_degrees(4, None, None) == 4
    assert check_degrees(4, None, [2, 2]) == 2
    assert check_degrees(4, 1, None, heads=2) == 1
    with pytest.raises(ConfigError, match=r"\[2, 2\] is not ulysses x ring = \[4, 1\]"):
        check_degrees(4, 4, [2, 2])


def test_the_planner_reads_the_run() -> None:
    run = planned_run(arguments(ulysses_degree=2, tensor_model_parallel_size=2, world_size=16))
    config, model = run.parallel_config(), run.model_shape()
    assert (config.tp, config.ulysses, config.ring, config.dp) == (2, 2, 2, 2)
    assert (config.zero, config.schedule, config.recompute) == (1, "1f1b", "none")
    assert config.overlap_gradients
    assert (model.kv_heads, model.learned_positions) == (8, False)
    virtual = planned_run(
        arguments(
            num_layers=8,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            recompute_granularity="selective",
        )
    ).parallel_config()
    assert (virtual.layers_per_virtual_stage, virtual.recompute) == (2, "attention-only")


def test_projections_need_several_ranks_and_unedited_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(projections, "verify_flag", asked.append)
    off, again, alone = arguments(), arguments(), arguments(context_parallel_size=1)
    again.usp_projection_overlap = alone.usp_projection_overlap = "recompute"
    assert projections.verify_edits(off) == projections.verify_edits(again) == ()
    assert asked == ["--usp-projection-overlap"]
    (line,) = projections.verify_edits(alone)
    assert line.endswith("recompute has no effect with --context-parallel-size 1")
    assert planned_run(again).parallel_config().projection_overlap == "recompute"
    assert planned_run(alone).parallel_config().projection_overlap == "off"


def test_every_tensor_parallel_rank_has_a_key_value_head() -> None:
    grouped = {"group_query_attention": True, "num_query_groups": 2}
    assert key_value_heads(arguments(**grouped)) == 2
    assert key_value_heads(arguments(**grouped, tensor_model_parallel_size=4)) == 4


class Value(SimpleNamespace):
    """An argument with a name and items."""

    def __getitem__(self, index: int) -> str:
        return f"<{index}>"


class Anything(dict[str, Any]):
    """A value for every name."""

    def __missing__(self, name: str) -> Value:
        return Value(name=f"<{name}>")


@pytest.mark.parametrize("module", [unsupported, memory, projections])
def test_every_refusal_says_what_to_do(module: ModuleType) -> None:
    tables = [x for x in vars(module).values() if isinstance(x, tuple)]
    rows = [row for table in tables for row in table if isinstance(row, Refusal)]
    assert len(rows) > 5
    for row in rows:
        text = f"{row.reason}. {row.fix}".format_map(Anything())
        assert row.fix[0].isupper() and not row.fix.endswith("."), text


def test_only_the_check_sees_one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    checked = ModuleType("megatron.training.arguments")
    checked.os = os  # type: ignore[attr-defined]
    training = ModuleType("megatron.training")
    training.arguments = checked  # type: ignore[attr-defined]
    for name, module in packages(training, checked):
        monkeypatch.setitem(sys.modules, name, module)

    def seen(**changes: Any) -> str | None:
        args = arguments(**changes)
        resolve(args)
        with connections.not_demanded(args):
            assert checked.os.getenv("PATH") == os.getenv("PATH")
            assert "PATH" in checked.os.environ.copy()
            value: str | None = checked.os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        assert checked.os is os
        return value

    assert seen() == "1"
    assert seen(tensor_model_parallel_size=2) is None
    assert seen(cp_comm_type=["usp", "p2p"]) is None
    assert seen(use_torch_fsdp2=True) is None


def packages(*modules: ModuleType) -> Iterable[tuple[str, ModuleType]]:
    """``sys.modules`` entries of modules, with a parent where there is none."""
    if "megatron" not in sys.modules:
        yield "megatron", ModuleType("megatron")
    for module in modules:
        yield module.__name__, module
