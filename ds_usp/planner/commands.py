"""The commands of the planner: a dataclass each, whose fields are its flags; a process makes one
(``__main__.py``), and :meth:`Command.run` calls its ``result`` once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.planner import report
from ds_usp.planner.answer import answer, answer_json, answer_text
from ds_usp.planner.arguments import (
    BYTES,
    DTYPES,
    TOKENS,
    Count,
    CountOrZero,
    Fraction,
    Gpus,
    Positive,
    Sequences,
    ZeroStage,
    flag,
    lengths,
    tokens,
    with_settings,
)
from ds_usp.planner.diffusion import diffusion_plan, known_heads
from ds_usp.planner.max_length import LengthQuestion, all_configs
from ds_usp.planner.memory import memory
from ds_usp.planner.models import load_model
from ds_usp.planner.parallel_config import (
    ENGINES,
    FRAMEWORKS,
    RECOMPUTE,
    SCHEDULES,
    ParallelConfig,
    Workload,
    framework_caps,
    infeasible_reason,
)
from ds_usp.planner.report import ClusterFlags, Command, Result
from ds_usp.planner.search import AXES, GIB, search

_MEMORY_GIB = "of a GPU, as the device says; a plan fills 96 %% of it (default: the cluster's)"


@dataclass(frozen=True, kw_only=True)
class _ModelFlags:
    model: str = flag("built-in name, id on the hub, or a config.json")


@dataclass(frozen=True, kw_only=True)
class _SequenceFlags(_ModelFlags):
    seq_len: int = flag(f"of one sequence, {TOKENS}", type=tokens)


@dataclass(frozen=True, kw_only=True)
@with_settings
class _FusionFlags:
    fused_loss: bool = flag("a chunked loss: the full logits are never in memory", False)
    fsdp2: bool = flag("FSDP2 shards weights, gradients and moments, which are fp32", False)
    bf16_states: bool = flag("FSDP2 does, and they are bf16", False)

    def fused(self) -> dict[str, Any]:
        """The fields of a configuration that these flags state."""
        settings = {f.name: getattr(self, f.name) for f in fields(_FusionFlags)}
        if self.fsdp2 or self.bf16_states:
            settings |= {"fsdp2": True, "zero": 3}
        return settings | ({"grad_bytes": 2} if self.bf16_states else {})


@dataclass(frozen=True, kw_only=True)
class _TrainingFlags(_FusionFlags, ClusterFlags):
    """One training configuration: degrees, ZeRO stage, pipeline and gradient dtype."""

    tp: Gpus | None = flag("tensor-parallel degree (default: 1)", None)
    ulysses: Gpus | None = flag("Ulysses degree (default: 1)", None)
    ring: Gpus | None = flag("ring degree (default: 1)", None)
    pp: Gpus | None = flag("pipeline-parallel degree (default: 1)", None)
    dp: Gpus | None = flag("data-parallel degree (default: what --gpus leaves, else 1)", None)
    micro_batch: Count = flag("sequences of a replica at a time", 1)
    zero: ZeroStage = flag("ZeRO stage", 1)
    gpus: Gpus | None = flag("GPUs of all nodes; what the degrees leave is dp", None)
    layers_per_virtual_stage: CountOrZero = flag("layers; 0: all of a stage", 0)
    grad_dtype: str = flag("of summed gradients", "fp32", choices=DTYPES)
    no_tp_sequence_parallel: bool = flag(
        "tensor parallelism without Megatron's sequence parallelism", False
    )

    def training_config(self, **settings: Any) -> ParallelConfig:
        """The parallel configuration, whose dp is what the other degrees leave of ``--gpus``.

        Raises:
            ConfigError: GPUs that are no multiple of the degrees.
        """
        names = {f.name for f in fields(ParallelConfig)}
        stated = {k: v for k, v in vars(self).items() if k in names and v is not None}
        stated |= {"grad_bytes": BYTES[self.grad_dtype], **self.fused(), "dp": 1, **settings}
        config = ParallelConfig(**stated, tp_sequence=not self.no_tp_sequence_parallel)
        if self.gpus and self.gpus % config.gpus:
            raise ConfigError(
                f"--gpus {self.gpus} is not a multiple of tp {config.tp} x ulysses "
                f"{config.ulysses} x ring {config.ring} x pp {config.pp} = {config.gpus}"
            )
        return config.replace(dp=self.dp or (self.gpus or config.gpus) // config.gpus)


@dataclass(frozen=True, kw_only=True)
class MemoryCommand(_TrainingFlags, _SequenceFlags, Command):
    """bytes that one GPU needs"""

    global_batch: Count | None = flag(
        "sequences of a step (default: enough to fill the stages)", None
    )
    schedule: str = flag("of the pipeline", "1f1b", choices=SCHEDULES)
    recompute: str = flag("what backward recomputes", "none", choices=RECOMPUTE)
    offload_ratio: Fraction = flag("fraction of the activations in host memory", 0.0)
    offload_unit: str = flag("what is copied at a time", "chunk", choices=("chunk", "layer"))

    def result(self) -> Result:
        """The memory of the fullest pipeline stage; exit status 1 if it is more than a GPU has."""
        config = self.training_config()
        global_batch = self.global_batch or 2 * config.pp * config.dp * self.micro_batch
        work = Workload(load_model(self.model), self.seq_len, global_batch)
        if reason := infeasible_reason(work, config, self.gpus):
            raise ConfigError(reason)
        cluster, name = self.load_cluster()
        fullest = memory(work, config, cluster.workspace_bytes)
        content, text = report.memory_row(fullest), [name, *report.memory_text(fullest)]
        budget = cluster.budget_bytes
        content["budget_bytes"] = round(budget)
        lacking = fullest.total - budget
        if lacking <= 0:
            text.append(f"fits: a GPU has {budget / GIB:.1f} GiB")
            return Result(content, text)
        text += [f"does not fit: a GPU has {budget / GIB:.1f} GiB, {lacking / GIB:.1f} are lacking"]
        return Result(content, text, 1)


@dataclass(frozen=True, kw_only=True)
class MaxLengthCommand(_TrainingFlags, _ModelFlags, Command):
    """the longest sequence that fits on --gpus, which share it, for each way to save memory"""

    engine: str = flag(
        "the program that trains", FRAMEWORKS[0].name, choices=[caps.name for caps in FRAMEWORKS]
    )
    # None is what the base class has not: not given.
    zero: ZeroStage | None = flag(  # type: ignore[assignment]
        "ZeRO stage (default: FSDP2, or 1 where there is none)", None
    )
    memory_gib: Positive | None = flag(_MEMORY_GIB, None)
    host_memory_gib: Positive | None = flag("of a node (default: the cluster's)", None)

    def result(self) -> Result:
        """The longest sequences; exit status 1 if not even the shortest one fits.

        All GPUs share a sequence, but for data-parallel ranks that are asked for: degrees that are
        not given are those that go furthest.
        """
        model, caps = load_model(self.model), framework_caps(self.engine)
        caps = caps.for_model(model)
        sharded = {"fsdp2": True, "zero": 3} if caps.fsdp2 and self.zero is None else {}
        base = self.training_config(**sharded)
        cluster, name = self.load_cluster()
        if self.host_memory_gib is not None:
            cluster = replace(cluster, host_memory_bytes=self.host_memory_gib * GIB)
        if self.memory_gib is not None:
            cluster = replace(cluster, memory_bytes=self.memory_gib * GIB)
        axes = ("tp", "ulysses", "ring", "pp")
        fixed = {axis: getattr(self, axis) for axis in axes if getattr(self, axis)}
        fixed |= {"dp": self.dp or 1}
        if not self.gpus:  # as many as the degrees take
            fixed = dict.fromkeys(axes, 1) | fixed
        gpus = self.gpus or math.prod(fixed.values())
        configs = all_configs(model, base, gpus, cluster, caps.with_settings_of(base), fixed)
        asked = LengthQuestion(model, configs, cluster, caps)
        rows = asked.lengths()
        content = [report.max_length_row(row) for row in rows]
        text = [name, *report.max_length_text(asked, rows)]
        return Result(content, text, 0 if any(row.seq_len for row in rows) else 1)


@dataclass(frozen=True, kw_only=True)
class PlanCommand(_FusionFlags, ClusterFlags, _SequenceFlags, Command):
    """how to run a model: one plan that fits, why it, and the lines that run it"""

    # None is what the base class has not: images have no length.
    seq_len: int | None = flag(  # type: ignore[assignment]
        f"of one sequence, {TOKENS}; of all but diffusers", None, type=tokens
    )
    gpus: Gpus = flag("GPUs of all nodes")
    gpus_per_node: Gpus | None = flag("in one node (default: the cluster's)", None)
    global_batch: Sequences | None = flag("sequences of a step (default: 1)", None)
    documents: tuple[int, ...] | None = flag(
        f"lengths of the packed documents, with commas, {TOKENS}", None, type=lengths
    )
    engine: str = flag("the program that trains", ENGINES[0], choices=ENGINES)
    memory_gib: Positive | None = flag(_MEMORY_GIB, None)
    top: CountOrZero = flag("plans within the formulas' error to list in a table", 0)
    lines: bool = flag("print the lines that run the plan, and nothing else", False)
    tp: Gpus | None = flag("only plans with this tp", None)
    ulysses: Gpus | None = flag("only plans with this ulysses", None)
    ring: Gpus | None = flag("only plans with this ring", None)
    pp: Gpus | None = flag("only plans with this pp", None)
    dp: Gpus | None = flag("only plans with this dp", None)
    zero: ZeroStage | None = flag("only plans with this zero", None)
    recompute: str | None = flag("only plans with this recompute", None, choices=RECOMPUTE)
    micro_batch: Count | None = flag("only plans with this micro_batch", None)

    def result(self) -> Result:
        """The recommended plan; exit status 1 if nothing fits."""
        cluster, name = self.load_cluster()
        if self.gpus_per_node is not None:
            cluster = cluster.with_gpus_per_node(self.gpus_per_node)
        if self.engine == "diffusers":
            per_node = min(cluster.gpus_per_node, self.gpus)
            content, text = diffusion_plan(self.model, self.gpus, per_node)
            return Result(content, [content["lines"]] if self.lines else text)
        if known_heads(self.model):
            raise ConfigError(f"{self.model} makes images or videos: add --engine diffusers")
        if self.seq_len is None:
            raise ConfigError("--seq-len is missing: the tokens of one sequence, as 128K")
        model = load_model(self.model)
        work = Workload(model, self.seq_len, self.global_batch or 1, self.documents or ())
        if self.memory_gib is not None:
            cluster = replace(cluster, memory_bytes=self.memory_gib * GIB)
        fixed = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        base = ParallelConfig(**self.fused())
        caps = framework_caps(self.engine).with_settings_of(base)
        found = search(cluster, work, self.gpus, caps, fixed=fixed, base=base)
        longer = None
        if found.plans:
            twice = replace(
                work, seq_len=2 * self.seq_len, document_lengths=2 * work.document_lengths
            )
            longer = search(cluster, twice, self.gpus, caps, fixed=fixed, base=base)
        told = answer(found, longer)
        content, status = answer_json(told, self.top), 0 if told.plan else 1
        if self.lines and told.plan:
            return Result(content, [told.lines])
        alone = self.global_batch is None and self.gpus > 1
        return Result(content, [name, *answer_text(told, self.top, alone)], status)


COMMANDS: Mapping[str, type[Command]] = MappingProxyType(
    {"memory": MemoryCommand, "max-length": MaxLengthCommand, "plan": PlanCommand}
)
ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({"max-length": ("longest",)})
