"""What the trainer's layers do not serve of ``--usp-projection-overlap``."""

from __future__ import annotations

from megatron_patches.projection_overlap import FLAG, OR_OFF
from megatron_patches.refusals import Refusal
from usp_trainer import transformer_impl

NOT_SERVED = (
    Refusal(
        lambda args: transformer_impl.chosen(args) != transformer_impl.LOCAL,
        f"{FLAG} multiplies weights of megatron-core's own linear layers",
        f"Use --transformer-impl {transformer_impl.LOCAL}, {OR_OFF}",
    ),
)
