"""A program on megatron-core as its users write them; nothing in here knows of ds_usp.

One forward and backward pass of a ``GPTModel`` on the local layer spec, with megatron-core's own
groups, batch slicing, rotary embedding and vocabulary-parallel loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

S, B, LAYERS, HEADS, HEAD_DIM, VOCAB = 32, 2, 2, 8, 4, 64


def step(
    *,
    tp: int = 1,
    cp: int = 1,
    levels: list[int] | None = None,
    kv_heads: int = HEADS,
    rotary: bool = True,
    dense_mask: bool = False,
    recompute: bool = False,
    comm_type: str | list[str] | None = None,
    dropout: float = 0.0,
    core: Callable[[], Any] | None = None,
) -> tuple[float, dict[str, Any]]:
    """The mean loss, and each weight's gradient with the dim that tensor parallelism cuts.

    Args:
        core: gives what the layer spec names as core attention, once the groups exist.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.utils import get_batch_on_this_cp_rank

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        hierarchical_context_parallel_sizes=levels,
    )
    model_parallel_cuda_manual_seed(1)
    recomputing = {"recompute_granularity": "full", "recompute_method": "uniform"}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HEADS * HEAD_DIM,
        num_attention_heads=HEADS,
        num_query_groups=kv_heads,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        cp_comm_type=comm_type,
        attention_dropout=dropout,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **({**recomputing, "recompute_num_layers": 1} if recompute else {}),
    )
    spec = get_gpt_layer_local_spec()
    if core:
        spec.submodules.self_attention.submodules.core_attention = core()
    torch.manual_seed(1)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=S,
        position_embedding_type="rope" if rotary else "learned_absolute",
    )
    batch = get_batch_on_this_cp_rank(full_batch(dense_mask))
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    loss = (losses * batch["loss_mask"]).sum() / (B * S)
    return reduced(model, loss)


def reduced(model: torch.nn.Module, loss: torch.Tensor) -> tuple[float, dict[str, Any]]:
    """Loss and gradients summed over all ranks that hold different tokens."""
    from megatron.core import parallel_state

    loss.backward()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    gradients = {}
    for name, weight in model.named_parameters():
        dist.all_reduce(weight.grad, group=group)
        is_cut = getattr(weight, "tensor_model_parallel", False)
        gradients[name] = weight.grad, weight.partition_dim if is_cut else None
    return loss.item(), gradients


def full_batch(dense_mask: bool) -> dict[str, Any]:
    """The batch before it is cut over the context-parallel ranks."""
    torch.manual_seed(2)
    text = torch.randint(VOCAB, (B, S + 1))
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(B, S),
        "position_ids": torch.arange(S).expand(B, S).contiguous(),
        "attention_mask": causal_mask() if dense_mask else None,
    }


def causal_mask() -> torch.Tensor:
    """True where a query must not look, as megatron-core's datasets make it."""
    return torch.ones(B, 1, S, S).triu(1).bool()
