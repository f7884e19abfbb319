"""The commands: what they print and emit, and how they refuse."""

import json
import os
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


@pytest.mark.parametrize(
    ("line", "expected"),
    [pytest.param(*command, id=command[0]) for command in planner_commands.read()],
)
def test_a_command_prints_what_the_snapshot_states(line, expected):
    """Written by tests/planner_commands.py."""
    printed = planner_commands.run(line)
    if "--json" not in line:
        assert printed == expected
        return
    first, second = (text.partition("\n") for text in (printed, expected))
    actual, stated = (numbers(json.loads(text)) for text, *_ in (first, second))
    assert list(actual) == list(stated)
    texts = [key for key, value in stated.items() if not isinstance(value, (int, float))]
    assert {k: actual.pop(k) for k in texts} == {k: stated.pop(k) for k in texts}
    assert actual == pytest.approx(stated, **CLOSE)
    assert first[2] == second[2]


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


def test_lengths_in_powers_of_1024(capsys):
    line = "memory --model 7b --ring 4 --recompute full --zero 3 --seq-len {} --json"
    written = [run(capsys, line.format(length)) for length in ("131072", "128K", "128k")]
    assert written[0] == written[1] == written[2]


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
    sharded = best.config.replace(ulysses=4, ring=2, zero=3)
    whole = best.config.replace(ulysses=2, ring=4, zero=1)
    plans = [replace(best, config=config) for config in (sharded, whole)]
    (marked,) = (
        line
        for line in plans_text(replace(result, plans=plans), 2).splitlines()
        if line.endswith("= simplest")
    )
    assert marked.startswith("2 x 4")  # a lower ZeRO stage before a smaller ring
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
    run = ParallelConfig()
    for how, alone, in_pipeline in (
        ("any", True, True),
        ("megatron-deepspeed", True, False),
        ("transformers", True, False),
        ("megatron-core", False, False),
    ):
        can = framework_caps(how).can_chunk_loss
        assert (can(run), can(run.replace(pp=2))) == (alone, in_pipeline)
        assert not can(run.replace(fused_loss=True))
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


# ------------------------------------------------------------------ refusals


