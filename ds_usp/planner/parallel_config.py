"""The parallel configuration of a training run: what makes one infeasible, what frameworks can run,
and the degrees into which GPUs can be divided; for all modules of the planner."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees, Refusal, divisors, zero_refusal
from ds_usp.planner.arguments import (
    MOST_GPUS,
    Count,
    CountOrZero,
    Fraction,
    Gpus,
    ZeroStage,
    choice,
    counted,
    violations,
)
from ds_usp.planner.hardware import Cluster
from ds_usp.planner.models import ModelShape
from ds_usp.settings import LENGTH_SETTINGS, Setting

RECOMPUTE = ("none", "gemm-last", "attention-only", "attention", "full")
CHECKPOINTED = ("attention", "full")  # those that checkpoint whole layers
_TRANSFORMERS_RECOMPUTE = ("none", *CHECKPOINTED)
SCHEDULES = ("1f1b", "interleaved", "deepspeed")


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its sequence length and global batch: what is to be trained.

    Args:
        seq_len: tokens of one sequence.
        global_batch: sequences of one step, over all ranks.
        document_lengths: of the documents that are packed into each sequence; empty: one document.
            They are lengths, where ``documents`` of a mask or a layout are borders.

    Raises:
        ConfigError: a number that its type does not take, or lengths that do not fill a sequence.
    """

    model: ModelShape
    seq_len: Count
    global_batch: Count = 1
    document_lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "document_lengths", tuple(self.document_lengths))
        for wrong in violations(self):
            raise ConfigError(wrong)
        # Here, once: every formula, table of kinds and cache key below has the same model.
        object.__setattr__(self, "model", self.model.for_length(self.seq_len))
        lengths = self.document_lengths
        if lengths and (min(lengths) < 1 or sum(lengths) != self.seq_len):
            raise ConfigError(
                f"documents of {', '.join(map(str, lengths[:8]))}{', ...' * (len(lengths) > 8)} "
                f"tokens do not fill a sequence of {self.seq_len}: give lengths of 1 or more whose "
                f"sum, {sum(lengths)}, is that of the sequence"
            )

    @property
    def parts(self) -> tuple[Workload, ...]:
        """The same tokens through the layers of each kind of the model."""
        kinds = self.model.kinds
        return tuple(replace(self, model=kind) for kind in kinds) if kinds else (self,)

    def rank_tokens(self, config: ParallelConfig) -> float:
        """Tokens of a micro batch on one rank."""
        return config.micro_batch * self.seq_len / config.sp


