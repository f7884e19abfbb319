"""The longest sequence that trains, under every way to keep less: where the memory formulas end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_usp.errors import ConfigError
from ds_usp.planner.degree_configs import degrees, refusal
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import Memory, memory, with_offload
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import RECOMPUTE, ParallelConfig, Workload, infeasible_reason

STEP = 1024  # tokens: lengths are multiples of it
_MAX_TOKENS = 2**30  # tokens; nobody has asked for more


@dataclass(frozen=True, slots=True)
class MaxLength:
    """One way to keep less, and how far it goes.

    Args:
        split: degrees and settings; its offload ratio is the one that the longest sequence needs.
        seq_len: tokens; 0: not even ``STEP`` of them fit.
        needs: memory of the fullest stage at that length, or at ``STEP`` where nothing fits.
        limit: what ends it: ``GPU memory``, ``host memory``, or another reason.
    """

    config: ParallelConfig
    seq_len: int
    memory_needed: Memory
    limit: str


def min_workload(model: ModelShape, config: ParallelConfig) -> Workload:
    """What any split must take: a token for each rank, and micro batches that fill the stages."""
    return _work(model, config, config.sp * config.tp)


def _work(model: ModelShape, config: ParallelConfig, seq_len: int) -> Workload:
    return Workload(model, seq_len, 2 * config.pp * config.dp * config.micro_batch)


def max_lengths(
    model: ModelShape,
    base: ParallelConfig,
    cluster: Cluster,
    budget_bytes: float,
    workspace_bytes: float,
) -> list[MaxLength]:
    """For each way to recompute, without offload and with as much as it takes.

    Activations grow with the sequence and nothing shrinks, so a bisection finds the end.

    Args:
        base: the degrees; what it says of recomputation and offload does not count.
        budget_bytes: of one GPU.
        workspace_bytes: what no formula sees.
    """
    return max_lengths_over(model, [base], cluster, budget_bytes, workspace_bytes)


def max_lengths_over(
    model: ModelShape,
    bases: Sequence[ParallelConfig],
    cluster: Cluster,
    budget_bytes: float,
    workspace_bytes: float,
) -> list[MaxLength]:
    """For each way to keep less the degrees that go furthest, of several; of equals the first.

    Args:
        bases: at least one; otherwise as for :func:`longest`.
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
                if not best or search.fits_beyond(best[0].seq_len):
                    best = [search.find()]
            results += best
    return results


def all_configs(
    model: ModelShape, base: ParallelConfig, gpus: int, cluster: Cluster
) -> list[ParallelConfig]:
    """All degrees of so many GPUs that a model can have, the simplest first.

    Data parallel ranks hold sequences of their own and make none longer, so ``base.dp`` stays.

    Raises:
        ConfigError: the GPUs are no multiple of ``base.dp``, or no degrees are possible.
    """
    configs = [
        base.replace(tp=tp, ulysses=ulysses, ring=ring, pp=pp)
        for tp, ulysses, ring, pp, _ in degrees(gpus, {"dp": base.dp})
        if tp <= cluster.gpus_per_node
    ]
    smallest = [(config, min_workload(model, config)) for config in configs]
    results = [
        config
        for config, work in smallest
        if not (refusal(work, config) or infeasible_reason(work, config))
    ]
    if not results:
        why = next(filter(None, (infeasible_reason(work, config) for config, work in smallest)), "")
        raise ConfigError(f"no degrees of {gpus} GPUs are possible: {why}")
    return sorted(results, key=lambda config: (config.tp, config.pp, config.ring))


@dataclass(frozen=True, slots=True)
class _LengthSearch:
    """The search of one way's end."""

    model: ModelShape
    config: ParallelConfig
    offload: bool
    cluster: Cluster
    budget_bytes: float
    workspace_bytes: float

    def fits_beyond(self, seq_len: int) -> bool:
        """Whether a longer sequence fits."""
        return self._evaluate(seq_len + STEP).limit == ""

    def find(self) -> MaxLength:
        """Double until it fails, then halve the gap."""
        fits, fails = 0, STEP
        while fails < _MAX_TOKENS and self._evaluate(fails).limit == "":
            fits, fails = fails, 2 * fails
        while fails - fits > STEP:
            middle = (fits + fails) // 2 // STEP * STEP
            fits, fails = (middle, fails) if self._evaluate(middle).limit == "" else (fits, middle)
        beyond = self._evaluate(fails)
        return replace(self._evaluate(fits) if fits else beyond, seq_len=fits, limit=beyond.limit)

    def _evaluate(self, seq_len: int) -> MaxLength:
        """What a length needs; its limit is "" where it fits."""
        config, work = self.config, _work(self.model, self.config, seq_len)
        if self.offload:
            config, _ = with_offload(work, config, self.budget_bytes, self.workspace_bytes)
        memory_needed = memory(work, config, self.workspace_bytes)
        limit = infeasible_reason(work, config) or ""
        if memory_needed.total > self.budget_bytes:
            limit = limit or "GPU memory"
        elif not self.cluster.host_memory_fits(memory_needed.offloaded, config.gpus):
            limit = limit or "host memory"
        return MaxLength(config, seq_len, memory_needed, limit)
