"""Clusters, their links, and rows of a profile: read, interpolated, and refused one by one."""

import json
import random
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_usp.errors import ConfigError
from ds_usp.planner.attention_time import attention_s
from ds_usp.planner.formulas import NOTHING, LaunchedWork, stage_elements
from ds_usp.planner.hardware import (
    CLUSTERS,
    ORIGINS,
    Cluster,
    MeasuredAttention,
    MeasuredEmbeddingHead,
    MeasuredExchange,
    MeasuredLayer,
    MeasuredStep,
    interpolate_curve,
    load_cluster,
    seconds_at,
)
from ds_usp.planner.models import load_model
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.step_time import MicroBatch, head_time, layer_time, step_time
from ds_usp.planner.traffic import (
    COLLECTIVE,
    DIRECT,
    RELAY,
    RankGroup,
    domain_traffic,
    exchange_s,
    group_of,
)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_number_says_where_it_is_from(name):
    cluster = load_cluster(name)
    given = {f.name for f in fields(Cluster)} - {"name", "origins", "embedding_heads", *ROWS}
    assert set(cluster.origins) == given
    for origin, source in cluster.origins.values():
        assert origin in ORIGINS and source


SHAPE = {"hidden": 4096, "ffn": 14336, "q_width": 4096, "kv_width": 1024, "gated": True, "tp": 1}

ROWS: dict[str, list[dict[str, float | str]]] = {
    "exchanges": [
        {"collective": "all_gather", "ranks": 4, "sent_bytes": size, "seconds": seconds}
        for size, seconds in ((2**20, 1e-4), (2**26, 1e-3))
    ],
    "layers": [
        {**SHAPE, "tokens": 8192, "forward_s": 0.010, "backward_s": 0.020},
        {**SHAPE, "tokens": 32768, "forward_s": 0.034, "backward_s": 0.068},
    ],
    "calls": [
        {
            "ulysses": 2,
            "ring": 2,
            "seq_len": length,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "forward_s": forward,
            "backward_s": 2.5 * forward,
        }
        for length, forward in ((32768, 0.005), (131072, 0.064))
    ],
    "ends": [{"hidden": 4096, "vocab": 128256, "tp": 1, "tokens": 8192, "seconds": 0.03}],
    "steps": [
        {"elements": 10**9, "zero": 1, "zero_ranks": 4, "seconds": 0.02},
        {"elements": 3 * 10**9, "zero": 1, "zero_ranks": 4, "seconds": 0.05},
    ],
}


def profiled(tmp_path: Path, **more: object) -> Cluster:
    file = tmp_path / "mine.json"
    contention = {"value": 0.2, "origin": "measured", "source": "today"}
    file.write_text(json.dumps({"base": "h200", "contention": contention, **ROWS, **more}))
    return load_cluster(str(file))


def test_a_profile_replaces_what_it_measured(tmp_path):
    cluster = profiled(tmp_path, version=1)
    assert cluster.name == "mine"
    assert (cluster.contention, cluster.origins["contention"]) == (0.2, ("measured", "today"))
    assert cluster.peak_flop_per_s == load_cluster("h200").peak_flop_per_s
    work, config = Workload(load_model("llama3-8b"), 65536), ParallelConfig(ulysses=2, ring=2)
    measured = layer_time(cluster, work, config)
    # 16384 tokens of a rank lie a third of the way between the two rows.
    assert measured.measured and measured.matrices == pytest.approx(0.030 + (0.102 - 0.030) / 3)
    assert measured.elementwise < measured.matrices / 20 and measured.tp == measured.recompute == 0
    again = layer_time(cluster, work, replace(config, recompute="full")).recompute
    forward = attention_s(cluster, work, config, backward=False).total
    assert again == pytest.approx(0.018 + forward)
    assert not layer_time(cluster, work, ParallelConfig(tp=2, ulysses=2)).measured
    assert not layer_time(cluster, Workload(load_model("7b"), 65536), config).measured


