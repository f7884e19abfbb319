"""The weights around self-attention, and which of their rows make which heads.

Letters of the shapes: b batch, s tokens of this rank, c features of a token, h query heads, g
key/value heads, d head dim of queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_usp.errors import ConfigError

ORDERS = ("qkv", "grouped")
Weights = tuple[torch.Tensor, ...]
QKV_KINDS = (0, 1, 2)  # queries, keys, values


class Rows(NamedTuple):
    """Rows ``start : stop`` of one of the weights."""

    weight: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Projection:
    """The weights of the projections around self-attention, as ``torch.nn.Linear`` has them.

    Args:
        qkv: of queries, keys and values: one weight ``[h d + g d + g e, c]``, or three
            ``[h d, c]``, ``[g d, c]``, ``[g e, c]``.
        out: of the output, ``[c_out, h e]``.
        heads, kv_heads: h and g.
        qkv_bias: as many as ``qkv`` has weights, or None.
        out_bias: ``[c_out]`` or None.
        order: of the rows of one ``qkv`` weight: ``"qkv"``, all queries, all keys, all values, or
            ``"grouped"``, as megatron-core has them: for each key/value head its query heads, its
            key and its value.
        gathered: weights that ZeRO-3 has partitioned are whole in the forward and the backward pass
            of the call, as those that DeepSpeed gathers for the module that calls
            (``deepspeed.zero.register_external_parameter``).

    Raises:
        ConfigError: shapes that do not fit.
    """

    qkv: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: torch.Tensor
    heads: int
    kv_heads: int
    qkv_bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    out_bias: torch.Tensor | None = None
    order: str = "qkv"
    gathered: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        weights, biases, (h, g) = self.weights, self.biases, (self.heads, self.kv_heads)
        sizes = f"qkv {[list(x.shape) for x in weights]}, out {list(self.out.shape)}"
        if not self.gathered and any(hasattr(x, "ds_id") for x in self.tensors):
            return  # ZeRO-3 may hold them without a shape: only their own layers multiply them
        check_heads(h, g, len(weights), self.order)
        counts = (h, g, g) if len(weights) == 3 else (h + 2 * g,)
        divides = [len(x) % n == 0 for x, n in zip(weights, counts, strict=True)]
        dims = self.dims if all(divides) else (0, 0)
        fits = all(x.ndim == 2 for x in (*weights, self.out)) and all(divides)
        if not fits or self.out.shape[1] != h * dims[1] or len({x.shape[1] for x in weights}) > 1:
            raise ConfigError(
                f"weights of {h} query and {g} key/value heads must be [h d + g d + g e, c], or "
                f"three [h d, c], [g d, c], [g e, c], and [c_out, h e]; got {sizes}"
            )
        shapes = [list(x.shape) for x in biases]
        if biases and shapes != [[len(x)] for x in weights]:
            raise ConfigError(f"biases {shapes} do not fit weights {sizes}")
        if self.out_bias is not None and self.out_bias.shape != self.out.shape[:1]:
            raise ConfigError(f"out_bias {list(self.out_bias.shape)} does not fit weights {sizes}")

    def _check_types(self) -> None:
        for name in ("qkv", "out", "qkv_bias", "out_bias"):
            given = getattr(self, name)
            several = name.startswith("qkv") and isinstance(given, (tuple, list))
            tensors = given if several else (given,)
            if name.endswith("bias") and given is None:
                continue
            if not all(isinstance(x, torch.Tensor) for x in tensors):
                kinds = ", ".join(type(x).__name__ for x in tensors)
                raise ConfigError(
                    f"{name} is {kinds}, expected a tensor{' or three' if name[0] == 'q' else ''}: "
                    "the weights and biases of the layers. USPSelfAttention takes the layers"
                )

    @property
    def weights(self) -> Weights:
        return (self.qkv,) if isinstance(self.qkv, torch.Tensor) else tuple(self.qkv)

    @property
    def biases(self) -> Weights:
        if self.qkv_bias is None:
            return ()
        is_one = isinstance(self.qkv_bias, torch.Tensor)
        return (self.qkv_bias,) if is_one else tuple(self.qkv_bias)  # type: ignore[return-value]

    @property
    def dims(self) -> tuple[int, int]:
        """d and e."""
        weights = self.weights
        if len(weights) == 1:
            dim = len(weights[0]) // (self.heads + 2 * self.kv_heads)
            return dim, dim
        return len(weights[0]) // self.heads, len(weights[2]) // self.kv_heads

    @property
    def tensors(self) -> Weights:
        out = (self.out,) if self.out_bias is None else (self.out, self.out_bias)
        return *self.weights, *self.biases, *out

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.heads, self.kv_heads, *self.dims, len(self.weights), self.order)

    def plain(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[b, s, h, d]``, keys ``[b, s, g, d]`` and values ``[b, s, g, e]`` of ``x [b, s,
        c]``, all heads at once; differentiable."""
        biases = self.biases or (None,) * len(self.weights)
        projected = [
            torch.nn.functional.linear(x, weight, bias)
            for weight, bias in zip(self.weights, biases, strict=True)
        ]
        return split_heads(projected, self.geometry)