P = "plan --model llama3-8b --seq-len 8K --gpus 8"
P128 = "plan --model llama3-8b --seq-len 128K --gpus 16"
M, LONG = "memory --model 7b --seq-len 8K", "max-length --model gpt-6.7b"
# A command, and the number or the name by which it says what is wrong with it.
REFUSED = {
    "plan --model none --seq-len 8 --gpus 8": "no model 'none'; there are llama-7b, ",
    "memory --model none.json --seq-len 128K": "cannot read the model file none.json",
    f"{P} --cluster none": "no cluster 'none'; there are a100, ",
    f"{P} --cluster none.json": "cannot read the cluster file none.json",
    "plan --model 7b --seq-len 8192 --gpus 12": "12 GPUs do not fill nodes of 8",
    "plan --model 7b --seq-len 0 --gpus 8": "--seq-len: '0' must be",
    "plan --model 7b --seq-len 1T --gpus 8": "'1T' must be a whole number",
    "plan --model 7b --seq-len 9999999999999M --gpus 8": "must be at most 1,125,899,",
    "plan --model 7b --seq-len 8192 --gpu 8 --zeroo 1": "--zeroo (did you mean --zero?)",
    f"{P} --documents 1,x": "--documents: 'x' must be",
    f"{P} --documents 100": "documents of 100 tokens do not fill a sequence of 8192",
    f"{P} --top 0": "--top 0 must be a whole number of 1 or more",
    # What would take hours.
    "plan --model 7b --seq-len 8K --gpus 1000000000": "--gpus 1000000000 must be at most 131,072",
    f"{P} --global-batch 999999999": "must be at most 32,768",
    f"{M} --dp 131072 --tp 8": "1,048,576 GPUs are more than the 131,072",
    "comm --model 7b --seq-len 1M --ring 8192": "are 8,192 ranks, and each has a row: at most",
    # Degrees, stages and the batch.
    f"{M} --gpus 6 --tp 4": "--gpus 6 is not a multiple of tp 4",
    f"{M} --tp 3": "tp=3 must divide the 32 query heads",
    f"{M} --tp 16 --ulysses 4": "ulysses=4 needs at least 4 query heads on each tensor-parallel",
    f"{M} --stage 1": "--stage 1 is outside the 1 stages",
    f"{M} --pp 3": "32 layers do not divide into pp=3 stages",
    f"{M} --pp 2 --layers-per-virtual-stage 3": "16 layers of a stage (32 / pp 2) do not divide",
    f"{M} --layers-per-virtual-stage 2": "virtual stages need a pipeline: pp is 1",
    f"{M} --pp 2 --layers-per-virtual-stage 1 --schedule deepspeed": "has no virtual stages",
    f"{M} --pp 2 --dp 4 --layers-per-virtual-stage 1 --global-batch 4": "multiples of pp=2",
    f"{M} --pp 2 --zero 2": "ZeRO-2 does not go with a pipeline (pp=2)",
    f"{M} --dp 3 --global-batch 4": "a global batch of 4 does not divide among dp 3",
    f"{M} --ring 4 --dp 1 --gpus 8": "= 4 ranks, but there are 8 GPUs",
    "memory --model 7b --seq-len 512 --ring 1024": "512 tokens are too few for tp 1 x ulysses 1",
    "comm --model 7b --seq-len 8192 --ulysses 64": "there are 32. Use one of 32 (ring 2), 16",
    f"{LONG} --ulysses 64": "ulysses=64 needs at least 64 query heads",
    f"{LONG} --ulysses 3 --gpus 4": "--gpus 4 is not a multiple of tp 1 x ulysses 3",
    f"{LONG} --zero 2 --pp 2": "ZeRO-2 does not go with a pipeline (pp=2)",
    f"{LONG} --gpus 9 --dp 2": "no configuration of 9 GPUs has dp 2",
    f"{P128} --tp 4 --ulysses 8": "no configuration of 16 GPUs has tp 4, ulysses 8",
    f"{P128} --order ring-ulysses --ring 1": "without both ulysses and ring there is no order",
    f"{P128} --micro-batch 3": "micro batch 3 does not divide the sequences of a replica",
    f"{P128} --zero 3 --pp 2": "ZeRO-3 does not go with a pipeline, ZeRO-3 has no ranks to share",
    # Settings that trade time for length.
    f"{M} --ulysses 2 --recompute full --mlp-chunks 8192": "tokens: 8192, a rank has 4096",
    f"{M} --recompute attention-only --mlp-chunks 2": "no program has an MLP in chunks",
    f"{M} --checkpoint-layers 2": "not with none: there are 2",
    f"{M} --zero 0 --states-on-host": "for ZeRO-1 to 3, not for ZeRO-0",
    f"{P} --checkpoint-layers 2 --recompute none": "recompute attention or full, not with none",
    f"{P} --mlp-chunks 9000": "has MLP in 9000 chunks: an MLP in more chunks than tokens",
    # What a framework has.
    f"{P} --engine megatron-core --mlp-chunks 2": "megatron-core has no --mlp-chunks",
    f"{P} --engine megatron-lm --fused-loss": "megatron-lm has no --fused-loss",
    f"{P} --emit megatron-lm --states-on-host": "megatron-lm has no --states-on-host",
    f"{P128} --engine megatron-core --zero 3": "megatron-core has no ZeRO-3",
    f"{P128} --engine megatron-core --recompute gemm-last": "has no recompute gemm-last",
    f"{P128} --engine megatron-deepspeed --order ring-ulysses": "has no order ring-ulysses",
    f"{P128} --engine any --emit megatron-core": "what megatron-core can run, not --engine any",
    f"{P128} --fused-activation --emit script": "fuses SwiGLU: leave --fused-activation out",
    f"{P128} --documents 131072 --emit megatron-core": "leave --documents out",
    f"{P128} --zero 0 --emit script": "trainer has no ZeRO-0",
    # Layers that transformers alone runs.
    "plan --model qwen3-next --seq-len 8K --gpus 8 --emit megatron-lm": "not for megatron-lm",
    "memory --model jamba --seq-len 8K --tp 2": "has no tp 2: jamba-mini",
    "memory --model lfm2 --seq-len 8K --recompute gemm-last": "has no recompute gemm-last: lfm2",
    "memory --model lfm2 --seq-len 8K --states-on-host": "has no --usp-states-on-host: lfm2",
    "memory --model jamba --seq-len 8K --mlp-chunks 2": "planned without experts: jamba-mini",
    "plan --model gemma-2-9b --seq-len 64K --gpus 8 --emit megatron-lm": "not for megatron-lm",
    "comm --model lfm2 --seq-len 8K --ring 4 --layout striped": "tokens that are 4 apart",
}
# Searches that have no configuration at all, by a rule that counts what it has refused.
IMPOSSIBLE = {
    f"{P128} --fused-loss --pp 2 --emit ds-config": "no chunked loss in a pipeline (20)",
    f"{P128} --documents 128K --pp 2 --emit ds-config": "no packed documents in a pipeline (20)",
    f"{P128} --pp 2 --emit script": "tp and pp, which the trainer has not (20)",
    "plan --model jamba --seq-len 8K --gpus 8 --tp 2": "layers that transformers runs (10)",
}


@pytest.mark.parametrize(
    ("line", "says", "status"),
    [*((*row, 2) for row in REFUSED.items()), *((*row, 1) for row in IMPOSSIBLE.items())],
)
def test_what_cannot_be_is_refused_in_one_line_with_its_numbers(line, says, status):
    printed = planner_commands.run(line)
    assert says in printed and printed.endswith(f"[exit {status}]")
    assert status == 1 or (printed.startswith("error: ") and printed.count("\n") == 1)


def test_a_search_called_from_python_has_the_same_bounds():
    cluster, model = load_cluster("h800"), load_model("llama3-8b")
    with pytest.raises(ConfigError, match="1,048,576 GPUs are more than the 131,072 that are"):
        search(cluster, Workload(model, 4096), 2**20)
    with pytest.raises(ConfigError, match="65,536 sequences is more than the 32,768"):
        search(cluster, Workload(model, 4096, 2**16), 8)
