"""A program on megatron-core as its users write them; nothing in here knows of ds_usp.

One forward and backward pass of a ``GPTModel`` on the local layer spec, with megatron-core's own
groups, batch slicing, rotary embedding and vocabulary-parallel loss.
"""

import zlib
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from recurrent_kernels import stack_spec

from ds_usp import testing as oracle

S, B, LAYERS, HEADS, HEAD_DIM, VOCAB = 32, 2, 2, 8, 4, 64


def step(
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    levels: list[int] | None = None,
    dense_mask: bool = False,
    contiguous: bool = False,
    documents: tuple[list[int], list[int]] | None = None,
    other_offsets: list[int] | None = None,
    padding_token: int = 0,
    alone: bool = False,
    scheduled: bool = False,
    padding_mask: bool = False,
    sharded_positions: bool = False,
    **model_options: Any,
) -> tuple[float, dict[str, Any]]:
    """The mean loss, and each weight's gradient with the dim that tensor parallelism cuts.

    Args:
        ep: ranks that share the experts of a layer.
        contiguous: the program shards its batches itself, in this order.
        documents: their lengths, and those of their places in a packed sequence (``thd``).
        other_offsets: which the last rank alone gives as those of its documents, a mistake.
        alone: one pass for each of them instead, without packing and padding.
        scheduled: as :func:`run_schedule`, of some tokens alone.
        sharded_positions: of M-RoPE are this rank's alone, which is a mistake.
        model_options: of :func:`gpt_model`.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.utils import get_batch_on_this_cp_rank

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        hierarchical_context_parallel_sizes=levels,
    )
    model_parallel_cuda_manual_seed(1)
    model = gpt_model(tp=tp, cp=cp, expert_model_parallel_size=ep, **model_options)
    three_axes = bool(model_options.get("mrope_section"))
    if documents:
        passes = [packed(*documents, padding_token, three_axes)]
        if other_offsets and dist.get_rank() == dist.get_world_size() - 1:
            given = passes[0][0]["packed_seq_params"]
            given.cu_seqlens_q = given.cu_seqlens_kv = torch.tensor(other_offsets)
            given.cu_seqlens_q_padded = given.cu_seqlens_kv_padded = None
        passes = alone_documents(*documents, three_axes) if alone else passes
        tokens = sum(documents[0])
    else:
        batch = full_batch(dense_mask)
        positions = batch["position_ids"]
        if contiguous:
            rank = parallel_state.get_context_parallel_rank()
            batch = {k: x if x is None else x.chunk(cp, 1)[rank] for k, x in batch.items()}
        else:
            batch = get_batch_on_this_cp_rank(batch)
        if three_axes:
            batch["position_ids"] = axes(batch["position_ids"] if sharded_positions else positions)
        weights = batch.pop("loss_mask")
        if padding_mask:
            batch["padding_mask"] = weights == 0
        passes, tokens = [({"input_ids": batch.pop("tokens"), **batch}, weights)], B * S
    if scheduled:
        return run_schedule(model, *passes[0])
    losses = [(model(**inputs) * weights).sum() / tokens for inputs, weights in passes]
    return reduced(model, torch.stack(losses).sum())


def run_schedule(
    model: Any, inputs: dict[str, Any], weights: torch.Tensor
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients by megatron-core's schedule, its DDP and its division by loss tokens, of
    which ranks have different numbers."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    mask = weights * (inputs["labels"] % 3 > 0)
    model.config.finalize_model_grads_func = finalize_model_grads

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total, tokens = (losses * mask).sum(), mask.sum()
        return total, tokens.int(), torch.stack([total.detach(), tokens])

    (report,) = forward_backward_no_pipelining(
        forward_step_func=lambda _, ddp: (ddp(**inputs, loss_mask=mask), loss_func),
        data_iterator=None,
        model=DistributedDataParallel(model.config, DistributedDataParallelConfig(), model),
        num_microbatches=1,
        seq_length=S,
        micro_batch_size=B,
        forward_only=False,
    )
    dist.all_reduce(report, group=parallel_state.get_context_parallel_group())
    gradients = {name: (weight.main_grad, None) for name, weight in model.named_parameters()}
    return (report[0] / report[1]).item(), gradients


def train(
    steps: int, *, cp: int = 1, lr: float = 0.05, **model_options: Any
) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each of some steps of SGD, each on text of its own."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.utils import get_batch_on_this_cp_rank

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)
    model = gpt_model(tp=1, cp=cp, **model_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses, norms = [], []
    for seed in range(steps):
        batch = get_batch_on_this_cp_rank(full_batch(False, seed))
        weights, tokens = batch.pop("loss_mask"), batch.pop("tokens")
        loss, gradients = reduced(model, (model(tokens, **batch) * weights).sum() / (B * S))
        losses.append(loss)
        norms.append(torch.stack([x.norm() for x, _ in gradients.values()]).norm().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def gpt_model(
    *,
    tp: int,
    cp: int,
    kv_heads: int = HEADS,
    rotary: bool = True,
    recompute: bool = False,
    comm_type: str | list[str] | None = None,
    dropout: float = 0.0,
    mla: bool = False,
    hybrid: str = "",
    core: Callable[[], Any] | None = None,
    **config_fields: Any,
) -> Any:
    """The model.

    Args:
        hybrid: its layers, as of :func:`stack_spec`; "": all attention.
        core: gives what the layer spec names as core attention, once the groups exist.
        config_fields: of the ``TransformerConfig``.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    recomputing = {"recompute_granularity": "full", "recompute_method": "uniform"}
    config = (MLATransformerConfig if mla else TransformerConfig)(
        num_layers=len(hybrid) or LAYERS,
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
        **config_fields,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        multi_latent_attention=mla,
        qk_layernorm=mla,
        normalization=config.normalization,
    )
    if core:
        spec.submodules.self_attention.submodules.core_attention = core()
    mtp = get_gpt_mtp_block_spec(config, spec, False) if config.mtp_num_layers else None
    positions = "rope" if rotary else "learned_absolute"
    positions = "mrope" if config.mrope_section else positions
    sizes = {"vocab_size": VOCAB, "max_sequence_length": S, "position_embedding_type": positions}
    torch.manual_seed(1)
    if hybrid:
        from megatron.core.models.mamba.mamba_model import MambaModel

        model = MambaModel(config, stack_spec(spec), hybrid_override_pattern=hybrid, **sizes)
    else:
        model = GPTModel(config, spec, mtp_block_spec=mtp, **sizes)
    remember_long(model)
    if config.num_moe_experts:
        draw_by_name(model)
    return model


