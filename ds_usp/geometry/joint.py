"""Layouts of joint attention: joint tokens beside a sharded sequence, as one sequence. Equal ones
are made on all ranks, by ``usp_joint_attention`` and for models of diffusers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ds_usp.errors import LayoutError
from ds_usp.geometry.layout import Shards, TokenLayout
from ds_usp.geometry.segments import Segment, coalesce


# Two sequences that attend as one (a text beside an image), each sharded over all ranks: whatever
# balances the work of each balances that of the two. Neither need divide, and contiguous shards
# give the extra tokens of both to the same, first ranks. A continued layout begins where the other
# one's longer shards end, so that every rank holds as many tokens as of one contiguous sequence:
#
#     image, 6 tokens on 4 ranks     2 2 1 1
#     text, 5, contiguous            2 1 1 1     together 4 3 2 2
#     text, 5, continued             1 1 2 1     together 3 3 3 2
@dataclass(frozen=True)
class ContinuedLayout(TokenLayout):
    """Contiguous shards, the longer ones on the ranks from ``first`` on and then from rank 0. With
    fewer tokens than ranks some ranks hold none: they have tokens of the other sequence."""

    LEAST: ClassVar[int] = 0
    first: int = 0

    @classmethod
    def after(cls, layout: TokenLayout, seq_len: int) -> ContinuedLayout:
        """The layout of ``seq_len`` tokens beside those of a contiguous layout."""
        shape = layout.ulysses, layout.ring, layout.order
        return cls("contiguous", seq_len, *shape, first=layout.seq_len % layout.degree)

    def _make_shards(self) -> Shards:
        size, longer = divmod(self.seq_len, self.degree)
        lengths = [size + ((r - self.first) % self.degree < longer) for r in range(self.degree)]
        return tuple(coalesce([Segment(sum(lengths[:r]), n)]) for r, n in enumerate(lengths))


@dataclass(frozen=True)
class JointLayout(TokenLayout):
    """Two sequences as one: each rank's shards of both, in layouts of the same kind. A rank stores
    its shard of the earlier one first. ``seq_len`` is the length of both together.

    Args:
        joint: tokens of the joint sequence, at least one for every rank unless continued.
        front: the joint tokens come before the others, else after them.
        continued: the joint tokens are in a :class:`ContinuedLayout`, the others are contiguous.

    Raises:
        LayoutError: fewer tokens of either sequence than every rank needs.
    """

    joint: int = 0
    front: bool = True
    continued: bool = False

    @classmethod
    def of(
        cls, layout: TokenLayout, joint: int, front: bool, continued: bool = False
    ) -> JointLayout:
        """A sequence's layout with so many joint tokens before or after it.

        Raises:
            LayoutError: a layout made for documents, as joint tokens are in none of them.
        """
        if layout.documents:
            raise LayoutError(f"joint tokens are in no document of {layout}: use another layout")
        shape = layout.ulysses, layout.ring, layout.order
        length = layout.seq_len + joint
        return cls(layout.kind, length, *shape, joint=joint, front=front, continued=continued)

    @property
    def layouts(self) -> tuple[TokenLayout, TokenLayout]:
        """The layouts of the joint sequence alone and of the other one alone."""
        shape = self.ulysses, self.ring, self.order
        other = TokenLayout(self.kind, self.seq_len - self.joint, *shape)
        if self.continued:
            return ContinuedLayout.after(other, self.joint), other
        return TokenLayout(self.kind, self.joint, *shape), other

    def _make_shards(self) -> Shards:
        first, second = self.layouts if self.front else self.layouts[::-1]
        shift = first.seq_len
        return tuple(
            coalesce([*one, *(replace(part, start=part.start + shift) for part in other)])
            for one, other in zip(first._shards, second._shards, strict=True)
        )

    def __str__(self) -> str:
        side = "before" if self.front else "after"
        continued = ", continued" if self.continued else ""
        _joint, other = self.layouts
        return f"{self.joint} joint tokens{continued} {side} {other}"


@dataclass(frozen=True)
class ConcatenatedShards(TokenLayout):
    """The shards of a layout without documents as if they were a sequence, rank after rank on one
    Ulysses axis: an all-to-all then gathers the joint output, for :meth:`TokenLayout.gather`.

    Args:
        degrees: Ulysses and ring of the layout itself.
    """

    degrees: tuple[int, int] = (1, 1)

    @classmethod
    def of(cls, layout: TokenLayout) -> ConcatenatedShards:
        degrees = layout.ulysses, layout.ring
        return cls(layout.kind, layout.seq_len, layout.degree, 1, layout.order, degrees=degrees)

    def _make_shards(self) -> Shards:
        layout = TokenLayout(self.kind, self.seq_len, *self.degrees, self.order)
        return tuple(
            (Segment(sum(layout._lengths[:rank]), length),)
            for rank, length in enumerate(layout._lengths)
        )
