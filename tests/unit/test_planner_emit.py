"""What plans are emitted as: every fact of the plan and of the model, or a refusal by name.

tests/megatron/test_planner_started.py starts what is emitted.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from ds_usp.errors import ConfigError
from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.__main__ import main
from ds_usp.planner.emit import KINDS, emit
from ds_usp.planner.parallel_config import framework_caps

SCRIPTS = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
H200 = "plan --model llama3-8b --seq-len 131072 --gpus 16 --cluster h200"


def run(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> str:
    assert main(line.split()) == status
    return capsys.readouterr().out


def words(text: str) -> list[str]:
    return text.replace("\\\n", " ").split()


def after(flags: list[str], flag: str, count: int = 1) -> list[str]:
    return flags[flags.index(flag) + 1 :][:count]


def test_the_flags_that_we_added_are_taken_by_both_programs() -> None:
    """Of Megatron-DeepSpeed's parser, ours alone; its own needs a checkout."""
    from megatron_patches.megatron_deepspeed.arguments import add_flags
    from megatron_patches.settings import MeshSettings

    sys.path.insert(0, str(SCRIPTS))
    try:
        from usp_trainer.arguments import build_parser
    finally:
        sys.path.pop(0)
    work = Workload(load_model("llama3-8b"), 131072, documents=(100000, 31072))
    config = ParallelConfig(
        ulysses=2,
        ring=4,
        recompute="attention",
        offload_ratio=0.25,
        offload_unit="layer",
        fused_loss=True,
        tp_sequence=False,
    )
    host = ArgumentParser()
    add_flags(host, MeshSettings())
    for parser in (host, build_parser()):
        args, _ = parser.parse_known_args(words(emit("megatron-deepspeed", work, config)))
        assert (args.ulysses_degree, args.usp_layout) == (2, "zigzag")
        assert (args.usp_recompute, args.usp_offload_ratio) == ("attention", 0.25)
        assert args.usp_loss_chunks == 16  # of 16K tokens of a rank, 1K each


