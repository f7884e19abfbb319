"""Evaluates every parallel configuration: refused with the reason, or ranked by predicted MFU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.planner.arguments import MOST_SEQUENCES
from ds_usp.planner.formulas import layer_bytes, stage_elements
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import (
    Memory,
    ModelWideBytes,
    memory,
    model_wide_bytes,
    states_bytes,
    with_offload,
)
from ds_usp.planner.parallel_config import (
    CHECKPOINTED,
    FRAMEWORKS,
    LENGTH_SETTING_NAMES,
    RECOMPUTE,
    FrameworkCaps,
    ParallelConfig,
    Workload,
    degree_configs,
    fixed_text,
    length_options,
    memory_violations,
    values_of,
)
from ds_usp.planner.step_time import MicroBatch, StepTime, micro_batch_time, step_mfu, step_time

# ------------------------------------------------------------------ what a search finds


GIB = 2.0**30
# The relative difference of MFU below which two plans are a tie: the order held for runs that were
# 6 % apart (GPT 1.3B on 4 H200).
STATED_ERROR = 0.06


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
        added_length_settings: settings that were searched because nothing fits without them.
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
    added_length_settings: tuple[str, ...] = ()

    def is_tie(self, plan: Plan) -> bool:
        """Whether a plan is within the stated error of the best one that fits."""
        return plan.mfu >= self.plans[0].mfu * (1 - STATED_ERROR)


# ------------------------------------------------------------------ the search


AXES = ("tp", "ulysses", "ring", "order", "pp", "dp", "zero", "recompute", "micro_batch")
_EXPLAINED_AXES = AXES[:-1]  # for which the best plan of each value is kept
_OVER_MEMORY = "too little memory"
_OVER_HOST = "offload beyond the host's memory"
_SLOWER = "slower than those that are listed"
_MAX_PLANS, _MAX_OVER_MEMORY = 64, 8


def search(
    cluster: Cluster,
    work: Workload,
    gpus: int,
    framework: FrameworkCaps = FRAMEWORKS[0],
    budget_bytes: float | None = None,
    fixed: Mapping[str, object] | None = None,
    base: ParallelConfig | None = None,
) -> SearchResult:
    """Evaluate every configuration of a run on a cluster.

    Args:
        budget_bytes: of one GPU; None: 96 % of its memory.
        fixed: values of :data:`AXES` that are not searched.
        base: its ``fused_loss``, ``fused_activation`` and settings that trade time for length are
            those of every configuration. Where nothing fits, more of the last are switched on.

    Raises:
        ConfigError: GPUs that do not fill nodes, or ``fixed`` that leaves no candidate at all.
    """
    if gpus < 1:
        raise ConfigError(f"--gpus {gpus} must be 1 or more")
    if gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node:
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {cluster.gpus_per_node}; give --gpus-per-node or a "
            "multiple"
        )
    if work.global_batch > MOST_SEQUENCES:
        raise ConfigError(
            f"a global batch of {work.global_batch:,} sequences is more than the "
            f"{MOST_SEQUENCES:,} whose divisors are searched"
        )
    cluster = cluster.with_gpus_per_node(min(gpus, cluster.gpus_per_node))
    budget = cluster.budget_bytes if budget_bytes is None else budget_bytes
    if not 0 < budget < math.inf:
        raise ConfigError(f"a budget of {budget / GIB:.1f} GiB holds nothing")
    framework = framework.for_model(work.model)
    fixed = fixed or {}
    base = base or ParallelConfig()
    result = SearchResult(
        cluster, work, gpus, budget, fixed=fixed, fused_loss_fixed=base.fused_loss
    )
    collector = _Collector(result, framework)
    degree_sets = list(degree_configs(cluster, work, gpus, framework, fixed, base, result.refused))
    for degrees in degree_sets:
        collector.search_degrees(degrees, fixed)
    if collector.unmet and not result.considered:
        why = ", ".join(rule for rule, _ in collector.unmet.most_common())
        raise ConfigError(
            f"no configuration of {gpus} GPUs has {fixed_text(fixed, base)}: {why}; leave one out"
        )
    if not result.plans:
        degree_sets = collector.search_longer(degree_sets, fixed)
    if not result.plans:
        collector.find_closest(degree_sets, fixed)
    collector.trim()
    return result


_length_values = attrgetter(*LENGTH_SETTING_NAMES)


class _Collector:
    """Evaluates the settings of sets of degrees, and records the plans that reports name."""

    def __init__(self, result: SearchResult, framework: FrameworkCaps) -> None:
        self._result, self._framework = result, framework
        self._worst_listed = 0.0
        self._micro_batches: dict[tuple[object, ...], MicroBatch] = {}
        self._bytes: dict[tuple[object, ...], float] = {}
        self.exhaustive = False
        self.unmet: Counter[str] = Counter()  # fixed values that a set of degrees cannot have

    def search_degrees(self, base: ParallelConfig, fixed: Mapping[str, object]) -> None:
        """Evaluate all settings of one set of degrees."""
        result, framework = self._result, self._framework
        known = framework.zero_in_pipeline if base.pp > 1 else framework.zero
        if base.states_on_host and fixed.get("zero") != 0:
            known = tuple(zero for zero in known if zero)
        stages = values_of(fixed, "zero", known[:1] if base.zero_ranks == 1 else known)
        both = min(base.ulysses, base.ring) > 1
        orders = values_of(fixed, "order", framework.orders if both else framework.orders[:1])
        recompute = values_of(fixed, "recompute", framework.recompute)
        batches = values_of(fixed, "micro_batch", divisors(result.work.global_batch // base.dp))
        if not (stages and orders and recompute and batches):
            axes = {"zero": stages, "order": orders, "recompute": recompute, "micro_batch": batches}
            axis = next(axis for axis, values in axes.items() if not values)
            self._refuse(framework.refusal(base, axis, fixed[axis]))
            return
        schedule = framework.schedule if base.pp > 1 else "1f1b"
        base = base.replace(schedule=schedule, zero=max(stages))
        broken = {}  # mode -> the first rule that it breaks, without numbers; "" for none
        for mode in recompute:
            rules = memory_violations(result.work, base.replace(recompute=mode))
            broken[mode] = next(rules, "").partition(":")[0]
        recompute = [mode for mode, rule in broken.items() if not rule]
        if not recompute:
            self._refuse(next(iter(broken.values())))
            return
        *on_gpu, optimizer = states_bytes(stage_elements(result.work, base, 0), base)
        states = sum(on_gpu) + (0.0 if base.states_on_host else optimizer)
        for micro_batch in batches:
            chunks = self._virtual_stage_layers(base, micro_batch)
            for recompute_mode in recompute:
                count = len(orders) * len(stages) * len(chunks)
                if self._cannot_fit(base, micro_batch, recompute_mode, states):
                    result.considered += count
                    result.refused[_OVER_MEMORY] += count
                    continue
                config = base.replace(micro_batch=micro_batch, recompute=recompute_mode)
                ordered = [config.replace(order=order) for order in orders]
                times = [self._micro_batch(config) for config in ordered]
                for n, config in enumerate(ordered):
                    if not n or times[n] != times[n - 1]:  # else it is the plan before it
                        self._zero_and_stages(config, stages, chunks)

    def _refuse(self, rule: str) -> None:
        self.unmet[rule] += 1
        self._result.refused[rule] += 1

    def _zero_and_stages(
        self, config: ParallelConfig, stages: Sequence[int], chunks: Sequence[int]
    ) -> None:
        """ZeRO stages and virtual pipeline stages, which leave a layer's time as it is."""
        result = self._result
        micro_batch_cost = self._micro_batch(config)
        for chunk in chunks:
            bound = self._best_possible(config, chunk, micro_batch_cost)
            axes = [axis for axis in _EXPLAINED_AXES if axis != "zero"]
            dominated = bound <= self._worst_listed and self._dominated(config, bound, axes)
            for zero in stages:
                result.considered += 1
                candidate = config.replace(zero=zero, layers_per_virtual_stage=chunk)
                if dominated and self._dominated(candidate, bound, ["zero"]):
                    result.refused[_SLOWER] += 1
                else:
                    self._evaluate(candidate, micro_batch_cost, bound)

    def _micro_batch(self, config: ParallelConfig) -> MicroBatch:
        """The time of one micro batch, computed once for all settings that do not change it."""
        degrees = config.tp, config.ulysses, config.ring, config.order
        memory_settings = config.recompute, config.fused_loss, *_length_values(config)
        key = *degrees, config.micro_batch, *memory_settings
        if key not in self._micro_batches:
            cluster, work = self._result.cluster, self._result.work
            self._micro_batches[key] = micro_batch_time(cluster, work, config)
        return self._micro_batches[key]

    def _cannot_fit(
        self, base: ParallelConfig, micro_batch: int, recompute_mode: str, states_bytes: float
    ) -> bool:
        """Whether the smallest states and the fewest layers in flight exceed the budget."""
        if self.exhaustive:
            return False
        result = self._result
        degrees = base.tp, base.ulysses, base.ring
        key = *degrees, micro_batch, recompute_mode, *_length_values(base)
        if key not in self._bytes:
            config = base.replace(micro_batch=micro_batch, recompute=recompute_mode)
            self._bytes[key] = layer_bytes(result.work, config)
        layers = base.layers_per_stage(result.work.model)
        resident_layers = min(3, layers) if self._framework.offloads else layers
        if base.checkpoint_layers > 1:
            resident_layers = min(2, layers)
        min_activations = resident_layers * self._bytes[key]
        return states_bytes + min_activations + result.cluster.workspace_bytes > result.budget_bytes

    def _virtual_stage_layers(self, base: ParallelConfig, micro_batch: int) -> list[int]:
        """Numbers of layers of a virtual stage to try; 0: all layers of a stage."""
        work = self._result.work
        micro_batches = work.global_batch // (base.dp * micro_batch)
        per_stage = base.layers_per_stage(work.model)
        if not self._framework.interleaves or base.pp == 1 or per_stage == 1:
            return [0]
        if micro_batches % base.pp:
            self._result.refused["interleaving needs micro batches in multiples of pp"] += 1
            return [0]
        return [0, *(layers for layers in divisors(per_stage) if layers < per_stage)]

    def _evaluate(self, config: ParallelConfig, micro_batch_cost: MicroBatch, bound: float) -> None:
        """Estimate and record one configuration, with offload or a chunked loss if it needs them.

        Args:
            bound: an upper bound of its MFU.
        """
        result = self._result
        cluster, work, budget = result.cluster, result.work, result.budget_bytes
        shared = model_wide_bytes(work, config)
        needs = memory(work, config, cluster.workspace_bytes, shared)
        over_budget = needs.total - budget
        if over_budget > 0 and shared.logits and self._framework.can_chunk_loss(config):
            # A setting of the configuration, as the offload ratio is: not counted as another.
            refused, chunked = result.refused.copy(), config.replace(fused_loss=True)
            self._evaluate(chunked, self._micro_batch(chunked), bound)
            result.refused = refused
        slower = len(result.over_memory) == _MAX_OVER_MEMORY and bound <= result.over_memory[-1].mfu
        only_if_fits = slower and not self.exhaustive
        if over_budget > 0 and self._framework.offloads:
            offloaded = self._offloaded(config, shared, only_if_fits)
            if offloaded is not None:
                config, needs = offloaded
                over_budget = needs.total - budget if config.offload_ratio == 1 else 0.0
        elif not cluster.host_memory_fits(needs.host, result.gpus):
            result.refused[_OVER_HOST] += 1
            return
        if over_budget > 0:
            result.refused[_OVER_MEMORY] += 1
            if only_if_fits:
                return
        time = step_time(cluster, work, config, micro_batch_cost)
        mfu = step_mfu(cluster, work, config, time.total)
        plan = Plan(config, needs, time, mfu, max(over_budget, 0.0))
        if over_budget <= 0:
            self._record(plan)
            return
        closest = result.closest_to_fitting
        if closest is None or plan.over_budget_bytes < closest.over_budget_bytes:
            result.closest_to_fitting = plan
        result.over_memory = sorted([*result.over_memory, plan], key=lambda p: -p.mfu)
        del result.over_memory[_MAX_OVER_MEMORY:]

    def _record(self, plan: Plan) -> None:
        """Keep a plan that fits if it is among the fastest, overall or for one value of an axis."""
        result = self._result
        if plan.mfu > self._worst_listed:
            result.plans.append(plan)
            if len(result.plans) > 2 * _MAX_PLANS:
                self.trim()
        for axis in _EXPLAINED_AXES:
            key = axis, getattr(plan.config, axis)
            best = result.best_with.get(key)
            if best is None or plan.mfu > best.mfu:
                result.best_with[key] = plan

    def _best_possible(self, config: ParallelConfig, chunk: int, cost: MicroBatch) -> float:
        """MFU if only the layers, the head and the bubble took time."""
        work = self._result.work
        chunk_layers = chunk or config.layers_per_stage(work.model)
        slots = config.micro_batches(work.global_batch)
        busy = slots * (config.layers_per_stage(work.model) * cost.layer + cost.head)
        total = busy + (config.pp - 1) * chunk_layers * cost.layer
        return step_mfu(self._result.cluster, work, config, total)

    def _dominated(self, config: ParallelConfig, mfu: float, axes: Sequence[str]) -> bool:
        """Whether the config's value of each of these axes has a plan of at least this MFU."""
        best = (self._result.best_with.get((axis, getattr(config, axis))) for axis in axes)
        return all(plan is not None and plan.mfu >= mfu for plan in best)

    def _offloaded(
        self, config: ParallelConfig, shared: ModelWideBytes, only_if_fits: bool
    ) -> tuple[ParallelConfig, Memory] | None:
        """The config with the smallest offload ratio that fits the GPU (1 if none does), and its
        memory; None if host memory cannot hold what it offloads.

        Args:
            only_if_fits: None, too, if the GPU's memory is too small even so.
        """
        result = self._result
        work, workspace = result.work, result.cluster.workspace_bytes
        chunks = config.pp > 2 and self._framework.offloads_chunks
        offloading = config.replace(offload_unit="chunk" if chunks else "layer")
        offloading, enough = with_offload(work, offloading, result.budget_bytes, workspace, shared)
        if only_if_fits and not enough:
            return None
        needs = memory(work, offloading, workspace, shared)
        if enough and not result.cluster.host_memory_fits(needs.host, result.gpus):
            result.refused[_OVER_HOST] += 1
            return None
        return offloading, needs

    def search_longer(
        self, degree_sets: Sequence[ParallelConfig], fixed: Mapping[str, object]
    ) -> list[ParallelConfig]:
        """Search again with settings that trade time for length, one more at a time, until
        something fits; returns the configurations that were searched last."""
        configs = list(degree_sets)
        known = values_of(fixed, "recompute", self._framework.recompute)
        modes = [mode for mode in known if mode in CHECKPOINTED]
        saving: dict[str, object] = {"recompute": (modes or known)[-1]} if known else {}
        for setting in self._framework.length_settings:
            # Checkpoints of several layers depend on the recomputation.
            changed = [
                option
                for config in configs
                for option in length_options(self._result.work, config.replace(**saving), setting)
                or [config]  # that cannot have it, as with tensor parallelism
            ]
            if changed == configs:
                continue
            configs = changed
            self._result.added_length_settings += (setting,)
            more = {**saving, **fixed} if setting == "checkpoint_layers" else fixed
            for config in configs:
                self.search_degrees(config, more)
            if self._result.plans:
                break
        return configs

    def find_closest(
        self, degree_sets: Iterable[ParallelConfig], fixed: Mapping[str, object]
    ) -> None:
        """Evaluate the settings that save most memory, for each set of degrees; called if nothing
        fits."""
        self.exhaustive = True
        modes = self._framework.recompute
        saving = {"micro_batch": 1, "recompute": "full" if "full" in modes else modes[-1]}
        counted = self._result.considered, self._result.refused.copy()
        for degrees in degree_sets:
            self.search_degrees(degrees, {**saving, **fixed})
        self._result.considered, self._result.refused = counted

    def trim(self) -> None:
        """Sort the plans, and drop the slowest ones."""
        plans = self._result.plans
        plans.sort(key=_rank)
        del plans[_MAX_PLANS:]
        self._worst_listed = plans[-1].mfu if plans else 0.0


def _rank(plan: Plan) -> tuple[float, ...]:
    """Sort key of plans: by MFU; among equals (0.01 % of the peak) the simpler one."""
    config = plan.config
    simple = (RECOMPUTE.index(config.recompute), config.zero, config.tp, config.pp)
    saves = config.offload_ratio, config.fused_loss
    return (-round(plan.mfu, 4), *saves, *simple, plan.memory.total)