@pytest.mark.parametrize(
    ("asked", "seconds"), [(5, 0.5), (10, 1.0), (15, 2.5), (20, 4.0), (30, 3.0), (60, 3.0)]
)
def test_seconds_between_and_beyond_rows(asked, seconds):
    """Also of rows that noise has bent: the last one took less than the one before."""
    rows = [SimpleNamespace(x=x, s=s) for x, s in ((10.0, 1.0), (20.0, 4.0), (30.0, 3.0))]
    interpolated = seconds_at(rows, "x", "s", asked)
    assert interpolated == pytest.approx(seconds)
    assert seconds_at(rows[:1], "x", "s", 30) == 3.0
    assert seconds_at(rows[:2], "x", "s", 30) == 7.0


def test_a_layer_at_another_degree_is_scaled_by_what_is_known(tmp_path):
    """Else a host that is slower than the formulas would look faster wherever it was not run."""
    cluster, plain = profiled(tmp_path), load_cluster("h200")
    work, known, guessed = (
        Workload(load_model("llama3-8b"), 65536),
        ParallelConfig(),
        ParallelConfig(tp=2),
    )
    formula, measured = layer_time(plain, work, known), layer_time(cluster, work, known)
    ratio = measured.matrices / (formula.matrices + formula.elementwise)
    assert ratio != pytest.approx(1, abs=0.05)
    scaled, alone = layer_time(cluster, work, guessed), layer_time(plain, work, guessed)
    assert not scaled.measured
    assert scaled.matrices == pytest.approx(ratio * alone.matrices)
    assert scaled.elementwise == pytest.approx(ratio * alone.elementwise)


def test_measured_calls_correct_the_formula_between_and_beyond_them(tmp_path):
    cluster, model = profiled(tmp_path), load_model("llama3-8b")
    config = ParallelConfig(ulysses=2, ring=2)
    for length, forward in ((32768, 0.005), (131072, 0.064)):
        for backward, seconds in ((False, forward), (True, 2.5 * forward)):
            corrected = attention_s(cluster, Workload(model, length), config, backward=backward)
            assert corrected.total == pytest.approx(seconds)
    interpolate = attention_s(cluster, Workload(model, 65536), config, backward=False).total
    assert 0.005 * 4 * 0.8 < interpolate < 0.064 / 4 * 1.2
    for links in (1, 2):  # nodes too small for the group that was measured: other links
        small = cluster.with_gpus_per_node(links)
        work = Workload(model, 65536)
        corrected = attention_s(small, work, config, backward=False)
        assert corrected == attention_s(replace(small, calls=()), work, config, backward=False)


def test_a_pair_that_was_not_measured_is_no_faster_than_the_nearest_one(tmp_path):
    """Else what was never run, as a group across nodes, would beat all that was."""
    cluster, work = profiled(tmp_path), Workload(load_model("llama3-8b"), 65536)
    (row, *_) = cluster.calls
    assert (row.ulysses, row.ring) == (2, 2)
    slow = {"forward_host_s": 0.5, "backward_host_s": 0.7}
    calls = tuple(replace(each, **slow) for each in cluster.calls)
    one = replace(row, ulysses=1, ring=1, forward_s=1e-6)
    cluster = replace(cluster, calls=(*calls, one))
    plain = replace(cluster, calls=())
    known = ParallelConfig(ulysses=2, ring=2)
    ratio = (
        attention_s(cluster, work, known, backward=False).total
        / attention_s(plain, work, known, backward=False).total
    )
    for guessed in (
        ParallelConfig(ulysses=4),
        ParallelConfig(ring=8),
        ParallelConfig(ulysses=4, ring=4),
    ):
        corrected, formula = (
            attention_s(c, work, guessed, backward=False) for c in (cluster, plain)
        )
        assert corrected.launch_s == 0.5 and formula.launch_s == 0
        assert corrected.total > formula.total and ratio > 1
    # Of one rank the row of one rank, and only its host's time is that of the nearest known one.
    alone = attention_s(cluster, work, ParallelConfig(), backward=False)
    assert alone.total < 1e-3 and alone.launch_s == 0.5


