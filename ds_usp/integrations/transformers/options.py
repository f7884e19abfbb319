"""The options of ``enable``, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.errors import ConfigError
from ds_usp.integrations.replicas import Reduction, check_reduction
from ds_usp.integrations.transformers.batch import AUTO_LAYOUT, check_layout_kind
from ds_usp.kernels.registry import AUTO

Logits = Literal["auto", "shard", "whole"]
Recompute = Literal["none", "attention", "full"]


@dataclass(frozen=True)
class Options:
    """See :func:`ds_usp.integrations.transformers.enable`.

    Raises:
        ConfigError, LayoutError: a value that does not exist.
    """

    layout: str = AUTO_LAYOUT
    kernel: str = AUTO
    gradients: Reduction = "mean"
    logits: Logits = "auto"
    tuning: Tuning = AUTO_TUNING
    recompute: Recompute = "none"
    offload_ratio: float = 0.0
    loss_chunks: int = 0
    mlp_chunks: int = 0

    def __post_init__(self) -> None:
        check_reduction(self.gradients)
        check_layout_kind(self.layout)
        if self.logits not in get_args(Logits):
            raise ConfigError(
                f"logits={self.logits!r} must be one of {', '.join(get_args(Logits))}"
            )
        if self.recompute not in get_args(Recompute):
            raise ConfigError(
                f"recompute={self.recompute!r} must be one of {', '.join(get_args(Recompute))} "
                "(gemm-last needs layers of Megatron)"
            )
        ratio = self.offload_ratio
        number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
        if not number or not 0 <= ratio <= 1:
            raise ConfigError(f"offload_ratio={ratio!r} must be a number from 0 to 1")
        for name, chunks in {"loss": self.loss_chunks, "mlp": self.mlp_chunks}.items():
            if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 0:
                raise ConfigError(
                    f"{name}_chunks={chunks!r} must be a whole number of 0 (not in chunks) or more"
                )
        if self.loss_chunks and self.logits == "whole":
            raise ConfigError(
                f"loss_chunks={self.loss_chunks} never makes the logits of all tokens, which "
                "logits='whole' asks for: leave one of them out"
            )
