"""Plans that the planner cannot tell apart: what separates them is less than its own error."""

from __future__ import annotations

from ds_usp.planner.profile_rows import nearest_tp
from ds_usp.planner.search import Plan, SearchResult

# Relative differences of MFU. Of formulas alone the order held for runs that were 6 % apart (GPT
# 1.3B on 4 H200, README). From a profile of the machine with the model's layers times are 1.5 %
# off in the mean over 19 runs, and two of them are compared.
FORMULA_ERROR, PROFILE_ERROR = 0.06, 0.03


def stated_error(result: SearchResult) -> float:
    """The relative difference of MFU below which two plans of this search are a tie."""
    cluster, model = result.cluster, result.work.model
    profiled = bool(cluster.calls) and nearest_tp(cluster.layers, model, 1) is not None
    return PROFILE_ERROR if profiled else FORMULA_ERROR


def ties(result: SearchResult, plan: Plan) -> bool:
    """Whether a plan is a tie with the best one that fits."""
    return plan.mfu >= result.plans[0].mfu * (1 - stated_error(result))
