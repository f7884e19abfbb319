"""Local attentions of frameworks: real ones, and stubs with their class names and attributes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from cases import mesh_of

from ds_usp import USPAttention

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 16


class Local(torch.nn.Module):
    """Causal attention in either order of dims; remembers what else it was handed."""

    def __init__(self, batch_dim: int, flat: bool = False) -> None:
        super().__init__()
        self.batch_dim, self.flat = batch_dim, flat
        self.handed: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self.handed.append((args, kwargs))
        order = (0, 2, 1, 3) if self.batch_dim == 0 else (1, 2, 0, 3)
        back = (0, 2, 1, 3) if self.batch_dim == 0 else (2, 0, 1, 3)
        q, k, v = (x.permute(order) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        out = out.permute(back).contiguous()
        return out.flatten(2) if self.flat else out


def rotary(features: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin ``[tokens, 1, 1, features]``, as Megatron-DeepSpeed makes them."""
    frequency = 100.0 ** (-torch.arange(0, features, 2) / features)
    angle = torch.outer(torch.arange(tokens).float(), frequency)
    angle = torch.cat([angle, angle], -1).view(tokens, 1, 1, features)
    return angle.cos(), angle.sin()


def stand_in(module: str, name: str, **attributes: Any) -> torch.nn.Module:
    """A module with the class name and attributes of the framework's."""
    kind = type(name, (torch.nn.Module,), {"__module__": module})
    if attributes.pop("derived", False):
        kind = type("MyAttention", (kind,), {"__module__": "my_model"})
    local = kind()
    for key, value in attributes.items():
        setattr(local, key, value)
    return local


def flash_self_attention(
    causal: bool = True, scale: float | None = None, dropout: float = 0.0, **more: Any
) -> torch.nn.Module:
    """Megatron-DeepSpeed's, with --use-flash-attn-v2."""
    place = ("megatron.model.transformer", "FlashSelfAttention")
    return stand_in(*place, causal=causal, softmax_scale=scale, dropout_p=dropout, **more)


def triton(
    causal: bool = True, scale: float | None = None, dropout: float = 0.0
) -> torch.nn.Module:
    """Megatron-DeepSpeed's, with --use-flash-attn-triton: its scale and dropout are never used."""
    place = ("megatron.model.transformer", "FlashSelfAttentionTriton")
    return stand_in(*place, causal=causal, softmax_scale=scale, dropout_p=dropout)


def flash_attn(
    causal: bool = True, window: tuple[int, int] = (-1, -1), dropout: float = 0.0, alibi: Any = None
) -> torch.nn.Module:
    """The flash-attn package's."""
    return stand_in(
        "flash_attn.modules.mha",
        "FlashSelfAttention",
        causal=causal,
        softmax_scale=None,
        drop=torch.nn.Dropout(dropout),
        window_size=window,
        alibi_slopes=alibi,
    )


def core_attention(
    kind: str = "causal", layer: int = 1, scaling: bool = False, dropout: float = 0.0
) -> torch.nn.Module:
    """Megatron-DeepSpeed's, without flash attention."""
    return stand_in(
        "megatron.model.transformer",
        "CoreAttention",
        attn_mask_type=SimpleNamespace(name=kind),
        layer_number=layer,
        apply_query_key_layer_scaling=scaling,
        norm_factor=math.sqrt(HEAD_DIM) * (layer if scaling else 1),
        attention_dropout=torch.nn.Dropout(dropout),
    )


def megatron_core(kind: str = "causal", layer: int = 1, sinks: Any = None, **config: Any) -> Any:
    """The real ``DotProductAttention`` of megatron-core."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    scale = config.pop("softmax_scale", None)
    settings = TransformerConfig(
        num_layers=layer,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        use_cpu_initialization=True,
        **{"attention_dropout": 0.0, **config},
    )
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))
    local = DotProductAttention(
        settings, layer, AttnMaskType[kind], "self", softmax_scale=scale, pg_collection=groups
    )
    if sinks is not None:  # as with softmax_type="learnable", which is made on GPUs
        local.softmax_offset = torch.nn.Parameter(torch.tensor(sinks))
    return local


def in_evaluation(make: Callable[..., torch.nn.Module], **arguments: Any) -> torch.nn.Module:
    return make(**arguments).eval()


def nobody_knows() -> torch.nn.Module:
    """A class that the package does not know."""
    return torch.nn.Identity()


@dataclass(frozen=True)
class Setting:
    """A local attention and how USPAttention is made around it."""

    local: Callable[..., Any]
    arguments: dict[str, Any]
    options: dict[str, Any]
    layout: str = "zigzag"
    batch_dim: int = 0
    rotary: int = 0
    ulysses: int = 2

    def module(self) -> USPAttention:
        return USPAttention(
            self.local(**self.arguments),
            None,
            gather_idx=1 - self.batch_dim,
            mesh=mesh_of(self.ulysses),
            layout=self.layout,
            **self.options,
        )


def full_tensors() -> list[torch.Tensor]:
    """q, k, v and dout of the full sequence ``[b, s, h, d]``, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(2, TOKENS, heads, HEAD_DIM, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
