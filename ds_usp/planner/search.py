"""Evaluates every parallel configuration: refused with the reason, or ranked by predicted MFU. Once
a command, for ``plan`` again with twice the length; once a start for ``--ulysses-degree auto``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors, zero_refusal
from ds_usp.planner.arguments import MOST_SEQUENCES, counted
from ds_usp.planner.degree_rule import rule_degrees
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
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import (
    CHECKPOINTED,
    FRAMEWORKS,
    RECOMPUTE,
    FrameworkCaps,
    ParallelConfig,
    Workload,
    degree_configs,
    fixed_text,
    memory_violations,
    values_of,
    with_setting,
)
from ds_usp.planner.step_time import MicroBatch, StepTime, micro_batch_time, step_mfu, step_time
from ds_usp.settings import LENGTH_SETTINGS

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

    config: ParallelConfig  # its degrees and settings
    memory: Memory
    time: StepTime
    mfu: float  # fraction of the peak that the model's own FLOP have
    over_budget_bytes: float = 0.0


@dataclass
class SearchResult:
    """The configurations of a search.

    Args:
        framework: the program that is planned.
        plans: those that fit and are within the stated error of the fastest one: the recommended
            one first, then by speed.
        outcomes: what became of a configuration -> of how many.
        over_memory: the fastest that do not fit.
        closest_to_fitting: the one that is least over the budget.
        best_with: (axis, value) -> the fastest plan that has it.
        fixed: axes that were not searched.
    """

    cluster: Cluster  # of the request, as the next three
    work: Workload  # the model and its batch
    gpus: int  # in all
    budget_bytes: float  # of a GPU
    framework: FrameworkCaps
    plans: list[Plan] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    over_memory: list[Plan] = field(default_factory=list)
    closest_to_fitting: Plan | None = None
    best_with: dict[tuple[str, object], Plan] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)

    @property
    def considered(self) -> int:
        """The number of configurations that were looked at."""
        return sum(self.outcomes.values())

    @property
    def fastest(self) -> Plan:
        return max(self.plans, key=lambda plan: plan.mfu)


# ------------------------------------------------------------------ the search


AXES = ("tp", "ulysses", "ring", "pp", "dp", "zero", "recompute", "micro_batch")
_COMPARED_AXES = ("tp", "split", "pp", "dp", "sharding", "recompute")
WITHIN_ERROR = f"within {STATED_ERROR:.0%} of the fastest"
_SLOWER = "slower"
_OVER_MEMORY = "too large for a GPU"
_OVER_HOST = "offload beyond the host's memory"
OUTCOMES = (WITHIN_ERROR, _SLOWER, _OVER_MEMORY, _OVER_HOST)
_MAX_OVER_MEMORY = 8
_LARGE_LOGITS = 1 / 8  # of a GPU's memory: a loss in chunks takes as long


def search(
    cluster: Cluster,
    work: Workload,
    gpus: int,
    framework: FrameworkCaps = FRAMEWORKS[0],
    fixed: Mapping[str, object] | None = None,
    base: ParallelConfig | None = None,
) -> SearchResult:
    """Evaluate every configuration of a run on a cluster.

    Args:
        fixed: values of :data:`AXES` that are not searched.
        base: its ``fused_loss``, ``fused_activation``, FSDP2 and settings that trade time for
            length are those of every configuration. Where nothing fits, more of the last are
            switched on.

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
    framework = framework.for_model(work.model)
    fixed = fixed or {}
    base = base or ParallelConfig()
    result = SearchResult(cluster, work, gpus, cluster.budget_bytes, framework, fixed=fixed)
    collector = _Collector(result)
    degree_sets = list(degree_configs(cluster, work, gpus, framework, fixed, base, result.outcomes))
    for degrees in degree_sets:
        collector.search_degrees(degrees, fixed)
    if collector.unmet and not collector.searched:
        why = ", ".join(rule for rule, _ in collector.unmet.most_common())
        raise ConfigError(
            f"no configuration of {counted(gpus, 'GPU')} has {fixed_text(fixed, base)}: {why}; "
            "leave one out"
        )
    if not result.plans:
        degree_sets = collector.search_longer(degree_sets, fixed)
    if not result.plans:
        collector.find_closest(degree_sets, fixed)
    collector.rank()
    return result


_length_values = attrgetter(*(row.name for row in LENGTH_SETTINGS))


