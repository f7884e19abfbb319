"""Reports of plans: where they lose, what was measured, and the launch time in a plot."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from ds_usp.planner.explain import explain
from ds_usp.planner.hardware import MeasuredAttention, MeasuredLayer, load_cluster
from ds_usp.planner.models import load_model
from ds_usp.planner.parallel_config import Workload, framework_caps
from ds_usp.planner.plot import panels
from ds_usp.planner.report import plans_text, search_result_json
from ds_usp.planner.search import SearchResult, search
from ds_usp.planner.step_time import StepTime

MODEL = load_model("llama3-8b")
LAYER = MeasuredLayer(4096, 14336, 4096, 1024, True, 1, 8192, 0.01, 0.02)
CALL = MeasuredAttention(4, 1, 32768, 32, 8, 128, 0.002, 0.005)
HOST = {"forward_host_s": 1e-3, "backward_host_s": 2e-3}


def found_on(
    layers: tuple[MeasuredLayer, ...] = (), calls: tuple[MeasuredAttention, ...] = ()
) -> SearchResult:
    cluster = replace(load_cluster("h200"), layers=layers, calls=calls)
    return search(cluster, Workload(MODEL, 131072), 4, fixed={"tp": 1, "pp": 1, "dp": 1})


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return found_on()


@pytest.mark.parametrize("part", [field.name for field in fields(StepTime)])
def test_whatever_a_plan_loses_with_has_a_name(result: SearchResult, part: str) -> None:
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


def test_pairs_that_were_not_measured_are_named(result: SearchResult) -> None:
    pairs = {(plan.config.ulysses, plan.config.ring) for plan in result.plans}
    assert pairs == {(4, 1), (2, 2), (1, 4)}
    assert "measured" not in plans_text(result, 99)
    text = plans_text(found_on(calls=(CALL,)), 99)
    assert "; measured: attention (not on ulysses x ring 1 x 4, 2 x 2)\n" in text
    text = plans_text(found_on(calls=(CALL, replace(CALL, ulysses=2, ring=2))), 99)
    assert "; measured: attention (not on ulysses x ring 1 x 4)\n" in text
    all_of_them = [replace(CALL, ulysses=u, ring=r) for u, r in pairs]
    assert "; measured: attention\n" in plans_text(found_on(calls=tuple(all_of_them)), 99)
    alone = found_on(calls=(CALL,))
    listed = alone.plans[0].config.ulysses, alone.plans[0].config.ring
    assert ("not on" in plans_text(alone, 1)) == (listed != (4, 1))


def test_ties_are_marked_and_counted(result: SearchResult) -> None:
    best = result.plans[0]
    near, far = (replace(best, mfu=best.mfu * share) for share in (0.95, 0.93))
    text = plans_text(replace(result, plans=[best, near, far]), 3)
    rows = [line for line in text.splitlines() if line[:1].isdigit()][:3]
    assert [row.endswith("=") for row in rows] == [True, True, False]
    assert "= 2 of the 3 are a tie: less than 6% apart" in text
    alone = plans_text(replace(result, plans=[best, far]), 2)
    assert "tie" not in alone and not any(line.endswith("=") for line in alone.splitlines())
    profiled = replace(result.cluster, layers=(LAYER,), calls=(CALL,))
    assert replace(result, cluster=profiled).stated_error == 0.03
    assert search_result_json(result, 1)["tie_within"] == 0.06


def test_orders_that_do_not_differ_are_one_plan(result: SearchResult) -> None:
    """Inside one node no link tells them apart; across nodes some do."""
    assert {plan.config.order for plan in result.plans} == {"ulysses-ring"}
    wide = search(load_cluster("h200"), Workload(MODEL, 131072), 16, fixed={"tp": 1, "pp": 1})
    assert {plan.config.order for plan in wide.plans} == {"ulysses-ring", "ring-ulysses"}
    seen = [replace(plan.config, order="") for plan in wide.plans if plan.mfu == wide.plans[0].mfu]
    assert len(seen) == len(set(seen))


def test_no_line_is_said_twice() -> None:
    for gpus in (8, 16):
        lines = explain(search(load_cluster("h100"), Workload(MODEL, 131072), gpus))
        assert len(lines) == len(set(lines))


def test_the_loss_is_in_chunks_where_its_logits_do_not_fit() -> None:
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


HOSTED_LAYER, HOSTED_CALL = replace(LAYER, **HOST), replace(CALL, **HOST)
OTHER = replace(HOSTED_LAYER, ffn=4096)  # of a model that is not asked for


@pytest.mark.parametrize(
    ("layers", "calls", "says"),
    [
        ((HOSTED_LAYER,), (HOSTED_CALL,), None),
        ((LAYER,), (CALL,), None),
        ((), (), None),
        ((HOSTED_LAYER,), (CALL,), "launch times of layers of llama3-8b, but not of attention: "),
        ((HOSTED_LAYER,), (), "launch times of layers of llama3-8b, but not of attention: "),
        ((LAYER,), (HOSTED_CALL,), "launch times of attention, but not of layers of llama3-8b: "),
        ((OTHER,), (HOSTED_CALL,), "launch times of attention, but not of layers of llama3-8b: "),
        (
            (HOSTED_LAYER, replace(LAYER, tokens=4096)),
            (HOSTED_CALL,),
            "of attention, but not of layers",
        ),
        ((OTHER,), (CALL,), None),
    ],
)
def test_host_times_of_one_half_are_no_host_times(
    layers: tuple[MeasuredLayer, ...], calls: tuple[MeasuredAttention, ...], says: str | None
) -> None:
    result = found_on(layers, calls)
    text, warnings = plans_text(result, 1), search_result_json(result, 1)["warnings"]
    if says is None:
        assert warnings == [] and "warning" not in text
    else:
        assert isinstance(warnings, list) and len(warnings) == 1 and says in warnings[0]
        assert f"\nwarning: {warnings[0]}\n" in text


def test_the_plots_layer_waits_for_its_launches(result: SearchResult) -> None:
    best = result.plans[0]
    assert best.config.micro_batches(1) == 1 and MODEL.layers == 32
    for seconds, shown in ((0.0, [None] * 3), (0.64, [None, 0.64, pytest.approx(20)])):
        plan = replace(best, time=replace(best.time, host=seconds))
        bars = panels(replace(result, plans=[plan]), 1).values()
        assert [bar.get("host") for (bar,) in bars] == shown
