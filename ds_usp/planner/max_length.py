"""The longest sequence that trains for each way to save memory: where the memory formulas end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ds_usp.errors import ConfigError
from ds_usp.planner.degree_rule import rule_degrees
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import Memory, memory, with_offload
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import (
    FrameworkCaps,
    ParallelConfig,
    Workload,
    added_words,
    degrees,
    infeasible_reason,
    length_options,
    memory_violations,
    refusal_rule,
    with_chunks_for,
)

STEP = 1024  # tokens: lengths are multiples of it
_MAX_TOKENS = 2**30


@dataclass(frozen=True, slots=True)
class MaxLength:
    """One way to save memory, and the longest sequence that it trains.

    Args:
        config: degrees and settings, with the offload ratio that the longest sequence needs.
        seq_len: tokens; 0: not even ``STEP`` of them fit.
        memory_needed: of the fullest stage at that length, or at ``STEP`` where nothing fits.
        limit: what ends it: ``GPU memory``, ``host memory``, or another reason.
        added: of :func:`length_steps`: the setting of this row that the one before has not.
    """

    config: ParallelConfig
    seq_len: int
    memory_needed: Memory
    limit: str
    added: str = ""


def shortest_workload(model: ModelShape, config: ParallelConfig) -> Workload:
    """The shortest sequence that is tried: where it does not fit, none does."""
    return _workload(model, config, STEP)


def _workload(model: ModelShape, config: ParallelConfig, seq_len: int) -> Workload:
    stages = 2 * config.pp if config.pp > 1 else 1  # enough micro batches to fill them
    return Workload(model, seq_len, stages * config.dp * config.micro_batch)


def max_lengths(
    model: ModelShape,
    bases: Sequence[ParallelConfig],
    cluster: Cluster,
    budget_bytes: float,
    workspace_bytes: float,
    framework: FrameworkCaps,
) -> list[MaxLength]:
    """Find the degrees that go furthest, for each recomputation, without and with offload.

    Memory grows with the sequence, so a bisection finds the end.

    Args:
        bases: at least one set of degrees, of equals the first is taken; their recomputation and
            offload do not count.
        budget_bytes: of one GPU.
        workspace_bytes: what no formula counts.
        framework: whose recomputation, and offload, are tried.
    """
    limits = _Limits(cluster, budget_bytes, workspace_bytes, bases[0])
    results = []
    for recompute in framework.recompute:
        configs = [base.replace(recompute=recompute, offload_ratio=0.0) for base in bases]
        if any(memory_violations(_workload(model, configs[0], _MAX_TOKENS), configs[0])):
            continue
        for offload in (False, True)[: 1 + framework.offloads]:
            results.append(limits.furthest(model, configs, offload))
    return results


def length_steps(
    model: ModelShape,
    bases: Sequence[ParallelConfig],
    cluster: Cluster,
    budget_bytes: float,
    workspace_bytes: float,
    framework: FrameworkCaps,
) -> list[MaxLength]:
    """Full recomputation with offload, then in each row one more setting that trades time for
    length: the one that goes furthest; those that make nothing longer are left out.

    Args:
        bases: as of :func:`max_lengths`, and so are the others; settings that they have stay.
    """
    limits = _Limits(cluster, budget_bytes, workspace_bytes, bases[0])
    configs = [base.replace(recompute="full", offload_ratio=0.0) for base in bases]
    offload = framework.offloads
    first = "full, offload" if offload else "full"
    steps = [replace(limits.furthest(model, configs, offload), added=first)]
    while True:
        options: list[tuple[str, list[ParallelConfig]]] = []
        if framework.can_chunk_loss(configs[0]):
            chunked = [config.replace(fused_loss=True) for config in configs]
            options.append(("loss in chunks", chunked))
        given = configs[0].replace(checkpoint_layers=bases[0].checkpoint_layers)
        long = _workload(model, given, _MAX_TOKENS)
        for setting in framework.length_settings:
            for config in length_options(long, given, setting):
                change = {setting: getattr(config, setting)}
                options.append((added_words(config, given), [c.replace(**change) for c in configs]))
        lengths = [
            (replace(limits.furthest(model, changed, offload), added=words), changed)
            for words, changed in options
        ]
        furthest = max(lengths, key=lambda each: each[0].seq_len, default=None)
        if furthest is None or furthest[0].seq_len <= steps[-1].seq_len:
            return steps
        steps.append(furthest[0])
        configs = furthest[1]


def needs_at(model: ModelShape, end: MaxLength, seq_len: int, workspace_bytes: float) -> Memory:
    """The memory of another length with the settings of a :class:`MaxLength`, all offloaded."""
    work = _workload(model, end.config, seq_len)
    config = end.config.replace(offload_ratio=1.0)
    return memory(work, with_chunks_for(work, config), workspace_bytes)


class _Limits(NamedTuple):
    """Holds what a sequence must fit into.

    Attributes:
        given: an MLP in chunks has as many as the length asks for, unless this has some already.
    """

    cluster: Cluster  # whose nodes bound host memory
    budget_bytes: float  # of a GPU
    workspace_bytes: float  # of them, what no formula counts
    given: ParallelConfig

    def furthest(
        self, model: ModelShape, configs: Sequence[ParallelConfig], offload: bool
    ) -> MaxLength:
        best: list[MaxLength] = []
        for config in configs:
            evaluate = partial(self._evaluate, model, config.replace(offload_unit="layer"), offload)
            if not best or not evaluate(best[0].seq_len + STEP).limit:
                best = [_bisect(evaluate)]
        return best[0]

    def _evaluate(
        self, model: ModelShape, config: ParallelConfig, offload: bool, seq_len: int
    ) -> MaxLength:
        """The memory that a length needs, and what refuses it: ``limit`` is "" where it fits."""
        work = _workload(model, config, seq_len)
        config = with_chunks_for(work, config, self.given)
        if offload:
            config, _ = with_offload(work, config, self.budget_bytes, self.workspace_bytes)
        needed = memory(work, config, self.workspace_bytes)
        limit = infeasible_reason(work, config) or ""
        if needed.total > self.budget_bytes:
            limit = limit or "GPU memory"
        elif not self.cluster.host_memory_fits(needed.host, config.gpus):
            limit = limit or "host memory"
        return MaxLength(config, seq_len, needed, limit)


def _bisect(evaluate: Callable[[int], MaxLength]) -> MaxLength:
    """The longest length that fits: doubles until one does not, then halves the gap."""
    low, high = 0, STEP
    while high < _MAX_TOKENS and not evaluate(high).limit:
        low, high = high, 2 * high
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        low, high = (low, middle) if evaluate(middle).limit else (middle, high)
    beyond = evaluate(high)
    return replace(evaluate(low) if low else beyond, seq_len=low, limit=beyond.limit)


def all_configs(
    model: ModelShape,
    base: ParallelConfig,
    gpus: int,
    cluster: Cluster,
    framework: FrameworkCaps,
    fixed: Mapping[str, int],
) -> list[ParallelConfig]:
    """All degrees of so many GPUs that a model and a program can have, the simplest first.

    Args:
        fixed: degrees that are given. Data-parallel ranks hold sequences of their own and make none
            longer, so ``dp`` is among them.

    Raises:
        ConfigError: no degrees are feasible.
    """
    configs, reason = [], ""
    undivided = {} if framework.divides_layers else {"tp": 1, "pp": 1}
    if any(fixed.get(axis, 1) > 1 for axis in undivided):
        raise ConfigError(f"{framework.name} has no --tp and no --pp: take --engine megatron-lm")
    cluster = cluster.with_gpus_per_node(min(gpus, cluster.gpus_per_node))
    base = base.replace(
        eager_norms=framework.eager_norms,
        tp_sequence=base.tp_sequence and framework.tp_sequence,
        unsharded_grad_reduce=framework.unsharded_grad_reduce,
    )
    for tp, ulysses, ring, pp, dp in degrees(gpus, {**fixed, **undivided}):
        if tp > cluster.gpus_per_node:
            continue
        config = base.replace(tp=tp, ulysses=ulysses, ring=ring, pp=pp, dp=dp)
        config = config.replace(schedule=framework.schedule if pp > 1 else "1f1b")
        work = _workload(model, config, _MAX_TOKENS)
        # Full recomputation goes with all other settings: what breaks a rule now always does.
        infeasible = infeasible_reason(work, config.replace(recompute="full"))
        reason = reason or infeasible or ""
        if not infeasible and (refusal_rule(work, config) is None or "ulysses" in fixed):
            configs.append(config)
    if not configs:
        raise ConfigError(f"no degrees of {gpus} GPUs are possible: {reason}")

    def simplest(config: ParallelConfig) -> tuple[object, ...]:
        rule = rule_degrees(config.sp, model.kv_heads, cluster.gpus_per_node, config.tp)
        return config.tp, config.pp, (config.ulysses, config.ring) != rule, config.ring

    return sorted(configs, key=simplest)
