"""The parallel configuration of a training run, and what makes one infeasible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import Degrees, Refusal
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, ORDERS
from ds_usp.planner.field_checks import (
    Count,
    CountOrZero,
    Fraction,
    ZeroStage,
    choice,
    violations,
)
from ds_usp.planner.models import ModelShape

RECOMPUTE = ("none", "gemm-last", "attention-only", "attention", "full")
CHECKPOINTED = ("attention", "full")  # those that checkpoint whole layers
PROJECTION_OVERLAP = ("off", "recompute")
PROJECTS_AGAIN = ("none", "full")  # recomputations that go with it
SCHEDULES = ("1f1b", "interleaved", "deepspeed")


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, its sequence length and global batch: what is to be trained.

    Args:
        seq_len: tokens of one sequence.
        global_batch: sequences of one step, over all ranks.
        documents: lengths of the documents that are packed into each sequence; empty: one.
    """

    model: ModelShape
    seq_len: Count
    global_batch: Count = 1
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", tuple(self.documents))
        for wrong in violations(self):
            raise ConfigError(wrong)
        window = self.model.window
        if 0 < window < self.seq_len:
            raise ConfigError(
                f"model {self.model.name} looks back {window} tokens in some layers, which is not "
                f"planned for {self.seq_len}: set its sliding_window to null to count as if all "
                "layers saw everything"
            )
        if self.documents and sum(self.documents) != self.seq_len:
            raise ConfigError(
                f"documents of {sum(self.documents)} tokens do not fill a sequence of "
                f"{self.seq_len}"
            )

    def rank_tokens(self, config: ParallelConfig) -> float:
        """Tokens of a micro batch on one rank."""
        return config.micro_batch * self.seq_len / config.sp


@dataclass(frozen=True)  # no slots: `replace` copies __dict__ at once
class ParallelConfig:
    """Degrees and settings of one run.

    Args:
        tp, ulysses, ring, pp, dp: ranks along each axis; together all GPUs.
        layers_per_virtual_stage: layers of a pipeline chunk; 0: all of a stage.
        order: which of ulysses and ring has contiguous ranks.
        zero: stage of ZeRO, over dp x ulysses x ring.
        recompute: one of :data:`RECOMPUTE`. ``gemm-last``: norms and activation functions are
            recomputed in backward, no GEMM (Kuaishou, ATC 24). ``attention-only``: the attention
            core. ``attention``: all but that and its exchanges (``--usp-recompute attention``).
            ``full``: all of a layer.
        offload_ratio: fraction of the saved activations in host memory.
        offload_unit: chunk | layer; how much is copied at once.
        tp_sequence: Megatron's sequence parallelism: norms are sharded along the sequence.
        schedule: one of :data:`SCHEDULES`; with several virtual stages it is interleaved.
        fused_activation: SwiGLU saves no output of its sigmoid.
        fused_loss: the loss is chunked; the full logits are never in memory.
        mlp_chunks: each layer's norm 2, MLP and residual are computed in so many chunks of a rank's
            tokens and again in backward (``--usp-mlp-chunks``); 0 or 1: in one.
        projection_overlap: ``recompute``: queries, keys and values exist for a chunk of heads at a
            time, and are projected and exchanged again in backward
            (``--usp-projection-overlap recompute``).
        checkpoint_layers: so many layers have one checkpoint around those that ``recompute`` makes
            (``--usp-checkpoint-layers``); 1: none.
        states_on_host: optimizer states and fp32 weights are in host memory but for the step
            (``--usp-states-on-host``).
        overlap_gradients: they are reduced under the last micro batch's backward.
        param_bytes, grad_bytes: of one element.
        unsharded_grad_reduce: in ZeRO-1 every rank all-reduces all gradients and keeps them
            unsharded until the step, as DeepSpeed's bf16 optimizer does for gradients in
            fp32 (runtime/bf16_optimizer.py of 0.19); in ZeRO-2 it all-reduces each bucket.
    """

    tp: Count = 1
    ulysses: Count = 1
    ring: Count = 1
    pp: Count = 1
    dp: Count = 1
    layers_per_virtual_stage: int = 0
    order: str = choice(ORDERS, DEFAULT_SP_ORDER)
    zero: ZeroStage = 1
    recompute: str = choice(RECOMPUTE, "none")
    micro_batch: Count = 1
    offload_ratio: Fraction = 0.0
    offload_unit: str = choice(("chunk", "layer"), "chunk")
    tp_sequence: bool = True
    schedule: str = choice(SCHEDULES, "1f1b")
    fused_activation: bool = False
    fused_loss: bool = False
    mlp_chunks: CountOrZero = 0
    projection_overlap: str = choice(PROJECTION_OVERLAP, "off")
    checkpoint_layers: Count = 1
    states_on_host: bool = False
    overlap_gradients: bool = False
    param_bytes: int = 2
    grad_bytes: int = 4
    unsharded_grad_reduce: bool = False

    def of_attention(self) -> ParallelConfig:
        """What the time of attention and of its projections depends on, the rest at defaults."""
        return ParallelConfig(
            tp=self.tp,
            ulysses=self.ulysses,
            ring=self.ring,
            order=self.order,
            micro_batch=self.micro_batch,
            param_bytes=self.param_bytes,
        )

    def replace(self, **changes: object) -> ParallelConfig:
        """A copy with other values: ``dataclasses.replace`` at a sixth of its time, which counts
        in a search of a hundred thousand configurations.

        Raises:
            TypeError: a name that is no field.
        """
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
    def heads_in_chunks(self) -> bool:
        """Whether queries, keys and values of all heads never exist at once."""
        return self.projection_overlap == "recompute"

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

    def length_settings(self) -> list[str]:
        """The settings that trade time for length, in words; none where all are off."""
        words = [f"MLP in {self.mlp_chunks} chunks"] if self.mlp_chunks > 1 else []
        words += ["heads in chunks"] if self.heads_in_chunks else []
        words += ["states on the host"] if self.states_on_host else []
        several = self.checkpoint_layers > 1
        return words + ([f"{self.checkpoint_layers} layers a checkpoint"] if several else [])

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"ulysses {self.ulysses}", f"ring {self.ring}"]
        parts += [f"pp {self.pp}", f"dp {self.dp}", f"ZeRO-{self.zero}"]
        parts.append(f"recompute {self.recompute}")
        if self.offload_ratio:
            parts.append(f"offload {self.offload_ratio:.2f}")
        parts += self.length_settings()
        return ", ".join(parts)


