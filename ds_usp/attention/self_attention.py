"""``USPSelfAttention``: self-attention of a transformer layer, with its linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import nn

from ds_usp.attention.plan import AttentionOptions
from ds_usp.attention.projected import (
    KEEPS,
    Keep,
    attend_rotated,
    projected_attention,
    warn_plain,
)
from ds_usp.attention.projection import Geometry, Projection, check_heads, split_heads
from ds_usp.attention.projection_choice import overlap_pays
from ds_usp.attention.rotary import Rotary
from ds_usp.attention.score_mod import NO_SCORE_MOD, Scores
from ds_usp.attention.tuning import AUTO_TUNING, Tuning
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.registry import AUTO

Overlap = bool | Literal["auto"]


class USPSelfAttention(nn.Module):
    """Self-attention over a mesh, with the linear layers before and after it.

    With ``overlap`` the rows of their weights are multiplied under the exchanges, by
    :func:`ds_usp.projected_attention`; otherwise, and where that cannot be, the layers are called
    as they are, with :func:`ds_usp.usp_attention` between them, and one line in the log names the
    reason. Weights keep their names in checkpoints: ``qkv``, or ``qkv.0`` to ``qkv.2``, and
    ``out``.

    Args:
        qkv: one linear layer, or three; see :class:`ds_usp.Projection` for their rows.
        out: the linear layer after attention.
        heads, kv_heads: query heads and key/value heads.
        mesh, layout, mask, softmax_scale, kernel, tuning, scores: as of
            :func:`ds_usp.usp_attention`.
        order: of the rows of one ``qkv`` layer: ``"qkv"`` or ``"grouped"``.
        q_norm, k_norm: modules that normalize queries and keys ``[b, s, heads, d]`` before they
            are rotated; with them the plain path is taken.
        overlap: multiply under the exchanges. ``"auto"``: where the planner's forecast of a layer
            is more than 1 % shorter with it (:func:`ds_usp.planner.choose_projections`); over
            NVLink it is not, and a layer was 0.6 to 4.9 % slower (2 H200).
        keep: what is kept for backward, if overlapped.

    Raises:
        ConfigError: arguments that do not fit.
    """

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
        overlap: Overlap = "auto",
        keep: Keep = "arrivals",
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
        if overlap not in (True, False, "auto") or keep not in KEEPS:
            raise ConfigError(
                f"overlap={overlap!r} must be True, False or 'auto', keep={keep!r} one of "
                f"{', '.join(KEEPS)}"
            )
        if not isinstance(qkv, nn.Module):
            qkv = nn.ModuleList(qkv)
        check_heads(heads, kv_heads, len(qkv) if isinstance(qkv, nn.ModuleList) else 1, order)
        self.qkv = qkv
        self.out, self.q_norm, self.k_norm = out, q_norm, k_norm
        self.heads, self.kv_heads, self.order = heads, kv_heads, order
        self.overlap, self.keep = overlap, keep
        self._options = AttentionOptions(
            mesh, layout, mask, softmax_scale, 0.0, kernel, False, tuning, scores
        )

    def forward(
        self, x: torch.Tensor, rotary: Rotary | None = None, *, mask: MaskSpec | None = None
    ) -> torch.Tensor:
        """Attention of this rank's tokens with the whole sequence. Collective over the mesh.

        Shapes:
            x ``[b, s_local, c]`` -> ``[b, s_local, c_out]``.

        Args:
            rotary: cos and sin ``[s_local, r]`` of this rank's tokens.
            mask: of this call, as of packed documents, instead of the module's.
        """
        options = self._options if mask is None else self._options._replace(mask=mask)
        plain = partial(self._plain, x, rotary, options)
        layers, mesh = self._layers, options.mesh
        if not (self._overlap_pays(x, options) if self.overlap == "auto" else self.overlap):
            return plain()
        reason = linear_reason((*layers, self.out)) or _bias_reason(layers)
        if self.q_norm is not None or self.k_norm is not None:
            reason = "queries or keys are normalized between their projection and attention"
        if reason is not None:
            if not torch.compiler.is_compiling():
                warn_plain(reason, mesh)
            return plain()
        call = options._asdict()
        for name in ("return_lse", "kv_layout"):
            del call[name]
        projection = self._projection(layers)
        return projected_attention(
            x, projection, rotary=rotary, keep=self.keep, plain=plain, **call
        )

    def _overlap_pays(self, x: torch.Tensor, options: AttentionOptions) -> bool:
        """What ``"auto"`` means for a call."""
        if torch.compiler.is_compiling() or type(self.out) is not nn.Linear:
            return False
        layout, mesh = options.layout, options.mesh
        tokens = layout.seq_len if isinstance(layout, TokenLayout) else x.shape[1] * mesh.sp_degree
        dim = self.out.in_features // self.heads
        return overlap_pays(mesh, x, tokens, self.heads, self.kv_heads, dim)

    @property
    def _layers(self) -> tuple[nn.Module, ...]:
        return tuple(self.qkv) if isinstance(self.qkv, nn.ModuleList) else (self.qkv,)

    def _projection(self, layers: Sequence[nn.Module]) -> Projection:
        """The layers' weights. Made at each call: a framework may exchange parameters."""
        weights = tuple(layer.weight for layer in layers)
        biases = tuple(layer.bias for layer in layers)
        one = len(layers) == 1
        bias = None if biases[0] is None else biases[0] if one else biases
        return Projection(
            weights[0] if one else weights,  # type: ignore[arg-type]
            self.out.weight,  # type: ignore[arg-type]
            self.heads,
            self.kv_heads,
            bias,  # type: ignore[arg-type]
            self.out.bias,  # type: ignore[arg-type]
            self.order,
        )

    def _plain(
        self, x: torch.Tensor, rotary: Rotary | None, options: AttentionOptions
    ) -> torch.Tensor:
        """The layers one after the other."""
        made = [layer(x) for layer in self._layers]
        h, g = self.heads, self.kv_heads
        counts = (h, g, g) if len(made) == 3 else (h + 2 * g,)
        features = [y.shape[-1] for y in made]
        if any(n % count for n, count in zip(features, counts, strict=True)):
            raise ConfigError(
                f"{features} features of the qkv layers are no multiples of the heads in each, "
                f"{list(counts)}: {h} query and {g} key/value heads"
            )
        dims = features[0] // counts[0], features[-1] // counts[-1]
        q, k, v = split_heads(made, Geometry(h, g, *dims, len(made), self.order))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        out: torch.Tensor = self.out(attend_rotated(q, k, v, rotary, options).flatten(2))
        return out


def _bias_reason(layers: Sequence[nn.Module]) -> str | None:
    """Why these linear layers must be called themselves; None if all or none have a bias."""
    if len({layer.bias is None for layer in layers}) > 1:
        return "some of the query, key and value layers have a bias, others none"
    return None


def linear_reason(layers: Sequence[nn.Module]) -> str | None:
    """Why these layers must be called themselves; None if their weights say all that they do."""
    for layer in layers:
        if type(layer) is not nn.Linear:  # as of LoRA, fp8, tensor parallelism, parametrizations
            return f"a projection is a {type(layer).__name__}, no torch.nn.Linear"
        hooks = layer._forward_hooks, layer._forward_pre_hooks
        if any(hooks) or layer._backward_hooks or layer._backward_pre_hooks:
            return "a projection has hooks, which only its own call runs"
        if "forward" in vars(layer):  # as Accelerate's offload does
            return "a projection's forward is replaced"
    return None