def draw_by_name(model: torch.nn.Module) -> None:
    """Draw each matrix by its name in the whole model: a rank has some of the experts."""
    for name, weight in named_weights(model):
        if weight.ndim == 2:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)


def named_weights(
    model: torch.nn.Module, ep_rank: int | None = None
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights, experts by their number in the whole model.

    Args:
        ep_rank: of the rank that holds these experts; None: this one.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_expert_model_parallel_rank() if ep_rank is None else ep_rank
    for name, weight in model.named_parameters():
        layer, of_experts, rest = name.partition(".experts.local_experts.")
        if of_experts:
            number, _, rest = rest.partition(".")
            held = len(model.get_submodule(layer).local_expert_indices)
            rest = f"{rank * held + int(number)}.{rest}"
        yield layer + of_experts + rest, weight


def remember_long(model: torch.nn.Module) -> None:
    """Decays near 1: with those of the initialization a state is forgotten within ten tokens."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.data -= 4


def reduced(model: torch.nn.Module, loss: torch.Tensor) -> tuple[float, dict[str, Any]]:
    """Loss and gradients summed over all ranks that hold different tokens."""
    from megatron.core import parallel_state

    loss.backward()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    holders = parallel_state.get_expert_model_parallel_group()
    gradients = {}
    of_ranks = ([name for name, _ in named_weights(model, i)] for i in range(holders.size()))
    for weight, *of_holders in zip(model.parameters(), *of_ranks, strict=True):
        is_cut = getattr(weight, "tensor_model_parallel", False)
        dim = getattr(weight, "partition_dim", 0) if is_cut else None
        held = [weight.grad] * len(of_holders)
        if len(set(of_holders)) > 1:  # an expert, of whose weights other ranks hold others
            dist.all_reduce(weight.grad, group=parallel_state.get_expert_data_parallel_group())
            held = [torch.empty_like(weight.grad) for _ in of_holders]
            dist.all_gather(held, weight.grad, group=holders)
        else:
            dist.all_reduce(weight.grad, group=group)
        gradients |= {
            name: (gradient, dim) for name, gradient in zip(of_holders, held, strict=True)
        }
    return loss.item(), gradients


def full_batch(dense_mask: bool, seed: int = 2) -> dict[str, Any]:
    """The batch before it is cut over the context-parallel ranks."""
    torch.manual_seed(seed)
    text = torch.randint(VOCAB, (B, S + 1))
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(B, S),
        "position_ids": torch.arange(S).expand(B, S).contiguous(),
        "attention_mask": causal_mask() if dense_mask else None,
    }


def axes(positions: torch.Tensor) -> torch.Tensor:
    """Three positions of a token, as M-RoPE takes them: ``[b, s]`` to ``[3, b, s]``."""
    return torch.stack([positions, positions // 2, positions % 3])


def alone_documents(
    lengths: list[int], places: list[int], three_axes: bool
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """The inputs of the model and the weights of its losses, for each document."""
    text = full_batch(False)
    passes = []
    for begin, end in pairwise([0, *accumulate(lengths)]):
        positions = torch.arange(end - begin)[None]
        inputs = {
            "input_ids": text["tokens"][:1, begin:end],
            "position_ids": axes(positions) if three_axes else positions,
            "attention_mask": None,
            "labels": text["labels"][:1, begin:end],
        }
        passes.append((inputs, torch.ones(1, end - begin)))
    return passes


def packed(
    lengths: list[int], places: list[int], padding_token: int, three_axes: bool
) -> tuple[dict[str, Any], torch.Tensor]:
    """The same in one sequence with padding, and this context-parallel rank's part of it, as
    ``get_thd_batch_on_this_cp_rank`` and TransformerEngine's ``thd_get_partitioned_indices`` do."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    rank = parallel_state.get_context_parallel_rank()
    chunks = 2 * parallel_state.get_context_parallel_world_size()
    starts = [0, *accumulate(places)]
    tokens, labels = torch.full((2, 1, starts[-1]), padding_token)
    positions, weights = torch.zeros_like(tokens), torch.zeros(1, starts[-1])
    index: list[int] = []
    for start, (inputs, weight) in zip(
        starts, alone_documents(lengths, places, False), strict=False
    ):
        document = slice(start, start + weight.shape[1])
        tokens[:, document], labels[:, document] = inputs["input_ids"], inputs["labels"]
        positions[:, document], weights[:, document] = inputs["position_ids"], weight
    for begin, end in pairwise(starts):
        chunk = (end - begin) // chunks
        for number in (rank, chunks - 1 - rank):
            index += range(begin + number * chunk, begin + (number + 1) * chunk)
    if chunks == 2:
        index = list(range(starts[-1]))
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    cu_seqlens_padded = torch.tensor(starts, dtype=torch.int32)
    inputs = {
        "input_ids": tokens[:, index],
        "position_ids": axes(positions) if three_axes else positions[:, index],
        "attention_mask": None,
        "labels": labels[:, index],
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens_padded,
            cu_seqlens_kv_padded=cu_seqlens_padded,
            max_seqlen_q=max(places),
            max_seqlen_kv=max(places),
        ),
    }
    return inputs, weights[:, index]


class DenseAttention(torch.nn.Module):
    """A core attention in fp64, of whole sequences: megatron-core's local one refuses MLA."""

    def __init__(self, *, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **unused: Any
    ) -> torch.Tensor:
        """``[s, b, h, d]`` to ``[s, b, h * e]``."""
        positions = range(query.shape[0])
        out, _ = oracle.dense_attention(
            *(x.transpose(0, 1) for x in (query, key, value)),
            oracle.causal(positions, positions),
            self.softmax_scale,
        )
        return out.transpose(0, 1).flatten(2).to(query.dtype)


def causal_mask() -> torch.Tensor:
    """True where a query must not look, as megatron-core's datasets make it."""
    return torch.ones(B, 1, S, S).triu(1).bool()