def test_measured_exchanges_serve_groups_of_their_size_inside_a_node(tmp_path):
    cluster, plain = profiled(tmp_path), load_cluster("h200")
    middle, slope = (2**20 + 2**26) / 2, 9e-4 / (2**26 - 2**20)
    for stride in (1, 2):
        predicted = exchange_s(cluster, RankGroup(4, stride), middle, COLLECTIVE)
        assert predicted == pytest.approx((1e-4 + 1e-3) / 2)
    assert exchange_s(cluster, RankGroup(4, 1), 2**27, COLLECTIVE) == pytest.approx(
        1e-3 + slope * 2**26
    )
    # Cut into messages, each of them has its latency.
    twice = exchange_s(cluster, RankGroup(4, 1), 2 * middle, COLLECTIVE, 2)
    assert twice == pytest.approx(2 * (1e-4 + 1e-3) / 2)
    for group, pattern in (
        (RankGroup(4, 4), COLLECTIVE),
        (RankGroup(2, 1), COLLECTIVE),
        (RankGroup(4, 1), RELAY),
    ):
        assert exchange_s(cluster, group, 1e6, pattern) == exchange_s(plain, group, 1e6, pattern)


def test_measured_ends_and_steps(tmp_path):
    cluster, model = profiled(tmp_path), load_model("llama3-8b")
    config = ParallelConfig(ulysses=2, ring=2, zero=1)
    assert head_time(cluster, Workload(model, 65536), config).device_s == pytest.approx(0.06)
    work = Workload(replace(model, layers=8), 65536)
    elements = stage_elements(work, config, 0)
    time = step_time(cluster, work, config)
    assert time.optimizer == pytest.approx(0.02 + (elements - 1e9) / 2e9 * 0.03)
    assert time.gradients == 0
    # Another stage, ranks and degree: the formula, as much slower as it is where it is known.
    plain = replace(cluster, steps=(), embedding_heads=())
    formula = step_time(plain, work, config)
    ratio = time.optimizer / (formula.gradients + formula.optimizer)
    for other in (replace(config, zero=3), ParallelConfig(ulysses=2, zero=1)):
        one = MicroBatch(LaunchedWork(0.4), LaunchedWork(0.6), LaunchedWork(0.1))
        measured, alone = step_time(cluster, work, other, one), step_time(plain, work, other, one)
        assert measured.optimizer == pytest.approx(ratio * alone.optimizer)
        assert measured.gradients == pytest.approx(ratio * alone.gradients)
    tp, alone = replace(config, tp=2), head_time(plain, Workload(model, 65536), config)
    formula = head_time(plain, Workload(model, 65536), tp).device_s
    assert head_time(cluster, Workload(model, 65536), tp).device_s == pytest.approx(
        0.06 / alone.device_s * formula
    )


def launched(jobs: list[tuple[float, float]]) -> float:
    """The wait by playing it: a GPU takes a job when it is launched and the one before is done."""
    host = device = 0.0
    for device_s, host_s in jobs:
        host += host_s
        device = max(device, host) + device_s
    return device - sum(device_s for device_s, _ in jobs)


def test_a_gpu_waits_for_its_host_as_in_a_flow_shop():
    """Sums and multiples of jobs wait as the row of their launches does."""
    draw = random.Random(5)
    waits = 0
    for _ in range(300):
        total, row = NOTHING, list[tuple[float, float]]()
        for _ in range(draw.randint(1, 4)):
            times, launches = draw.randint(0, 4), draw.randint(1, 5)
            job = LaunchedWork(draw.random() * draw.choice((0.1, 1)), draw.random() * 0.5)
            other = LaunchedWork(draw.random(), draw.random())
            total += (job.in_launches(launches) + other) * times
            row += [
                *[(job.device_s / launches, job.launch_s / launches)] * launches,
                (other.device_s, other.launch_s),
            ] * times
        assert total.wait_s == pytest.approx(launched(row), abs=1e-12)
        assert total.device_s == pytest.approx(sum(device for device, _ in row))
        waits += bool(row) and total.wait_s > row[0][1] + 1e-9
    assert waits > 60


