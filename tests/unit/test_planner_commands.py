"""The commands: what they print and emit, and how they refuse."""

import json
import os
import random
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, replace
from itertools import pairwise, product
from pathlib import Path

import planner_commands
import pytest
from programs import python

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.planner import ParallelConfig, Workload, load_model
from ds_usp.planner.__main__ import main
from ds_usp.planner.answer import answer, answer_text
from ds_usp.planner.degree_rule import RULE, rule_degrees
from ds_usp.planner.emit import emit, megatron_deepspeed, megatron_lm
from ds_usp.planner.hardware import load_cluster
from ds_usp.planner.memory import with_offload
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ENGINES, framework_caps
from ds_usp.planner.search import (
    STATED_ERROR,
    WITHIN_ERROR,
    SearchResult,
    preference,
    search,
)
from ds_usp.planner.step_time import StepTime, step_mfu, step_time

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
    best = report["recommended"]
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
from ds_usp.planner.__main__ import main
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
    return search(load_cluster("h200"), work, 4, framework_caps("trainer"), fixed={"dp": 1})


@pytest.mark.parametrize("part", [field.name for field in fields(StepTime)])
def test_whatever_a_plan_loses_with_has_a_name(result, part):
    """The layers' time is reported by component, so where it alone is more, one of these is."""
    best = result.plans[0]
    more = getattr(best.time, part) + 1e3
    slow = best.config.replace(zero=best.config.zero % 3 + 1)
    time = replace(best.time, **{part: more})
    other = replace(best, config=slow, mfu=best.mfu / 2, time=time)
    of_one = replace(result, plans=[best], best_with={("sharding", "other"): other}, over_memory=[])
    line = answer(of_one).why[-1]
    assert ": 1000.00 s more for " in line or (part == "layers" and " s more for " in line)


def requests(count: int) -> Iterator[SearchResult]:
    """Searches of random models, lengths, batches, GPUs and programs."""
    draw = random.Random(63)
    models = ["llama3.1-8b", "qwen3-8b", "qwen2.5-7b", "qwen3-30b-a3b", "gemma-2-9b", "gpt-1.3b"]
    for _ in range(count):
        model, gpus = load_model(draw.choice(models)), draw.choice([1, 2, 4, 8])
        length, batch = 1024 * 2 ** draw.randrange(2, 10), draw.choice([1, 1, 2])
        cluster, work = draw.choice(["h100", "h200", "a100"]), Workload(model, length, batch)
        engines = ENGINES[:4] if work.model.is_plain and gpus <= 2 else ENGINES[:1]
        yield search(load_cluster(cluster), work, gpus, framework_caps(draw.choice(engines)))


def test_two_hundred_random_requests_have_one_answer():
    """The plan is within the error of the fastest, or there is none; it has the rule's degrees, or
    the reason says why not; it is the one that is marked and written; counts add up to the number
    considered, whatever is listed."""
    ruled = shared = 0
    for found in requests(200):
        told = answer(found)
        if not found.plans:
            assert told.plan is None and not told.lines and told.why
            continue
        plan, config = found.plans[0], found.plans[0].config
        assert told.plan is plan and plan.mfu >= found.fastest.mfu * (1 - STATED_ERROR)
        assert found.outcomes[WITHIN_ERROR] == len(found.plans)
        rule = rule_degrees(
            config.sp, found.work.model.kv_heads, found.cluster.gpus_per_node, config.tp
        )
        shared += config.sp > 1
        ruled += config.sp > 1 and config.split == rule
        named = f"Ulysses {rule[0]} x ring {rule[1]}, which the rule takes"
        assert (config.sp == 1 or config.split == rule) != told.why[0].startswith(named)
        written = f"no lines of {found.framework.name}"
        with suppress(ConfigError):
            written = emit(found.framework.name, found.work, config)
        assert told.lines.startswith(written)
        for top in (0, 1, 7):
            text = "\n".join(map(str, answer_text(told, top, False)))
            counts = re.search(r"\n([\d,]+) configurations considered: ((?:.|\n(?!\n))+)", text)
            each = re.findall(r"(?:^|,\s)([\d,]+)\s(?=[a-zA-Z])", counts[2])
            numbers = [int(number.replace(",", "")) for number in (counts[1], *each)]
            assert numbers[0] == sum(numbers[1:]) == found.considered
            assert text.count(f"take    {config}\n") == 1
            rows = [row.split() for row in text.splitlines() if "%" in row and row.endswith("*")]
            assert len(rows) == min(top, 1) and all(row[0] == str(config.ulysses) for row in rows)
    assert ruled > 0.8 * shared > 60


