"""megatron-core's layers that carry a state from token to token, over the ranks of a mesh.

Each rank computes its own tokens with all heads of its tensor-parallel rank, and states travel
(``ds_usp.affine_scan``), in forward and backward: all ranks of the mesh have to call a layer. Its
own code runs, with other functions for its convolution and its recurrence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import ds_usp
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.recurrence import delta_rule, mamba2
from megatron_patches.megatron_core.packed_documents import packed_documents

ATTRIBUTE = "usp_mesh"  # of a layer: where its tokens are


@dataclass(frozen=True)
class LayerSharding:
    """Says where the tokens of a layer are, and for one call its documents.

    Args:
        mesh: the ranks that share a sequence.
        layout: kind of token layout, or one.
        packed: megatron-core's ``PackedSeqParams``; None: one document a sequence.
        documents_read: those that were read for the call, by its number of tokens.
    """

    mesh: ds_usp.SequenceMesh
    layout: str | ds_usp.TokenLayout
    packed: Any = None
    documents_read: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)

    def of(self, tokens: Tensor) -> dict[str, Any]:
        """The arguments of ``ds_usp.affine_scan`` for tensors of this rank's tokens, dim 0."""
        layout: str | ds_usp.TokenLayout = self.layout
        documents: Any = ()
        if self.packed is not None:
            # Once for a convolution and the scan after it: a layer that asks twice begins a pass.
            if (documented := self.documents_read.get(tokens.shape[0])) is None:
                documented = self.documents_read[tokens.shape[0]] = packed_documents(
                    self.packed, ds_usp.MaskSpec.causal(), layout, self.mesh, tokens
                )
            layout, documents = documented.layout, documented.mask.documents
        if isinstance(layout, str):
            layout = self.mesh.layout(layout, tokens.shape[0] * self.mesh.sp_degree)
        return {"mesh": self.mesh, "layout": layout, "documents": documents}


class OneRank:
    """A context-parallel group for megatron-core's layers, which exchange and cut nothing then."""

    def size(self) -> int:
        """The size of the group."""
        return 1


def check_delta_net(layer: Any) -> None:
    """UnsupportedAttentionError for a gated delta net whose convolution is a module's, and not a
    function which a mesh replaces."""
    options = {
        "deterministic_mode": layer.config.deterministic_mode,
        f"activation_func={layer.activation}": layer.activation not in ("silu", "swish"),
    }
    for option, is_set in options.items():
        if is_set:
            raise UnsupportedAttentionError(
                f"layer {layer.layer_number}: with {option} a gated delta net computes its "
                "convolution of this rank's tokens alone. Use activation_func=silu without "
                "deterministic_mode, or context_parallel_size=1"
            )


