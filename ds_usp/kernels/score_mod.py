"""Score modifiers (FlexAttention's ``score_mod``): soft cap, ALiBi, dropout of the weights, and
sinks.

Applied in this order: the soft cap, the ALiBi bias, the mask, the softmax, dropout. Positions,
heads and samples are global, so a kernel call on some heads and tokens computes the same numbers as
one on all of them.

Letters of the shapes: B batch, S query rows, T key columns, H query heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_usp.geometry.tiles import Tile

SOFTCAP, ALIBI, DROPOUT = "softcap", "ALiBi", "dropout"
FEATURES = frozenset({SOFTCAP, ALIBI, DROPOUT})

# Why dropout hashes positions instead of drawing numbers: a generator's draw depends on the shape
# and order of the calls, which differ with the mesh. A hash of (seed, sample, head, query, key)
# drops the same weights on 1 rank and on 8, and again in backward.
# Constants of MurmurHash3's 64-bit finalizer (Austin Appleby, public domain) and 2**64 / golden
# ratio, as signed numbers: torch multiplies int64 modulo 2**64.
_MIX = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
_STEP = 0x9E3779B97F4A7C15 - 2**64
_BITS = 31

_BLOCK_ELEMENTS = 1 << 24  # that are converted to fp32 at a time


@dataclass(frozen=True)
class ScoreMod:
    """The score modifiers of a call, without tensors.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118);
            None leaves them.
        alibi: ``slope * |key - query|`` is taken off each score, a slope a query head (ALiBi,
            arXiv 2108.12409).
        dropout_p: fraction of the softmax's weights that are dropped; the others are scaled by
            ``1 / (1 - dropout_p)``. The log-sum-exp is that before dropout.
    """

    softcap: float | None = None
    alibi: bool = False
    dropout_p: float = 0.0

    @property
    def features(self) -> frozenset[str]:
        used = {SOFTCAP: self.softcap is not None, ALIBI: self.alibi, DROPOUT: self.dropout_p > 0}
        return frozenset(name for name, is_used in used.items() if is_used)

    @property
    def needs_positions(self) -> bool:
        return self.alibi or self.dropout_p > 0

    @property
    def texts(self) -> tuple[str, ...]:
        """What the ranks of a mesh compare of it."""
        texts = {
            SOFTCAP: f"softcap {self.softcap}",
            ALIBI: "ALiBi",
            DROPOUT: f"dropout {self.dropout_p}",
        }
        return tuple(texts[name] for name in sorted(self.features)) or ("plain scores",)

    def __str__(self) -> str:
        return ", ".join(self.texts)


PLAIN = ScoreMod()


@dataclass(frozen=True, eq=False)
class GlobalPositions:
    """Global indices of the samples, heads, rows and columns of a kernel call.

    Args:
        samples, heads: indices of the samples and query heads, ``[B]`` and ``[H]`` int64.
        rows, columns: positions of the queries and keys, ``[S]`` and ``[T]`` int64.
        slopes: ALiBi's, of these heads, ``[H]``; None without it.
        seed: of dropout, the same for the whole call.
    """

    samples: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    heads: torch.Tensor
    slopes: torch.Tensor | None
    seed: int

    def for_tile(self, tile: Tile) -> GlobalPositions:
        rows = self.rows[tile.q_start : tile.q_stop]
        return replace(self, rows=rows, columns=self.columns[tile.k_start : tile.k_stop])


@dataclass(frozen=True, eq=False)
class BoundScoreMod:
    """A :class:`ScoreMod` bound to the positions of a kernel call, which only one that needs none
    may lack."""

    mod: ScoreMod = PLAIN
    positions: GlobalPositions | None = None

    def for_tile(self, tile: Tile) -> BoundScoreMod:
        positions = self.positions
        return self if positions is None else replace(self, positions=positions.for_tile(tile))

    def for_samples(self, samples: slice) -> BoundScoreMod:
        positions = self.positions
        if positions is None:
            return self
        return replace(self, positions=replace(positions, samples=positions.samples[samples]))

    def apply_softcap(self, scores: torch.Tensor) -> torch.Tensor:
        """``softcap * tanh(scores / softcap)``, in place; the scores themselves without one."""
        cap = self.mod.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    def softcap_grad(self, capped: torch.Tensor) -> torch.Tensor | None:
        """The soft cap's derivative, from its result; None without one."""
        cap = self.mod.softcap
        return None if cap is None else 1.0 - (capped / cap).square_()

    def alibi_bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """ALiBi, ``-slope * |key - query|``: ``[H, S, T]``; None without it."""
        positions = self.positions
        if positions is None or positions.slopes is None:
            return None
        distance = (positions.columns[None, :] - positions.rows[:, None]).abs_().to(dtype)
        return -positions.slopes.to(dtype)[:, None, None] * distance

    def dropout_multiplier(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Dropout's factors of the softmax's weights, ``[B, H, S, T]``: 0 or ``1 / (1 - p)``; None
        without it."""
        dropout_p, positions = self.mod.dropout_p, self.positions
        if not dropout_p or positions is None:
            return None
        seed = torch.tensor(positions.seed, dtype=torch.int64, device=positions.rows.device)
        bits = _hash_mix(seed)
        for indices in (positions.samples, positions.heads, positions.rows, positions.columns):
            bits = _hash_mix(bits[..., None] + _STEP * (indices + 1))
        is_kept = _high_bits(bits) >= round(dropout_p * (1 << _BITS))
        return is_kept.to(dtype).div_(1.0 - dropout_p)


def _hash_mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer of int64."""
    for factor in _MIX:
        x = x.bitwise_xor(_high_bits(x)).mul_(factor)
    return x.bitwise_xor_(_high_bits(x))


def _high_bits(x: torch.Tensor) -> torch.Tensor:
    """``x >> 33`` as of an unsigned number: torch's shift of int64 keeps the sign."""
    return (x >> 64 - _BITS).bitwise_and_((1 << _BITS) - 1)


# ------------------------------------------------------------------------------------------------
# Attention sinks: a learned or fixed logit a query head beside the scores in the softmax.
#
# A sink is one more key whose value is 0: it takes weight and adds nothing (gpt-oss, OpenAI 2025;
# "off-by-one" softmax is a sink of 0). So it is merged like a block whose output is 0, on any
# kernel. Once, after the last block: as part of each block's softmax it would be counted once a
# ring rank.


def apply_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all keys and the sinks, from that over the keys; in place. Rows that
    attend to no key get out 0 and the sink as log-sum-exp.

    Shapes:
        out ``[B, S, H, D]``, lse ``[B, H, S]``, sinks ``[H]``.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    weight = torch.exp(lse - total).transpose(1, 2).unsqueeze(-1)
    return out.mul_(weight), total  # computed in the weight's dtype, rounded once


def sink_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """The gradient of the sinks ``[H]`` from these tokens, in the log-sum-exp's dtype.

    The sink's weight is ``p = exp(sink - lse)`` and its value 0, so its score's gradient, which is
    ``p * (dout . value - dout . out)``, is ``-p * (dout . out)``.

    Shapes:
        dout, out ``[B, S, H, D]``, lse ``[B, H, S]``, both of keys and sinks together.
    """
    acc_dtype = lse.dtype
    total = torch.zeros_like(sinks, dtype=acc_dtype)
    rows = max(1, _BLOCK_ELEMENTS // out[:, :1].numel())
    for start in range(0, out.shape[1], rows):
        block = slice(start, start + rows)
        dots = (dout[:, block].to(acc_dtype) * out[:, block].to(acc_dtype)).sum(-1).transpose(1, 2)
        total -= (torch.exp(sinks.to(acc_dtype)[:, None] - lse[:, :, block]) * dots).sum((0, 2))
    return total
