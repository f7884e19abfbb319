"""Tuning of one call: head chunks, KV gathering, copy engines. It changes speed, not results.
``plan.py`` resolves it once a plan, on each rank; nothing here communicates."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, NamedTuple

import torch

from ds_usp.comm.fused_exchange import RANKS as FUSED_RANKS
from ds_usp.comm.fused_exchange import fused_unavailable_reason
from ds_usp.comm.keywords import explain_keywords
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.config import p2p_disabled_reason, single_hw_queue
from ds_usp.errors import ConfigError
from ds_usp.geometry.chunking import (
    CallSize,
    ChunkPositions,
    attention_flop,
    chunk_positions,
    equal_blocks,
    is_launch_bound,
)
from ds_usp.geometry.heads import HeadSplit
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec

# The longest call that FlashInfer's kernel was measured to shorten (exchange_flashinfer.csv).
_MAX_FUSED_TOKENS = 8192


# Note [head chunks]
#
#   1 chunk    [a2a      ][kernel                       ][return   ]
#   4 chunks   [a2][k0][k1       ][k2       ][k3][ret]     exchanges of 1 to 3 and returns of 0 to 2
#                                                          are under kernels; 0 and 3 are cut small
#
# Heads are divided, not tokens: heads are independent, so nothing is merged between chunks, every
# kernel call keeps all its tokens, and one mechanism hides the all-to-all and the ring, forward and
# backward. With a ring a chunk has whole KV heads: half a KV group would bring the group's KV
# around twice. What a chunk costs, and so how many there are: geometry/chunking.py.
@explain_keywords
@dataclass(frozen=True)
class Tuning:
    """How a call is divided and exchanged.

    Args:
        chunks: head chunks. While one is computed, the exchange of the next one and the return of
            the one before are in flight. At most the KV heads of the rank with fewest; without a
            ring, where all ranks use equally many KV heads, the query heads of the rank with
            fewest. ``"auto"``: by the work of a chunk, its bytes and the links on GPUs, one on
            CPUs.
        gather: True all-gathers the keys and values of the ring, chunk by chunk: large kernel calls
            and no sums over blocks. False receives them stepwise, in memory that does not grow with
            the ring. ``"auto"``: all-gathered where that takes no more memory, or little.
        copies: exchanges use the GPUs' copy engines and peer memory; else NCCL. ``"auto"``: on
            NVIDIA GPUs of one node, except under ``NCCL_P2P_DISABLE=1``. ``"flashinfer"``:
            FlashInfer's kernel exchanges the heads of short calls (one sample of up to 8,192
            tokens, in one chunk, not in a CUDA graph) where the ranks have equal shares of heads
            and tokens; others as ``"auto"``.
    """

    chunks: int | Literal["auto"] = "auto"
    gather: bool | Literal["auto"] = "auto"
    copies: bool | Literal["auto", "flashinfer"] = "auto"

    def __post_init__(self) -> None:
        number = isinstance(self.chunks, int) and not isinstance(self.chunks, bool)
        if self.chunks != "auto" and (not number or self.chunks < 1):
            raise ConfigError(f"chunks={self.chunks!r} must be 'auto' or a number of 1 or more")
        for name, words in (("gather", ("auto",)), ("copies", ("auto", "flashinfer"))):
            value = getattr(self, name)
            if value not in words and not isinstance(value, bool):
                allowed_words = ", ".join(map(repr, words))
                raise ConfigError(f"{name}={value!r} must be {allowed_words}, True or False")

    def resolve(
        self,
        split: HeadSplit,
        layout: TokenLayout,
        q: torch.Tensor,
        mesh: SequenceMesh,
        mask: MaskSpec,
        keys: int | None = None,
        *,
        backward: bool = True,
        varlen: bool = True,
    ) -> ResolvedTuning:
        """Resolve ``"auto"`` for one call, the same on every rank.

        Args:
            layout: of the queries ``q [b, s, h, d]``; ``split``: of the heads.
            keys: tokens of the keys' whole sequence; None: the queries'.
            backward: a backward pass follows.
            varlen: the kernel computes many documents in one call.

        Raises:
            ConfigError: more chunks than heads allow, copy engines or FlashInfer that cannot be
                used.
        """
        if self.chunks != "auto":
            split.check_chunks(self.chunks, layout.ring)
        # Nothing of it may depend on this rank's own tokens or free memory: other chunks are other
        # exchanges, and the ranks would wait for each other.
        size = _call_size(split, layout, q, mesh, mask, keys or layout.seq_len)
        samples = () if varlen else range(len(mask.documents))
        areas = sum(1 for sample in samples for _ in mask.areas_of(sample))
        kernel_calls = max(1, ceil(areas / layout.ring))
        blocks = equal_blocks(mask, q.shape[0], layout.seq_len // layout.ring)
        size = size._replace(backward=backward, kernel_calls=kernel_calls, head_blocks=blocks)
        chunks = size.num_chunks() if self.chunks == "auto" else self.chunks
        if layout.degree == 1:  # nothing is exchanged that parts of a KV group would overlap
            chunks = min(chunks, split.max_chunks)
        gather = self.gather
        if gather == "auto":
            gather = size.flop > 0 and size.all_gathers_kv(chunks)
        use_copy_engines = self._resolve_copy_engines(q, mesh)
        # Rank 0's heads, by which every rank decides.
        kv_heads = [split.chunk(chunks, index).keys[0] for index in range(chunks)]
        positions = chunk_positions(
            [stop - start for start, stop in kv_heads],
            launch_bound=use_copy_engines and is_launch_bound(size.flop),
        )
        use_fused = (  # besides copy engines, which calls with unequal shares take
            self.copies == "flashinfer"
            and chunks == q.shape[0] == 1
            and max(layout.seq_len, keys or 0) <= _MAX_FUSED_TOKENS
            and not (q.is_cuda and torch.cuda.is_current_stream_capturing())
        )
        return ResolvedTuning(
            chunks, gather and layout.ring > 1, use_copy_engines, positions, use_fused
        )

    def _resolve_copy_engines(self, q: torch.Tensor, mesh: SequenceMesh) -> bool:
        """Whether a call with such a ``q`` exchanges by copy engines.

        Raises:
            ConfigError: ``copies=True`` where they are not available, ``"flashinfer"`` where they
                or its kernel are not; or a CUDA graph is captured
                under ``CUDA_DEVICE_MAX_CONNECTIONS=1``.
        """
        why_not = mesh.copy_engine_unavailable or p2p_disabled_reason()
        if why_not is None and not q.is_cuda:
            why_not = f"the tensors are on {q.device.type}"
        if why_not is None and self.copies == "flashinfer":
            why_not = fused_unavailable_reason()
            if mesh.ring_degree > 1 or mesh.ulysses_degree not in FUSED_RANKS:
                why_not = (
                    f"the mesh is ulysses {mesh.ulysses_degree} x ring {mesh.ring_degree}, and its "
                    f"kernel is for ulysses {', '.join(map(str, FUSED_RANKS))} without a ring"
                )
        if self.copies in (True, "flashinfer") and why_not is not None:
            raise ConfigError(f"copies={self.copies!r}, but {why_not}. Use copies='auto'")
        use_copy_engines = self.copies is not False and why_not is None
        if use_copy_engines and single_hw_queue() and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "a CUDA graph with exchanges by copy engines may wait for itself where all streams "
                "share a queue. Unset CUDA_DEVICE_MAX_CONNECTIONS (it is 1), or use "
                "Tuning(copies=False) here and in the calls that come before the capture"
            )
        return use_copy_engines


def _call_size(
    split: HeadSplit,
    layout: TokenLayout,
    q: torch.Tensor,
    mesh: SequenceMesh,
    mask: MaskSpec,
    keys: int,
) -> CallSize:
    """The sizes of a call, the same on every rank; FLOP and exchanged bytes, a rank's in the
    forward pass, are 0 where nothing can be overlapped."""
    batch, _, heads, dim = q.shape
    flop = exchange_bytes = 0.0
    head_bytes = batch * dim * q.element_size()  # of one head of one token; v is taken for as wide
    if q.device.type != "cpu" and layout.degree > 1:
        flop = attention_flop(mask, layout.seq_len, keys, batch * heads * dim) / layout.degree
        sent = (split.ulysses - 1) / split.ulysses / layout.degree * head_bytes
        # Queries and output, keys and values.
        tokens = split.heads * layout.seq_len + max(split.kv_heads, split.ulysses) * keys
        exchange_bytes = 2 * sent * tokens
    return CallSize(
        split,
        flop,
        exchange_bytes,
        kv_bytes=2 * keys * head_bytes * max(split.kv_heads // split.ulysses, 1),
        ring=layout.ring,
        ulysses_in_node=mesh.ulysses_in_node,
    )


class ResolvedTuning(NamedTuple):
    """A :class:`Tuning` for one call, nothing left open; ``chunk_positions``: of each chunk in the
    pipeline, forward and backward; ``use_fused``: FlashInfer's kernel exchanges heads."""

    chunks: int
    gather_kv: bool
    use_copy_engines: bool
    chunk_positions: ChunkPositions = (("only", "only"),)
    use_fused: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """Return, as words, the choices that the ranks compare."""
        return (
            "1 chunk" if self.chunks == 1 else f"{self.chunks} chunks",
            "KV all-gathered" if self.gather_kv else "KV stepwise",
            "FlashInfer" if self.use_fused else "copy engines" if self.use_copy_engines else "P2P",
        )

    def __str__(self) -> str:
        return ", ".join(self.texts)


AUTO_TUNING = Tuning()


def check_tuning(tuning: object) -> None:
    """ConfigError if it is no :class:`Tuning`."""
    if not isinstance(tuning, Tuning):
        raise ConfigError(f"tuning={tuning!r} must be a Tuning, as Tuning(chunks=2)")
