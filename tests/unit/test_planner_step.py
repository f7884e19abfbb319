"""What a step communicates and what of it is exposed: the model, and measured steps beside it."""

import csv
from pathlib import Path

import pytest

from ds_usp.planner import Cluster, ModelShape, ParallelConfig, Workload, load_cluster, load_model
from ds_usp.planner.attention_time import simulated_pass
from ds_usp.planner.formulas import (
    LEAST_BUCKET_ELEMENTS,
    bucket_elements,
    full_buckets,
    in_buckets,
    stage_elements,
    under,
)
from ds_usp.planner.step_time import (
    data_parallel_time,
    layer_time,
    step_time,
    tensor_parallel_time,
)
from ds_usp.planner.traffic import layer_traffic, step_traffic

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results"
PAGE = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
DEEPSPEED = {"overlap_gradients": True, "unsharded_grad_reduce": True, "tp_sequence": False}


def measured_rows(name: str) -> list[dict[str, str]]:
    lines = (RESULTS / name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def two_gpus() -> Cluster:
    return load_cluster("h200").with_gpus_per_node(2)


@pytest.mark.parametrize(
    ("buckets", "exposed"),
    [
        ([], 0.0),
        ([(10.0, 3.0)], 3.0),  # the last one is full when nothing is left to compute
        ([(2.0, 3.0), (6.0, 3.0)], 0.0),
        ([(2.0, 3.0), (9.0, 3.0)], 2.0),
        ([(2.0, 5.0), (4.0, 2.0)], 3.0),  # the second waits for the first, and so does backward
        ([(2.0, 5.0), (4.0, 2.0), (10.0, 1.0)], 4.0),
    ],
)
def test_what_buckets_hide(buckets, exposed):
    cluster = load_cluster("h200")
    time = in_buckets(cluster, buckets, 10.0)
    assert time.seconds == sum(seconds for _, seconds in buckets)
    assert time.exposed == exposed
    assert time.slower == pytest.approx(cluster.contention * (time.seconds - exposed))
    one = under(cluster, 4.0, 3.0)
    assert (one.exposed, one.slower) == (1.0, pytest.approx(3.0 * cluster.contention))


@pytest.mark.parametrize("name", ["llama3-8b", "gpt-1.3b"])
@pytest.mark.parametrize("tp", [1, 4])
def test_buckets_hold_every_matrix_once_and_none_is_cut(name, tp):
    model = load_model(name)
    elements = bucket_elements(model, tp, 1)
    filled = full_buckets(model, tp, model.layers, elements)
    tables = (1 if model.tied else 2) * model.padded_vocab(tp) * model.hidden
    every = (model.layers * model.matrix_elements + tables) / tp
    assert sum(size for _, size in filled) == pytest.approx(every)
    whole = stage_elements(Workload(model, 1024), ParallelConfig(tp=tp), 0)
    assert every == pytest.approx(whole, rel=0.01)
    parts = [part for part, _ in filled]
    assert parts == sorted(parts) and parts[-1] == 1.0
    table = model.padded_vocab(tp) * model.hidden / tp
    assert all(size <= max(elements, table) for _, size in filled)
    assert bucket_elements(model, tp, 2) == max(elements, table)
    assert bucket_elements(model, tp, 3) == LEAST_BUCKET_ELEMENTS  # it is there all the time


def test_the_forecast_beside_reported_steps():
    """8 layers of hidden 4096 on 2 H200; as docs/planner.md has them."""
    model, cluster = ModelShape("8 layers", 8, 4096, 10880, 32, 32, 257), two_gpus()
    work = Workload(model, 32768)
    for zero in (1, 2):
        rows = measured_rows(f"communication_zero{zero}.csv")
        config = ParallelConfig(ulysses=2, zero=zero, **DEEPSPEED)  # type: ignore[arg-type]
        time, sent = step_time(cluster, work, config), step_traffic(work, config)
        reduction, gather = data_parallel_time(cluster, work, config, time.layers)
        passes = (simulated_pass(cluster, work, config, backward=way) for way in (False, True))
        exposed_s = sum(timeline.exposed["all_to_all"] for timeline, _ in passes)
        for kind, sent_bytes, forecast in (
            ("all-to-all", 8 * 2 * layer_traffic(work, config).ulysses, 8 * exposed_s),
            ("gradient reduction", sent.gradients, reduction.exposed),
            ("parameter gather", sent.parameters, gather.exposed),
        ):
            of_kind = [row for row in rows if row["kind"] == kind]
            counted = [int(row["sent_bytes"]) for row in of_kind]
            assert counted == pytest.approx([sent_bytes] * len(counted), rel=1e-3)
            measured = ", ".join(f"{float(row['exposed_ms']):.1f}" for row in of_kind)
            text = f"| {zero} | {kind} | {measured} | {1e3 * forecast:.1f} |"
            assert text in PAGE, f"docs/planner.md lacks: {text}"
        steps = [f"{float(row['busy_ms'] or 0):.0f}" for row in rows if row["kind"] == "step"]
        text = f"| {zero} | step | {', '.join(steps)} | {1e3 * time.total:.0f} |"
        assert text in PAGE, f"docs/planner.md lacks: {text}"


def test_the_forecast_beside_layers_with_sharded_tokens():
    """With all-reduces and with sharded tokens, on 2 H200."""
    rows = measured_rows("tp_overlap.csv")
    for hidden, tokens, ffn in (
        (4096, 12288, 10880), (4096, 4096, 10880), (2048, 12288, 5440), (2048, 4096, 5440),
    ):  # fmt: skip
        sizes = str(hidden), str(tokens), "layer"
        ms = {
            r["method"]: float(r["ms"])
            for r in rows
            if (r["hidden"], r["tokens"], r["what"]) == sizes
        }
        heads = hidden // 128
        work = Workload(ModelShape("layer", 4, hidden, ffn, heads, heads, 32000), tokens)
        reduced, sharded = (
            1e3 * layer_time(two_gpus(), work, ParallelConfig(tp=2, tp_sequence=x)).total
            for x in (False, True)
        )
        text = (
            f"| {hidden}, {tokens} | {ms['all-reduce']:.1f}, {reduced:.1f} | {ms['plain']:.1f}, "
            f"{sharded:.1f} | {100 * ms['plain'] / ms['all-reduce'] - 100:+.0f} %, "
            f"{100 * sharded / reduced - 100:+.0f} % |"
        )
        assert text in PAGE, f"docs/planner.md lacks: {text}"
    assert tensor_parallel_time(two_gpus(), work, ParallelConfig())[0].seconds == 0


def test_nothing_is_hidden_longer_than_it_takes():
    work, cluster = Workload(load_model("llama3-8b"), 131072, 4), load_cluster("a800")
    for config in (
        ParallelConfig(ulysses=4, ring=2, dp=2, zero=3, recompute="full"),
        ParallelConfig(tp=2, ulysses=2, ring=2, pp=2, offload_ratio=0.5, zero=1),
        ParallelConfig(ulysses=2, ring=8, zero=2, overlap_gradients=True),
    ):
        layers_s = step_time(cluster, work, config).layers
        parts = data_parallel_time(cluster, work, config, layers_s)
        assert all(0 <= x.exposed <= x.seconds * (1 + 1e-9) for x in parts)
