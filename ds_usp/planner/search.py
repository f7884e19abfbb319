"""Every configuration of a run on a cluster: refused with the reason, or ranked by predicted
MFU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import divisors
from ds_usp.planner.families import asked_for, families, values_of
from ds_usp.planner.formulas import layer_bytes, stage_elements
from ds_usp.planner.frameworks import ENGINES, Engine
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import Memory, Shared, memory, shared_bytes, states_bytes, with_offload
from ds_usp.planner.parallel_config import RECOMPUTE, Split, Workload
from ds_usp.planner.step_time import (
    MicroBatch,
    StepTime,
    micro_batch_time,
    step_mfu,
    step_time,
)

GIB = 2.0**30
AXES = ("tp", "ulysses", "ring", "order", "pp", "dp", "zero", "recompute", "micro_batch")
_NAMED = AXES[:-1]  # for which the best plan of each value is kept
_TOO_LITTLE = "too little memory"
_SLOWER = "slower than those that are listed"
_MOST_KEPT, _MOST_TOO_LARGE = 64, 8


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration, with what it takes.

    Args:
        lacks_bytes: how much more than the budget it needs; 0: it fits.
    """

    split: Split
    memory: Memory
    time: StepTime
    mfu: float
    lacks_bytes: float = 0.0


@dataclass
class Found:
    """What a search found.

    Args:
        plans: those that fit, the best first.
        considered: how many configurations were looked at.
        refused: reason -> how many configurations it refused.
        too_large: the fastest that do not fit.
        nearest: the one that lacks least.
        best_with: (axis, value) -> the best plan that has it.
        given: axes that were not free to be chosen.
        loss_given: nor was whether the loss is in chunks.
    """

    cluster: Cluster
    work: Workload
    gpus: int
    budget_bytes: float
    plans: list[Plan] = field(default_factory=list)
    considered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    too_large: list[Plan] = field(default_factory=list)
    nearest: Plan | None = None
    best_with: dict[tuple[str, object], Plan] = field(default_factory=dict)
    given: Mapping[str, object] = field(default_factory=dict)
    loss_given: bool = False