def test_a_step_waits_for_the_host_where_all_of_it_is_known(tmp_path):
    cluster, model = profiled(tmp_path), replace(load_model("llama3-8b"), layers=8)
    work, config = Workload(model, 65536), ParallelConfig(ulysses=2, ring=2)
    assert step_time(cluster, work, config).host == 0
    slow = {"forward_host_s": 2.0, "backward_host_s": 3.0}
    calls = tuple(replace(row, **slow) for row in cluster.calls)
    layers = tuple(replace(row, **slow) for row in cluster.layers)
    assert step_time(replace(cluster, calls=calls), work, config).host == 0
    known = replace(cluster, calls=calls, layers=layers)
    layer, time = layer_time(known, work, config), step_time(known, work, config)
    assert (layer.forward.launch_s, layer.backward.launch_s) == pytest.approx((4, 6))
    assert layer.forward.device_s + layer.backward.device_s == pytest.approx(layer.total)
    # All launches, then the GPU's last product: one of four, all but the first behind attention.
    busy = time.layers + time.head
    assert time.host + busy > 8 * 10
    assert time.host + busy < 8 * 10 + layer.backward.device_s
    assert sum(time.components().values()) == pytest.approx(time.total)
    two = step_time(known, replace(work, global_batch=2), config)
    assert two.host + two.layers + two.head > 2 * 8 * 10
    again = layer_time(known, work, replace(config, recompute="full"))
    assert again.backward.launch_s == pytest.approx(10)
    scaled = layer_time(known, work, replace(config, tp=2))
    assert (scaled.forward.launch_s, scaled.backward.launch_s) == pytest.approx((4, 6))
    assert scaled.forward.device_s + scaled.backward.device_s == pytest.approx(scaled.total)
    longer = tuple(replace(r, forward_host_s=r.tokens * 1e-3) for r in known.layers)
    at_length = layer_time(replace(known, layers=longer), work, config).forward.launch_s - 2
    assert min(r.tokens for r in longer) * 1e-3 < at_length < max(r.tokens for r in longer) * 1e-3
    ends = tuple(replace(r, host_s=7.0) for r in known.embedding_heads)
    late = step_time(replace(known, embedding_heads=ends), work, config)
    assert late.host == pytest.approx(time.host + 7, rel=1e-3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"base": "h900"}, "base 'h900' is none of a100"),
        ({"base": "h100", "speed": 1}, "unknown speed"),
        ({"peak_flop_per_s": 1e12}, "missing attention_efficiency"),
        (
            {"base": "h100", "peak_flop_per_s": 0},
            "peak_flop_per_s=0 must be a finite number above 0",
        ),
        ({"base": "h100", "gpus_per_node": 4}, "last of its levels must be the node of 4"),
        ({"base": "h100", "contention": {"value": 1, "origin": "guessed"}}, "origin 'guessed'"),
        ({"base": "h100", "contention": -1}, "contention=-1 must be a number between 0 and 1"),
        (
            {"base": "h100", "host_bytes_per_s": -1},
            "host_bytes_per_s=-1 must be a finite number, 0 or more",
        ),
        (
            {"base": "h100", "memory_bytes": float("nan")},
            "memory_bytes=nan must be a finite number above 0",
        ),
        ({"base": "h100", "attention_efficiency": []}, "attention_efficiency needs points"),
        ({"base": "h100", "gemm_efficiency": [[9, 0.5], [2, 0.4]]}, "with sizes that ascend"),
        ({"base": "h100", "gemm_efficiency": [[256, 70]]}, "has 70: a share of the peak lies"),
        ({"base": "h100", "layers": [{"tokens": 1}]}, "missing"),
        ({"base": "h100", "version": 2}, "is of version 2, this planner reads version 1"),
        ({"base": "h100", "steps": [{**ROWS["steps"][0], "seconds": 0}]}, "seconds=0 must be"),
        (
            {"base": "h100", "levels": [["node", 8, 0, 1, 1]]},
            "level node: port_bytes_per_s=0 must be",
        ),
        ([], "must be an object"),
        ({"base": ["h100"]}, r"base \['h100'\] is none of a100"),
        ({"base": "h100", "host_bytes_per_s": 0}, "host_bytes_per_s=0 copies nothing"),
        ({"base": "h100", "memory_bytes": 10**400}, "memory_bytes=10+ must be at most 1e.30"),
        ({"base": "h100", "workspace_bytes": [1]}, r"workspace_bytes=\[1\] must be a finite"),
        ({"base": "h100", "workspace_bytes": float("nan")}, "workspace_bytes=nan must be a finite"),
        ({"base": "h100", "gpus_per_node": 10**9}, "gpus_per_node=1000000000 must be at most 131,"),
    ],
)
def test_profiles_that_are_none(tmp_path, content, says):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        load_cluster(str(file))


