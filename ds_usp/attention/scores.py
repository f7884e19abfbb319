"""Options of a call that modify attention scores: a soft cap and sinks. ``plan.py`` checks them
once a plan."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ds_usp.comm.keywords import explain_keywords
from ds_usp.errors import ConfigError


@explain_keywords
@dataclass(frozen=True, eq=False)
class Scores:
    """Options that modify attention scores, besides the scale and the mask.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118).
        sinks: logits ``[h]`` beside the scores in the softmax, which take weight and give nothing
            (gpt-oss), finite; of all query heads on this tensor-parallel rank, the same values on
            every rank of the mesh. They may be trained: each rank computes the gradient of its own
            tokens, and the sum over the mesh is the gradient, as of any weight.

    Raises:
        ConfigError: a cap that is not a finite number above 0, sinks that are no tensor.
    """

    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        cap, sinks = self.softcap, self.sinks
        is_number = isinstance(cap, (int, float)) and not isinstance(cap, bool)
        if cap is not None and (not is_number or not 0 < cap < math.inf):
            raise ConfigError(
                f"softcap={cap!r} must be a finite number above 0; None leaves the scores as they "
                "are (a library's 0.0 is None here)"
            )
        if sinks is not None and not isinstance(sinks, torch.Tensor):
            raise ConfigError(f"sinks={sinks!r} must be a tensor with a number for each query head")

    @property
    def static_values(self) -> Hashable:
        """The soft cap, and whether there are no sinks: equal in both runs of a checkpoint."""
        return self.softcap, self.sinks is None

    @property
    def plan_key(self) -> Hashable:
        """All fields, but not the sinks' values: calls with equal keys share a plan."""
        x = self.sinks
        return self.softcap, None if x is None else (x.shape, x.dtype, x.device, x.requires_grad)


PLAIN_SCORES = Scores()


def check_scores(scores: Scores, q: torch.Tensor) -> None:
    """ConfigError for score options that do not fit queries ``[b, s, h, d]``."""
    if not isinstance(scores, Scores):
        raise ConfigError(f"scores={scores!r} must be a Scores, as Scores(softcap=50.0)")
    sinks = scores.sinks
    if sinks is None:
        return
    if sinks.shape != q.shape[2:3]:
        raise ConfigError(
            f"sinks {list(sinks.shape)} must have a number for each of the {q.shape[2]} query "
            f"heads, [{q.shape[2]}]"
        )
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise ConfigError(
            f"sinks of {sinks.dtype} on {sinks.device} must be floating and on {q.device}, as q is"
        )