def search(
    cluster: Cluster,
    work: Workload,
    gpus: int,
    how: Engine = ENGINES[0],
    budget_bytes: float | None = None,
    fixed: Mapping[str, object] | None = None,
    base: Split | None = None,
) -> Found:
    """Look at every configuration.

    Args:
        budget_bytes: of one GPU; None: 96 % of its memory.
        fixed: axes of :data:`AXES` that are given.
        base: whose ``fused_loss`` and ``fused_activation`` all have.

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
    cluster = cluster.with_gpus_per_node(min(gpus, cluster.gpus_per_node))
    budget = cluster.budget_bytes if budget_bytes is None else budget_bytes
    if not 0 < budget < math.inf:
        raise ConfigError(f"a budget of {budget / GIB:.1f} GiB holds nothing")
    given = fixed or {}
    base = base or Split()
    found = Found(cluster, work, gpus, budget, given=given, loss_given=base.fused_loss)
    collector = _Collector(found, how)
    every = list(families(cluster, work, gpus, how, given, base, found.refused))
    for family in every:
        collector.family(family, given)
    if collector.unmet and not found.considered:
        why = ", ".join(why for why, _ in collector.unmet.most_common())
        raise ConfigError(
            f"no configuration of {gpus} GPUs has {asked_for(given)}: {why}; leave one out"
        )
    if not found.plans:
        collector.look_for_the_nearest(every, given)
    collector.finish()
    return found


class _Collector:
    """Evaluates families of configurations and keeps those that reports name."""

    def __init__(self, found: Found, how: Engine) -> None:
        self._found, self._how = found, how
        self._worst_kept = 0.0
        self._ones: dict[tuple[object, ...], MicroBatch] = {}
        self._bytes: dict[tuple[object, ...], float] = {}
        self.thorough = False
        self.unmet: Counter[str] = Counter()  # what is given and none of a family can have

    def family(self, base: Split, fixed: Mapping[str, object]) -> None:
        """All settings of one set of degrees."""
        found, how = self._found, self._how
        known = how.zero_in_pipeline if base.pp > 1 else how.zero
        stages = values_of(fixed, "zero", known[:1] if base.zero_ranks == 1 else known)
        both = min(base.ulysses, base.ring) > 1
        orders = values_of(fixed, "order", how.orders if both else how.orders[:1])
        recompute = values_of(fixed, "recompute", how.recompute)
        batches = values_of(fixed, "micro_batch", divisors(found.work.global_batch // base.dp))
        if not (stages and orders and recompute and batches):
            axes = {"zero": stages, "order": orders, "recompute": recompute, "micro_batch": batches}
            axis = next(axis for axis, values in axes.items() if not values)
            why = how.refusal(base, axis, fixed[axis])
            self.unmet[why] += 1
            found.refused[why] += 1
            return
        base = base.but(schedule=how.schedule if base.pp > 1 else "1f1b", zero=max(stages))
        states = sum(states_bytes(stage_elements(found.work, base, 0), base))
        for micro_batch in batches:
            chunks = self._chunks(base, micro_batch)
            for again in recompute:
                count = len(orders) * len(stages) * len(chunks)
                if self._hopeless(base, micro_batch, again, states):
                    found.considered += count
                    found.refused[_TOO_LITTLE] += count
                    continue
                split = base.but(micro_batch=micro_batch, recompute=again)
                for order in self._orders(split, orders):
                    self._settings(split.but(order=order), stages, chunks)

    def _orders(self, split: Split, orders: Sequence[str]) -> list[str]:
        """Without those that take as long as the one before: they are the same plan."""
        times = [self._micro_batch(split.but(order=order)) for order in orders]
        return [order for n, order in enumerate(orders) if not n or times[n] != times[n - 1]]

    def _settings(self, split: Split, stages: Sequence[int], chunks: Sequence[int]) -> None:
        """What does not change a layer's time."""
        found = self._found
        parts = self._micro_batch(split)
        for chunk in chunks:
            bound = self._best_possible(split, chunk, parts)
            known = self._known_better(split, bound)
            for zero in stages:
                found.considered += 1
                if known and self._all_stages_better((zero,), bound):
                    found.refused[_SLOWER] += 1
                    continue
                one = split.but(zero=zero, layers_per_virtual_stage=chunk)
                self._one(one, parts, bound)

    def _micro_batch(self, split: Split) -> MicroBatch:
        degrees = split.tp, split.ulysses, split.ring, split.order
        key = *degrees, split.micro_batch, split.recompute, split.fused_loss
        if key not in self._ones:
            self._ones[key] = micro_batch_time(self._found.cluster, self._found.work, split)
        return self._ones[key]

    def _hopeless(self, base: Split, micro_batch: int, again: str, states_bytes: float) -> bool:
        """Whether not even the fewest layers in flight leave room for the smallest states."""
        if self.thorough:
            return False
        found = self._found
        key = base.tp, base.ulysses, base.ring, micro_batch, again
        if key not in self._bytes:
            split = base.but(micro_batch=micro_batch, recompute=again)
            self._bytes[key] = layer_bytes(found.work, split)
        layers = base.layers_per_stage(found.work.model)
        least = (min(3, layers) if self._how.offloads else layers) * self._bytes[key]
        return states_bytes + least + found.cluster.workspace_bytes > found.budget_bytes

    def _chunks(self, base: Split, micro_batch: int) -> list[int]:
        """Layers of a virtual stage; 0: a whole stage."""
        work = self._found.work
        micro_batches = work.global_batch // (base.dp * micro_batch)
        per_stage = base.layers_per_stage(work.model)
        if not self._how.interleaves or base.pp == 1 or per_stage == 1:
            return [0]
        if micro_batches % base.pp:
            self._found.refused["interleaving needs micro batches in multiples of pp"] += 1
            return [0]
        return [0, *(layers for layers in divisors(per_stage) if layers < per_stage)]

    def _one(self, split: Split, parts: MicroBatch, bound: float) -> None:
        found = self._found
        cluster, work, budget = found.cluster, found.work, found.budget_bytes
        shared = shared_bytes(work, split)
        needs = memory(work, split, cluster.workspace_bytes, shared)
        lacks = needs.total - budget
        if lacks > 0 and shared.logits and self._how.can_chunk_loss(split):
            self._in_chunks(split.but(fused_loss=True), bound)
        dull = len(found.too_large) == _MOST_TOO_LARGE and bound <= found.too_large[-1].mfu
        if lacks > 0 and self._how.offloads:
            offloaded = self._offloaded(split, shared, dull and not self.thorough)
            if offloaded is not None:
                split, needs = offloaded
                lacks = needs.total - budget if split.offload_ratio == 1 else 0.0
        if lacks > 0:
            found.refused[_TOO_LITTLE] += 1
            if dull and not self.thorough:
                return
        time = step_time(cluster, work, split, parts)
        share = step_mfu(cluster, work, split, time.total)
        plan = Plan(split, needs, time, share, max(lacks, 0.0))
        if lacks > 0:
            self._too_large(plan)
        else:
            self._keep(plan)

    def _in_chunks(self, split: Split, bound: float) -> None:
        """The same with the loss in chunks, which saves memory and no time.

        It is a setting of the configuration, as the offload ratio is, and not counted as another.
        """
        refused = self._found.refused.copy()
        self._one(split, self._micro_batch(split), bound)
        self._found.refused = refused

    def _keep(self, plan: Plan) -> None:
        found, share = self._found, plan.mfu
        if share > self._worst_kept:
            found.plans.append(plan)
            if len(found.plans) > 2 * _MOST_KEPT:
                self._trim()
        for axis in _NAMED:
            key = axis, getattr(plan.split, axis)
            best = found.best_with.get(key)
            if best is None or share > best.mfu:
                found.best_with[key] = plan

    def _best_possible(self, split: Split, chunk: int, one: MicroBatch) -> float:
        """MFU if nothing but the layers, the head and the bubble took time."""
        work = self._found.work
        chunk_layers = chunk or split.layers_per_stage(work.model)
        slots = split.micro_batches(work.global_batch)
        busy = slots * (split.layers_per_stage(work.model) * one.layer_s + one.head.device_s)
        total = busy + (split.pp - 1) * chunk_layers * one.layer_s
        return step_mfu(self._found.cluster, work, split, total)

    def _known_better(self, split: Split, mfu: float) -> bool:
        """Whether the list is full of better plans and each value, ZeRO aside, has a better one."""
        best = self._found.best_with
        if mfu > self._worst_kept:
            return False
        for axis in _NAMED:
            plan = best.get((axis, getattr(split, axis)))
            if axis != "zero" and (plan is None or plan.mfu < mfu):
                return False
        return True

    def _all_stages_better(self, stages: Iterable[int], mfu: float) -> bool:
        """The same for stages of ZeRO."""
        plans = (self._found.best_with.get(("zero", stage)) for stage in stages)
        return all(plan is not None and plan.mfu >= mfu for plan in plans)

    def _offloaded(self, split: Split, shared: Shared, dull: bool) -> tuple[Split, Memory] | None:
        """With as much offload as it takes; None if the hosts do not hold that.

        Args:
            dull: what does not fit even so is not worth knowing: None then.
        """
        found = self._found
        work, workspace = found.work, found.cluster.workspace_bytes
        chunks = split.pp > 2 and self._how.offloads_chunks
        asked = split.but(offload_unit="chunk" if chunks else "layer")
        asked, enough = with_offload(work, asked, found.budget_bytes, workspace, shared)
        if dull and not enough:
            return None
        then = memory(work, asked, workspace, shared)
        if enough and not found.cluster.hosts_hold(then.offloaded, found.gpus):
            found.refused["offload beyond the host's memory"] += 1
            return None
        return asked, then

    def _too_large(self, plan: Plan) -> None:
        found = self._found
        if found.nearest is None or plan.lacks_bytes < found.nearest.lacks_bytes:
            found.nearest = plan
        found.too_large = sorted([*found.too_large, plan], key=lambda p: -p.mfu)
        del found.too_large[_MOST_TOO_LARGE:]

    def look_for_the_nearest(self, families: Iterable[Split], fixed: Mapping[str, object]) -> None:
        """Where nothing fits: what saves most on each set of degrees."""
        self.thorough = True
        saving = {
            "micro_batch": 1,
            "recompute": "full" if "full" in self._how.recompute else self._how.recompute[-1],
        }
        counted = self._found.considered, self._found.refused.copy()
        for family in families:
            self.family(family, {**saving, **fixed})
        self._found.considered, self._found.refused = counted

    def _trim(self) -> None:
        plans = self._found.plans
        plans.sort(key=_rank)
        del plans[_MOST_KEPT:]
        self._worst_kept = plans[-1].mfu

    def finish(self) -> None:
        """Sort what was kept."""
        self._found.plans.sort(key=_rank)
        del self._found.plans[_MOST_KEPT:]


def _rank(plan: Plan) -> tuple[float, ...]:
    """By MFU; among equals (0.01 % of the peak) the simpler one, with more room."""
    split = plan.split
    simple = (RECOMPUTE.index(split.recompute), split.zero, split.tp, split.pp)
    keeps = split.offload_ratio, split.fused_loss
    return (-round(plan.mfu, 4), *keeps, *simple, plan.memory.total)
