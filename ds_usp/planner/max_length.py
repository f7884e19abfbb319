"""The longest sequence that trains for each way to save memory: where the memory formulas end
(``ds-usp max-length``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import counted
from ds_usp.planner.degree_rule import rule_degrees
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.memory import Memory, memory, with_offload
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import (
    FrameworkCaps,
    ParallelConfig,
    Workload,
    degrees,
    infeasible_reason,
    memory_violations,
    refusal_rule,
    with_chunks_for,
    with_setting,
)
from ds_usp.settings import LENGTH_SETTINGS

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
        added: the setting that trades time for length and that the row before has not, or "".
    """

    config: ParallelConfig
    seq_len: int
    memory_needed: Memory
    limit: str
    added: str = ""


@dataclass(frozen=True)
class LengthQuestion:
    """Asks how long a sequence can be, for each way to save memory.

    Args:
        model: whose sequences they are.
        bases: at least one set of degrees, of equals the first is taken; their recomputation and
            offload do not count, settings that they have stay.
        cluster: whose nodes bound host memory.
        framework: whose recomputation, offload and settings are tried.
    """

    model: ModelShape
    bases: Sequence[ParallelConfig]
    cluster: Cluster
    framework: FrameworkCaps

    def workload(self, config: ParallelConfig, seq_len: int = STEP) -> Workload:
        """A step of sequences of a length: where the shortest does not fit, none does."""
        stages = 2 * config.pp if config.pp > 1 else 1  # enough micro batches to fill them
        return Workload(self.model, seq_len, stages * config.dp * config.micro_batch)

    def lengths(self) -> list[MaxLength]:
        """Find the degrees that go furthest, for each recomputation, without and with offload; then
        with one more setting in each row that trades time for length.
        """
        results = []
        for recompute in self.framework.recompute:
            configs = [x.replace(recompute=recompute, offload_ratio=0.0) for x in self.bases]
            if any(memory_violations(self.workload(configs[0], _MAX_TOKENS), configs[0])):
                continue
            for offload in (False, True)[: 1 + self.framework.offloads]:
                results.append(self._furthest(configs, offload))
        return [*results, *self._with_settings(results[-1])]

    def _with_settings(self, longest: MaxLength) -> Iterator[MaxLength]:
        """Add to the way that goes furthest the setting that makes it the longest, then the next
        one; those that make nothing longer are left out."""
        saving = {"recompute": longest.config.recompute, "offload_ratio": 0.0}
        configs = [base.replace(**saving) for base in self.bases]
        while True:
            # Words, field and value of each setting that is left. Behind a checkpoint of two
            # layers come those of four.
            single = configs[0].replace(checkpoint_layers=self.bases[0].checkpoint_layers)
            work, options = self.workload(single, _MAX_TOKENS), list[tuple[str, str, object]]()
            if self.framework.can_chunk_loss(single):
                options.append(("loss in chunks", "fused_loss", True))
            for row in LENGTH_SETTINGS:
                if row.name in self.framework.length_settings:
                    changed = with_setting(work, single, row.name)
                    options += [(row.words, row.name, getattr(x, row.name)) for x in changed]
            ends = []
            for words, field, value in options:
                changed = [config.replace(**{field: value}) for config in configs]
                end = self._furthest(changed, self.framework.offloads)
                text = words.format(getattr(end.config, field))
                ends.append((replace(end, added=text), changed))
            furthest = max(ends, key=lambda each: each[0].seq_len, default=None)
            if furthest is None or furthest[0].seq_len <= longest.seq_len:
                return
            longest, configs = furthest
            yield longest

    def _furthest(self, configs: Sequence[ParallelConfig], offload: bool) -> MaxLength:
        """The longest sequence of any of these degrees; of equals the first."""
        best: list[MaxLength] = []
        for config in configs:
            evaluate = partial(self._evaluate, config.replace(offload_unit="layer"), offload)
            if not best or not evaluate(best[0].seq_len + STEP).limit:
                best = [_bisect(evaluate)]
        return best[0]

    def _evaluate(self, config: ParallelConfig, offload: bool, seq_len: int) -> MaxLength:
        """The memory that a length needs, and what refuses it: ``limit`` is "" where it fits."""
        work = self.workload(config, seq_len)
        config = with_chunks_for(work, config, self.bases[0])
        budget, workspace = self.cluster.budget_bytes, self.cluster.workspace_bytes
        if offload:
            config, _ = with_offload(work, config, budget, workspace)
        needed = memory(work, config, workspace)
        limit = infeasible_reason(work, config) or ""
        if needed.total > budget:
            limit = limit or "GPU memory"
        elif not self.cluster.host_memory_fits(needed.host, config.gpus):
            limit = limit or "host memory"
        return MaxLength(config, seq_len, needed, limit)


def _bisect(evaluate: Callable[[int], MaxLength]) -> MaxLength:
    """The longest length that fits, as memory grows with it: doubles until one does not, then
    halves the gap."""
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
    cluster = cluster.with_gpus_per_node(min(gpus, cluster.gpus_per_node))
    base = framework.settings_of(base)
    for tp, ulysses, ring, pp, dp in degrees(gpus, framework.fixed_degrees(fixed)):
        if tp > cluster.gpus_per_node:
            continue
        config = base.replace(tp=tp, ulysses=ulysses, ring=ring, pp=pp, dp=dp)
        config = config.replace(schedule=framework.schedule if pp > 1 else "1f1b")
        # Micro batches that fill a pipeline, and more tokens than any rule asks for.
        work = Workload(model, _MAX_TOKENS, 2 * pp * dp * config.micro_batch)
        # Full recomputation goes with all other settings: what breaks a rule now always does.
        infeasible = infeasible_reason(work, config.replace(recompute="full"))
        reason = reason or infeasible or ""
        # Degrees that a search leaves out, such as those of unequal heads, are there if asked for.
        if not infeasible and (refusal_rule(work, config) is None or "ulysses" in fixed):
            configs.append(config)
    if not configs:
        raise ConfigError(f"no degrees of {counted(gpus, 'GPU')} are possible: {reason}")

    def simplest(config: ParallelConfig) -> tuple[object, ...]:
        rule = rule_degrees(config.sp, model.kv_heads, cluster.gpus_per_node, config.tp)
        return config.tp, config.pp, (config.ulysses, config.ring) != rule, config.ring

    return sorted(configs, key=simplest)