def mamba_mixer(
    original: Callable[..., Any],
    mixer: Any,
    hidden_states: Tensor,
    *inference: Any,
    packed_seq_params: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """``MambaMixer.forward``: ``[s_local, b, h]``, and the bias of the projection. Its other
    arguments are for inference: UnsupportedAttentionError.

    In training it runs a kernel that fuses convolution and scan; here the same path as without
    ``use_mamba_mem_eff_path``.
    """
    sharding: LayerSharding | None = getattr(mixer, ATTRIBUTE, None)
    if sharding is None:
        return original(
            mixer, hidden_states, *inference, packed_seq_params=packed_seq_params, **options
        )
    if any(x is not None for x in (*inference, *options.values())):
        raise UnsupportedAttentionError(
            f"layer {mixer.layer_number}: a Mamba mixer over {sharding.mesh.sp_degree} ranks "
            "keeps no state for inference. Use context_parallel_size=1 to generate"
        )
    projected, _ = mixer.in_proj(hidden_states)
    y = mixer._ssm_prefill(projected, None, None, packed_seq_params=packed_seq_params)
    out, bias = mixer.out_proj(y)
    return out, bias


def mamba_between_projections(
    original: Callable[..., Tensor],
    mixer: Any,
    projected: Tensor,
    *states: Any,
    packed_seq_params: Any = None,
    **options: Any,
) -> Tensor:
    """``MambaMixer._ssm_prefill``, with the documents of a batch.

    Shapes:
        projected: ``[s_local, b, z x B C dt]``; result: ``[s_local, b, d_inner]``.
    """
    sharding: LayerSharding | None = getattr(mixer, ATTRIBUTE, None)
    if sharding is None:
        return original(mixer, projected, *states, **options)
    kernels = {"mamba_chunk_scan_combined": _mamba_scan}
    run = _on_mesh(original, sharding, packed_seq_params, kernels)
    return run(mixer, projected, *states, **options)


def gated_delta_net(
    original: Callable[..., Any],
    layer: Any,
    *args: Any,
    packed_seq_params: Any = None,
    **kwargs: Any,
) -> Any:
    """``GatedDeltaNet.forward``, which alone refuses packed documents."""
    sharding: LayerSharding | None = getattr(layer, ATTRIBUTE, None)
    if sharding is None:
        return original(layer, *args, packed_seq_params=packed_seq_params, **kwargs)
    kernels = {"chunk_gated_delta_rule": _delta_rule}
    return _on_mesh(original, sharding, packed_seq_params, kernels)(layer, *args, **kwargs)


def _on_mesh(
    function: Any, sharding: LayerSharding, packed: Any, replacements: dict[str, Callable[..., Any]]
) -> Any:
    """A layer's function, for one call with its ``packed`` documents, with other ones under the
    names by which it calls kernels: ``replacements``, and :func:`_convolution`."""
    sharding = LayerSharding(sharding.mesh, sharding.layout, packed)
    kernels = function.__globals__
    replaced = {
        name: partial(replacement, kernels[name], sharding)
        for name, replacement in {"causal_conv1d_fn": _convolution, **replacements}.items()
    }
    bound = FunctionType(
        function.__code__, {**kernels, **replaced}, function.__name__, function.__defaults__
    )
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _convolution(
    kernel: Callable[..., Tensor] | None,
    sharding: LayerSharding,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    seq_idx: Any = None,
    initial_states: Any = None,
) -> Tensor:
    """``causal_conv1d_fn``; kernel None: it is not installed.

    Shapes:
        x ``[b, d, s_local]``, result likewise; weight ``[d, taps]``; bias ``[d]``.
    """
    channels, taps = weight.shape

    def convolve(tokens: Tensor) -> Tensor:
        if kernel is not None:
            return kernel(tokens, weight, bias, activation=activation)
        padded = F.pad(tokens, (taps - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels))

    return ds_usp.causal_conv(convolve, x, taps, **sharding.of(x.movedim(2, 0)))


def _mamba_scan(
    kernel: Callable[..., Any],
    sharding: LayerSharding,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    z: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """``mamba_chunk_scan_combined`` of a layer in training.

    Shapes:
        x, z ``[b, s_local, h, p]``, result likewise; dt ``[b, s_local, h]``; A ``[h]``; B, C
        ``[b, s_local, g, n]``.
    """
    options = {k: value for k, value in options.items() if value is not None and value is not False}
    arguments = sharding.of(x.transpose(0, 1))
    out = mamba2(kernel, x, dt, A, B, C, chunk_size=chunk_size, **options, **arguments)
    return out if z is None else out * F.silu(z)


def _delta_rule(
    kernel: Callable[..., Any],
    sharding: LayerSharding,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Any = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """``chunk_gated_delta_rule`` of a layer in training.

    Shapes:
        query, key ``[b, s_local, h, k]``; value ``[b, s_local, h, v]``, result likewise; g, beta
        ``[b, s_local, h]``.
    """
    if initial_state is not None or output_final_state:
        raise ConfigError("a gated delta net over ranks keeps no state between calls")
    out = delta_rule(
        kernel, query, key, value, g, beta, **options, **sharding.of(query.transpose(0, 1))
    )
    return out, None