def infeasible_reason(
    work: Workload, config: ParallelConfig, gpus: int | None = None
) -> str | None:
    """Why a configuration cannot run, with the constraint and the numbers; None if it can."""
    return next(_violations(work, config, gpus), None)


def require_feasible(work: Workload, config: ParallelConfig, gpus: int | None = None) -> None:
    """Refuse a configuration that cannot run.

    Raises:
        ConfigError: with the constraint and the numbers.
    """
    reason = infeasible_reason(work, config, gpus)
    if reason:
        raise ConfigError(reason)


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
            f"{work.seq_len} tokens are too few for tp {config.tp} x ulysses {config.ulysses} x "
            f"ring {config.ring}: at least {ranks}",
        )
    return refusal


def _violations(work: Workload, config: ParallelConfig, gpus: int | None) -> Iterator[str]:
    """A sentence for each rule of degrees, stages, batch and schedule that the config breaks.

    Args:
        gpus: which the degrees must use up; None: as many as they take.
    """
    yield from violations(config)
    refusal = degree_refusal(work, config)
    if refusal:
        yield refusal.message
    model, tp, pp, dp = work.model, config.tp, config.pp, config.dp
    if model.layers % pp:
        yield f"{model.layers} layers do not divide into pp={pp} stages"
    per_stage, chunk = config.layers_per_stage(model), config.chunk_layers(model)
    if chunk < 1 or per_stage % chunk:
        yield (
            f"{per_stage} layers of a stage ({model.layers} / pp {pp}) do not divide into "
            f"virtual stages of {chunk}"
        )
    if gpus is not None and config.gpus != gpus:
        yield (
            f"tp {tp} x ulysses {config.ulysses} x ring {config.ring} x pp {pp} x dp {dp} = "
            f"{config.gpus} ranks, but there are {gpus} GPUs"
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
    if config.zero >= 2 and pp > 1:
        yield f"ZeRO-{config.zero} does not go with a pipeline (pp={pp}); use ZeRO-1"


def memory_violations(work: Workload, config: ParallelConfig) -> Iterator[str]:
    """A sentence for each rule of the settings that trade time for length, with its numbers behind
    the last colon."""
    tokens = work.seq_len // (config.sp * (config.tp if config.tp_sequence else 1))
    if config.mlp_chunks > tokens:
        yield f"an MLP in more chunks than tokens: {config.mlp_chunks}, a rank has {tokens}"
    if config.mlp_chunks > 1 and config.recompute == "attention-only":
        yield "no program has an MLP in chunks with recompute attention-only"
    if config.checkpoint_layers > 1 and config.recompute not in CHECKPOINTED:
        yield (
            f"several layers a checkpoint go with recompute {' or '.join(CHECKPOINTED)}, not with "
            f"{config.recompute}: there are {config.checkpoint_layers}"
        )
    if config.heads_in_chunks:
        yield from projection_violations(work.model, config)
    if config.states_on_host and config.zero == 0:
        yield "states on the host are planned for ZeRO-1 to 3, not for ZeRO-0"


def projection_violations(model: ModelShape, config: ParallelConfig) -> Iterator[str]:
    """What does not go with queries, keys and values by chunks of heads."""
    if model.qk_norm:
        yield (
            "projection overlap recompute multiplies queries and keys just before their exchange, "
            f"and {model.name} normalizes them between"
        )
    if config.tp > 1:
        yield f"projection overlap recompute multiplies whole weights: tp is {config.tp}, not 1"
    if config.sp == 1:
        yield "projection overlap recompute is for sequences on several ranks"
    if config.recompute not in PROJECTS_AGAIN:
        yield f"projection overlap recompute does not go with recompute {config.recompute}"
