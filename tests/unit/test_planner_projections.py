"""The price of projections under the exchanges: the schedule that runs, beside measured layers."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

from ds_usp.experimental.projected_schedule import ProjectedOp
from ds_usp.geometry.pipeline_schedule import Op
from ds_usp.planner import Cluster, ModelShape, ParallelConfig, Workload, load_cluster
from ds_usp.planner.attention_time import (
    OFF,
    PROJECTIONS,
    RECOMPUTE,
    PassSeconds,
    ProductSeconds,
    SentBytes,
    mean_costs,
)
from ds_usp.planner.projection_time import block_time
from ds_usp.planner.step_time import layer_time
from ds_usp.planner.traffic import layer_traffic

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results"
PATHS = {"plain": OFF, "projected keep=input": RECOMPUTE}  # and "keep=arrivals", removed
TO_HEADS, TO_SEQUENCE = 8.0 + 4.0, 6.0  # bytes of q and of k and v, and of the output


def seconds(backward: bool) -> PassSeconds:
    """Whole numbers: 100 s of queries' rows, 10 of keys' and values', 1 of the output."""
    qkv, out = SentBytes(8.0, 4.0), SentBytes(6.0)
    sent = {Op.A2A_POST: out if backward else qkv, Op.RETURN_POST: qkv if backward else out}
    return PassSeconds(0.0, 0.0, 0.0, sent, lambda _, n: n, ProductSeconds(100.0, 10.0, 1.0))


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("projections", PROJECTIONS)
def test_every_product_and_byte_is_priced_once(chunks, ring, projections):
    """4 chunks of 2 KV heads: K and V come with the first chunk of their group."""
    for backward in (False, True):
        costs, _ = mean_costs(
            4, 2 if ring == 1 else 4, chunks, ring, ulysses=True, gather=False,
            backward=backward, projections=projections,
        )  # fmt: skip
        cost = {x: costs.cost(x, seconds(backward)) for x in costs.schedule}
        products = sum(c.compute for x, c in cost.items() if isinstance(x.op, ProjectedOp))
        sent = sum(c.exchange for x, c in cost.items() if x.op not in (Op.KV_POST, Op.DKV_POST))
        again = backward and projections == RECOMPUTE
        once = 0.0 if projections == OFF else 222.0 if backward else 111.0
        assert products == pytest.approx(once + 110.0 * again)
        assert sent == pytest.approx(TO_HEADS + TO_SEQUENCE + (TO_HEADS + TO_SEQUENCE) * again)


class Row(NamedTuple):
    """A measured layer and its forecast, in milliseconds."""

    block: float
    layer: float
    exposed: float
    forecast_block: float
    forecast_layer: float
    forecast_exposed: float
    gain: float  # of a layer's time beside plain, measured and forecast
    forecast_gain: float


def workload(row: dict[str, str]) -> tuple[Workload, ParallelConfig]:
    hidden, heads, kv_heads = (int(row[name]) for name in ("hidden", "heads", "kv_heads"))
    model = ModelShape("layer", 1, hidden, 4 * hidden, heads, kv_heads, 1, gated=False, biases=True)
    ulysses, ring = map(int, row["mesh"].split("x"))
    return Workload(model, int(row["tokens"])), ParallelConfig(ulysses=ulysses, ring=ring)


def two_gpus(port_bytes_per_s: float = 0.0) -> Cluster:
    cluster = load_cluster("h200").with_gpus_per_node(2)
    level = cluster.levels[0]
    rate = port_bytes_per_s or level.port_bytes_per_s
    return replace(cluster, levels=(replace(level, port_bytes_per_s=rate),))


def measured(file: str, *, slow: bool = False) -> Iterator[tuple[str, Row]]:
    """Each row of a result by its path; ``slow``: at the rate that its plain path had."""
    lines = (RESULTS / file).read_text(encoding="utf-8").splitlines()
    cluster, plain, forecast_plain, layer = two_gpus(), 0.0, 0.0, 0.0
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        work, config = workload(row)
        path = PATHS.get(row["path"])
        if path is None:
            continue
        if slow and path == OFF:
            traffic = layer_traffic(work, config)
            sent = 2 * traffic.ulysses + traffic.ring_forward + traffic.ring_backward
            cluster = two_gpus(1e3 * sent / float(row["communication_ms"]))
        time = block_time(cluster, work, config.of_attention(), path)
        of_row = [float(row[name]) for name in ("block_ms", "layer_ms", "exposed_ms")]
        if path == OFF:
            plain, forecast_plain = of_row[1], 1e3 * time.total
            layer = 1e3 * layer_time(cluster, work, config).total
        shorter = forecast_plain - 1e3 * time.total
        forecast = 1e3 * time.total, layer - shorter, 1e3 * time.exposed
        yield path, Row(*of_row, *forecast, 1 - of_row[1] / plain, shorter / layer)


def test_the_forecast_beside_measured_layers():
    """Errors as docs/planner.md states them."""
    rows = list(measured("projected.csv"))
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    for path in PROJECTIONS:
        of_path = [row for key, row in rows if key == path]
        assert len(of_path) == 12
        blocks = [row.forecast_block / row.block - 1 for row in of_path]
        layers = [row.forecast_layer / row.layer - 1 for row in of_path]
        gains = [abs(row.forecast_gain - row.gain) for row in of_path]
        waits = [sum(values) for values in zip(*((r.exposed, r.forecast_exposed) for r in of_path))]  # noqa: B905
        text = (
            f"| `{path}` | {100 * fmean(blocks):+.0f} %, {100 * min(blocks):+.0f} to "
            f"{100 * max(blocks):+.0f} | {100 * fmean(layers):+.0f} %, {100 * min(layers):+.0f} to "
            f"{100 * max(layers):+.0f} | {100 * fmean(gains):.1f}, {100 * max(gains):.1f} | "
            f"{waits[0]:.2f}, {waits[1]:.2f} |"
        )
        assert text in page, f"docs/planner.md states other errors than: {text}"


def test_the_forecast_beside_layers_over_a_slow_link():
    rows = [row for _, row in measured("projected_slow_link.csv", slow=True)]
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    for name, (plain, again) in (("Ulysses 2", rows[:2]), ("ring 2", rows[2:])):
        gain = f"{again.gain:.1%}, {again.forecast_gain:.1%}".replace("%", " %")
        text = f"| {name} | {plain.block:.1f}, {plain.forecast_block:.1f} | {gain} |"
        assert text in page, f"docs/planner.md lacks: {text}"
