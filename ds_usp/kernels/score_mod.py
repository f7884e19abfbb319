"""What becomes of attention scores between ``scale * q.k`` and the softmax, and of its weights.

In this order: the soft cap, the ALiBi bias, the mask, the softmax, dropout. Positions, heads and
samples are global, so a kernel that is given a part of the heads and of the tokens computes what
it would as a part of the whole.

Letters of the shapes: B batch, S query rows, T key columns, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds_usp.geometry.tiles import Tile

SOFTCAP, ALIBI, DROPOUT = "softcap", "ALiBi", "dropout"
FEATURES = frozenset({SOFTCAP, ALIBI, DROPOUT})

# Constants of MurmurHash3's 64-bit finalizer (Austin Appleby, public domain) and 2**64 / golden
# ratio, as signed numbers: torch multiplies int64 modulo 2**64.
_MIX = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)
_STEP = 0x9E3779B97F4A7C15 - 2**64
_BITS = 31


@dataclass(frozen=True)
class ScoreSpec:
    """What is asked of a kernel, in numbers.

    Args:
        softcap: scores become ``softcap * tanh(score / softcap)`` (Gemma 2, arXiv 2408.00118);
            None leaves them.
        alibi: ``slope * |key - query|`` is taken off each score, a slope a query head (ALiBi,
            arXiv 2108.12409).
        dropout_p: share of the softmax's weights that are dropped; the others grow by
            ``1 / (1 - dropout_p)``. The log-sum-exp is that before dropout.
    """

    softcap: float | None = None
    alibi: bool = False
    dropout_p: float = 0.0

    @property
    def features(self) -> frozenset[str]:
        """What a kernel must be able to do, of :data:`FEATURES`."""
        used = {SOFTCAP: self.softcap is not None, ALIBI: self.alibi, DROPOUT: self.dropout_p > 0}
        return frozenset(name for name, is_used in used.items() if is_used)

    @property
    def by_position(self) -> bool:
        """A score depends on which query, key and head it is of."""
        return self.alibi or self.dropout_p > 0

    def __str__(self) -> str:
        said = {
            SOFTCAP: f"softcap {self.softcap}",
            ALIBI: "ALiBi",
            DROPOUT: f"dropout {self.dropout_p}",
        }
        return ", ".join(said[name] for name in sorted(self.features)) or "plain scores"


PLAIN = ScoreSpec()


@dataclass(frozen=True, eq=False)
class Place:
    """Where the samples, heads, rows and columns of a kernel call are in the whole.

    Args:
        samples: numbers of the samples, ``[B]`` int64.
        rows, columns: global positions of the queries and keys, ``[S]`` and ``[T]`` int64.
        heads: global numbers of the query heads, ``[H]`` int64.
        slopes: ALiBi's, of these heads, ``[H]``; None without it.
        seed: of dropout, the same for the whole call.
    """

    samples: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    heads: torch.Tensor
    slopes: torch.Tensor | None
    seed: int

    def of(self, tile: Tile) -> Place:
        """The place of a tile's rows and columns."""
        rows = self.rows[tile.q_start : tile.q_stop]
        return replace(self, rows=rows, columns=self.columns[tile.k_start : tile.k_stop])


@dataclass(frozen=True, eq=False)
class ScoreChange:
    """A :class:`ScoreSpec` with all that a kernel call needs for it.

    Args:
        place: there wherever a score depends on its position.
    """

    spec: ScoreSpec = PLAIN
    place: Place | None = None

    def of(self, tile: Tile) -> ScoreChange:
        """That of a tile's rows and columns."""
        return self if self.place is None else replace(self, place=self.place.of(tile))

    def for_samples(self, samples: slice) -> ScoreChange:
        """That of some samples of the batch."""
        if self.place is None:
            return self
        return replace(self, place=replace(self.place, samples=self.place.samples[samples]))

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores under the soft cap, in place."""
        cap = self.spec.softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    def slope(self, capped: torch.Tensor) -> torch.Tensor | None:
        """The soft cap's derivative where it has given these scores; None without one."""
        cap = self.spec.softcap
        return None if cap is None else 1.0 - (capped / cap).square_()

    def bias(self, dtype: torch.dtype) -> torch.Tensor | None:
        """ALiBi, ``-slope * |key - query|``: ``[H, S, T]``; None without it."""
        place = self.place
        if place is None or place.slopes is None:
            return None
        distance = (place.columns[None, :] - place.rows[:, None]).abs_().to(dtype)
        return -place.slopes.to(dtype)[:, None, None] * distance

    def kept(self, dtype: torch.dtype) -> torch.Tensor | None:
        """What dropout multiplies the softmax's weights with, ``[B, H, S, T]``; None without it.

        Each weight has bits of its own, a hash of the seed and of its sample, head, query and key
        (a counter-based generator), so the result does not depend on who computes it, nor when.
        """
        share, place = self.spec.dropout_p, self.place
        if not share or place is None:
            return None
        bits = _mixed(torch.tensor(place.seed, dtype=torch.int64, device=place.rows.device))
        for numbers in (place.samples, place.heads, place.rows, place.columns):
            bits = _mixed(bits[..., None] + _STEP * (numbers + 1))
        keeps = _high_bits(bits) >= round(share * (1 << _BITS))
        return keeps.to(dtype).div_(1.0 - share)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finalizer of int64."""
    for factor in _MIX:
        x = x.bitwise_xor(_high_bits(x)).mul_(factor)
    return x.bitwise_xor_(_high_bits(x))


def _high_bits(x: torch.Tensor) -> torch.Tensor:
    """``x >> 33`` as of an unsigned number: torch's shift of int64 keeps the sign."""
    return (x >> 64 - _BITS).bitwise_and_((1 << _BITS) - 1)