@pytest.mark.parametrize("kind", ["megatron-deepspeed", "script"])
def test_what_a_plan_fits_with_is_emitted(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """512K tokens on 8 GPUs: the loss in chunks, and a share of the activations on the host."""
    line = f"plan --model llama3-8b --seq-len 512K --gpus 8 --cluster a800 --emit {kind}"
    line += " --tp 1 --recompute attention --zero 1"
    flags = words(run(capsys, line))
    best = json.loads(run(capsys, line + " --json"))["plans"][0]
    assert 0 < best["offload_ratio"] < 1 and best["fused_loss"]
    assert after(flags, "--usp-offload-ratio") == [f"{best['offload_ratio']:g}"]
    assert after(flags, "--usp-recompute") == ["attention"]
    assert after(flags, "--usp-loss-chunks") == ["64"]  # 64K tokens of a rank, 1K at a time
    assert "--reset-attention-mask" not in flags
    packed = words(run(capsys, f"{H200} --documents 100000,31072 --emit {kind}"))
    assert "--reset-attention-mask" in packed and "--reset-position-ids" in packed


def test_degrees_of_a_patched_megatron_lm_and_of_a_program_on_megatron_core() -> None:
    """The first reads --ulysses-degree, the second the sizes of Megatron-LM's own parser."""
    work = Workload(load_model("llama3-8b"), 131072)
    config = ParallelConfig(ulysses=2, ring=4, tp_sequence=False)
    flags = words(emit("megatron-lm", work, config))
    assert after(flags, "--context-parallel-size") == ["8"]
    assert after(flags, "--ulysses-degree") == ["2"] and "--cp-comm-type" not in flags
    levels = words(emit("megatron-core", work, config))
    assert after(levels, "--hierarchical-context-parallel-sizes", 2) == ["2", "4"]
    assert after(levels, "--cp-comm-type") == ["usp"] and "--ulysses-degree" not in levels
    alone = words(emit("megatron-lm", work, replace(config, ulysses=1, ring=1)))
    assert "--ulysses-degree" not in alone
    keeping = replace(config, recompute="attention")
    assert after(words(emit("megatron-lm", work, keeping)), "--usp-recompute") == ["attention"]
    for kind, other in (("megatron-core", "attention"), ("megatron-lm", "gemm-last")):
        with pytest.raises(ConfigError, match=f"search with --engine {kind}"):
            emit(kind, work, replace(config, recompute=other))


def test_an_order_that_no_host_has_is_not_emitted() -> None:
    work = Workload(load_model("llama3-8b"), 131072)
    config = ParallelConfig(ulysses=2, ring=4, order="ring-ulysses", tp_sequence=False)
    for kind in KINDS:
        with pytest.raises(ConfigError, match="has no switch for ring-ulysses"):
            emit(kind, work, config)
        assert emit(kind, work, replace(config, ring=1))  # which is the same in both orders


@pytest.mark.parametrize("kind", ["script", "megatron-deepspeed", "ds-config"])
def test_zero_0_is_not_emitted(kind: str) -> None:
    with pytest.raises(ConfigError, match="sums gradients of bf16 weights in bf16"):
        emit(kind, Workload(load_model("llama3-8b"), 8192), ParallelConfig(zero=0))
    assert 0 not in framework_caps("megatron-deepspeed").zero


FACTS = {
    "script": ("qkv_bias", "qk_norm", "head_dim", "rope_theta", "other_facts"),
    "megatron-deepspeed": ("qkv_bias", "qk_norm", "rope_theta", "other_facts"),
    "megatron-lm": ("rope_theta", "other_facts"),
    "megatron-core": ("rope_theta", "other_facts"),
}
CHANGED = {
    "qkv_bias": (True, "qkv_bias=True"),
    "qk_norm": (True, "qk_norm=True"),
    "head_dim": (64, "head_dim=64"),
    "rope_theta": (10000.5, "rope_theta=10000.5"),
    "other_facts": (("rope_scaling {}",), "rope_scaling {}"),
}


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize("fact", CHANGED)
def test_every_fact_of_a_model_is_in_the_flags_or_refused_by_name(kind: str, fact: str) -> None:
    shape = load_model("llama3-8b")
    value, name = CHANGED[fact]
    other = Workload(replace(shape, **{fact: value}), 8192)
    if fact in FACTS[kind]:
        with pytest.raises(ConfigError, match="has no flag for") as error:
            emit(kind, other, ParallelConfig())
        assert name in str(error.value)
    else:
        assert emit(kind, other, ParallelConfig()) != emit(
            kind, Workload(shape, 8192), ParallelConfig()
        )


@pytest.mark.parametrize("kind", FACTS)
def test_what_both_kinds_of_models_are_made_of_is_in_the_flags(kind: str) -> None:
    llama = words(emit(kind, Workload(load_model("llama3-8b"), 8192), ParallelConfig()))
    gpt = words(emit(kind, Workload(load_model("gpt-1.3b"), 8192), ParallelConfig()))
    for flag in ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"):
        assert flag in llama and flag not in gpt
    is_megatron_lm = kind in ("megatron-lm", "megatron-core")
    epsilon = "--norm-epsilon" if is_megatron_lm else "--layernorm-epsilon"
    assert [word.lower() for word in after(llama, "--normalization")] == ["rmsnorm"]
    assert [word.lower() for word in after(gpt, "--normalization")] == ["layernorm"]
    assert float(after(llama, epsilon)[0]) == 1e-5
    theta, vocabulary = {
        "script": ("rope_theta=500000", "vocab_size=128256"),
    }.get(kind, ("500000", "128255"))
    assert theta in llama and vocabulary in llama and theta not in gpt


def test_an_explanation_beside_what_is_emitted(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{H200} --engine megatron-deepspeed --emit megatron-deepspeed"
    assert main(line.split()) == 0
    alone = capsys.readouterr()
    assert main([*line.split(), "--explain"]) == 0
    explained = capsys.readouterr()
    assert alone.err == "" and explained.out == alone.out  # what a shell keeps
    assert "% MFU" in explained.err and "because" in explained.err