@dataclass(frozen=True)  # no slots: `replace` copies __dict__ at once
class ParallelConfig:
    """Degrees and settings of one run.

    Args:
        tp, ulysses, ring, pp, dp: ranks along each axis; together all GPUs.
        layers_per_virtual_stage: layers of a pipeline chunk; 0: all of a stage.
        zero: stage of ZeRO, over dp x ulysses x ring.
        micro_batch: sequences that a replica (dp) computes at a time.
        recompute: one of :data:`RECOMPUTE`. ``gemm-last``: norms and activation functions are
            recomputed in backward, no GEMM (Kuaishou, ATC 24). ``attention-only``: the attention
            core. ``attention``: all but that (``--usp-recompute attention``).
            ``full``: all of a layer.
        offload_ratio: fraction of the saved activations in host memory.
        offload_unit: chunk | layer; how much is copied at once.
        tp_sequence: Megatron's sequence parallelism: norms are sharded along the sequence.
        schedule: one of :data:`SCHEDULES`; with several virtual stages it is interleaved.
        fused_activation: SwiGLU saves no output of its sigmoid.
        eager_norms: norms without biases are computed operator by operator, in fp32, as in models
            of transformers.
        fused_loss: the loss is chunked; the full logits are never in memory.
        mlp_chunks, checkpoint_layers, states_on_host: the settings of these names
            (``ds_usp.settings``); the norm before an MLP in chunks and its residual are in chunks,
            too.
        overlap_gradients: they are reduced under the last micro batch's backward.
        fsdp2: the shards of stage 3 are FSDP2's and not DeepSpeed's: weights, gradients and moments
            in fp32, each gathered and reduced in bf16.
        bf16_states: FSDP2's weights, gradients and moments are in bf16 throughout.
        param_bytes, grad_bytes: of one element.
        unsharded_grad_reduce: in ZeRO-1 every rank all-reduces all gradients and keeps them
            unsharded until the step, as DeepSpeed's bf16 optimizer does for gradients in
            fp32 (runtime/bf16_optimizer.py of 0.19); in ZeRO-2 it all-reduces each bucket.
    """

    tp: Gpus = 1
    ulysses: Gpus = 1
    ring: Gpus = 1
    pp: Gpus = 1
    dp: Gpus = 1
    layers_per_virtual_stage: int = 0
    zero: ZeroStage = 1
    recompute: str = choice(RECOMPUTE, "none")
    micro_batch: Count = 1
    offload_ratio: Fraction = 0.0
    offload_unit: str = choice(("chunk", "layer"), "chunk")
    tp_sequence: bool = True
    schedule: str = choice(SCHEDULES, "1f1b")
    fused_activation: bool = False
    eager_norms: bool = False
    fused_loss: bool = False
    mlp_chunks: CountOrZero = 0
    checkpoint_layers: Count = 1
    states_on_host: bool = False
    overlap_gradients: bool = False
    fsdp2: bool = False
    bf16_states: bool = False
    param_bytes: int = 2
    grad_bytes: int = 4
    unsharded_grad_reduce: bool = False

    def of_attention(self) -> ParallelConfig:
        """Return all that ``attention_s`` reads, which caches by it, the rest at defaults."""
        return ParallelConfig(
            tp=self.tp,
            ulysses=self.ulysses,
            ring=self.ring,
            micro_batch=self.micro_batch,
            param_bytes=self.param_bytes,
            recompute="attention" if exchanges_shards_again(self) else "none",
        )

    def replace(self, **changes: object) -> ParallelConfig:
        """A copy with other values, unchecked; TypeError for a name that is no field."""
        # `dataclasses.replace` takes six times as long: a search has a hundred thousand of these.
        copy, values = object.__new__(ParallelConfig), self.__dict__ | changes
        if len(values) > len(self.__dict__):
            unknown = [name for name in changes if name not in self.__dict__]
            raise TypeError(f"a parallel configuration has no {', '.join(unknown)}")
        copy.__dict__.update(values)
        return copy

    @property
    def sp(self) -> int:
        """Ranks that share a sequence, tp aside."""
        return self.ulysses * self.ring

    @property
    def split(self) -> tuple[int, int]:
        """Ulysses and ring degree."""
        return self.ulysses, self.ring

    @property
    def gpus(self) -> int:
        """The number of all ranks: the product of the degrees."""
        return self.tp * self.sp * self.pp * self.dp

    @property
    def zero_ranks(self) -> int:
        """Ranks that share gradients and optimizer states: dp x sp."""
        return self.dp * self.sp

    def layers_per_stage(self, model: ModelShape) -> int:
        """Layers of one pipeline stage."""
        return model.layers // self.pp

    def chunk_layers(self, model: ModelShape) -> int:
        """Layers of one virtual stage."""
        return self.layers_per_virtual_stage or self.layers_per_stage(model)

    def virtual_stages(self, model: ModelShape) -> int:
        """Virtual stages on one pipeline rank."""
        return max(1, self.layers_per_stage(model) // self.chunk_layers(model))

    def micro_batches(self, global_batch: int) -> int:
        """Micro batches of a step, at least 1."""
        return max(1, global_batch // (self.dp * self.micro_batch))

    @property
    def sharding(self) -> str:
        """The name of what shards the states of training."""
        bf16 = " in bf16" if self.bf16_states else ""
        return f"FSDP2{bf16}" if self.fsdp2 else f"ZeRO-{self.zero}"

    def length_settings(self) -> list[tuple[Setting, Any]]:
        """The settings that trade time for length and are on, with their values."""
        values = [(row, getattr(self, row.name)) for row in LENGTH_SETTINGS]
        return [(row, value) for row, value in values if row.is_used(value)]

    def length_words(self) -> list[str]:
        """The settings that trade time for length, in words; none where all are off."""
        return [row.words.format(value) for row, value in self.length_settings()]

    def parts(self) -> dict[str, str]:
        """Kind of choice -> the choice in a user's words; none where there is nothing to set."""
        split = f"Ulysses {self.ulysses} x ring {self.ring}" if self.sp > 1 else "whole sequences"
        stages = f"pipeline {self.pp}"
        if self.layers_per_virtual_stage:
            stages += f", virtual stages of {counted(self.layers_per_virtual_stage, 'layer')}"
        recompute, offload = f"recompute {self.recompute}", f"offload {self.offload_ratio:.1%}"
        parts = {
            "degrees": split,
            "tensor parallelism": self.tp > 1 and f"tensor parallel {self.tp}",
            "pipeline": self.pp > 1 and stages,
            "data parallelism": self.dp > 1 and f"data parallel {self.dp}",
            "sharding": (self.zero_ranks > 1 or self.fsdp2) and self.sharding,
            "recomputation": self.recompute != "none" and recompute,
            "loss in chunks": self.fused_loss and "loss in chunks",
            "setting for length": ", ".join(self.length_words()),
            "offload": self.offload_ratio > 0 and offload,
            "micro batch": self.micro_batch > 1 and f"micro batch {self.micro_batch}",
        }
        return {kind: text for kind, text in parts.items() if text}

    def __str__(self) -> str:
        return ", ".join(self.parts().values())


def exchanges_shards_again(config: ParallelConfig) -> bool:
    """Return whether backward brings q, k, v and the output to heads again, and saves shards."""
    return config.recompute == "attention" and config.ulysses > 1


def infeasible_reason(
    work: Workload, config: ParallelConfig, gpus: int | None = None
) -> str | None:
    """Why a configuration cannot run, with the constraint and the numbers; None if it can."""
    return next(_violations(work, config, gpus), None)


def degree_refusal(work: Workload, config: ParallelConfig) -> Refusal | None:
    """Why tp, ulysses and ring do not fit the model's heads, MLP or sequence; None if they do."""
    model, ranks = work.model, config.sp * config.tp
    refusal = Degrees(
        sp=config.sp,
        ulysses=config.ulysses,
        ring=config.ring,
        tp=config.tp,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
    ).refusal({})
    if refusal is None and work.seq_len < ranks:
        refusal = Refusal(
            "too few tokens for a rank",
            f"a sequence of {counted(work.seq_len, 'token')} is too short for tp {config.tp} x "
            f"ulysses {config.ulysses} x ring {config.ring}: at least {ranks}",
        )
    return refusal


def _violations(work: Workload, config: ParallelConfig, gpus: int | None) -> Iterator[str]:
    """A sentence for each rule of degrees, stages, batch and schedule that the config breaks.

    Args:
        gpus: which the degrees must use up; None: as many as they take.
    """
    yield from violations(config)
    if config.gpus > MOST_GPUS:
        yield f"{config}: {config.gpus:,} GPUs are more than the {MOST_GPUS:,} that are planned"
    refusal = degree_refusal(work, config)
    if refusal:
        yield refusal.message
    model, tp, pp, dp = work.model, config.tp, config.pp, config.dp
    if model.layers % pp:
        yield f"{counted(model.layers, 'layer')} cannot be divided into pp={pp} stages"
    per_stage, chunk = config.layers_per_stage(model), config.chunk_layers(model)
    if chunk < 1 or per_stage % chunk:
        yield (
            f"{counted(per_stage, 'layer')} of a stage ({model.layers} / pp {pp}) cannot be "
            f"divided into virtual stages of {chunk}"
        )
    if gpus is not None and config.gpus != gpus:
        yield (
            f"tp {tp} x ulysses {config.ulysses} x ring {config.ring} x pp {pp} x dp {dp} = "
            f"{counted(config.gpus, 'rank')}, and --gpus is {gpus}"
        )
    yield from memory_violations(work, config)
    if work.global_batch % (dp * config.micro_batch):
        yield (
            f"a global batch of {work.global_batch} does not divide among dp {dp} x micro batch "
            f"{config.micro_batch}"
        )
    if config.virtual_stages(model) > 1:
        micro_batches = config.micro_batches(work.global_batch)
        if pp == 1:
            yield "virtual stages need a pipeline: pp is 1"
        if config.schedule == "deepspeed":
            yield "DeepSpeed's pipeline has no virtual stages"
        if micro_batches % pp:
            yield (
                f"interleaving needs micro batches in multiples of pp={pp}, there are "
                f"{micro_batches}"
            )
    if unsharded := zero_refusal(config.zero, pp, bf16=False):
        yield unsharded.message


def memory_violations(work: Workload, config: ParallelConfig) -> Iterator[str]:
    """A sentence for each rule of the settings that trade time for length, with its numbers behind
    the last colon."""
    model, shards = work.model, config.sp * (config.tp if config.tp_sequence else 1)
    tokens = work.seq_len // shards
    if lacking := [] if model.is_plain else _not_in_transformers(config):
        yield f"transformers, which runs such layers, has no {', '.join(lacking)}: {model.name}"
    if config.mlp_chunks > 1 and any(part.experts for part in model.parts):
        yield f"an MLP in chunks is planned without experts: {model.name}"
    if config.mlp_chunks > tokens:
        yield f"an MLP in more chunks than tokens: {config.mlp_chunks}, a rank has {tokens}"
    if config.mlp_chunks > 1 and config.recompute == "attention-only":
        yield "no program has an MLP in chunks with recompute attention-only"
    if config.checkpoint_layers > 1 and config.recompute not in CHECKPOINTED:
        yield (
            f"several layers a checkpoint go with recompute {' or '.join(CHECKPOINTED)}, not with "
            f"{config.recompute}: there are {config.checkpoint_layers}"
        )
    if config.fsdp2 and (config.zero != 3 or config.states_on_host):
        yield f"FSDP2 is planned as stage 3, with its states on the GPU: stage {config.zero}"
    if config.bf16_states and not config.fsdp2:
        yield f"states in bf16 are FSDP2's, not those of ZeRO-{config.zero}"
    if config.states_on_host and config.zero == 0:
        yield "states on the host are planned for ZeRO-1 to 3, not for ZeRO-0"


def _not_in_transformers(config: ParallelConfig) -> list[str]:
    words = [
        f"{axis} {getattr(config, axis)}" for axis in ("tp", "pp") if getattr(config, axis) > 1
    ]
    if config.recompute not in _TRANSFORMERS_RECOMPUTE:
        words.append(f"recompute {config.recompute}")
    used = config.length_settings()
    return words + [row.flag for row, _ in used if "transformers" not in row.programs]


# ------------------------------------------------------------------ what training frameworks can do


_MLP_CHUNK_TOKENS = 16384  # matrix products over so many reach the rate of longer ones
_GROUPS = (2, 4, 8)  # layers a checkpoint that are tried


def mlp_chunks_for(work: Workload, config: ParallelConfig) -> int:
    """Chunks of an MLP, as few as leave no chunk too many tokens, and at least 2."""
    return max(2, math.ceil(work.rank_tokens(config) / _MLP_CHUNK_TOKENS))


def with_chunks_for(
    work: Workload, config: ParallelConfig, asked: ParallelConfig | None = None
) -> ParallelConfig:
    """The config with as many chunks of an MLP as the length asks for, where it has several.

    Args:
        asked: whose number of chunks stays.
    """
    if config.mlp_chunks <= 1 or (asked and asked.mlp_chunks > 1):
        return config
    return config.replace(mlp_chunks=mlp_chunks_for(work, config))


def with_setting(work: Workload, config: ParallelConfig, setting: str) -> list[ParallelConfig]:
    """The config with one of ``LENGTH_SETTINGS`` switched on, as searches do one by one; several
    where it has a number; none where it is on already, or the model or the config excludes it.

    Raises:
        ConfigError: a setting that has no way to be switched on here.
    """
    if setting == "mlp_chunks":
        chunks = mlp_chunks_for(work, config)
        experts = any(part.experts for part in work.model.parts)
        refused = config.mlp_chunks > 1 or chunks > work.rank_tokens(config) or experts
        return [] if refused else [config.replace(mlp_chunks=chunks)]
    if setting == "states_on_host":
        refused = config.states_on_host or config.zero == 0 or config.fsdp2
        return [] if refused else [config.replace(states_on_host=True)]
    if setting == "checkpoint_layers":
        refused = config.checkpoint_layers > 1 or config.recompute not in CHECKPOINTED
        layers = config.chunk_layers(work.model)
        sizes = () if refused else tuple(size for size in _GROUPS if size <= layers)
        return [config.replace(checkpoint_layers=size) for size in sizes]
    raise ConfigError(f"the planner does not know how to switch {setting} on: add it here")


@dataclass(frozen=True, slots=True)
class FrameworkCaps:
    """The settings that the program that trains has.

    Args:
        zero: stages of ZeRO; in a pipeline those that ``zero_refusal`` leaves.
        schedule: of its pipeline, without virtual stages.
        interleaves: it has virtual stages.
        offloads: saved activations can go to host memory, a layer at a time.
        chunks_loss: it can compute the loss in chunks, without a pipeline.
        documents_in_pipeline: it keeps packed documents apart in a pipeline.
        tp_sequence: Megatron's sequence parallelism goes with the others.
        fsdp2: FSDP2 can shard its states.
        eager_norms: of :class:`ParallelConfig`.
        unsharded_grad_reduce: of :class:`ParallelConfig`.
        divides_layers: it has tensor and pipeline parallelism.
        length_settings: names of those of ``LENGTH_SETTINGS`` that the search may switch on.
    """

    name: str  # of ``--engine``
    zero: tuple[int, ...]
    recompute: tuple[str, ...]  # what it can compute again
    schedule: str
    interleaves: bool
    offloads: bool
    chunks_loss: bool = False
    documents_in_pipeline: bool = True
    tp_sequence: bool = True
    fsdp2: bool = False
    eager_norms: bool = False
    unsharded_grad_reduce: bool = False
    divides_layers: bool = True
    length_settings: tuple[str, ...] = ()

    def can_chunk_loss(self, config: ParallelConfig) -> bool:
        """Whether a run with full logits could chunk its loss instead."""
        return self.chunks_loss and config.pp == 1 and not config.fused_loss

    def not_in_pipeline(self, work: Workload, config: ParallelConfig) -> str:
        """Why a run cannot have a pipeline, as a rule without numbers; "" if it can."""
        if config.fused_loss and self.chunks_loss:
            return f"{self.name} has no chunked loss in a pipeline"
        if work.document_lengths and not self.documents_in_pipeline:
            return f"{self.name} has no packed documents in a pipeline"
        return ""

    def with_settings_of(self, config: ParallelConfig) -> FrameworkCaps:
        """Itself, if it has the settings of a config that trade time for length, its loss and what
        shards its states.

        Raises:
            ConfigError: which it lacks.
        """
        used = config.length_settings()
        lacking = [row.name for row, _ in used if self.name not in row.programs]
        lacking += ["fused_loss"] if config.fused_loss and not self.chunks_loss else []
        lacking += ["fsdp2"] if config.fsdp2 and not self.fsdp2 else []
        if lacking:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in lacking)
            raise ConfigError(f"{self.name} has no {names}: leave it out, or take another --engine")
        return self

    def fixed_degrees(self, fixed: Mapping[str, object]) -> dict[str, object]:
        """The degrees that are given, and those that the program does not divide.

        Raises:
            ConfigError: given ones that it has not.
        """
        if self.divides_layers:
            return {**fixed}
        if flags := [f"--{axis}" for axis in ("tp", "pp") if fixed.get(axis) not in (None, 1)]:
            raise ConfigError(
                f"{self.name} has no {' and '.join(flags)}: leave it out, or take "
                "--engine megatron-lm or megatron-deepspeed"
            )
        return {**fixed, "tp": 1, "pp": 1}

    def settings_of(self, config: ParallelConfig) -> ParallelConfig:
        """The config as the program computes it."""
        return config.replace(
            unsharded_grad_reduce=self.unsharded_grad_reduce,
            tp_sequence=config.tp_sequence and self.tp_sequence,
            eager_norms=self.eager_norms,
        )

    def for_model(self, model: ModelShape) -> FrameworkCaps:
        """Itself, if it runs the model's layers: experts, windows and layers that carry a state
        are planned as transformers runs them.

        Raises:
            ConfigError: another program than transformers.
        """
        if model.is_plain or self.name == "transformers":
            return self
        raise ConfigError(
            f"the layers of {model.name} are planned as transformers runs them, not for "
            f"{self.name}: leave --engine out"
        )

    def refusal(self, config: ParallelConfig, axis: str, value: object) -> str:
        """Why these degrees do not go with a value of another axis, as a short heading."""
        if axis == "micro_batch":
            return f"micro batch {value} does not divide the sequences of a replica"
        if axis == "zero" and value in self.zero:
            shares = config.zero_ranks > 1
            refusal = zero_refusal(value, config.pp, bf16=False) if shares else None
            return refusal.rule if refusal else f"ZeRO-{value} has no ranks to share with"
        return f"{self.name} has no " + (f"ZeRO-{value}" if axis == "zero" else f"{axis} {value}")


def _caps(name: str, **facts: Any) -> FrameworkCaps:
    names = tuple(row.name for row in LENGTH_SETTINGS if name in row.programs)
    return FrameworkCaps(name, length_settings=names, **facts)


# ZeRO-0 of bf16 weights sums gradients in bf16, and plans count fp32.
_DEEPSPEED: Mapping[str, Any] = MappingProxyType(
    {
        "zero": (1, 2, 3),
        "schedule": "deepspeed",
        "interleaves": False,
        "offloads": True,
        "chunks_loss": True,
        "documents_in_pipeline": False,
        "tp_sequence": False,
        "unsharded_grad_reduce": True,
    }
)
_OF_MEGATRON_DEEPSPEED = ("none", "gemm-last", "attention", "full")
FRAMEWORKS = (
    _caps(
        "transformers",  # enable or attach, under FSDP2 or DeepSpeed
        recompute=_TRANSFORMERS_RECOMPUTE,
        divides_layers=False,
        fsdp2=True,
        eager_norms=True,
        **_DEEPSPEED,
    ),
    _caps(
        "megatron-lm",  # under the patches: --usp-recompute attention beside its own
        zero=(0, 1),
        recompute=("none", "attention-only", "attention", "full"),
        schedule="1f1b",
        interleaves=True,
        offloads=False,
    ),
    _caps("megatron-deepspeed", recompute=_OF_MEGATRON_DEEPSPEED, **_DEEPSPEED),
    _caps("trainer", recompute=_OF_MEGATRON_DEEPSPEED, divides_layers=False, **_DEEPSPEED),
)
ENGINES = (*(caps.name for caps in FRAMEWORKS), "diffusers")


def framework_caps(name: str) -> FrameworkCaps:
    """A framework by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    for caps in FRAMEWORKS:
        if caps.name == name:
            return caps
    raise ConfigError(f"no engine {name!r}; there are {', '.join(e.name for e in FRAMEWORKS)}")


# ------------------------------------------------------------------ degrees
# Into which GPUs can be divided, and the rules that refuse others.


_T = TypeVar("_T")


def degree_configs(
    cluster: Cluster,
    work: Workload,
    gpus: int,
    framework: FrameworkCaps,
    fixed: Mapping[str, object],
    base: ParallelConfig,
    refused: Counter[str],
) -> Iterator[ParallelConfig]:
    """Configurations whose degrees multiply to the GPUs and fit the model and the batch.

    Args:
        fixed: values of tp, ulysses, ring, pp and dp that are not searched; others are ignored.
        base: the other settings.
        refused: rule -> how many it refused; updated.

    Raises:
        ConfigError: no degrees have the fixed values.
    """
    model, defaults = work.model, framework.settings_of(base)
    for tp, ulysses, ring, pp, dp in degrees(gpus, framework.fixed_degrees(fixed)):
        config = defaults.replace(tp=tp, ulysses=ulysses, ring=ring)
        reason = "tp beyond a node" if tp > cluster.gpus_per_node else refusal_rule(work, config)
        if reason:
            refused[reason] += 1
        elif model.layers % pp:
            refused["layers do not divide into stages"] += 1
        elif pp > 1 and framework.not_in_pipeline(work, base):
            refused[framework.not_in_pipeline(work, base)] += 1
        elif work.global_batch % dp:
            refused["the global batch does not divide among dp"] += 1
        else:
            yield config.replace(pp=pp, dp=dp, overlap_gradients=pp == 1)


def degrees(gpus: int, fixed: Mapping[str, object]) -> list[tuple[int, ...]]:
    """(tp, ulysses, ring, pp, dp) whose product is the number of GPUs.

    Raises:
        ConfigError: none has the fixed values, or more GPUs than are searched.
    """
    if gpus > MOST_GPUS:
        raise ConfigError(f"{gpus:,} GPUs are more than the {MOST_GPUS:,} that are searched")
    prefixes: list[tuple[int, ...]] = [()]
    for axis in ("tp", "ulysses", "ring", "pp"):
        prefixes = [
            (*prefix, degree)
            for prefix in prefixes
            for degree in values_of(fixed, axis, divisors(gpus // math.prod(prefix)))
        ]
    combinations = [(*prefix, gpus // math.prod(prefix)) for prefix in prefixes]
    combinations = [
        combination for combination in combinations if fixed.get("dp") in (None, combination[-1])
    ]
    if not combinations:
        raise ConfigError(
            f"no configuration of {counted(gpus, 'GPU')} has {fixed_text(fixed)}: degrees "
            "multiply to the number of GPUs; leave one out"
        )
    return combinations


def fixed_text(fixed: Mapping[str, object], base: ParallelConfig | None = None) -> str:
    """The fixed axes, and the settings of ``base`` that trade time for length, for a message."""
    words = [f"{axis} {value}" for axis, value in fixed.items()]
    return ", ".join([*words, *(base.length_words() if base else [])])


def refusal_rule(work: Workload, config: ParallelConfig) -> str | None:
    """Why tp, ulysses and ring are not searched, without numbers, to count by."""
    refusal = degree_refusal(work, config)
    if refusal:
        return refusal.rule
    unequal = work.model.heads // config.tp % config.ulysses
    return "ulysses leaves ranks with unequal heads" if unequal else None


def values_of(fixed: Mapping[str, object], axis: str, values: Iterable[_T]) -> list[_T]:
    """The values of an axis that ``fixed`` allows."""
    return [value for value in values if fixed.get(axis) in (None, value)]
