"""The drop-in for ``deepspeed.sequence.layer.DistributedAttention``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ds_usp.attention.functional import SeqAllToAll, usp_attention
from ds_usp.attention.host_arguments import HostArguments
from ds_usp.attention.local_attention import read_local_attention
from ds_usp.attention.request import HeadTraffic, agreed, check_tensors
from ds_usp.attention.rotary import apply_rotary, check_rotary
from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import DEFAULT_SP_ORDER, TokenLayout
from ds_usp.geometry.masks import MaskSpec
from ds_usp.kernels.registry import AUTO


class USPAttention(torch.nn.Module):
    """Attention over a sequence that is spread over ranks, around any local attention.

    Constructor and call are those of ``deepspeed.sequence.layer.DistributedAttention``. With
    ``ring_degree`` 1 the local attention runs on all tokens of its share of the heads, and the
    result is DeepSpeed's bit for bit. With a ring the package's own kernels compute what the
    local attention would: its mask, scale and dropout are read from it where its class is known,
    and have to be given otherwise.

    Args:
        local_attention: module called as ``local_attention(q, k, v, *args, **kwargs)``; it may
            return ``[b, s, h, d]`` / ``[s, b, h, d]`` or ``[b, s, h * d]`` / ``[s, b, h * d]``.
        sequence_process_group: the sequence-parallel group; None: the default group.
        scatter_idx: dim of the heads: 2.
        gather_idx: dim of the tokens, 0 or 1; used where the call does not say the batch dim.
        sp_stream: the stream that Megatron-DeepSpeed's overlap computes q and k on; it is waited
            for, forward and backward.
        num_kv_heads: if given, checked against the keys.
        ulysses_degree: ranks that exchange heads, the ring takes the rest; None: all ranks.
        mesh: instead of a group and a degree, a mesh that exists.
        layout: kind of token layout, or a :class:`TokenLayout`, which also says the length of a
            sequence that does not divide.
        mask, softmax_scale: what the local attention computes, where the ring cannot read it.
        kernel: name of the ring's kernel.
        order: which axis of the mesh has its ranks next to each other.

    Raises:
        ConfigError, LayoutError, MeshError, UnsupportedAttentionError: what cannot be served, at
            construction or at the first call, on every rank.

    Source: the interface is DeepSpeed's (deepspeed.sequence.layer, 0.19).
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        ulysses_degree: int | None = None,
        mesh: SequenceMesh | None = None,
        layout: str | TokenLayout = "zigzag",
        mask: MaskSpec | None = None,
        softmax_scale: float | None = None,
        kernel: str = AUTO,
        order: str = DEFAULT_SP_ORDER,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ConfigError(
                f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: heads are dim 2, tokens are "
                "dim 0 of [s, b, h, d] or dim 1 of [b, s, h, d]"
            )
        if mesh is None:
            mesh = SequenceMesh.from_group(sequence_process_group, ulysses_degree, order)
        elif ulysses_degree not in (None, mesh.ulysses_degree):
            raise ConfigError(
                f"ulysses_degree={ulysses_degree}, but the mesh has {mesh.ulysses_degree}"
            )
        self.local_attn = local_attention
        self.mesh = mesh
        self.gather_idx = gather_idx
        self.sp_stream = sp_stream
        self.num_kv_heads = num_kv_heads
        self.kernel = kernel
        self._layout = layout
        self._layouts: dict[int, TokenLayout] = {}
        self._host: HostArguments | None = None
        if mesh.ring_degree > 1:
            read = read_local_attention(local_attention, mask, softmax_scale)
            self._host = HostArguments(read)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int | torch.Tensor | None = None,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of this rank's tokens with the whole sequence. Collective over the mesh.

        Shapes:
            query ``[b, s_local, h, d]``, key and value ``[b, s_local, h_kv, d]`` with
            ``batch_dim_idx`` 0, or ``[s_local, b, ...]`` with 1 -> the same order of dims, 4-D or
            3-D (``h * d``) as the local attention returns.

        Args:
            batch_dim_idx: dim of the batch. A tensor here is an attention mask, as
                Megatron-DeepSpeed's path without flash attention passes it; the batch dim then
                is the one that ``gather_idx`` leaves.
            rotary_pos_emb: cos and sin ``[tokens, 1, 1, rot_dim]`` of the whole sequence.
            args, kwargs: passed to the local attention. With a ring they are checked to say
                nothing else than what the ring computes.
        """
        if batch_dim_idx is None or isinstance(batch_dim_idx, torch.Tensor):
            args = args if batch_dim_idx is None else (batch_dim_idx, *args)
            batch_dim_idx = 1 - self.gather_idx
        self._check(key, batch_dim_idx)
        swap = batch_dim_idx == 1
        self._wait_for_stream(query, key, value)
        q, k, v = (x.transpose(0, 1) if swap else x for x in (query, key, value))
        layout = self._agreed_layout(q)
        if self._host is None:
            out = self._local(q, k, v, layout, swap, rotary_pos_emb, args, kwargs)
        else:
            out = self._ring(q, k, v, layout, self._host, rotary_pos_emb, args, kwargs)
        return out.transpose(0, 1) if swap else out

    def _local(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        swap: bool,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """Ring 1: the local attention between two exchanges, as DeepSpeed does it."""

        def check() -> tuple[str, HeadTraffic]:
            text = check_tensors(q, k, v, self.mesh, layout)
            if rotary is not None:
                check_rotary(rotary, layout.seq_len, q.shape[3])
            return text, HeadTraffic.plan(q, k, self.mesh, layout)

        traffic = agreed(self.mesh, check)
        q, k, v = SeqAllToAll.apply(traffic.qkv, True, q, k, v)
        k, v = traffic.expand(k), traffic.expand(v)
        if rotary is not None:
            positions = layout.ring_positions(self.mesh.ring_rank)
            q, k = apply_rotary(q, rotary, positions), apply_rotary(k, rotary, positions)
        heads = q.shape[2]
        if swap:
            q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        out = self.local_attn(q, k, v, *args, **kwargs)
        flat = out.ndim == 3
        out = out.unflatten(2, (heads, -1)) if flat else out
        out = out.transpose(0, 1) if swap else out
        (out,) = SeqAllToAll.apply(traffic.out, False, out)
        return out.flatten(2) if flat else out

    def _ring(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: TokenLayout,
        host: HostArguments,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """With a ring: what the local attention would compute, on the package's kernels."""

        def check() -> tuple[str, None]:
            if rotary is not None:
                check_rotary(rotary, layout.seq_len, q.shape[3])
            return host.check(layout.seq_len, args, kwargs)

        if args or kwargs or rotary is not None:
            agreed(self.mesh, check)
        attention = host.attention
        if rotary is not None:
            positions = layout.positions(self.mesh.rank)
            q, k = (apply_rotary(x, rotary, positions).to(v.dtype) for x in (q, k))
        training = getattr(self.local_attn, "training", self.training)
        out: torch.Tensor = usp_attention(
            q,
            k,
            v,
            mesh=self.mesh,
            layout=layout,
            mask=attention.mask,
            softmax_scale=attention.softmax_scale,
            dropout_p=attention.dropout_p if training else 0.0,
            kernel=self.kernel,
        )
        return out.flatten(2) if attention.flat_output else out

    def _check(self, key: torch.Tensor, batch_dim_idx: int) -> None:
        error = None
        if batch_dim_idx not in (0, 1):
            error = ConfigError(
                f"batch_dim_idx={batch_dim_idx!r} must be 0 for [b, s, h, d] or 1 for [s, b, h, d]"
            )
        elif self.num_kv_heads is not None and key.shape[2:3] != (self.num_kv_heads,):
            error = ConfigError(
                f"num_kv_heads={self.num_kv_heads}, but the keys are {list(key.shape)}: their "
                "dim 2 is the heads"
            )
        if error:
            self.mesh.agree_on_call("", error)  # raises it, and tells the other ranks

    def _agreed_layout(self, q: torch.Tensor) -> TokenLayout:
        """The token layout for this many local tokens, the same on every rank."""
        if isinstance(self._layout, TokenLayout):
            return self._layout
        tokens = q.shape[1]
        if tokens not in self._layouts:
            kind = self._layout

            def check() -> tuple[str, TokenLayout]:
                layout = self.mesh.layout(kind, tokens * self.mesh.sp_degree)
                return f"{tokens} tokens on each rank", layout

            self._layouts[tokens] = agreed(self.mesh, check)
        return self._layouts[tokens]

    def _wait_for_stream(self, *tensors: torch.Tensor) -> None:
        """Order this call after the overlap stream's work, and that stream after our gradients."""
        stream = self.sp_stream
        if stream is None or not tensors[0].is_cuda:
            return
        torch.cuda.current_stream().wait_stream(stream)

        def hand_over(grad: torch.Tensor) -> None:
            stream.wait_stream(torch.cuda.current_stream())

        for x in tensors:
            if x.requires_grad:
                x.register_hook(hand_over)
