"""The longest sequence that trains for each way to save memory: where the memory formulas end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_usp.errors import ConfigError
from ds_usp.planner.degree_configs import degrees, refusal_rule
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import Memory, memory, with_offload
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import RECOMPUTE, ParallelConfig, Workload, infeasible_reason

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
    """

    config: ParallelConfig
    seq_len: int
    memory_needed: Memory
    limit: str


def min_workload(model: ModelShape, config: ParallelConfig) -> Workload:
    """The shortest workload: a token for each rank, micro batches that fill the stages."""
    return _workload(model, config, config.sp * config.tp)


def _workload(model: ModelShape, config: ParallelConfig, seq_len: int) -> Workload:
    return Workload(model, seq_len, 2 * config.pp * config.dp * config.micro_batch)


def max_lengths(
    model: ModelShape,
    bases: Sequence[ParallelConfig],
    cluster: Cluster,
    budget_bytes: float,
    workspace_bytes: float,
) -> list[MaxLength]:
    """For each kind of recomputation, without and with offload, the degrees that go furthest.

    Memory grows with the sequence, so a bisection finds the end.

    Args:
        bases: at least one set of degrees, of equals the first is taken; their recomputation and
            offload do not count.
        budget_bytes: of one GPU.
        workspace_bytes: what no formula counts.
    """
    results = []
    for recompute in RECOMPUTE:
        for offload in (False, True):
            best: list[MaxLength] = []
            for base in bases:
                config = base.replace(recompute=recompute, offload_ratio=0.0, offload_unit="layer")
                search = _LengthSearch(
                    model, config, offload, cluster, budget_bytes, workspace_bytes
                )
                if not best or search.fits(best[0].seq_len + STEP):
                    best = [search.find()]
            results += best
    return results


def all_configs(
    model: ModelShape, base: ParallelConfig, gpus: int, cluster: Cluster
) -> list[ParallelConfig]:
    """All degrees of so many GPUs that a model can have, the simplest first.

    Data-parallel ranks hold sequences of their own and make none longer, so ``base.dp`` stays.

    Raises:
        ConfigError: the GPUs are no multiple of ``base.dp``, or no degrees are feasible.
    """
    configs, reason = [], ""
    for tp, ulysses, ring, pp, _ in degrees(gpus, {"dp": base.dp}):
        if tp > cluster.gpus_per_node:
            continue
        config = base.replace(tp=tp, ulysses=ulysses, ring=ring, pp=pp)
        work = min_workload(model, config)
        infeasible = infeasible_reason(work, config)
        reason = reason or infeasible or ""
        if not (infeasible or refusal_rule(work, config)):
            configs.append(config)
    if not configs:
        raise ConfigError(f"no degrees of {gpus} GPUs are possible: {reason}")
    return sorted(configs, key=lambda config: (config.tp, config.pp, config.ring))


@dataclass(frozen=True, slots=True)
class _LengthSearch:
    """The bisection for one configuration, with or without offload."""

    model: ModelShape
    config: ParallelConfig
    offload: bool
    cluster: Cluster
    budget_bytes: float
    workspace_bytes: float

    def fits(self, seq_len: int) -> bool:
        """Whether a length trains."""
        return not self._evaluate(seq_len).limit

    def find(self) -> MaxLength:
        """The longest length that trains: doubles until one fails, then halves the gap."""
        low, high = 0, STEP
        while high < _MAX_TOKENS and self.fits(high):
            low, high = high, 2 * high
        while high - low > STEP:
            middle = (low + high) // 2 // STEP * STEP
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        beyond = self._evaluate(high)
        return replace(self._evaluate(low) if low else beyond, seq_len=low, limit=beyond.limit)

    def _evaluate(self, seq_len: int) -> MaxLength:
        """The memory that a length needs, and what refuses it: ``limit`` is "" where it fits."""
        config, work = self.config, _workload(self.model, self.config, seq_len)
        if self.offload:
            config, _ = with_offload(work, config, self.budget_bytes, self.workspace_bytes)
        needed = memory(work, config, self.workspace_bytes)
        limit = infeasible_reason(work, config) or ""
        if needed.total > self.budget_bytes:
            limit = limit or "GPU memory"
        elif not self.cluster.host_memory_fits(needed.offloaded, config.gpus):
            limit = limit or "host memory"
        return MaxLength(config, seq_len, needed, limit)
