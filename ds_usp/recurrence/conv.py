"""The causal convolution over a sharded sequence: each piece behind the tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.state_chains import Halo
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.recurrence.exchange import ExchangeCall


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

    All pieces of a rank go through one call of ``conv``, each behind its halo, zeros where a
    document begins. So the kernel need know no documents.

    Shapes:
        x ``[rows, channels, tokens]``; the output alike, with the channels of ``conv``'s result.

    Args:
        conv: of ``[rows, channels, any tokens]``, as if zeros were before the first one.
        taps: tokens that an output depends on.
        layout, documents: as of :func:`~ds_usp.affine_scan`.

    Raises:
        ConfigError, LayoutError, MeshError: as of :func:`~ds_usp.affine_scan`.
    """
    call = ExchangeCall("causal_conv", "halo", [x], [2], mesh, layout, documents)

    def compute(inputs: list[torch.Tensor]) -> tuple[list[str], torch.Tensor]:
        if isinstance(taps, bool) or not isinstance(taps, int) or taps < 1:
            raise ConfigError(f"taps={taps!r} must be a whole number of 1 or more")
        if x.ndim != 3:
            raise ConfigError(f"x must be [rows, channels, tokens], got {list(x.shape)}")
        return [f"{taps} taps"], inputs[0]

    tokens = call.begin(compute)
    halo = call.chains.halo(mesh.rank, taps - 1)
    cuts = tokens.split(halo.lengths, 2)
    zeros = tokens.new_zeros(*tokens.shape[:2], halo.width)
    before = _exchange(call, halo, cuts) if halo.crosses else zeros
    line, lengths = list[torch.Tensor](), list[int]()
    for (first, stop), spans in zip(halo.pieces, halo.halos, strict=True):
        known = sum(end - begin for begin, end in spans)
        line.append(zeros[..., known:])
        line += [before[..., begin:end] for begin, end in spans]
        line += cuts[first:stop]
        lengths += [halo.width, sum(halo.lengths[first:stop])]
    with call.raising_everywhere():
        y = conv(_join(line))
        if not isinstance(y, torch.Tensor):
            raise ConfigError(f"conv gave a {type(y).__name__}, not a tensor")
        if y.ndim != 3 or len(y) != len(tokens) or y.shape[2] != sum(lengths):
            raise ConfigError(
                f"conv gave {list(y.shape)} for {len(tokens)} rows of {sum(lengths)} tokens"
            )
    return call.leave(_join(y.split(lengths, 2)[1::2]), 2)


def _exchange(call: ExchangeCall, halo: Halo, cuts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tokens ``[rows, channels, tokens]`` that the ranks send to this one, in their order."""
    rows, channels, _ = cuts[0].shape
    size = rows * channels
    sent = [size * sum(halo.lengths[cut] for cut in needed) for needed in halo.sends]
    # Tokens first on the way: cuts of any lengths join to one tensor.
    parts = [cuts[cut].movedim(2, 0) for needed in halo.sends for cut in needed]
    flat = call.exchange(parts, sent, [size * n for n in halo.received], cuts[0].dtype)
    return flat.view(-1, rows, channels).movedim(0, 2)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts ``[rows, channels, tokens]`` one after the other, with channels last in memory where
    the longest one has them so: a kernel gets what it would without a mesh."""
    if len(parts) == 1:
        return parts[0]
    longest = max(parts, key=lambda part: part.shape[2])
    if longest.stride(1) != 1:
        return torch.cat(list(parts), 2)
    return torch.cat([part.transpose(1, 2) for part in parts], 1).transpose(1, 2)