def check_heads(heads: int, kv_heads: int, num_weights: int, order: str) -> None:
    """ConfigError for query heads that key/value heads do not divide, other than one or three
    weights, or an unknown order of their rows."""
    counts = heads, kv_heads
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if not whole or heads % kv_heads:
        raise ConfigError(f"{heads!r} query heads are no multiple of {kv_heads!r} key/value heads")
    if num_weights not in (1, 3):
        raise ConfigError(
            f"{num_weights} weights of queries, keys and values: give one, or three in this order"
        )
    if order not in ORDERS or (order == "grouped" and num_weights > 1):
        raise ConfigError(
            f"order={order!r} must be one of {', '.join(ORDERS)}, of which three weights have 'qkv'"
        )


class Geometry(NamedTuple):
    """A :class:`Projection` without its tensors; ``num_weights`` is 1 or 3."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    num_weights: int
    order: str

    def head_dim(self, kind: int) -> int:
        return (self.dim, self.dim, self.value_dim)[kind]

    def rows(self, kind: int, heads: Iterable[int]) -> tuple[Rows, ...]:
        """The rows of these heads of queries (0), keys (1) or values (2), in this order; those that
        follow each other as one."""
        return _joined((self._first_row(kind, head) for head in heads), self.head_dim(kind))

    def out_columns(self, heads: Iterable[int]) -> tuple[Rows, ...]:
        """The columns of these heads in the output's weight, likewise."""
        return _joined(((0, head * self.value_dim) for head in heads), self.value_dim)

    def _first_row(self, kind: int, head: int) -> tuple[int, int]:
        dim, h, g = self.dim, self.heads, self.kv_heads
        if self.num_weights == 3:
            return kind, head * self.head_dim(kind)
        if self.order == "qkv":
            return 0, ((0, h, h + g)[kind] + head) * dim
        ratio = h // g
        group, place = divmod(head, ratio) if kind == 0 else (head, ratio + kind - 1)
        return 0, (group * (ratio + 2) + place) * dim


def _joined(starts: Iterable[tuple[int, int]], length: int) -> tuple[Rows, ...]:
    """Runs of one length, of a weight and their first row; those that follow each other as one."""
    runs = list[Rows]()
    for weight, start in starts:
        if runs and runs[-1].weight == weight and runs[-1].stop == start:
            runs[-1] = runs[-1]._replace(stop=start + length)
        else:
            runs.append(Rows(weight, start, start + length))
    return tuple(runs)


def split_heads(
    projected: Sequence[torch.Tensor], geometry: Geometry
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values ``[..., heads, dim]`` of what the weights made."""
    h, g, dim = geometry.heads, geometry.kv_heads, geometry.dim
    if geometry.num_weights == 3:
        counts = (h, g, g)
        q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip(projected, counts, strict=True))
    elif geometry.order == "qkv":
        q, k, v = projected[0].unflatten(-1, (h + 2 * g, dim)).split((h, g, g), dim=-2)
    else:
        groups = projected[0].unflatten(-1, (g, h // g + 2, dim))
        q = groups[..., :-2, :].flatten(-3, -2)
        k, v = groups[..., -2, :], groups[..., -1, :]
    return q, k, v


def select_rows(weights: Sequence[torch.Tensor], runs: Sequence[Rows]) -> torch.Tensor:
    """These rows one after the other; a view where they are one run."""
    pieces = [weights[weight][start:stop] for weight, start, stop in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unselect_rows(
    rows: torch.Tensor, runs: Sequence[Rows], like: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The reverse of :func:`select_rows` of all rows: tensors of the shapes of ``like``."""
    pieces: list[list[tuple[int, torch.Tensor]]] = [[] for _ in like]
    offset = 0
    for weight, start, stop in runs:
        pieces[weight].append((start, rows[offset : offset + stop - start]))
        offset += stop - start
    tensors = []
    for runs_of_weight in pieces:
        ordered = [x for _, x in sorted(runs_of_weight, key=lambda piece: piece[0])]
        tensors.append(ordered[0] if len(ordered) == 1 else torch.cat(ordered))
    return tensors