def test_clusters_that_do_not_exist(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    for given, says in (
        ("b9000", "no cluster 'b9000'; there are a100"),
        (str(tmp_path / "none.json"), "cannot read"),
        (str(tmp_path / "broken.json"), "is not JSON"),
    ):
        with pytest.raises(ConfigError, match=says):
            load_cluster(given)


def test_smaller_nodes_have_fewer_nics():
    eight, four = load_cluster("h100"), load_cluster("h100").with_gpus_per_node(4)
    assert (four.gpus_per_node, four.nics) == (4, 4)
    assert four.nic_bytes_per_s == eight.nic_bytes_per_s
    assert load_cluster("l20").with_gpus_per_node(2).node.gpus == 2
    with pytest.raises(ConfigError, match="must be 1 or more"):
        eight.with_gpus_per_node(0)


def test_curves_are_linear_in_the_logarithm():
    curve = ((1024.0, 0.2), (4096.0, 0.6))
    assert [interpolate_curve(curve, size) for size in (1, 1024, 4096, 1e9)] == [0.2, 0.2, 0.6, 0.6]
    assert interpolate_curve(curve, 2048) == pytest.approx(0.4)


def test_groups_lie_in_the_order_of_the_ranks():
    config = ParallelConfig(tp=2, ulysses=4, ring=3, dp=5, pp=7)
    groups = {axis: group_of(config, axis) for axis in ("ulysses", "ring", "zero", "dp", "pp")}
    assert groups["ulysses"] == RankGroup(4, 2) and groups["ring"] == RankGroup(3, 8)
    assert groups["zero"] == RankGroup(60, 2) and groups["dp"] == RankGroup(5, 24)
    assert groups["pp"] == RankGroup(7, 120)
    turned = ParallelConfig(tp=2, ulysses=4, ring=3, order="ring-ulysses")
    assert group_of(turned, "ring") == RankGroup(3, 2)
    assert group_of(turned, "ulysses") == RankGroup(4, 6)


def test_what_leaves_a_domain():
    # Two groups of 8 ranks, all in one node of 8 each.
    assert domain_traffic(RankGroup(8, 1), 8, DIRECT).inside
    # 16 in a row: each rank sends 8/15 to the other node, a relay leaves it once.
    assert domain_traffic(RankGroup(16, 1), 8, DIRECT).domain == pytest.approx(8 * 8 / 15)
    assert domain_traffic(RankGroup(16, 1), 8, RELAY).domain == 1
    # Pairs across nodes: everything leaves.
    assert domain_traffic(RankGroup(2, 8), 8, RELAY).domain == 8
    assert domain_traffic(RankGroup(2, 8), 8, DIRECT).busiest == 1
    # Rings of 4 with a stride of 2, seen by pairs of GPUs: both leave each pair.
    assert domain_traffic(RankGroup(4, 2), 2, RELAY).domain == 2


@pytest.mark.parametrize(
    ("size", "stride", "uneven"),
    [(16, 2, False), (12, 2, False), (6, 2, True), (7, 2, True), (7, 4, True), (10, 4, False)],
)
def test_groups_that_straddle_nodes_get_one_nic(size, stride, uneven):
    cluster, group = load_cluster("h800"), RankGroup(size, stride)
    assert domain_traffic(group, cluster.gpus_per_node, COLLECTIVE).even is not uneven
    nics = 1 if uneven else 8 // stride
    rate = 1e9 / exchange_s(cluster, group, 1e9, COLLECTIVE, 0)
    assert rate == pytest.approx(nics * 12.5e9)


def test_nothing_is_sent_for_nothing():
    cluster = load_cluster("a100")
    assert exchange_s(cluster, RankGroup(1, 1), 1e9, DIRECT) == 0
    assert exchange_s(cluster, RankGroup(8, 1), 0, DIRECT) == 0
    assert exchange_s(cluster, RankGroup(8, 1), 1.0, DIRECT) >= 25e-6
    assert exchange_s(cluster, RankGroup(2, 8), 1.0, DIRECT) >= 30e-6


# ------------------------------------------------------------------ rows of a profile
# Those that the planner cannot draw a line through are refused, one by one.


KINDS = {
    "layers": MeasuredLayer(64, 128, 64, 32, True, 1, 48, 0.1, 0.2, 0.01, 0.02),
    "calls": MeasuredAttention(2, 1, 96, 4, 2, 16, 0.1, 0.2),
    "ends": MeasuredEmbeddingHead(64, 100, 1, 48, 0.1),
    "steps": MeasuredStep(1000, 0, 4, 0.1),
    "exchanges": MeasuredExchange("all_to_all", 2, 1024, 0.1),
}


def loaded(folder: Path, kind: str, *rows: dict[str, object]) -> Cluster:
    file = folder / "mine.json"
    file.write_text(json.dumps({"base": "h200", kind: rows}))
    return load_cluster(str(file))


@pytest.mark.parametrize("kind", KINDS)
def test_a_thing_is_measured_once(tmp_path, kind):
    """Two times of one size have no line through them, nor has the planner a reason to choose."""
    row = vars(KINDS[kind])
    seconds = "seconds" if "seconds" in row else "forward_s"
    for name in row:
        if not name.endswith(("_s", "seconds")):  # another thing, then
            other = {"gated": False, "zero": 1, "collective": "p2p"}.get(name, 3)
            assert loaded(tmp_path, kind, row, {**row, name: other}).name == "mine"
    with pytest.raises(ConfigError, match=f"{kind}: two rows of .*: leave one of them out"):
        loaded(tmp_path, kind, row, {**row, seconds: 0.3})


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_rows(tmp_path, kind):
    row = vars(KINDS[kind])
    not_a_number = (float("nan"), True, "4", None)
    wrong: dict[str, tuple[object, ...]] = {
        "Count": (1.5, 0, -1, *not_a_number),
        "ZeroStage": (1.5, 4, -1, *not_a_number),
        "Positive": (0, -0.1, float("inf"), *not_a_number),
        "LaunchSeconds": (-0.1, float("inf"), *not_a_number),
        "bool": (1, "yes"),
        "Collective": ("all_to_some", 3),
    }
    for field in fields(KINDS[kind]):
        for value in wrong[str(field.type)]:
            with pytest.raises(ConfigError, match=f"{kind}: {field.name}=.* must be "):
                loaded(tmp_path, kind, {**row, field.name: value})


def test_what_may_be_zero(tmp_path):
    layer = vars(KINDS["layers"])
    assert loaded(tmp_path, "layers", {**layer, "forward_host_s": 0}).layers[0].forward_host_s == 0
    with pytest.raises(ConfigError, match=r"forward_host_s=-1 must be .* above 0, or 0: not known"):
        loaded(tmp_path, "layers", {**layer, "forward_host_s": -1})
    step = vars(KINDS["steps"])
    assert loaded(tmp_path, "steps", {**step, "zero": 0}).steps[0].zero == 0
    with pytest.raises(ConfigError, match="zero=4 must be 0, 1, 2 or 3"):
        loaded(tmp_path, "steps", {**step, "zero": 4})
