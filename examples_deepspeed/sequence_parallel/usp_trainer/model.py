"""The GPT: plain torch layers on this rank's tokens, of which attention alone meets other ranks.

Tensors are ``[s_local, b, features]``, tokens first as in Megatron.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_usp import SequenceMesh, usp_attention
from ds_usp.memory import LayerMemory, in_chunks, recompute_before
from ds_usp.training import (
    RotaryPositions,
    ShardedBatch,
    chunked_weighted_loss,
    local_positions,
    rotate_projected,
)

# Causal attention of q [b, s, h, d], k and v [b, s, h_kv, d].
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class GPT(nn.Module):
    """A GPT that returns its loss.

    Args:
        args: validated; ``padded_vocab_size`` is set.
        memory: what its layers save for backward.
    """

    def __init__(self, args: Namespace, memory: LayerMemory) -> None:
        super().__init__()
        self.args, self.memory = args, memory
        self.embedding = nn.Embedding(args.padded_vocab_size, args.hidden_size)
        self.positions = None
        if not args.use_rotary_position_embeddings:
            self.positions = nn.Embedding(args.max_position_embeddings, args.hidden_size)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.num_layers))
        self.norm = new_norm(args)
        self.output = Output(args)
        self._draw_weights(args)
        if not args.untie_embeddings_and_output_weights:
            self.output.weight = self.embedding.weight

    def _draw_weights(self, args: Namespace) -> None:
        """Draw Megatron's initial weights, by the seed: matrices that write into the residual
        stream are smaller by sqrt(2 layers)."""
        draws = torch.Generator().manual_seed(args.seed)
        small = args.init_method_std / (2 * args.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if name.endswith((".out.weight", ".down.weight")):
                nn.init.normal_(parameter, std=small, generator=draws)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=args.init_method_std, generator=draws)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor,
        weights: Tensor,
        positions: Tensor,
        rotary: RotaryPositions | None,
        attention: Attention,
    ) -> Tensor:
        """This rank's part of the loss: the weighted sum over its tokens.

        Shapes:
            tokens, labels, weights, positions: ``[b, s_local]``.
        """
        hidden = self.embedding(tokens)
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        hidden = hidden.transpose(0, 1).contiguous()
        for number, layer in enumerate(self.layers):
            run = partial(layer, rotary=rotary, attention=attention)
            hidden = self.memory.run(number, run, hidden)
        return self.output(self.norm(hidden), labels.t(), weights.t())


class Layer(nn.Module):
    """Attention and an MLP, each behind a norm and added to its input."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(args), MLP(args)
        self.mlp_chunks = args.usp_mlp_chunks

    def forward(
        self, hidden: Tensor, rotary: RotaryPositions | None, attention: Attention
    ) -> Tensor:
        hidden = self.attention(hidden, rotary, attention)
        return in_chunks(self.mlp, hidden, max(1, self.mlp_chunks))


class SelfAttention(nn.Module):
    """Queries, keys and values of this rank's tokens, rotated where they are projected."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.kv_heads = args.num_key_value_heads
        self.head_dim = args.hidden_size // args.num_attention_heads
        self.gemm_last = args.usp_recompute == "gemm-last"
        bias = not args.disable_bias_linear
        kv_width = 2 * self.kv_heads * self.head_dim
        self.norm = new_norm(args)
        self.qkv = nn.Linear(args.hidden_size, args.hidden_size + kv_width, bias)
        self.out = nn.Linear(args.hidden_size, args.hidden_size, bias)

    def forward(
        self, hidden: Tensor, rotary: RotaryPositions | None, attention: Attention
    ) -> Tensor:
        if self.gemm_last:
            qkv = recompute_before(self.norm, self.qkv, hidden)
        else:
            qkv = self.qkv(self.norm(hidden))
        if rotary is not None:
            qkv = rotate_projected(qkv, rotary, self.kv_heads, self.head_dim)
        # Behind each other: the queries of a KV head, its key, its value.
        by_head = qkv.view(*qkv.shape[:2], self.kv_heads, -1, self.head_dim)
        q, k, v = by_head.split([by_head.shape[3] - 2, 1, 1], dim=3)
        if self.kv_heads > 1 and q.shape[3] > 1:
            # Flattened queries are a copy then. Keys and values would stay views, and backward
            # would keep the whole projection for them.
            k, v = k.clone(), v.clone()
        q, k, v = (x.flatten(2, 3).transpose(0, 1) for x in (q, k, v))
        out = attention(q, k, v)  # [b, s_local, h, d]
        # The tensors of one sample need no transposition, which backward would undo.
        tokens, samples = hidden.shape[:2]
        out = out.reshape(tokens, 1, -1) if samples == 1 else out.transpose(0, 1).flatten(2)
        return hidden + self.out(out)


class MLP(nn.Module):
    """Norm, two products around an activation function, and the residual."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.gated, bias = args.swiglu, not args.disable_bias_linear
        # In chunks it is recomputed as a whole.
        self.gemm_last = args.usp_recompute == "gemm-last" and args.usp_mlp_chunks <= 1
        self.norm = new_norm(args)
        self.up = nn.Linear(args.hidden_size, args.ffn_hidden_size * (1 + self.gated), bias)
        self.down = nn.Linear(args.ffn_hidden_size, args.hidden_size, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gemm_last:
            projected = recompute_before(self.norm, self.up, hidden)
            return hidden + recompute_before(self.activate, self.down, projected)
        return hidden + self.down(self.activate(self.up(self.norm(hidden))))

    def activate(self, projected: Tensor) -> Tensor:
        """SwiGLU of gate and value, which ``up`` puts behind each other, or GELU."""
        if not self.gated:
            return F.gelu(projected)
        gate, value = projected.chunk(2, dim=-1)
        return F.silu(gate) * value


class Output(nn.Module):
    """The projection to logits and the loss, in chunks of tokens."""

    def __init__(self, args: Namespace) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(args.padded_vocab_size, args.hidden_size))
        self.chunks = max(1, args.usp_loss_chunks)

    def forward(self, hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return chunked_weighted_loss(hidden, self.weight, labels, weights, chunks=self.chunks)


def new_norm(args: Namespace) -> nn.Module:
    """A norm of the model's width."""
    kind = nn.RMSNorm if args.normalization == "rmsnorm" else nn.LayerNorm
    return kind(args.hidden_size, eps=args.layernorm_epsilon)


def rotary_of(args: Namespace, positions: Tensor) -> RotaryPositions | None:
    """What layers rotate by; None: the model has learned positions.

    Args:
        positions: ``[s_local]``, in the sequence: angles are differences, so that packed documents
            need no positions of their own.
    """
    if not args.use_rotary_position_embeddings:
        return None
    head_dim = args.hidden_size // args.num_attention_heads
    return RotaryPositions.of(positions, head_dim, args.rotary_base, seq_len=args.seq_length)


def inputs_of(
    batch: ShardedBatch, args: Namespace, mesh: SequenceMesh
) -> tuple[Tensor, RotaryPositions | None, Attention]:
    """Positions, rotation and attention of a batch: causal, in its documents, over the mesh."""
    positions = local_positions(batch.layout, mesh.rank, batch.tokens.device)
    where = {"mesh": mesh, "layout": batch.layout, "mask": batch.mask, "kernel": args.usp_kernel}
    return batch.positions, rotary_of(args, positions), partial(usp_attention, **where)
