"""The causal convolution before a layer's state: each piece with the tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_usp.comm.call_record import Signature
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import Halo, StateChains
from ds_usp.recurrence.exchange import ExchangeCall
from ds_usp.recurrence.scan import chains_of, fold_rows, signature, unfold_rows


def causal_conv(
    conv: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    taps: int,
    *,
    mesh: SequenceMesh,
    layout: TokenLayout,
    documents: Any = (),
) -> torch.Tensor:
    """A causal convolution of this rank's tokens, each with the ``taps - 1`` before it in its
    document, wherever they are. Collective over the mesh.

    The pieces of a rank go through one call, each behind the tokens before it, zeros where a
    document begins: the kernel need know no documents.

    Shapes:
        x ``[rows, channels, tokens]`` -> alike, with the channels of ``conv``'s result.

    Args:
        conv: of such a tensor with any number of tokens, with zeros before its first one.
        taps: of the convolution.
        layout, documents: as of :func:`affine_scan`.
    """
    call = ExchangeCall(mesh, "halo", [x])

    def begin() -> tuple[Signature, StateChains]:
        chains = chains_of([x], [2], mesh, layout, documents)
        return signature(chains), chains

    chains = call.compare(begin)
    halo = chains.halo(mesh.rank, taps - 1)
    (tokens,) = call.inputs
    if chains.folded:
        tokens = fold_rows(tokens, 2)
    rows, channels, _ = tokens.shape
    cuts = tokens.movedim(2, 0).split(halo.lengths)  # [tokens, rows, channels]
    before = tokens.new_zeros(0, rows, channels)
    if halo.crosses:
        before = _received(call, halo, cuts)
    lengths, line = [], []
    for (first, stop), spans in zip(halo.pieces, halo.halos, strict=True):
        pad = halo.width - sum(b - a for a, b in spans)
        line += [cuts[0].new_zeros(pad, rows, channels)] if pad else []
        line += [before[a:b] for a, b in spans]
        line += cuts[first:stop]
        lengths += [halo.width, sum(halo.lengths[first:stop])]
    y = conv(torch.cat(line).movedim(0, 2).contiguous())
    y = torch.cat(y.split(lengths, 2)[1::2], 2)
    if chains.folded:
        y = unfold_rows(y, 2, chains.rows)
    return call.leave(y)


def _received(call: ExchangeCall, halo: Halo, cuts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tokens ``[tokens, rows, channels]`` from all ranks, in their order."""
    _, rows, channels = cuts[0].shape
    size = rows * channels
    sent = [size * sum(halo.lengths[cut] for cut in to) for to in halo.sends]
    parts = [cuts[cut] for to in halo.sends for cut in to]
    flat = call.exchange(parts, sent, [size * n for n in halo.received], cuts[0].dtype)
    return flat.view(-1, rows, channels)
