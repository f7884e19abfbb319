"""How a training run is split over ranks, and what makes a split impossible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, ORDERS
from ds_usp.planner.models import ModelShape

RECOMPUTE = ("none", "gemm-last", "attention-only", "attention", "full")
SCHEDULES = ("1f1b", "interleaved", "deepspeed")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is to be trained.

    Args:
        seq_len: tokens of one sequence.
        global_batch: sequences of one step, over all ranks.
        documents: lengths of the documents that are packed into each sequence; empty: one.
    """

    model: ModelShape
    seq_len: int
    global_batch: int = 1
    documents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "documents", tuple(self.documents))
        for name in ("seq_len", "global_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
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


@dataclass(frozen=True)  # no slots: `but` copies the whole of it at once
class ParallelConfig:
    """Degrees and settings of one run.

    Args:
        tp, ulysses, ring, pp, dp: ranks along each axis; together all GPUs.
        layers_per_virtual_stage: layers of a pipeline chunk; 0: all of a stage.
        order: which of ulysses and ring has its ranks next to each other.
        zero: stage of ZeRO, over dp x ulysses x ring.
        recompute: one of :data:`RECOMPUTE`. ``gemm-last``: norms and activation functions again in
            backward, no matrix product (Kuaishou, ATC 24). ``attention-only``: the attention
            core. ``attention``: all but that and its exchanges (``--usp-recompute attention``).
            ``full``: whole layers.
        offload_ratio: share of the saved activations that goes to host memory.
        offload_unit: chunk | layer; how much comes and goes at once.
        tp_sequence: Megatron's sequence parallelism beside tp: norms are cut along the sequence.
        schedule: one of :data:`SCHEDULES`; with several virtual stages it is interleaved.
        fused_activation: SwiGLU saves no output of its sigmoid.
        fused_loss: the loss is computed in chunks; the logits are never held whole.
        overlap_gradients: they are reduced under the last micro batch's backward.
        param_bytes, grad_bytes: of one element.
        whole_reduction: in ZeRO-1 every rank reduces all gradients and keeps them as backward made
            them until the step, as DeepSpeed's bf16 optimizer does where gradients are summed in
            fp32 (runtime/bf16_optimizer.py of 0.19).
    """

    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    pp: int = 1
    dp: int = 1
    layers_per_virtual_stage: int = 0
    order: str = DEFAULT_SP_ORDER
    zero: int = 1
    recompute: str = "none"
    micro_batch: int = 1
    offload_ratio: float = 0.0
    offload_unit: str = "chunk"
    tp_sequence: bool = True
    schedule: str = "1f1b"
    fused_activation: bool = False
    fused_loss: bool = False
    overlap_gradients: bool = False
    param_bytes: int = 2
    grad_bytes: int = 4
    unsharded_grad_reduce: bool = False

    def replace(self, **changes: object) -> ParallelConfig:
        """This split with other values: ``dataclasses.replace`` at a sixth of its time, which a
        search of a hundred thousand splits feels.

        Raises:
            TypeError: a name that no split has.
        """
        copy, values = object.__new__(ParallelConfig), self.__dict__ | changes
        if len(values) > len(self.__dict__):
            unknown = [name for name in changes if name not in self.__dict__]
            raise TypeError(f"a split has no {', '.join(unknown)}")
        copy.__dict__.update(values)
        return copy

    @property
    def sp(self) -> int:
        """Ranks that share a sequence, tp aside."""
        return self.ulysses * self.ring

    @property
    def gpus(self) -> int:
        """All ranks."""
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

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"ulysses {self.ulysses}", f"ring {self.ring}"]
        parts += [f"pp {self.pp}", f"dp {self.dp}", f"ZeRO-{self.zero}"]
        parts.append(f"recompute {self.recompute}")
        if self.offload_ratio:
            parts.append(f"offload {self.offload_ratio:.2f}")
        return ", ".join(parts)


