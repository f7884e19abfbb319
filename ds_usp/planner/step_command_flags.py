"""Flags of ``ds-usp explain`` that say which step is explained."""

from __future__ import annotations

from dataclasses import dataclass

from ds_usp.geometry.layout import DEFAULT_SP_ORDER, ORDERS
from ds_usp.planner.arguments import flag, tokens
from ds_usp.planner.attention_schedule import OFF, PROJECTIONS
from ds_usp.planner.command_flags import TOKENS
from ds_usp.planner.explain_step import explain_step, settings_lines, step_json, step_rows
from ds_usp.planner.field_checks import Count, ZeroStage
from ds_usp.planner.frameworks import FRAMEWORKS, framework_caps
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.model_files import load_model
from ds_usp.planner.parallel_config import (
    RECOMPUTE,
    ParallelConfig,
    Workload,
    require_feasible,
)
from ds_usp.removed_settings import kept_value

# Of an attention call, too.
SHARED_FLAGS = frozenset(
    {"seq_len", "batch", "order", "ulysses_degree", "ring_degree", "projections"}
)


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """A model and its degrees; those that an attention call has too, and those of a step alone."""

    seq_len: int = flag(f"of one sequence, {TOKENS}", type=tokens)
    batch: Count = flag("sequences of a micro batch", 1)
    order: str = flag("whose ranks are contiguous", DEFAULT_SP_ORDER, choices=ORDERS)
    ulysses_degree: Count = flag("Ulysses degree", 1)
    ring_degree: Count = flag("ring degree", 1)
    projections: str = flag(
        "the products before and after attention: not in it, or chunk by chunk under its "
        "exchanges, and again in backward",
        OFF,
        choices=PROJECTIONS,
        type=kept_value("--projections"),
    )
    model: str | None = flag(
        "explain a step of it: built-in name, FILE.json:NAME, HuggingFace config.json", None
    )
    tp: Count = flag("tensor-parallel degree of a step", 1)
    pp: Count = flag("pipeline-parallel degree of a step", 1)
    dp: Count = flag("data-parallel degree of a step", 1)
    zero: ZeroStage = flag("ZeRO stage of a step", 1)
    recompute: str = flag("what backward recomputes in a step", "none", choices=RECOMPUTE)
    global_batch: Count | None = flag("sequences of a step (default: one micro batch each)", None)
    engine: str = flag(
        "whose reduction of gradients a step has",
        "megatron-deepspeed",
        choices=[caps.name for caps in FRAMEWORKS],
    )

    def explain_step(self, cluster: Cluster) -> tuple[list[str], dict[str, object]]:
        """The step as lines, and as what ``--json`` prints.

        Raises:
            ConfigError: degrees that do not fit the model.
        """
        caps = framework_caps(self.engine)
        config = ParallelConfig(
            tp=self.tp,
            ulysses=self.ulysses_degree,
            ring=self.ring_degree,
            pp=self.pp,
            dp=self.dp,
            order=self.order,
            zero=self.zero,
            recompute=self.recompute,
            micro_batch=self.batch,
            tp_sequence=caps.tp_sequence,
            schedule=caps.schedule if self.pp > 1 else "1f1b",
            overlap_gradients=self.pp == 1,
            grad_bytes=caps.grad_bytes,
            unsharded_grad_reduce=caps.unsharded_grad_reduce,
        )
        sequences = self.global_batch or self.batch * self.dp * self.pp
        work = Workload(load_model(self.model or ""), self.seq_len, sequences)
        require_feasible(work, config)
        priced = cluster, work, config, self.projections
        content = step_json(*step_rows(*priced))
        content["settings"] = [*settings_lines(cluster, work, config)]
        return explain_step(*priced), content
