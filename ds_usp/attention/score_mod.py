"""Score modifiers of a call (soft cap, ALiBi, sinks, dropout), bound to each kernel call."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ds_usp.attention.validation import ChunkExchanges
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.ring_schedule import RingStep
from ds_usp.geometry.ring_traffic import TokenRange
from ds_usp.geometry.segments import slice_segments
from ds_usp.kernels.api import AttentionKernel
from ds_usp.kernels.score_mod import PLAIN, BoundScoreMod, GlobalPositions, ScoreMod


@dataclass(frozen=True, eq=False)
class Scores:
    """Options that modify attention scores, besides the scale and the mask.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118).
        alibi_slopes: ``slope * |key - query|``, in global positions, is taken off the capped
            scores (ALiBi, arXiv 2108.12409; as flash-attn takes it). Not trained here.
        sinks: logits beside the scores in the softmax, which take weight and give nothing
            (gpt-oss), finite. They may be trained. Each rank computes a local gradient of its own
            tokens: the sum over the ranks of the mesh is the gradient, as it is for any weight
            that all of them hold.
        dropout_seed: what attention dropout (``dropout_p``) draws from, 0 to 2**63 - 1. A weight
            is dropped by the seed and its own sample, head, query and key, so the same ones are
            under any degrees; give another seed at each call.

    Shapes:
        alibi_slopes, sinks: ``[h]``, of all query heads on this tensor-parallel rank, the same
        values on every rank of the mesh.

    Raises:
        ConfigError: a cap that is not a finite number above 0, a seed that is not such a number,
            slopes or sinks that are no tensors.
    """

    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout_seed: int | None = None

    def __post_init__(self) -> None:
        cap, seed = self.softcap, self.dropout_seed
        is_number = isinstance(cap, (int, float)) and not isinstance(cap, bool)
        if cap is not None and (not is_number or not 0 < cap < math.inf):
            raise ConfigError(
                f"softcap={cap!r} must be a finite number above 0; None leaves the scores as they "
                "are (a library's 0.0 is None here)"
            )
        is_int = isinstance(seed, int) and not isinstance(seed, bool)
        if seed is not None and (not is_int or not 0 <= seed < 2**63):
            raise ConfigError(f"dropout_seed={seed!r} must be a whole number, 0 to 2**63 - 1")

        for name in ("alibi_slopes", "sinks"):
            x = getattr(self, name)
            if x is not None and not isinstance(x, torch.Tensor):
                raise ConfigError(
                    f"{name}={x!r} must be a tensor with a number for each query head"
                )

    @property
    def static_values(self) -> Hashable:
        """All fields that are no tensors, and which tensors are given."""
        return self.softcap, self.dropout_seed, self.alibi_slopes is None, self.sinks is None

    @property
    def plan_key(self) -> Hashable:
        """All but the values of tensors and of the seed: calls with equal keys share a plan."""
        key: list[Hashable] = [self.softcap, self.dropout_seed is None]
        for x in (self.alibi_slopes, self.sinks):
            key.append(None if x is None else (x.shape, x.dtype, x.device, x.requires_grad))
        return tuple(key)


NO_SCORE_MOD = Scores()


def check_score_mod(
    scores: Scores,
    dropout_p: float,
    q: torch.Tensor,
    *,
    one_sequence: bool = True,
    tree: bool = False,
) -> ScoreMod:
    """Check score options against queries ``[b, s, h, d]``; returns what a kernel must support.

    Args:
        one_sequence: the keys are of the queries' sequence.
        tree: the mask is one.

    Raises:
        ConfigError, UnsupportedAttentionError: they do not fit.
    """
    if not isinstance(scores, Scores):
        raise ConfigError(f"scores={scores!r} must be a Scores, as Scores(softcap=50.0)")
    for name in ("alibi_slopes", "sinks"):
        x = getattr(scores, name)
        if x is None:
            continue
        if x.shape != q.shape[2:3]:
            raise ConfigError(
                f"{name} {list(x.shape)} must have a number for each of the {q.shape[2]} query "
                f"heads, [{q.shape[2]}]"
            )
        if not x.is_floating_point() or x.device != q.device:
            raise ConfigError(
                f"{name} of {x.dtype} on {x.device} must be floating and on {q.device}, as q is"
            )
    if scores.alibi_slopes is not None and not one_sequence:
        raise UnsupportedAttentionError(
            "alibi_slopes weigh distances, and there is none between queries and keys of two "
            "sequences (kv_layout): leave them out"
        )
    # A second answer's tokens are as far from the prompt as the first one's are, along the tree.
    if scores.alibi_slopes is not None and tree:
        raise UnsupportedAttentionError(
            "alibi_slopes weigh distances in the sequence, and the segments of a tree are not as "
            "far apart as their tokens are in it: leave them out, or give each branch a row of "
            "its own with its ancestors, MaskSpec.causal()"
        )
    if scores.alibi_slopes is not None and scores.alibi_slopes.requires_grad:
        raise UnsupportedAttentionError(
            "alibi_slopes requires a gradient, and slopes are not trained here: detach() them"
        )
    is_number = isinstance(dropout_p, (int, float)) and not isinstance(dropout_p, bool)
    if not is_number or not 0.0 <= dropout_p < 1.0:
        raise ConfigError(f"dropout_p={dropout_p!r} must be a number from 0 to below 1")
    return ScoreMod(scores.softcap, scores.alibi_slopes is not None, float(dropout_p))


# Note [positions are global]
#
# ALiBi's distance and dropout's hash are of a sample, a head, a query and a key of the whole call.
# A kernel call has rows and columns of buffers: this rank's tokens in the layout's order, and a
# block of another rank's. So global numbers go with each kernel call, and the same weight gets the
# same bias and is dropped or not, whatever the degrees, in which step it is computed, and in
# backward again. Sinks need none of this: they are one more partial result with output 0, merged at
# the end.


@dataclass(frozen=True, eq=False)
class ChunkScoreMod:
    """The score modifiers of one head chunk on this rank, for tensors of this batch and device."""

    mesh: SequenceMesh
    exchanges: ChunkExchanges
    score_mod: ScoreMod
    scores: Scores
    batch: int
    device: torch.device

    def bind(self, kernel: AttentionKernel, step: RingStep) -> AttentionKernel:
        """The kernel with the modifiers, for the local queries and the keys of a step."""
        if self.score_mod == PLAIN:
            return kernel
        positions = self._global_positions(step) if self.score_mod.needs_positions else None
        return kernel.with_score_mod(BoundScoreMod(self.score_mod, positions))

    def slice_heads(self, x: torch.Tensor) -> torch.Tensor:
        """This chunk's view of a tensor of all query heads ``[h]``."""
        return x[slice(*self._head_range)]

    @property
    def _head_range(self) -> tuple[int, int]:
        return self.exchanges.qkv.ranges[0][self.mesh.ulysses_rank]

    def _global_positions(self, step: RingStep) -> GlobalPositions:
        layout, kv_layout = self.exchanges.qkv.layouts[0], self.exchanges.kv_layout
        rank = self.mesh.ring_rank
        slopes = self.scores.alibi_slopes
        return GlobalPositions(
            torch.arange(self.batch, device=self.device),
            self._positions(layout, [TokenRange(rank, 0, layout.ring_length(rank))]),
            self._positions(kv_layout, step.kv_ranges),
            torch.arange(*self._head_range, device=self.device),
            None if slopes is None else self.slice_heads(slopes),
            self.scores.dropout_seed or 0,
        )

    def _positions(self, layout: TokenLayout, pieces: Sequence[TokenRange]) -> torch.Tensor:
        """Global positions ``[tokens]`` of token ranges, one after the other."""
        runs = (
            segment.positions
            for piece in pieces
            for segment in slice_segments(layout.ring_segments(piece.rank), piece.start, piece.stop)
        )
        positions = [torch.arange(x.start, x.stop, x.step, device=self.device) for x in runs]
        return torch.cat(positions) if positions else torch.arange(0, device=self.device)
