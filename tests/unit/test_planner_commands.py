"""The commands: what they print and emit, and how they refuse."""

import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import fields, replace
from pathlib import Path

import planner_commands
import pytest
from programs import python

from ds_usp.errors import ConfigError
from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.__main__ import main
from ds_usp.planner.emit import KINDS, emit
from ds_usp.planner.explain import explain
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.parallel_config import framework_caps
from ds_usp.planner.report import plans_text, search_result_json
from ds_usp.planner.search import SearchResult, search
from ds_usp.planner.step_time import StepTime

ROOT = Path(__file__).resolve().parents[2]
CLOSE = {"rel": 1e-9, "abs": 1e-9}  # another libm may differ in the last digit


def run(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> str:
    assert main(line.split()) == status
    return capsys.readouterr().out


def numbers(content: object, path: str = "") -> dict[str, object]:
    """The leaves of a JSON document by their path."""
    if isinstance(content, (dict, list)):
        items = content.items() if isinstance(content, dict) else enumerate(content)
        return {k: v for key, x in items for k, v in numbers(x, f"{path}/{key}").items()}
    return {path: content}


@pytest.mark.parametrize("name", planner_commands.FILES)
def test_commands_print_what_their_golden_file_states(name, monkeypatch):
    """Written by tests/planner_commands.py."""
    monkeypatch.chdir(ROOT)
    for line, expected in planner_commands.read(name):
        printed = planner_commands.run(line)
        first, second = (text.partition("\n") for text in (printed, expected))
        if expected.startswith(("{", "[{")):
            actual, stated = (numbers(json.loads(text)) for text, *_ in (first, second))
            assert list(actual) == list(stated), line
            texts = [key for key, value in stated.items() if not isinstance(value, (int, float))]
            assert {k: actual.pop(k) for k in texts} == {k: stated.pop(k) for k in texts}, line
            assert actual == pytest.approx(stated, **CLOSE), line
            assert first[2] == second[2], line
        else:
            assert printed == expected, line


def test_json_is_consistent_with_itself(capsys):
    line = "plan --model llama3-8b --seq-len 131072 --gpus 16 --cluster a800 --json"
    report = json.loads(run(capsys, line))
    best = report["plans"][0]
    assert best["tp"] * best["ulysses"] * best["ring"] * best["pp"] * best["dp"] == 16
    assert best["memory"]["total_bytes"] <= report["budget_bytes"]
    assert best["step_s"] == pytest.approx(sum(best["time_s"].values()))
    assert best["tokens_per_s_per_gpu"] == pytest.approx(131072 / 16 / best["step_s"])
    sizes = best["memory"]
    apart = ("total_bytes", "formula_bytes", "offloaded_bytes", "pipeline_stage")
    total = sum(size for name, size in sizes.items() if name not in apart)
    assert total == pytest.approx(sizes["total_bytes"], abs=8)


def test_measured_memory(capsys):
    """Llama-65B on 256 H800 (Megatron-Kwai, figure 7), which the golden file has predicted."""
    line = next(line for line, _ in planner_commands.read("memory.txt"))
    report = json.loads(run(capsys, f"{line} --json"))
    assert report["total_bytes"] == pytest.approx(52089073152, rel=0.012)


def test_bytes_of_attention_by_hand(capsys):
    line = "comm --model llama3-8b --seq-len 131072 --ulysses 4 --ring 4 --json"
    first = json.loads(run(capsys, line))["ranks"][0]
    # (u - 1) x local tokens x (q and out of 8 heads, k and v of 2) x 128 features x 2 bytes
    assert first["forward_bytes"]["all_to_all"] == 3 * 8192 * (8 + 4 + 8) * 128 * 2
    # Ring rank 0's back chunk is the last of all: only its front one is seen, by 3 ranks.
    assert first["forward_bytes"]["ring_kv"] == 3 * 16384 * 2 * 2 * 128 * 2
    assert first["ledger_bytes"]["ring_dkv"] == 6 * 16384 * 2 * 2 * 128 * 2


def test_lengths_in_powers_of_1024(capsys):
    line = "memory --model 7b --ring 4 --recompute full --zero 3 --seq-len {} --json"
    written = [run(capsys, line.format(length)) for length in ("131072", "128K", "128k")]
    assert written[0] == written[1] == written[2]


COMPONENTS = ("weights", "activations", "logits", "exchange", "transient", "workspace")

LEGEND_OF = {
    "plan": (*COMPONENTS, "ulysses x ring", "mb", "loss", "recompute", "offload", "MFU", "step s"),
    "memory": COMPONENTS,
    "max-length": (*COMPONENTS, "tokens", "GPU, host", "ends with"),
    "longest": (*COMPONENTS, "tokens", "GPU, host", "ends with"),
    "comm": (),
}


@pytest.mark.parametrize("command", LEGEND_OF)
def test_help_states_one_default_a_flag_and_what_columns_mean(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--help"], prog="ds-usp")
    text = capsys.readouterr().out
    name = "max-length" if command == "longest" else command
    assert text.startswith(f"usage: ds-usp {name} ")
    options, _, legend = re.split(
        r"\n((?:columns|components) of )", text + "\ncolumns of ", maxsplit=1
    )
    assert all(f"  {word}" in legend or f", {word}" in legend for word in LEGEND_OF[command])
    assert "None" not in options and "False" not in options
    for option in " ".join(options.split()).split(" --")[1:]:
        assert option.count("default") <= 1, option


STARTED = """
import sys, time
begin = time.process_time()
from ds_usp.errors import ConfigError
from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.__main__ import main
from ds_usp.planner.emit import KINDS, emit
main("memory --model 7b --seq-len 8K".split())
loaded = [name for name in ("torch", "numpy", "matplotlib") if name in sys.modules]
print(time.process_time() - begin, *loaded)
"""


def test_it_starts_at_once():
    """No torch, and half a second of a core at most; the whole process, as a shell sees it."""
    done = python("-c", STARTED)
    assert done.returncode == 0, done.stderr
    seconds, *loaded = done.stdout.splitlines()[-1].split()
    assert float(seconds) < 0.5 and loaded == []


def test_a_closed_pipe_is_no_error():
    """As `| head -1` does: the reader goes before the text is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "ds_usp.planner", "memory", "--model", "7b", "--seq-len", "8K"]
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            command, cwd=ROOT, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------ reports of plans


MODEL = load_model("llama3-8b")


@pytest.fixture(scope="module")
def result() -> SearchResult:
    work = Workload(MODEL, 131072)
    return search(load_cluster("h200"), work, 4, fixed={"tp": 1, "pp": 1, "dp": 1})


@pytest.mark.parametrize("part", [field.name for field in fields(StepTime)])
def test_whatever_a_plan_loses_with_has_a_name(result, part):
    """The layers' time is reported by component, so where it alone is more, one of these is."""
    best = result.plans[0]
    more = getattr(best.time, part) + 1e3
    other = replace(best, mfu=best.mfu / 2, time=replace(best.time, **{part: more}))
    (line,) = (
        line
        for line in explain(replace(result, best_with={("zero", "other"): other}, fixed={}))
        if "because zero other" in line
    )
    assert ": 1000.00 s more for " in line or (part == "layers" and " s more for " in line)


def test_ties_are_marked_and_counted(result):
    best = result.plans[0]
    near, far = (replace(best, mfu=best.mfu * share) for share in (0.95, 0.93))
    text = plans_text(replace(result, plans=[best, near, far]), 3)
    rows = [line for line in text.splitlines() if line[:1].isdigit()][:3]
    assert [row.partition("=")[2] or row[-1] == "=" for row in rows] == [" simplest", True, False]
    lean = replace(near, config=best.config.replace(recompute="none", offload_ratio=0.0))
    costly = replace(best, config=best.config.replace(recompute="full", offload_ratio=0.5))
    lines = plans_text(replace(result, plans=[costly, lean, far]), 3).splitlines()
    (marked,) = (line for line in lines if line.endswith("= simplest"))
    assert f"{lean.mfu:.1%}" in marked  # not the fastest, but without settings for memory
    assert "= 2 of the 3 are a tie: less than 6% apart" in text
    across = best.config.replace(ulysses=8, ring=1)
    within = best.config.replace(ulysses=4, ring=2, recompute="full")
    for nodes_of, simplest in ((8, "8 x 1"), (4, "4 x 2")):
        cluster = result.cluster.with_gpus_per_node(nodes_of)
        plans = [replace(best, config=config) for config in (within, across)]
        text = plans_text(replace(result, cluster=cluster, plans=plans), 2)
        (marked,) = (line for line in text.splitlines() if line.endswith("= simplest"))
        assert marked.startswith(simplest)
    alone = plans_text(replace(result, plans=[best, far]), 2)
    assert "tie" not in alone and not any(line.endswith("=") for line in alone.splitlines())
    assert search_result_json(result, 1)["tie_within"] == 0.06


def test_orders_that_do_not_differ_are_one_plan(result):
    """Inside one node no link tells them apart; across nodes some do."""
    assert {plan.config.order for plan in result.plans} == {"ulysses-ring"}
    wide = search(load_cluster("h200"), Workload(MODEL, 131072), 16, fixed={"tp": 1, "pp": 1})
    assert {plan.config.order for plan in wide.plans} == {"ulysses-ring", "ring-ulysses"}
    seen = [replace(plan.config, order="") for plan in wide.plans if plan.mfu == wide.plans[0].mfu]
    assert len(seen) == len(set(seen))


def test_no_line_is_said_twice():
    for gpus in (8, 16):
        lines = explain(search(load_cluster("h100"), Workload(MODEL, 131072), gpus))
        assert len(lines) == len(set(lines))


def test_the_loss_is_in_chunks_where_its_logits_do_not_fit():
    work = Workload(MODEL, 131072)
    for how in ("any", "megatron-deepspeed"):
        # With the keys and values of two ring ranks beside them.
        result = search(load_cluster("h100"), work, 8, framework_caps(how), fixed={"ring": 2})
        best = result.plans[0].config
        assert best.fused_loss and not best.offload_ratio
        assert search_result_json(result, 1)["plans"][0]["fused_loss"]
        assert any(line.startswith("chunked loss: the full logits") for line in explain(result))
        unchunked = search(
            load_cluster("h200"), Workload(MODEL, 32768), 8, framework_caps(how)
        ).plans[0]
        assert not unchunked.config.fused_loss
    for how in ("megatron-deepspeed", "megatron-core"):
        plans = search(load_cluster("h100"), work, 16, framework_caps(how)).plans
        chunked = [plan.config for plan in plans if plan.config.fused_loss]
        assert all(config.pp == 1 for config in chunked) and (how[-4:] != "core" or not chunked)


# ------------------------------------------------------------------ what plans are emitted as
# Every fact of plan and model, or a refusal by name. tests/megatron/test_planner_started.py
# starts it.


SCRIPTS = Path(__file__).resolve().parents[2] / "examples_deepspeed" / "sequence_parallel"
H200 = "plan --model llama3-8b --seq-len 131072 --gpus 16 --cluster h200"


def words(text: str) -> list[str]:
    return text.replace("\\\n", " ").split()


def test_the_flags_that_we_added_are_taken_by_both_programs():
    """Of Megatron-DeepSpeed's parser, ours alone; its own needs a checkout."""
    from megatron_patches.megatron_deepspeed.arguments import add_flags
    from megatron_patches.settings import MeshSettings

    sys.path.insert(0, str(SCRIPTS))
    try:
        from usp_trainer.arguments import build_parser
    finally:
        sys.path.pop(0)
    work = Workload(load_model("llama3-8b"), 131072, document_lengths=(100000, 31072))
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


def test_degrees_of_a_patched_megatron_lm_and_of_a_program_on_megatron_core():
    """Golden files have those of several ranks."""
    work, config = Workload(load_model("llama3-8b"), 131072), ParallelConfig(tp_sequence=False)
    assert "--ulysses-degree" not in words(emit("megatron-lm", work, config))
    for kind, other in (("megatron-core", "attention"), ("megatron-lm", "gemm-last")):
        with pytest.raises(ConfigError, match=f"search with --engine {kind}"):
            emit(kind, work, replace(config, recompute=other))


def test_an_order_that_no_host_has_is_not_emitted():
    work = Workload(load_model("llama3-8b"), 131072)
    config = ParallelConfig(ulysses=2, ring=4, order="ring-ulysses", tp_sequence=False)
    for kind in KINDS:
        with pytest.raises(ConfigError, match="has no switch for ring-ulysses"):
            emit(kind, work, config)
        assert emit(kind, work, replace(config, ring=1))  # which is the same in both orders


@pytest.mark.parametrize("kind", ["script", "megatron-deepspeed", "ds-config"])
def test_zero_0_is_not_emitted(kind):
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
def test_every_fact_of_a_model_is_in_the_flags_or_refused_by_name(kind, fact):
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


def test_an_explanation_beside_what_is_emitted(capsys):
    line = f"{H200} --engine megatron-deepspeed --emit megatron-deepspeed"
    assert main(line.split()) == 0
    alone = capsys.readouterr()
    assert main([*line.split(), "--explain"]) == 0
    explained = capsys.readouterr()
    assert alone.err == "" and explained.out == alone.out  # what a shell keeps
    assert "% MFU" in explained.err and "because" in explained.err


PLAN, OF_8B = "plan --model llama3-8b --seq-len 128K", "--model llama3-8b --seq-len 1M"
HUGE = {
    f"{PLAN} --gpus 1000000000": "--gpus 1000000000 must be at most 131,072",
    f"{PLAN} --gpus 8 --global-batch 999999999": "must be at most 32,768",
    "plan --model llama3-8b --seq-len 1T --gpus 8": "'1T' must be a whole number",
    "plan --model llama3-8b --seq-len 9999999999999M --gpus 8": "must be at most 1,125,899,",
    "max-length --model llama3-8b --gpus 131073": "--gpus 131073 must be at most 131,072",
    f"memory {OF_8B} --dp 131072 --tp 8": "1,048,576 GPUs are more than the 131,072",
    f"comm {OF_8B} --ring 1000000": "--ring 1000000 must be at most 131,072",
    f"comm {OF_8B} --ring 8192": "are 8,192 ranks, and each has a row: at most 4,096",
}


@pytest.mark.parametrize(("line", "says"), HUGE.items())
def test_what_would_take_hours_is_refused_with_the_bound(line, says):
    """Without the bounds most of these go on until memory ends."""
    printed = planner_commands.run(line)
    assert printed.startswith("error: ") and printed.endswith("[exit 2]") and says in printed


def test_a_search_called_from_python_has_the_same_bounds():
    cluster, model = load_cluster("h800"), load_model("llama3-8b")
    with pytest.raises(ConfigError, match="1,048,576 GPUs are more than the 131,072 that are"):
        search(cluster, Workload(model, 4096), 2**20)
    with pytest.raises(ConfigError, match="65,536 sequences is more than the 32,768"):
        search(cluster, Workload(model, 4096, 2**16), 8)
