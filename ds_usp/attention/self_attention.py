"""Self-attention with the linear layers before and after it, as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ds_usp.attention.functional import usp_attention
from ds_usp.attention.plan import AttentionOptions, explain_keywords
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.registry import AUTO
from ds_usp.kernels.rotary import Rotary, RotaryPositions, apply_rotary, rotated

_ORDERS = ("qkv", "grouped")


class USPSelfAttention(nn.Module):
    """Self-attention over a mesh, with the linear layers before and after it, which keep their
    names in checkpoints: ``qkv``, or ``qkv.0`` to ``qkv.2``, and ``out``.

    Letters of the shapes: b batch, s tokens of this rank, c features of a token, h query heads, g
    key/value heads, d head dim of queries and keys, e of values.

    Args:
        qkv: one layer of ``h d + 2 g d`` features, or three of ``h d``, ``g d`` and ``g e``.
        out: the layer after attention, of ``h e`` features.
        heads, kv_heads: h and g.
        mesh, layout, mask, softmax_scale, kernel, tuning, scores: as of
            :func:`ds_usp.usp_attention`.
        order: of the features of one ``qkv`` layer: ``"qkv"``, all queries, all keys, all values,
            or ``"grouped"``, as megatron-core has them: for each key/value head its query heads,
            its key and its value.
        q_norm, k_norm: modules that normalize queries and keys ``[b, s, heads, d]`` before they
            are rotated.

    Raises:
        ConfigError: arguments that do not fit.
    """

    @explain_keywords
    def __init__(
        self,
        qkv: nn.Module | Sequence[nn.Module],
        out: nn.Module,
        heads: int,
        kv_heads: int,
        *,
        mesh: SequenceMesh,
        layout: TokenLayout | str,
        mask: MaskSpec,
        order: str = "qkv",
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        softmax_scale: float | None = None,
        kernel: str = AUTO,
        tuning: Tuning = AUTO_TUNING,
        scores: Scores = NO_SCORE_MOD,
    ) -> None:
        super().__init__()
        if not isinstance(mesh, SequenceMesh):
            raise ConfigError(
                f"mesh={mesh!r} must be a SequenceMesh: SequenceMesh.from_group(group, "
                "ulysses_degree=...), or SequenceMesh.single() for one process"
            )
        if not isinstance(qkv, nn.Module):
            qkv = nn.ModuleList(qkv)
        _check_heads(heads, kv_heads, len(qkv) if isinstance(qkv, nn.ModuleList) else 1, order)
        self.qkv = qkv
        self.out, self.q_norm, self.k_norm = out, q_norm, k_norm
        self.heads, self.kv_heads, self.order = heads, kv_heads, order
        self._options = AttentionOptions(
            mesh, layout, mask, softmax_scale, 0.0, kernel, False, tuning, scores
        )

    def forward(
        self, x: torch.Tensor, rotary: Rotary | None = None, *, mask: MaskSpec | None = None
    ) -> torch.Tensor:
        """Attention of this rank's tokens with the whole sequence. Collective over the mesh.

        Shapes:
            x ``[b, s, c]`` -> ``[b, s, c_out]``.

        Args:
            rotary: cos and sin ``[s, r]`` of this rank's tokens, which turn queries and keys
                (:func:`ds_usp.training.apply_rotary`), or
                :class:`ds_usp.training.RotaryPositions` of the tokens, without a table.
            mask: of this call, as of packed documents, instead of the module's.
        """
        q, k, v = self._heads_of(x)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if isinstance(rotary, RotaryPositions):
            q, k = rotated(q, rotary, 1), rotated(k, rotary, 1)
        elif rotary is not None:
            q, k = apply_rotary((q, k), *rotary, token_dim=1)
        options = self._options if mask is None else self._options._replace(mask=mask)
        attended: torch.Tensor = usp_attention(q, k, v, **options._asdict())
        out: torch.Tensor = self.out(attended.flatten(2))
        return out

    def _heads_of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[b, s, h, d]``, keys ``[b, s, g, d]`` and values ``[b, s, g, e]``."""
        layers = self.qkv if isinstance(self.qkv, nn.ModuleList) else (self.qkv,)
        projected = [layer(x) for layer in layers]
        h, g = self.heads, self.kv_heads
        counts = (h, g, g) if len(projected) == 3 else (h + 2 * g,)
        features = [y.shape[-1] for y in projected]
        if any(n % count for n, count in zip(features, counts, strict=True)):
            raise ConfigError(
                f"{features} features of the qkv layers are no multiples of the heads in each, "
                f"{list(counts)}: {h} query and {g} key/value heads"
            )
        q, *kv = (y.unflatten(-1, (n, -1)) for y, n in zip(projected, counts, strict=True))
        if kv:
            k, v = kv
        elif self.order == "qkv":
            q, k, v = q.split((h, g, g), dim=-2)
        else:
            groups = q.unflatten(-2, (g, h // g + 2))
            q = groups[..., :-2, :].flatten(-3, -2)
            k, v = groups[..., -2, :], groups[..., -1, :]
        return q, k, v


def _check_heads(heads: int, kv_heads: int, num_layers: int, order: str) -> None:
    """ConfigError for query heads that key/value heads do not divide, other than one or three
    layers, or an unknown order of their features."""
    counts = heads, kv_heads
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if not whole or heads % kv_heads:
        raise ConfigError(f"{heads!r} query heads are no multiple of {kv_heads!r} key/value heads")
    if num_layers not in (1, 3):
        raise ConfigError(
            f"{num_layers} layers of queries, keys and values: give one, or three in this order"
        )
    if order not in _ORDERS or (order == "grouped" and num_layers > 1):
        raise ConfigError(
            f"order={order!r} must be one of {', '.join(_ORDERS)}, of which three layers have 'qkv'"
        )
