"""The causal convolution over a sharded sequence: each piece behind the tokens before it. Layers
call it on every rank, in each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import Halo
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.recurrence.exchange import ExchangeCall


# Note [two convolutions of a shard]
#
#     shard    a a a a a b b b b b      pieces a and b, which do not follow each other; 3 taps
#     y        . . y y y . . y y y      one call for all tokens; . saw no tokens, or those of a
#     line     0 0 a a | h h b b        pieces' first tokens, each behind its halo, or zeros
#     out      + + y y y + + y y y      + of the line
#
# A line of all tokens would copy the shard and the output, of which only the first tokens of each
# piece need a halo: on 2 H100, 8,192 channels, 64K tokens a rank, 22 of 87 ms of a delta layer.
@disable_in_compile("a convolution over ranks is not in a graph: its exchange is compared")
def causal_conv(
    conv: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    taps: int,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
) -> torch.Tensor:
    """A causal convolution over a sharded sequence: this rank's tokens, each with the ``taps - 1``
    before it in its document, wherever they are. Collective over the mesh.

    ``conv`` is called for the whole shard, and for the first tokens of its pieces behind their
    halo, zeros where a document begins.

    Shapes:
        x ``[rows, channels, tokens]``; the output likewise, with the channels of ``conv``'s result.

    Args:
        conv: of ``[rows, channels, any tokens]``, as if zeros were before the first one.
        taps: tokens that an output depends on.
        layout, documents: as of :func:`~ds_usp.affine_scan`.

    Raises:
        ConfigError, LayoutError, MeshError: as of :func:`~ds_usp.affine_scan`.
    """
    call = ExchangeCall("causal_conv", "halo", [x], [2], mesh, layout, documents)

    def compute(inputs: list[torch.Tensor]) -> tuple[list[str], _Shard]:
        """Check, and convolve this rank's tokens, before the ranks compare. ``inputs``: x, as one
        row ``[1, channels, rows * tokens]`` where documents differ by row."""
        if isinstance(taps, bool) or not isinstance(taps, int) or taps < 1:
            raise ConfigError(f"taps={taps!r} must be a whole number of 1 or more")
        if x.ndim != 3:
            raise ConfigError(f"x must be [rows, channels, tokens], got {list(x.shape)}")
        shard = _Shard(inputs[0], call.chains.halo(mesh.rank, taps - 1))
        shard.out = _convolved(conv, shard.tokens)
        return [f"{taps} taps"], shard

    shard = call.begin(compute)
    before = shard.exchange(call)
    with mesh.consistency.raising_everywhere():
        out = shard.finish(conv, before)
    return call.leave(out, 2)


def _convolved(conv: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The result of ``conv``; ConfigError for one that is not of these rows and tokens."""
    y = conv(tokens)
    if not isinstance(y, torch.Tensor):
        raise ConfigError(f"conv gave a {type(y).__name__}, not a tensor")
    rows, _, length = tokens.shape
    if y.ndim != 3 or len(y) != rows or y.shape[2] != length:
        raise ConfigError(f"conv gave {list(y.shape)} for {rows} rows of {length} tokens")
    return y


class _Shard:
    """This rank's tokens ``[rows, channels, tokens]``, and those of them that are read apart: what
    is sent, and the first tokens of pieces that have others before them on this rank or another.

    Attributes:
        out: of the convolution of all tokens.
    """

    out: torch.Tensor

    def __init__(self, x: torch.Tensor, halo: Halo) -> None:
        self.halo = halo
        ends = list(accumulate(halo.lengths, initial=0))
        # The pieces, by number, that have a halo, or are the halo of another one behind them.
        self._to_finish = [
            n
            for n, ((first_cut, _), spans) in enumerate(zip(halo.pieces, halo.halos, strict=True))
            if halo.width and (spans or first_cut > 0)
        ]
        heads = [range(*halo.heads[n]) for n in self._to_finish]
        self._heads = tuple((ends[head.start], ends[head.stop]) for head in heads)
        cuts = sorted({cut for each in (*halo.sends, *heads) for cut in each})
        self.tokens, self._cuts = x, dict[int, torch.Tensor]()
        if cuts:
            spans = tuple((ends[cut], ends[cut + 1]) for cut in cuts)
            self.tokens, read = _Read.apply(x, _index(spans, x.device))
            parts = read.split([halo.lengths[cut] for cut in cuts], 2)
            self._cuts = dict(zip(cuts, parts, strict=True))

    def exchange(self, call: ExchangeCall) -> torch.Tensor:
        """The tokens ``[rows, channels, tokens]`` that the ranks, this one too, send to this one,
        in their order. Collective if ``halo.crosses``, which all ranks agree on."""
        halo, (rows, channels, _) = self.halo, self.tokens.shape
        if not halo.crosses:
            local_cuts = [self._cuts[cut] for needed in halo.sends for cut in needed]
            return torch.cat(local_cuts, 2) if local_cuts else self.tokens[..., :0]
        size = rows * channels
        sent = [size * sum(halo.lengths[cut] for cut in needed) for needed in halo.sends]
        # Tokens first on the way: cuts of any lengths join to one tensor.
        parts = [self._cuts[cut].movedim(2, 0) for needed in halo.sends for cut in needed]
        received = [size * n for n in halo.received]
        flat = call.exchange(parts, sent, received, self.tokens.dtype)
        return flat.view(-1, rows, channels).movedim(0, 2)

    def finish(
        self, conv: Callable[[torch.Tensor], torch.Tensor], before: torch.Tensor
    ) -> torch.Tensor:
        """The output, with the first tokens of each piece behind those ``before`` it, which
        :meth:`exchange` returns."""
        if not self._to_finish:
            return self.out
        halo = self.halo
        zeros = before.new_zeros(*before.shape[:2], halo.width)
        line, lengths = list[torch.Tensor](), list[int]()
        for n in self._to_finish:
            spans, head = halo.halos[n], range(*halo.heads[n])
            line.append(zeros[..., sum(end - begin for begin, end in spans) :])
            line += [before[..., begin:end] for begin, end in spans]
            line += [self._cuts[cut] for cut in head]
            lengths += [halo.width, sum(halo.lengths[cut] for cut in head)]
        y = _convolved(conv, torch.cat(line, 2))
        heads = torch.cat(y.split(lengths, 2)[1::2], 2).to(self.out.dtype)  # without the halos
        return _Replace.apply(self.out, heads, _index(self._heads, heads.device))


@lru_cache(maxsize=64)
def _index(spans: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """The tokens of half-open spans."""
    with torch.inference_mode(False):  # kept: a later training pass saves it
        tokens = [token for begin, end in spans for token in range(begin, end)]
        return torch.tensor(tokens).to(device)


# By index, since the backward pass of a slice would fill a whole shard with zeros for each; and on
# a copy, since a gradient may be another function's too.
class _Read(torch.autograd.Function):
    """x ``[rows, channels, tokens]``, and its tokens of an index."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(index)
        return x.view_as(x), x.index_select(2, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, read: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.clone().index_add_(2, index, read), None


class _Replace(torch.autograd.Function):
    """x ``[rows, channels, tokens]`` with others for its tokens of an index."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, others: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        return x.clone().index_copy_(2, index, others)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.clone().index_fill_(2, index, 0), grad.index_select(2, index), None
