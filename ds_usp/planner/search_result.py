"""What a search of parallel configurations finds."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import Memory
from ds_usp.planner.parallel_config import ParallelConfig, Workload
from ds_usp.planner.profile_rows import layer_rows
from ds_usp.planner.step_time import StepTime

GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration with its predicted memory and time.

    Args:
        over_budget_bytes: beyond the memory budget of a GPU; 0: it fits.
    """

    config: ParallelConfig
    memory: Memory
    time: StepTime
    mfu: float
    over_budget_bytes: float = 0.0

    @property
    def split(self) -> ParallelConfig:
        """:attr:`config` under its old name."""
        warnings.warn("Plan.split is now config", DeprecationWarning, stacklevel=2)
        return self.config


@dataclass
class SearchResult:
    """The configurations of a search.

    Args:
        plans: those that fit, the best first.
        considered: how many configurations were considered.
        refused: rule -> how many configurations it refused.
        over_memory: the fastest that do not fit.
        closest_to_fitting: the one that is least over the budget.
        best_with: (axis, value) -> the best plan that has it.
        fixed: axes that were not searched.
        fused_loss_fixed: nor was whether the loss is chunked.
        length_flags: settings that were searched because nothing fits without them.
    """

    cluster: Cluster
    work: Workload
    gpus: int
    budget_bytes: float
    plans: list[Plan] = field(default_factory=list)
    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    over_memory: list[Plan] = field(default_factory=list)
    closest_to_fitting: Plan | None = None
    best_with: dict[tuple[str, object], Plan] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    fused_loss_fixed: bool = False
    length_flags: tuple[str, ...] = ()

    @property
    def stated_error(self) -> float:
        """The relative difference of MFU below which two plans are a tie.

        With formulas alone the order held for runs that were 6 % apart (GPT 1.3B on 4 H200). With
        a profile of the machine that has the model's layers, times are 1.5 % off in the mean over
        19 runs, and two of them are compared.
        """
        profiled = self.cluster.calls and layer_rows(self.cluster.layers, self.work.model)
        return 0.03 if profiled else 0.06

    def is_tie(self, plan: Plan) -> bool:
        """Whether a plan is within the stated error of the best one that fits."""
        return plan.mfu >= self.plans[0].mfu * (1 - self.stated_error)