@pytest.mark.parametrize("tokens", [8192, 65536])
def test_every_configuration_is_counted_once(tokens):
    """By trying all of them."""
    work, cluster = Workload(MODEL, tokens, 2), load_cluster("h100").with_gpus_per_node(4)
    caps = framework_caps("transformers")
    found = search(cluster, work, 4, caps)
    base = ParallelConfig(eager_norms=True, tp_sequence=False, unsharded_grad_reduce=True)
    base = base.replace(overlap_gradients=True)
    fitting, tried = [], 0
    for ulysses, ring, dp in product((1, 2, 4), repeat=3):
        if ulysses * ring * dp != 4 or dp > 2:
            tried += ulysses * ring * dp == 4
            continue
        for zero, mode, micro in product((1, 2, 3, "fsdp2"), caps.recompute, divisors(2 // dp)):
            tried += 1
            config = base.replace(ulysses=ulysses, ring=ring, dp=dp, recompute=mode)
            config = config.replace(zero=3 if zero == "fsdp2" else zero, micro_batch=micro)
            config = config.replace(fsdp2=zero == "fsdp2", offload_unit="layer")
            for chunked in (config, config.replace(fused_loss=True)):
                offloaded, fits = with_offload(
                    work, chunked, cluster.budget_bytes, cluster.workspace_bytes
                )
                if fits:
                    seconds = step_time(cluster, work, offloaded).total
                    fitting.append(step_mfu(cluster, work, offloaded, seconds))
                    if chunked is config and not offloaded.offload_ratio:
                        break
    assert tried == found.considered
    assert found.fastest.mfu == pytest.approx(max(fitting))


def test_readme_page_and_the_planners_reason_have_one_rule(capsys):
    """Its words, the page's examples, and the command that both show: all from `rule_degrees`."""
    pages = {name: (ROOT / name).read_text() for name in ("README.md", "docs/which-degrees.md")}
    for page in pages.values():
        assert "; ".join(RULE) in " ".join(page.split())
        (command,) = re.findall(r"^ds-usp (plan .*)$", page, re.MULTILINE)
        plan_json = json.loads(run(capsys, f"{command} --json"))
        taken = plan_json["recommended"]["ulysses"], plan_json["recommended"]["ring"]
        assert taken == rule_degrees(16, 8, 8) == (8, 2)
        numbers = "16 GPUs a sequence, 8 KV heads, 8 GPUs a node"
        assert plan_json["why"][0] == f"{RULE[1]}, {RULE[2]} ({numbers})"
    facts, numbers = r"\| ([^|,]+)(?:, (\d+) heads)?(?:, (\d+) (?:KV )?heads)? ", r"(\d+), (\d+)"
    row = f"{facts}\\| {numbers} \\| {numbers.replace(',', ' x')} \\|"
    rows = re.findall(row, pages["docs/which-degrees.md"])
    assert len(rows) == 6
    model = MODEL
    for name, heads, kv_heads, *degrees in rows:
        model = model if name == "the same" else load_model(name.lower().replace(" ", "-"))
        given = [int(number) for number in (heads, kv_heads) if number]
        assert not given or {*given} == {model.heads, model.kv_heads}
        ranks, node, *split = map(int, degrees)
        assert rule_degrees(ranks, model.kv_heads, node) == tuple(split)
        cluster = load_cluster("h200").with_gpus_per_node(node)
        why = answer(search(cluster, Workload(model, 131072), ranks)).why[0]
        numbers = f"{ranks} GPUs a sequence, {model.kv_heads} KV heads, {node} GPUs a node"
        named = "Ulysses {} x ring {}, which the rule takes".format(*split)
        assert f"({numbers})" in why and why.startswith((RULE[1], named))


def test_where_nothing_is_faster_the_rule_and_the_fewest_settings_are_taken():
    best = search(load_cluster("h200"), Workload(MODEL, 131072), 8).plans[0]
    cluster = load_cluster("h200")

    def taken(*configs: ParallelConfig) -> ParallelConfig:
        plans = [replace(best, config=config) for config in configs]
        return min(plans, key=lambda plan: preference(cluster, MODEL, plan)).config

    plain = ParallelConfig(ulysses=8, zero=1)
    worse = [
        {"recompute": "full"},
        {"offload_ratio": 0.3},
        {"states_on_host": True},
        {"zero": 3},
        {"pp": 2, "ulysses": 4},
        {"ulysses": 4, "ring": 2},
        {"recompute": "attention"},
        {"fused_loss": True},
    ]
    for one, two in pairwise([{}, *reversed(worse)]):
        assert taken(plain.replace(**two), plain.replace(**one)) == plain.replace(**one)
    more, less = (plain.replace(offload_ratio=ratio) for ratio in (0.97, 0.53))
    assert taken(more, less) == less
    small = ModelShape("four KV heads", 32, 4096, 14336, 32, 4, 128256)
    plans = [replace(best, config=plain.replace(ulysses=u, ring=8 // u)) for u in (8, 4, 2, 1)]
    first = min(plans, key=lambda plan: preference(cluster, small, plan)).config
    assert first.split == rule_degrees(8, 4, 8) == (4, 2)


def test_the_loss_is_in_chunks_where_its_logits_do_not_fit():
    work = Workload(MODEL, 131072)
    for how in ("trainer", "megatron-deepspeed"):
        # With the keys and values of two ring ranks beside them.
        best = search(load_cluster("h100"), work, 8, framework_caps(how), fixed={"ring": 2})
        config = best.plans[0].config
        assert config.fused_loss and not config.offload_ratio
        unchunked = search(load_cluster("h200"), Workload(MODEL, 32768), 8, framework_caps(how))
        assert not unchunked.plans[0].config.fused_loss
    run = ParallelConfig()
    for how, alone in (
        ("megatron-deepspeed", True),
        ("transformers", True),
        ("megatron-lm", False),
    ):
        can = framework_caps(how).can_chunk_loss
        assert can(run) == alone and not can(run.replace(pp=2))
        assert not can(run.replace(fused_loss=True))
    for how in ("megatron-deepspeed", "megatron-lm"):
        plans = search(load_cluster("h100"), work, 16, framework_caps(how)).plans
        chunked = [plan.config for plan in plans if plan.config.fused_loss]
        assert all(config.pp == 1 for config in chunked) and (how[-2:] != "lm" or not chunked)


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
        args, _ = parser.parse_known_args(words(megatron_deepspeed(work, config)))
        assert (args.ulysses_degree, args.usp_layout) == (2, "zigzag")
        assert (args.usp_recompute, args.usp_offload_ratio) == ("attention", 0.25)
        assert args.usp_loss_chunks == 16  # of 16K tokens of a rank, 1K each


def test_degrees_of_a_patched_megatron_lm_and_llamas_scaling():
    """Golden files have those of several ranks."""
    work, config = Workload(load_model("llama3-8b"), 131072), ParallelConfig(tp_sequence=False)
    assert "--ulysses-degree" not in words(megatron_lm(work, config))
    scaled = words(megatron_lm(Workload(load_model("llama3.1-8b"), 131072), config))
    added = ["--use-rope-scaling", "--rope-scaling-factor"]
    assert [word for word in scaled if word not in words(megatron_lm(work, config))] == added
    assert scaled[scaled.index(added[1]) + 1] == "8"
    other = replace(load_model("llama3.1-8b"), other_facts=('rope_scaling {"factor": 8.0}',))
    with pytest.raises(ConfigError, match="has no flag for rope_scaling"):
        megatron_lm(Workload(other, 131072), config)


def test_settings_that_the_program_lacks_are_said_in_place_of_its_lines():
    base = ParallelConfig(fused_loss=True)
    found = search(
        load_cluster("h200"), Workload(MODEL, 32768), 8, framework_caps("megatron-lm"), base=base
    )
    assert answer(found).lines.startswith(
        "no lines of megatron-lm: megatron-lm has no --fused-loss"
    )


@pytest.mark.parametrize("engine", ["megatron-deepspeed", "transformers"])
def test_zero_0_is_not_emitted(engine):
    with pytest.raises(ConfigError, match="sums gradients of bf16 weights in bf16"):
        emit(engine, Workload(load_model("llama3-8b"), 8192), ParallelConfig(zero=0))
    assert 0 not in framework_caps("megatron-deepspeed").zero


FACTS = {
    "trainer": ("qkv_bias", "qk_norm", "head_dim", "rope_theta", "other_facts"),
    "megatron-deepspeed": ("qkv_bias", "qk_norm", "rope_theta", "other_facts"),
    "megatron-lm": ("rope_theta", "other_facts"),
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


def test_the_lines_alone(capsys):
    """What a shell keeps is what the answer ends with, and JSON has."""
    line = f"{H200} --engine megatron-deepspeed"
    whole, alone = run(capsys, line), run(capsys, f"{line} --lines")
    assert whole.endswith(alone) and alone.startswith("cat > ds_config.json")
    assert json.loads(run(capsys, f"{line} --json"))["lines"] == alone.rstrip("\n")


# ------------------------------------------------------------------ refusals


P = "plan --model llama3-8b --seq-len 8K --gpus 8"
P128 = "plan --model llama3-8b --seq-len 128K --gpus 16"
M, LONG = "memory --model 7b --seq-len 8K", "max-length --model gpt-6.7b"
# A command, and the number or the name by which it says what is wrong with it.
REFUSED = {
    "plan --model none --seq-len 8 --gpus 8": "no model 'none'; there are llama-7b, ",
    "memory --model ./none --seq-len 128K": "there is no folder ./none with a config.json",
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
    f"{P} --emit transformers": "unknown argument --emit. See ",
    f"{P} --top -1": "--top -1 must be a whole number of 0 or more",
    # What would take hours.
    "plan --model 7b --seq-len 8K --gpus 1000000000": "--gpus 1000000000 must be at most 131,072",
    f"{P} --global-batch 999999999": "must be at most 32,768",
    f"{M} --dp 131072 --tp 8": "1,048,576 GPUs are more than the 131,072",
    # Degrees, stages and the batch.
    f"{M} --gpus 6 --tp 4": "--gpus 6 is not a multiple of tp 4",
    f"{M} --tp 3": "tp=3 must divide the 32 query heads",
    f"{M} --tp 16 --ulysses 4": "ulysses=4 needs at least 4 query heads on each tensor-parallel",
    f"{M} --pp 3": "32 layers cannot be divided into pp=3 stages",
    f"{M} --pp 2 --layers-per-virtual-stage 3": "16 layers of a stage (32 / pp 2) cannot be",
    f"{M} --layers-per-virtual-stage 2": "virtual stages need a pipeline: pp is 1",
    f"{M} --pp 2 --layers-per-virtual-stage 1 --schedule deepspeed": "has no virtual stages",
    f"{M} --pp 2 --dp 4 --layers-per-virtual-stage 1 --global-batch 4": "multiples of pp=2",
    f"{M} --pp 2 --zero 2": "ZeRO-2 does not go with a pipeline, here of 2 stages",
    f"{M} --dp 3 --global-batch 4": "a global batch of 4 does not divide among dp 3",
    f"{M} --ring 4 --dp 1 --gpus 8": "= 4 ranks, and --gpus is 8",
    "memory --model 7b --seq-len 512 --ring 1024": "of 512 tokens is too short for tp 1",
    f"{M} --ulysses 64": "there are 32. Use one of 32 (ring 2), 16",
    f"{LONG} --ulysses 64": "ulysses=64 needs at least 64 query heads",
    f"{LONG} --ulysses 3 --gpus 4": "--gpus 4 is not a multiple of tp 1 x ulysses 3",
    f"{LONG} --zero 2 --pp 2 --engine megatron-deepspeed": "with a pipeline, here of 2 stages",
    f"{LONG} --gpus 9 --dp 2": "no configuration of 9 GPUs has dp 2",
    f"{P128} --engine megatron-lm --tp 4 --ulysses 8": "16 GPUs has tp 4, ulysses 8",
    f"{P128} --micro-batch 3": "micro batch 3 does not divide the sequences of a replica",
    f"{P128} --zero 3 --pp 2 --engine megatron-deepspeed": "ZeRO-3 does not go with a pipeline, ",
    # Settings that trade time for length.
    f"{M} --ulysses 2 --recompute full --mlp-chunks 8192": "tokens: 8192, a rank has 4096",
    f"{M} --recompute attention-only --mlp-chunks 2": "no program has an MLP in chunks",
    f"{M} --checkpoint-layers 2": "not with none: there are 2",
    f"{M} --zero 0 --states-on-host": "for ZeRO-1 to 3, not for ZeRO-0",
    f"{P} --engine trainer --checkpoint-layers 2 --recompute none": "or full, not with none",
    f"{P} --mlp-chunks 9000": "has MLP in 9000 chunks: an MLP in more chunks than tokens",
    # What a program has.
    f"{P} --engine megatron-lm --fused-loss": "megatron-lm has no --fused-loss",
    f"{P} --engine megatron-lm --states-on-host": "megatron-lm has no --states-on-host",
    f"{P} --engine trainer --bf16-states": "trainer has no --fsdp2",
    f"{P} --checkpoint-layers 2": "transformers has no --checkpoint-layers",
    f"{P128} --tp 2": "has no --tp: leave it out, or take --engine megatron-lm",
    f"{P128} --engine megatron-lm --zero 3": "megatron-lm has no ZeRO-3",
    f"{P128} --engine megatron-lm --recompute gemm-last": "has no recompute gemm-last",
    f"{P128} --zero 0 --engine trainer": "trainer has no ZeRO-0",
    f"{P128} --engine diffusers": "llama3-8b is a model of text",
    "plan --model black-forest-labs/FLUX.1-dev --seq-len 8K --gpus 4": "add --engine diffusers",
    "plan --model 7b --gpus 8": "--seq-len is missing",
    "plan --model sd --gpus 2 --engine diffusers": "no diffusion transformer 'sd'",
    f"{LONG} --tp 2": "transformers has no --tp: leave it out, or take",
    f"{LONG} --states-on-host": "transformers has no --states-on-host",
    # Layers that transformers alone runs.
    "plan --model qwen3-next --seq-len 8K --gpus 8 --engine megatron-lm": "not for megatron-lm",
    "memory --model jamba --seq-len 8K --tp 2": "has no tp 2: jamba-mini",
    "memory --model lfm2 --seq-len 8K --recompute gemm-last": "has no recompute gemm-last: lfm2",
    "memory --model lfm2 --seq-len 8K --states-on-host": "has no --usp-states-on-host: lfm2",
    "memory --model jamba --seq-len 8K --mlp-chunks 2": "planned without experts: jamba-mini",
}
# Searches that have no configuration at all, by a rule that counts what it has refused.
DEEP = f"{P128} --engine megatron-deepspeed --pp 2"
IMPOSSIBLE = {
    f"{DEEP} --fused-loss": "no chunked loss in a pipeline (20)",
    f"{DEEP} --documents 128K": "no packed documents in a pipeline (20)",
}


@pytest.mark.parametrize(
    ("line", "says", "status"),
    [*((*row, 2) for row in REFUSED.items()), *((*row, 1) for row in IMPOSSIBLE.items())],
)
def test_what_cannot_be_is_refused_in_one_line_with_its_numbers(line, says, status):
    printed = planner_commands.run(line)
    assert says in printed and printed.endswith(f"[exit {status}]")
    assert status == 1 or (printed.startswith("error: ") and printed.count("\n") == 1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("max-length --model llama3-8b --gpus 1 --cluster h200", "a sequence on 1 GPU, Ulysses"),
        ("plan --model llama3.2-1b --seq-len 8K --gpus 1 --cluster h200", "# 1 process of"),
        ("plan --model flux.1-dev --engine diffusers --gpus 1", "(1 GPU, 24 heads, 1 GPU a node)"),
        (f"{P} --gpus 2 --gpus-per-node 1", "(2 GPUs a sequence, 8 KV heads, 1 GPU a node)"),
        ("plan --model 7b --seq-len 8K --gpus 1 --dp 2", "no configuration of 1 GPU has dp 2"),
        ("memory --model 7b --seq-len 1 --ring 2", "a sequence of 1 token is too short"),
    ],
)
def test_one_of_a_thing_is_named_in_the_singular(line, says):
    printed = planner_commands.run(line)
    assert says in " ".join(printed.split())
    assert not re.search(r"(?<![\d.,])1 (GPU|process|token|layer|head|configuration)e?s\b", printed)


def test_a_search_called_from_python_has_the_same_bounds():
    cluster, model = load_cluster("h800"), load_model("llama3-8b")
    with pytest.raises(ConfigError, match="1,048,576 GPUs are more than the 131,072 that are"):
        search(cluster, Workload(model, 4096), 2**20)
    with pytest.raises(ConfigError, match="65,536 sequences is more than the 32,768"):
        search(cluster, Workload(model, 4096, 2**16), 8)
