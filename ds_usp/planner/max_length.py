"""The longest sequence that trains, under every way to keep less: where the memory formulas end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_usp.errors import ConfigError
from ds_usp.planner.families import degrees, refusal
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import Memory, memory, with_offload
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import RECOMPUTE, Split, Workload, impossible

STEP = 1024  # tokens: lengths are multiples of it
_MOST = 2**30  # tokens; nobody has asked for more


@dataclass(frozen=True, slots=True)
class Longest:
    """One way to keep less, and how far it goes.

    Args:
        split: degrees and settings; its offload ratio is the one that the longest sequence needs.
        seq_len: tokens; 0: not even ``STEP`` of them fit.
        needs: memory of the fullest stage at that length, or at ``STEP`` where nothing fits.
        limit: what ends it: ``GPU memory``, ``host memory``, or another reason.
    """

    split: Split
    seq_len: int
    needs: Memory
    limit: str


def shortest(model: ModelShape, split: Split) -> Workload:
    """What any split must take: a token for each rank, and micro batches that fill the stages."""
    return _work(model, split, split.sp * split.tp)


def _work(model: ModelShape, split: Split, seq_len: int) -> Workload:
    return Workload(model, seq_len, 2 * split.pp * split.dp * split.micro_batch)


def longest(
    model: ModelShape, base: Split, cluster: Cluster, budget_bytes: float, workspace_bytes: float
) -> list[Longest]:
    """For each way to recompute, without offload and with as much as it takes.

    Activations grow with the sequence and nothing shrinks, so a bisection finds the end.

    Args:
        base: the degrees; what it says of recomputation and offload does not count.
        budget_bytes: of one GPU.
        workspace_bytes: what no formula sees.
    """
    return furthest(model, [base], cluster, budget_bytes, workspace_bytes)


def furthest(
    model: ModelShape,
    bases: Sequence[Split],
    cluster: Cluster,
    budget_bytes: float,
    workspace_bytes: float,
) -> list[Longest]:
    """For each way to keep less the degrees that go furthest, of several; of equals the first.

    Args:
        bases: at least one; otherwise as for :func:`longest`.
    """
    found = []
    for recompute in RECOMPUTE:
        for offload in (False, True):
            best: list[Longest] = []
            for base in bases:
                split = base.but(recompute=recompute, offload_ratio=0.0, offload_unit="layer")
                ends = _Ends(model, split, offload, cluster, budget_bytes, workspace_bytes)
                if not best or ends.goes_beyond(best[0].seq_len):
                    best = [ends.find()]
            found += best
    return found


def every_split(model: ModelShape, base: Split, gpus: int, cluster: Cluster) -> list[Split]:
    """All degrees of so many GPUs that a model can have, the simplest first.

    Data parallel ranks hold sequences of their own and make none longer, so ``base.dp`` stays.

    Raises:
        ConfigError: the GPUs are no multiple of ``base.dp``, or no degrees are possible.
    """
    splits = [
        base.but(tp=tp, ulysses=ulysses, ring=ring, pp=pp)
        for tp, ulysses, ring, pp, _ in degrees(gpus, {"dp": base.dp})
        if tp <= cluster.gpus_per_node
    ]
    first = [(split, shortest(model, split)) for split in splits]
    found = [
        split for split, work in first if not (refusal(work, split) or impossible(work, split))
    ]
    if not found:
        why = next(filter(None, (impossible(work, split) for split, work in first)), "")
        raise ConfigError(f"no degrees of {gpus} GPUs are possible: {why}")
    return sorted(found, key=lambda split: (split.tp, split.pp, split.ring))


@dataclass(frozen=True, slots=True)
class _Ends:
    """The search of one way's end."""

    model: ModelShape
    split: Split
    offload: bool
    cluster: Cluster
    budget_bytes: float
    workspace_bytes: float

    def goes_beyond(self, seq_len: int) -> bool:
        """Whether a longer sequence fits."""
        return self._at(seq_len + STEP).limit == ""

    def find(self) -> Longest:
        """Double until it fails, then halve the gap."""
        good, bad = 0, STEP
        while bad < _MOST and self._at(bad).limit == "":
            good, bad = bad, 2 * bad
        while bad - good > STEP:
            middle = (good + bad) // 2 // STEP * STEP
            good, bad = (middle, bad) if self._at(middle).limit == "" else (good, middle)
        beyond = self._at(bad)
        return replace(self._at(good) if good else beyond, seq_len=good, limit=beyond.limit)

    def _at(self, seq_len: int) -> Longest:
        """What a length needs; its limit is "" where it fits."""
        split, work = self.split, _work(self.model, self.split, seq_len)
        if self.offload:
            split, _ = with_offload(work, split, self.budget_bytes, self.workspace_bytes)
        needs = memory(work, split, self.workspace_bytes)
        limit = impossible(work, split) or ""
        if needs.total > self.budget_bytes:
            limit = limit or "GPU memory"
        elif not self.cluster.hosts_hold(needs.offloaded, split.gpus):
            limit = limit or "host memory"
        return Longest(split, seq_len, needs, limit)
