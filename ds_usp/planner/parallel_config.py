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
class Split:
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
    whole_reduction: bool = False

    def but(self, **changes: object) -> Split:
        """This split with other values: ``dataclasses.replace`` at a sixth of its time, which a
        search of a hundred thousand splits feels.

        Raises:
            TypeError: a name that no split has.
        """
        made, values = object.__new__(Split), self.__dict__ | changes
        if len(values) > len(self.__dict__):
            unknown = [name for name in changes if name not in self.__dict__]
            raise TypeError(f"a split has no {', '.join(unknown)}")
        made.__dict__.update(values)
        return made

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


def impossible(work: Workload, split: Split, gpus: int | None = None) -> str | None:
    """Why a split cannot be, as text that names the constraint and the numbers; None if it can."""
    return next(_reasons(work, split, gpus), None)


def check(work: Workload, split: Split, gpus: int | None = None) -> None:
    """Refuse a split that cannot be.

    Raises:
        ConfigError: with the constraint and the numbers.
    """
    why = impossible(work, split, gpus)
    if why:
        raise ConfigError(why)


def _reasons(work: Workload, split: Split, gpus: int | None) -> Iterator[str]:
    yield from _ranges(split)
    yield from _heads(work.model, split)
    model, seq_len = work.model, work.seq_len
    if seq_len < split.sp * split.tp:
        yield (
            f"{seq_len} tokens are too few for tp {split.tp} x ulysses {split.ulysses} x ring "
            f"{split.ring}: at least {split.sp * split.tp}"
        )
    if model.layers % split.pp:
        yield f"{model.layers} layers do not divide into pp={split.pp} stages"
    per_stage, chunk = split.layers_per_stage(model), split.chunk_layers(model)
    if chunk < 1 or per_stage % chunk:
        yield (
            f"{per_stage} layers of a stage ({model.layers} / pp {split.pp}) do not divide into "
            f"virtual stages of {chunk}"
        )
    if gpus is not None and split.gpus != gpus:
        yield (
            f"tp {split.tp} x ulysses {split.ulysses} x ring {split.ring} x pp {split.pp} x dp "
            f"{split.dp} = {split.gpus} ranks, but there are {gpus} GPUs"
        )
    if work.global_batch % (split.dp * split.micro_batch):
        yield (
            f"a global batch of {work.global_batch} does not divide among dp {split.dp} x micro "
            f"batch {split.micro_batch}"
        )
    micro_batches = split.micro_batches(work.global_batch)
    if split.virtual_stages(model) > 1:
        if split.pp == 1:
            yield "virtual stages need a pipeline: pp is 1"
        if split.schedule == "deepspeed":
            yield "DeepSpeed's pipeline has no virtual stages"
        if micro_batches % split.pp:
            yield (
                f"interleaving needs micro batches in multiples of pp={split.pp}, there are "
                f"{micro_batches}"
            )
    if split.zero >= 2 and split.pp > 1:
        yield f"ZeRO-{split.zero} does not go with a pipeline (pp={split.pp}); use ZeRO-1"


def _ranges(split: Split) -> Iterator[str]:
    for name in ("tp", "ulysses", "ring", "pp", "dp", "micro_batch"):
        size = getattr(split, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            yield f"{name}={size!r} must be a whole number of 1 or more"
    if split.zero not in (0, 1, 2, 3):
        yield f"zero={split.zero} must be 0, 1, 2 or 3"
    if not 0 <= split.offload_ratio <= 1:
        yield f"offload_ratio={split.offload_ratio} must be between 0 and 1"
    known = (("recompute", RECOMPUTE), ("schedule", SCHEDULES), ("order", ORDERS))
    for name, values in (*known, ("offload_unit", ("chunk", "layer"))):
        if getattr(split, name) not in values:
            yield f"{name}={getattr(split, name)!r} is none of {', '.join(values)}"


def _heads(model: ModelShape, split: Split) -> Iterator[str]:
    if model.heads % split.tp or model.kv_heads % split.tp:
        yield (
            f"tp={split.tp} must divide the {model.heads} query heads and the {model.kv_heads} "
            "key/value heads"
        )
    elif model.heads // split.tp < split.ulysses:
        yield (
            f"ulysses={split.ulysses} needs at least {split.ulysses} query heads on each "
            f"tensor-parallel rank, there are {model.heads // split.tp} ({model.heads} heads, "
            f"tp={split.tp}); the ring may be larger instead"
        )
    if model.ffn % split.tp:
        yield f"tp={split.tp} must divide the MLP's width of {model.ffn}"