def infeasible_reason(
    work: Workload, config: ParallelConfig, gpus: int | None = None
) -> str | None:
    """Why a split cannot be, as text that names the constraint and the numbers; None if it can."""
    return next(_violations(work, config, gpus), None)


def require_feasible(work: Workload, config: ParallelConfig, gpus: int | None = None) -> None:
    """Refuse a split that cannot be.

    Raises:
        ConfigError: with the constraint and the numbers.
    """
    why = infeasible_reason(work, config, gpus)
    if why:
        raise ConfigError(why)


def _violations(work: Workload, config: ParallelConfig, gpus: int | None) -> Iterator[str]:
    yield from _range_violations(config)
    yield from _head_violations(work.model, config)
    model, seq_len = work.model, work.seq_len
    if seq_len < config.sp * config.tp:
        yield (
            f"{seq_len} tokens are too few for tp {config.tp} x ulysses {config.ulysses} x ring "
            f"{config.ring}: at least {config.sp * config.tp}"
        )
    if model.layers % config.pp:
        yield f"{model.layers} layers do not divide into pp={config.pp} stages"
    per_stage, chunk = config.layers_per_stage(model), config.chunk_layers(model)
    if chunk < 1 or per_stage % chunk:
        yield (
            f"{per_stage} layers of a stage ({model.layers} / pp {config.pp}) do not divide into "
            f"virtual stages of {chunk}"
        )
    if gpus is not None and config.gpus != gpus:
        yield (
            f"tp {config.tp} x ulysses {config.ulysses} x ring {config.ring} x pp {config.pp} x dp "
            f"{config.dp} = {config.gpus} ranks, but there are {gpus} GPUs"
        )
    if work.global_batch % (config.dp * config.micro_batch):
        yield (
            f"a global batch of {work.global_batch} does not divide among dp {config.dp} x micro "
            f"batch {config.micro_batch}"
        )
    micro_batches = config.micro_batches(work.global_batch)
    if config.virtual_stages(model) > 1:
        if config.pp == 1:
            yield "virtual stages need a pipeline: pp is 1"
        if config.schedule == "deepspeed":
            yield "DeepSpeed's pipeline has no virtual stages"
        if micro_batches % config.pp:
            yield (
                f"interleaving needs micro batches in multiples of pp={config.pp}, there are "
                f"{micro_batches}"
            )
    if config.zero >= 2 and config.pp > 1:
        yield f"ZeRO-{config.zero} does not go with a pipeline (pp={config.pp}); use ZeRO-1"


def _range_violations(config: ParallelConfig) -> Iterator[str]:
    for name in ("tp", "ulysses", "ring", "pp", "dp", "micro_batch"):
        size = getattr(config, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield f"{name}={size!r} must be a whole number of 1 or more"
    if config.zero not in (0, 1, 2, 3):
        yield f"zero={config.zero} must be 0, 1, 2 or 3"
    if not 0 <= config.offload_ratio <= 1:
        yield f"offload_ratio={config.offload_ratio} must be between 0 and 1"
    known = (("recompute", RECOMPUTE), ("schedule", SCHEDULES), ("order", ORDERS))
    for name, values in (*known, ("offload_unit", ("chunk", "layer"))):
        if getattr(config, name) not in values:
            yield f"{name}={getattr(config, name)!r} is none of {', '.join(values)}"


def _head_violations(model: ModelShape, config: ParallelConfig) -> Iterator[str]:
    if model.heads % config.tp or model.kv_heads % config.tp:
        yield (
            f"tp={config.tp} must divide the {model.heads} query heads and the {model.kv_heads} "
            "key/value heads"
        )
    elif model.heads // config.tp < config.ulysses:
        yield (
            f"ulysses={config.ulysses} needs at least {config.ulysses} query heads on each "
            f"tensor-parallel rank, there are {model.heads // config.tp} ({model.heads} heads, "
            f"tp={config.tp}); the ring may be larger instead"
        )
    if model.ffn % config.tp:
        yield f"tp={config.tp} must divide the MLP's width of {model.ffn}"
