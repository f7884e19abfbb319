"""Shapes of the timed attention calls: what a shape says, its work, and named sets of them."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

import ds_usp

# Shortest, longest and number of the documents in each bin of MagiAttention's data set, whose
# benchmark takes the middle of a bin. github.com/SandAI-org/MagiAttention at 2c64135,
# exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv.
MAGI = (
    *((0, 10, 30254), (11, 50, 391188), (51, 100, 699596), (101, 200, 1377757)),
    *((201, 500, 3794735), (501, 1024, 3316785), (1025, 2048, 2106566), (2049, 4096, 988525)),
    *((4097, 8192, 410002), (8193, 16384, 173574), (16385, 32768, 115007)),
    *((32769, 65536, 18428), (65537, 131072, 22513), (131073, 196608, 18284)),
)
SHAPE_SYNTAX = "seq_len:heads:kv_heads:head_dim, then any of :full :forward :batch=N :window=LEFT"
# The name of each set can stand among the arguments of --shapes.
SHAPE_SETS = {
    # Causal, forward and backward: what a training step of a short or long sequence calls.
    "short": (
        "8192:32:8:128",
        "16384:16:16:128",
        "24576:40:8:128",
        "32768:32:32:128",
        "131072:16:4:128",
    ),
    # Full attention without gradients, as image and video diffusion transformers call it.
    "inference": (
        "4608:24:24:128:full:forward",  # Flux, 1024 px
        "4608:24:24:128:full:forward:batch=2",
        "17776:48:48:64:full:forward",  # CogVideoX
        "32760:40:40:128:full:forward",  # Wan 14B, 480p
        "75600:40:40:128:full:forward",  # Wan 14B, 720p
    ),
    # What neither of them has: uneven shards, heads that do not divide, head dims, masks.
    "held-out": (
        "8191:32:8:128",
        "12345:24:24:128:full:forward",
        "16384:40:5:128",
        "16384:32:32:64",
        "16384:32:8:96",
        "16384:16:16:192",
        "4096:16:4:128:batch=3",
        "2049:24:24:64:full:forward:batch=3",
        "32768:32:8:128:window=4096",
        "32768:32:8:128:documents=1024-8192",
    ),
    # Packed documents: lengths that TransformerEngine need not pad, then lengths as they are.
    "packed": (
        "16384:32:8:128:documents=256-8192/8",
        "16384:32:32:128:documents=256-8192/8",
        "32768:32:8:128:documents=256-8192/8",
        "32768:32:32:128:documents=256-8192/8",
        "131072:32:8:128:documents=256-8192/8",
        "131072:32:8:128:documents=1024-32768/8",
        "131072:32:32:128:documents=1024-32768/8",
        "32768:32:8:128:documents=256-8192",
        "131072:32:8:128:documents=1024-32768",
    ),
    # MagiAttention's benchmark at 16K tokens on each of 2 GPUs. The time of backward alone is the
    # difference to the row ``forward``.
    "magi": tuple(
        f"32768:64:8:128{documents}{forward}"
        for documents in (*(f":documents=magi-{number}" for number in range(3)), "")
        for forward in ("", ":forward")
    ),
    # A prompt and eight answers to it as a tree, and as rows that repeat the prompt: packed, batch.
    "trees": (
        "32768:32:8:128:tree=16384+8x2048",
        "147456:32:8:128:documents=18432-18432",
        "18432:32:8:128:batch=8",
    ),
}


@dataclass(frozen=True)
class Shape:
    """An attention call over the full sequence, before sharding.

    Attributes:
        full: every token sees every other one; else the mask is causal.
        forward: no backward pass, and no gradients.
        window: tokens to the left that a token sees; 0: all.
        documents: ``shortest-longest`` length of packed documents in tokens, log-uniform; with
            ``/n`` each length is a multiple of n; ``magi-n``: the n-th row of :func:`magi_row`;
            empty: one document.
        tree: ``prompt+NxANSWER``, tokens of a prompt and of each of N answers that see it and not
            each other, such trees one after the other; empty: none.
    """

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    full: bool = False
    forward: bool = False
    window: int = 0
    documents: str = ""
    tree: str = ""

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From :data:`SHAPE_SYNTAX`, or ``:documents=SHORTEST-LONGEST[/MULTIPLE]``, or
        ``:tree=PROMPT+NxANSWER``."""
        words = text.split(":")
        options = dict(word.partition("=")[::2] for word in words[4:])
        shape = cls(
            *map(int, words[:4]),
            batch=int(options.pop("batch", 1)),
            full=options.pop("full", None) is not None,
            forward=options.pop("forward", None) is not None,
            window=int(options.pop("window", 0)),
            documents=options.pop("documents", ""),
            tree=options.pop("tree", ""),
        )
        others = shape.window or shape.documents
        if options or (shape.full and others) or (shape.tree and (shape.full or others)):
            raise ValueError(
                f"shape {text!r}: expected {SHAPE_SYNTAX}; full and trees exclude other masks"
            )
        return shape

    @property
    def borders(self) -> tuple[int, ...]:
        """Cumulative lengths of the documents; empty without documents."""
        if not self.documents:
            return ()
        bounds, _, multiple = self.documents.partition("/")
        first, _, last = bounds.partition("-")
        if first == "magi":
            return tuple(magi_row(self.seq_len, int(last)))
        shortest, longest = int(first), int(last)
        return tuple(packed(self.seq_len, shortest, longest, seed=0, multiple=int(multiple or 1)))

    @property
    def segments(self) -> list[tuple[int, int, int | None]]:
        """Of the trees that fill the sequence; ValueError if they do not."""
        prompt, _, answers = self.tree.partition("+")
        count, length = map(int, answers.split("x"))
        size = int(prompt) + count * length
        if self.seq_len % size:
            raise ValueError(f"{self.seq_len} tokens are no whole number of trees of {size}")
        segments: list[tuple[int, int, int | None]] = []
        for root in range(0, self.seq_len, size):
            parent, first = len(segments), root + int(prompt)
            segments.append((root, first, None))
            starts = range(first, root + size, length)
            segments += [(start, start + length, parent) for start in starts]
        return segments

    @property
    def mask(self) -> ds_usp.MaskSpec:
        """Full, a tree, or causal with the window and documents."""
        if self.tree:
            return ds_usp.MaskSpec.tree(self.segments)
        if self.full:
            return ds_usp.MaskSpec.full()
        return ds_usp.MaskSpec.window(self.window or None, documents=self.borders)

    @property
    def layout_kind(self) -> str:
        """Token layout that balances the work of a ring."""
        if self.documents or self.tree:
            return "balanced"
        return "contiguous" if self.full or self.window else "zigzag"

    @property
    def tflop(self) -> float:
        """TFLOP of the visible pairs: 2 matrix products forward, 5 backward."""
        borders, pairs = self.borders or (0, self.seq_len), 0.0
        if self.tree:
            mask = self.mask
            borders, contexts = mask.documents[0], mask.contexts()
            pairs = sum((b - a) * x for (a, b), x in zip(pairwise(borders), contexts, strict=True))
        pairs += sum(self._pairs(b - a) for a, b in pairwise(borders))
        passes = 1.0 if self.forward else 3.5
        return passes * 4 * pairs * self.batch * self.heads * self.head_dim / 1e12

    def _pairs(self, tokens: int) -> float:
        """Visible (query, key) pairs of a document, without the diagonal's half."""
        if self.full:
            return tokens**2
        masked = max(tokens - 1 - self.window, 0) if self.window else 0
        return (tokens**2 - masked**2) / 2

    def random(self, device: torch.device, tokens: int) -> tuple[torch.Tensor, ...]:
        """Random bf16 q, k, v and dout of ``tokens`` tokens."""
        return tuple(
            torch.randn(
                self.batch, tokens, heads, self.head_dim, device=device, dtype=torch.bfloat16
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )

    def __str__(self) -> str:
        kilo, rest = divmod(self.seq_len, 1024)
        words = [
            str(self.seq_len) if rest else f"{kilo}K",
            f"{self.heads}/{self.kv_heads} d{self.head_dim}",
            f"b{self.batch}" if self.batch > 1 else "",
            "full" if self.full else "",
            f"window {self.window}" if self.window else "",
            f"documents {self.documents}" if self.documents else "",
            f"tree {self.tree}" if self.tree else "",
            "forward" if self.forward else "",
        ]
        return " ".join(filter(None, words))


def packed(tokens: int, shortest: int, longest: int, seed: int, multiple: int = 1) -> list[int]:
    """Cumulative log-uniform document lengths (``cu_seqlens``), each rounded down to a multiple,
    the last cut at ``tokens``."""
    if tokens % multiple or shortest < multiple:
        raise ValueError(f"{tokens} tokens, or {shortest}, in documents of multiples of {multiple}")
    draw, borders = random.Random(seed), [0]
    while borders[-1] < tokens:
        length = int(shortest * (longest / shortest) ** draw.random()) // multiple * multiple
        borders.append(min(tokens, borders[-1] + length))
    return borders


def magi_row(tokens: int, number: int) -> list[int]:
    """Cumulative lengths of one of the packed rows that documents of :data:`MAGI` fill one after
    the other, each cut into pieces of at most a quarter of a row, and what does not fit into a row
    begins the next: as MagiAttention's benchmark has them."""
    pieces = Counter[int]()
    for first, last, count in MAGI:
        whole, rest = divmod((first + last) // 2, tokens // 4)
        pieces[tokens // 4] += whole * count
        pieces[rest] += count
    del pieces[0]
    draw, end, borders = random.Random(0), 0, {0, tokens}
    lengths, weights = list(pieces), list(pieces.values())
    while (end := end + draw.choices(lengths, weights)[0]) < (number + 1) * tokens:
        if end > number * tokens:
            borders.add(end - number * tokens)
    return sorted(borders)


def requested_shapes(args: argparse.Namespace) -> list[Shape]:
    """The shapes of ``--shapes``, sets expanded; with ``--forward`` all without backward pass."""
    texts = [text for name in args.shapes for text in SHAPE_SETS.get(name, (name,))]
    shapes = [Shape.parse(text) for text in texts]
    return [replace(s, forward=True) for s in shapes] if vars(args).get("forward") else shapes
