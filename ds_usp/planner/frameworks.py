"""What training frameworks can do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import ORDERS
from ds_usp.planner.parallel_config import (
    CHECKPOINTED,
    RECOMPUTE,
    ParallelConfig,
    Workload,
    projection_violations,
)

# Fields of a configuration that trade time for length, the cheapest first.
LENGTH_FLAGS = ("mlp_chunks", "projection_overlap", "states_on_host", "checkpoint_layers")
_MLP_CHUNK_TOKENS = 16384  # matrix products over so many reach the rate of longer ones
_GROUPS = (2, 4, 8)  # layers a checkpoint that are tried


def mlp_chunks_for(work: Workload, config: ParallelConfig) -> int:
    """Chunks of an MLP, as few as leave no chunk too many tokens, and at least 2."""
    return max(2, math.ceil(work.rank_tokens(config) / _MLP_CHUNK_TOKENS))


def length_options(work: Workload, config: ParallelConfig, flag: str) -> list[ParallelConfig]:
    """The config with one of :data:`LENGTH_FLAGS` switched on; several where it has a number; none
    where it is on already or does not go with the others."""
    if flag == "mlp_chunks":
        chunks = mlp_chunks_for(work, config)
        refused = config.mlp_chunks > 1 or chunks > work.rank_tokens(config)
        return [] if refused else [config.replace(mlp_chunks=chunks)]
    if flag == "projection_overlap":
        changed = config.replace(projection_overlap="recompute")
        refused = config.heads_in_chunks or any(projection_violations(work.model, changed))
        return [] if refused else [changed]
    if flag == "states_on_host":
        refused = config.states_on_host or config.zero == 0
        return [] if refused else [config.replace(states_on_host=True)]
    refused = config.checkpoint_layers > 1 or config.recompute not in CHECKPOINTED
    layers = config.chunk_layers(work.model)
    sizes = () if refused else tuple(size for size in _GROUPS if size <= layers)
    return [config.replace(checkpoint_layers=size) for size in sizes]


@dataclass(frozen=True, slots=True)
class FrameworkCaps:
    """What a training framework can do.

    Args:
        zero: stages of ZeRO; ``zero_in_pipeline`` those that go with one.
        schedule: of its pipeline, without virtual stages.
        interleaves: it has virtual stages.
        offloads: saved activations can go to host memory.
        offloads_chunks: in units of a chunk of layers, not of one layer alone.
        chunks_loss: it can compute the loss in chunks; ``chunks_loss_in_pipeline``: in one, too.
        documents_in_pipeline: it keeps packed documents apart in a pipeline.
        length_flags: which of :data:`LENGTH_FLAGS` it has.
        tp_sequence: Megatron's sequence parallelism goes with the others.
        orders: of ulysses and ring that it can have.
        grad_bytes: in which it sums gradients.
        whole_reduction: in ZeRO-1 gradients are all-reduced, not reduce-scattered (``Split``).
    """

    name: str
    zero: tuple[int, ...]
    zero_in_pipeline: tuple[int, ...]
    recompute: tuple[str, ...]
    schedule: str
    interleaves: bool
    offloads: bool
    offloads_chunks: bool = False
    chunks_loss: bool = False
    chunks_loss_in_pipeline: bool = False
    documents_in_pipeline: bool = True
    length_flags: tuple[str, ...] = ()
    tp_sequence: bool = True
    orders: tuple[str, ...] = ORDERS
    grad_bytes: int = 4
    unsharded_grad_reduce: bool = False

    def can_chunk_loss(self, config: ParallelConfig) -> bool:
        """Whether a run with full logits could chunk its loss instead."""
        in_pipeline = config.pp == 1 or self.chunks_loss_in_pipeline
        return self.chunks_loss and in_pipeline and not config.fused_loss

    def not_in_pipeline(self, work: Workload, config: ParallelConfig) -> str:
        """Why a run cannot have a pipeline, as a rule without numbers; "" if it can."""
        if config.fused_loss and self.chunks_loss and not self.chunks_loss_in_pipeline:
            return f"{self.name} has no chunked loss in a pipeline"
        if work.documents and not self.documents_in_pipeline:
            return f"{self.name} has no packed documents in a pipeline"
        return ""

    def with_settings_of(self, config: ParallelConfig) -> FrameworkCaps:
        """Itself, if it has the settings of a config that trade time for length, and its loss.

        Raises:
            ConfigError: which it lacks.
        """
        used = {
            "mlp_chunks": config.mlp_chunks > 1,
            "projection_overlap": config.heads_in_chunks,
            "states_on_host": config.states_on_host,
            "checkpoint_layers": config.checkpoint_layers > 1,
        }
        lacking = [flag for flag in used if used[flag] and flag not in self.length_flags]
        lacking += ["fused_loss"] if config.fused_loss and not self.chunks_loss else []
        if lacking:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in lacking)
            raise ConfigError(f"{self.name} has no {names}: leave it out, or take another --engine")
        return self

    def refusal(self, config: ParallelConfig, axis: str, value: object) -> str:
        """Why these degrees do not go with a value of another axis, as a short heading."""
        if axis == "micro_batch":
            return f"micro batch {value} does not divide the sequences of a replica"
        if axis == "order" and value in self.orders:
            return f"without both ulysses and ring there is no order {value}"
        if axis == "zero" and value in self.zero:
            if config.zero_ranks == 1:
                return f"ZeRO-{value} has no ranks to share with"
            return f"ZeRO-{value} does not go with a pipeline"
        return f"{self.name} has no " + (f"ZeRO-{value}" if axis == "zero" else f"{axis} {value}")


_MEGATRON_DEEPSPEED = FrameworkCaps(
    "megatron-deepspeed",  # ZeRO-0 of bf16 weights sums gradients in bf16
    zero=(1, 2, 3),
    zero_in_pipeline=(1,),
    recompute=("none", "gemm-last", "attention", "full"),
    schedule="deepspeed",
    interleaves=False,
    offloads=True,
    chunks_loss=True,
    documents_in_pipeline=False,
    length_flags=LENGTH_FLAGS,
    tp_sequence=False,
    orders=ORDERS[:1],
    unsharded_grad_reduce=True,
)
FRAMEWORKS = (
    FrameworkCaps(
        "any",
        zero=(0, 1, 2, 3),
        zero_in_pipeline=(0, 1),
        recompute=RECOMPUTE,
        schedule="1f1b",
        interleaves=True,
        offloads=True,
        offloads_chunks=True,
        chunks_loss=True,
        chunks_loss_in_pipeline=True,
        length_flags=LENGTH_FLAGS,
    ),
    _MEGATRON_DEEPSPEED,
    replace(_MEGATRON_DEEPSPEED, name="trainer"),
    FrameworkCaps(
        "megatron-core",
        zero=(0, 1),
        zero_in_pipeline=(0, 1),
        recompute=("none", "attention-only", "full"),
        schedule="1f1b",
        interleaves=True,
        offloads=False,
        orders=ORDERS[:1],
    ),
    FrameworkCaps(
        "megatron-lm",  # under the patches: --usp-recompute attention beside its own
        zero=(0, 1),
        zero_in_pipeline=(0, 1),
        recompute=("none", "attention-only", "attention", "full"),
        schedule="1f1b",
        interleaves=True,
        offloads=False,
        length_flags=("mlp_chunks", "projection_overlap"),
        orders=ORDERS[:1],
    ),
)


def framework_caps(name: str) -> FrameworkCaps:
    """A framework by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    for known in FRAMEWORKS:
        if known.name == name:
            return known
    raise ConfigError(f"no engine {name!r}; there are {', '.join(e.name for e in FRAMEWORKS)}")