class _Collector:
    """Evaluates the settings of sets of degrees, and records the plans that reports name."""

    def __init__(self, result: SearchResult) -> None:
        self._result, self._framework = result, result.framework
        self._slowest_kept = 0.0  # MFU at which a plan is within the error of the fastest so far
        self.searched = False
        self._micro_batches: dict[tuple[object, ...], MicroBatch] = {}
        self._bytes: dict[tuple[object, ...], float] = {}
        self.exhaustive = False
        self.unmet: Counter[str] = Counter()  # fixed values that a set of degrees cannot have

    def search_degrees(self, base: ParallelConfig, fixed: Mapping[str, object]) -> None:
        """Evaluate one set of degrees, with all settings that ``fixed`` allows."""
        result, framework = self._result, self._framework
        zero_stages = tuple(x for x in framework.zero if not zero_refusal(x, base.pp, bf16=False))
        if base.states_on_host and fixed.get("zero") != 0:
            zero_stages = tuple(zero for zero in zero_stages if zero)
        # A single rank shards nothing: one stage stands for all.
        stages = values_of(fixed, "zero", zero_stages[:1] if base.zero_ranks == 1 else zero_stages)
        recompute = values_of(fixed, "recompute", framework.recompute)
        batches = values_of(fixed, "micro_batch", divisors(result.work.global_batch // base.dp))
        if not (stages and recompute and batches):
            axes = {"zero": stages, "recompute": recompute, "micro_batch": batches}
            axis = next(axis for axis, values in axes.items() if not values)
            self._refuse(framework.refusal(base, axis, fixed[axis]))
            return
        # FSDP2 is a further way to have stage 3, or the only one where it is asked for.
        shardings = [(zero, False) for zero in stages if not base.fsdp2]
        if framework.fsdp2 and 3 in (*stages, base.zero) and not base.states_on_host:
            shardings += [(3, True)] * (base.zero_ranks > 1 or base.fsdp2)
        schedule = framework.schedule if base.pp > 1 else "1f1b"
        base = base.replace(schedule=schedule, zero=shardings[-1][0], fsdp2=shardings[-1][1])
        broken = {}  # mode -> the first rule that it breaks, without numbers; "" for none
        for mode in recompute:
            rules = memory_violations(result.work, base.replace(recompute=mode))
            broken[mode] = next(rules, "").partition(":")[0]
        recompute = [mode for mode, rule in broken.items() if not rule]
        if not recompute:
            self._refuse(next(iter(broken.values())))
            return
        self.searched = True
        *on_gpu, optimizer = states_bytes(stage_elements(result.work, base, 0), base)
        states = sum(on_gpu) + (0.0 if base.states_on_host else optimizer)
        if base.fsdp2:  # whose gradients are not there when layers hold the most
            states -= on_gpu[1]
        for micro_batch in batches:
            chunks = self._virtual_stage_layers(base, micro_batch)
            for mode in recompute:
                if self._cannot_fit(base, micro_batch, mode, states):
                    result.outcomes[_OVER_MEMORY] += len(shardings) * len(chunks)
                    continue
                config = base.replace(micro_batch=micro_batch, recompute=mode)
                self._shardings_and_stages(config, shardings, chunks)

    def _refuse(self, rule: str) -> None:
        self.unmet[rule] += 1
        self._result.outcomes[rule] += 1

    def _shardings_and_stages(
        self, config: ParallelConfig, shardings: Sequence[tuple[int, bool]], chunks: Sequence[int]
    ) -> None:
        """Evaluate a configuration with each way to shard the states, (ZeRO stage, FSDP2), and each
        number of layers a virtual stage, which leave a layer's time as it is."""
        cost = self._micro_batch(config)
        for chunk in chunks:
            bound = self._best_possible(config, chunk, cost)
            axes = [axis for axis in _COMPARED_AXES if axis != "sharding"]
            dominated = bound < self._slowest_kept and self._dominated(config, bound, axes)
            for zero, fsdp2 in shardings:
                candidate = config.replace(zero=zero, fsdp2=fsdp2, layers_per_virtual_stage=chunk)
                if dominated and self._dominated(candidate, bound, ["sharding"]):
                    self._result.outcomes[_SLOWER] += 1
                else:
                    self._result.outcomes[self._evaluate(candidate, cost, bound)] += 1

    def _micro_batch(self, config: ParallelConfig) -> MicroBatch:
        """The time of one micro batch, computed once for all settings that do not change it: those
        that do are its key."""
        degrees = config.tp, config.ulysses, config.ring
        memory_settings = config.recompute, config.fused_loss, *_length_values(config)
        key = *degrees, config.micro_batch, *memory_settings
        if key not in self._micro_batches:
            cluster, work = self._result.cluster, self._result.work
            self._micro_batches[key] = micro_batch_time(cluster, work, config)
        return self._micro_batches[key]

    def _cannot_fit(
        self, base: ParallelConfig, micro_batch: int, recompute_mode: str, states: float
    ) -> bool:
        """Whether the smallest ``states``, in bytes, and the fewest layers in flight exceed the
        budget."""
        if self.exhaustive:
            return False
        result = self._result
        degrees = base.tp, base.ulysses, base.ring
        key = *degrees, micro_batch, recompute_mode, *_length_values(base)
        if key not in self._bytes:
            config = base.replace(micro_batch=micro_batch, recompute=recompute_mode)
            self._bytes[key] = layer_bytes(result.work, config)
        layers = base.layers_per_stage(result.work.model)
        # Offload leaves two layers, a group its input and those of its layers in backward.
        leaves_two = self._framework.offloads or base.checkpoint_layers > 1
        resident_layers = min(2, layers) if leaves_two else layers
        min_activations = resident_layers * self._bytes[key]
        return states + min_activations + result.cluster.workspace_bytes > result.budget_bytes

    def _virtual_stage_layers(self, base: ParallelConfig, micro_batch: int) -> list[int]:
        """Numbers of layers of a virtual stage to try; 0: all layers of a stage. Counts an outcome
        where micro batches allow no others."""
        work = self._result.work
        micro_batches = work.global_batch // (base.dp * micro_batch)
        per_stage = base.layers_per_stage(work.model)
        if not self._framework.interleaves or base.pp == 1 or per_stage == 1:
            return [0]
        if micro_batches % base.pp:
            self._result.outcomes["without interleaving, which needs other micro batches"] += 1
            return [0]
        return [0, *(layers for layers in divisors(per_stage) if layers < per_stage)]

    def _evaluate(self, config: ParallelConfig, cost: MicroBatch, bound: float) -> str:
        """Estimate and record one configuration, with a chunked loss and with offload if it needs
        them; returns what became of it.

        Args:
            bound: an upper bound of its MFU.
        """
        result = self._result
        cluster, work, budget = result.cluster, result.work, result.budget_bytes
        shared = model_wide_bytes(work, config)
        needs = memory(work, config, cluster.workspace_bytes, shared)
        large = shared.logits > _LARGE_LOGITS * budget
        if (large or needs.total > budget) and self._framework.can_chunk_loss(config):
            chunked = config.replace(fused_loss=True)  # which takes as long
            of_chunks = model_wide_bytes(work, chunked)
            less = memory(work, chunked, cluster.workspace_bytes, of_chunks)
            if less.total < needs.total:
                config, needs, shared = chunked, less, of_chunks
                cost = self._micro_batch(chunked)
        slower = len(result.over_memory) == _MAX_OVER_MEMORY and bound <= result.over_memory[-1].mfu
        only_if_fits = slower and not self.exhaustive
        over_budget = needs.total - budget
        if over_budget > 0 and self._framework.offloads:
            offloaded = self._offloaded(config, shared, only_if_fits)
            if isinstance(offloaded, str):
                return offloaded
            config, needs = offloaded
            over_budget = needs.total - budget if config.offload_ratio == 1 else 0.0
        elif not cluster.host_memory_fits(needs.host, result.gpus):
            return _OVER_HOST
        if over_budget > 0 and only_if_fits:
            return _OVER_MEMORY
        time = step_time(cluster, work, config, cost)
        mfu = step_mfu(cluster, work, config, time.total)
        plan = Plan(config, needs, time, mfu, max(over_budget, 0.0))
        if over_budget <= 0:
            return self._record(plan)
        closest = result.closest_to_fitting
        if closest is None or plan.over_budget_bytes < closest.over_budget_bytes:
            result.closest_to_fitting = plan
        result.over_memory = sorted([*result.over_memory, plan], key=lambda p: -p.mfu)
        del result.over_memory[_MAX_OVER_MEMORY:]
        return _OVER_MEMORY

    def _record(self, plan: Plan) -> str:
        """Keep a plan that fits if it is within the error of the fastest so far, and as the best
        one of a value of an axis if it is."""
        result = self._result
        for axis in _COMPARED_AXES:
            key = axis, getattr(plan.config, axis)
            best = result.best_with.get(key)
            if best is None or plan.mfu > best.mfu:
                result.best_with[key] = plan
        if plan.mfu < self._slowest_kept:
            return _SLOWER
        result.plans.append(plan)
        least = plan.mfu * (1 - STATED_ERROR)
        if least > self._slowest_kept:
            self._slowest_kept = least
            kept = [plan for plan in result.plans if plan.mfu >= least]
            dropped = len(result.plans) - len(kept)
            result.plans = kept
            result.outcomes[WITHIN_ERROR] -= dropped
            result.outcomes[_SLOWER] += dropped
        return WITHIN_ERROR

    def _best_possible(self, config: ParallelConfig, chunk: int, cost: MicroBatch) -> float:
        """MFU if only the layers, the head and the bubble took time; ``chunk``: layers of a virtual
        stage, 0: all of a stage."""
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
    ) -> tuple[ParallelConfig, Memory] | str:
        """The config with the smallest offload ratio that fits the GPU (1 if none does), and its
        memory; or why there is none: host memory cannot hold what it offloads.

        Args:
            only_if_fits: none, too, if the GPU's memory is too small even so.
        """
        result = self._result
        work, workspace = result.work, result.cluster.workspace_bytes
        offloading = config.replace(offload_unit="layer")
        offloading, enough = with_offload(work, offloading, result.budget_bytes, workspace, shared)
        if only_if_fits and not enough:
            return _OVER_MEMORY
        needs = memory(work, offloading, workspace, shared)
        if enough and not result.cluster.host_memory_fits(needs.host, result.gpus):
            return _OVER_HOST
        return offloading, needs

    def search_longer(
        self, degree_sets: Sequence[ParallelConfig], fixed: Mapping[str, object]
    ) -> list[ParallelConfig]:
        """Search again with settings that trade time for length, one more at a time, until
        something fits; returns the configurations that were searched last."""
        configs = list(degree_sets)
        modes = values_of(fixed, "recompute", self._framework.recompute)
        checkpointed = [mode for mode in modes if mode in CHECKPOINTED]
        saving: dict[str, object] = {"recompute": (checkpointed or modes)[-1]} if modes else {}
        for setting in self._framework.length_settings:
            # Checkpoints of several layers depend on the recomputation.
            changed = [
                option
                for config in configs
                for option in with_setting(self._result.work, config.replace(**saving), setting)
                or [config]  # that cannot have it, as with tensor parallelism
            ]
            if changed == configs:
                continue
            configs = changed
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
        counted = self._result.outcomes.copy()
        for degrees in degree_sets:
            self.search_degrees(degrees, {**saving, **fixed})
        self._result.outcomes = counted

    def rank(self) -> None:
        """Put the recommended plan first, and the others behind it by their speed."""
        plans, cluster, work = self._result.plans, self._result.cluster, self._result.work
        plans.sort(key=lambda plan: (-round(plan.mfu, 4), *preference(cluster, work.model, plan)))
        if plans:
            taken = min(plans, key=lambda plan: preference(cluster, work.model, plan))
            plans.remove(taken)
            plans.insert(0, taken)


# What each number of `preference` says of the plan whose number is the smaller.
PREFERENCES = (
    "the one that does not recompute attention",
    "the one that offloads less",
    "the one with fewer settings",
    "the lower stage of sharding",
    "FSDP2",
    "the one with fewer GPUs a sequence",
    "the one with less of a pipeline",
    "the one with less tensor parallelism",
    "the one with the rule's degrees",
    "the one that recomputes less",
    "the one that offloads a little less",
    "the one with the whole loss",
    "the faster one",
    "the one with the smaller micro batch",
    "the one with more data parallelism",
)


def preference(cluster: Cluster, model: ModelShape, plan: Plan) -> tuple[float, ...]:
    """Return the key that decides among plans within the error of the formulas: the smaller of
    two is taken. No recomputation beyond attention, no offload, fewer settings that trade time for
    length, the lower stage of ZeRO, the fewest GPUs a sequence, the rule's degrees; then what is
    recomputed, and the time. :data:`PREFERENCES` has the words of each number."""
    config = plan.config
    shares = config.tp * config.sp * config.pp
    # Without KV heads that could be divided among tensor-parallel ranks the rule is another's.
    by_rule = rule_degrees(config.sp, model.kv_heads, cluster.gpus_per_node, config.tp)
    return (
        config.recompute == "full",
        math.ceil(4 * config.offload_ratio),  # in quarters: a little more is no other plan
        len(config.length_words()),
        config.zero,
        not config.fsdp2,  # of stage 3
        shares,
        config.pp,
        config.tp,
        config.split != by_rule,
        RECOMPUTE.index(config.recompute),
        config.offload_ratio,
        config.fused_loss,
        -plan.mfu,
        config.micro_batch,
        -config.dp,
    )
