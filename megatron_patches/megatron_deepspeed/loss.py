"""Token losses of the whole sequence on every rank that holds a shard of it.

Collective over the mesh, once a micro batch, in the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ds_usp.training import chunked_token_losses
from megatron_patches.megatron_deepspeed.state import FrameworkState, get_state


def gather_losses(losses: Tensor, state: FrameworkState) -> Tensor:
    """All-gather of token losses in sequence order; gradients reach the local losses only.

    Every rank weights the same gathered losses, so the sum of the ranks' gradients is the gradient
    of the mean, and Megatron-DeepSpeed's loss masks, averages and logs stay right.

    Shapes:
        losses: ``[s_local, b]``; result ``[s, b]``.
    """
    mesh, layout = state.mesh, state.layout
    lengths = [layout.length(rank) for rank in range(mesh.sp_degree)]
    padded = losses.new_zeros((max(lengths), *losses.shape[1:]))  # all_gather needs equal shapes
    padded[: losses.shape[0]] = losses.detach()
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded, group=mesh.sp_group)
    shards = [shard[:length] for shard, length in zip(gathered, lengths, strict=True)]
    shards[mesh.rank] = losses
    return layout.gather(shards, dim=0)


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Token losses under tensor and sequence parallelism.

    Shapes:
        vocab_parallel_logits: ``[s_local, b, vocabulary / tp]``; target: ``[s_local, b]``;
        result ``[s, b]``, the same on every rank of the sequence.
    """
    from megatron.core import tensor_parallel

    losses = tensor_parallel.vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, label_smoothing
    )
    return gather_losses(losses, get_state())


def losses_of_hidden(
    original: Callable[..., Tensor],
    lm_output: Tensor,
    labels: Tensor | None,
    logit_weights: Tensor,
    parallel_output: bool,
    fp16_lm_cross_entropy: bool,
) -> Tensor:
    """``post_language_model_processing``: with ``--usp-loss-chunks`` the losses without logits.

    Shapes:
        lm_output ``[s_local, b, h]``, labels ``[b, s_local]``, logit_weights ``[vocabulary / tp,
        h]``; result ``[b, s]``. Without labels: logits.

    The last two arguments are the original's alone: ``memory.py`` refuses chunks with ``--fp16``.
    """
    from megatron import get_args
    from megatron.core import parallel_state

    chunks = get_args().usp_loss_chunks
    if not chunks or labels is None:
        return original(lm_output, labels, logit_weights, parallel_output, fp16_lm_cross_entropy)
    losses = chunked_token_losses(
        lm_output,
        logit_weights,
        labels.transpose(0, 1),
        chunks=chunks,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )
    state = get_state()
    all_losses = gather_losses(losses, state) if state.is_sequence_parallel else losses
    return all_losses.transpose(0, 1).contiguous()


def pipeline_loss(
    original: Callable[..., Tensor], output: Tensor, labels: tuple[Tensor, Tensor]
) -> Tensor:
    """The loss of the last pipeline stage: the masked mean over the whole sequence.

    Shapes:
        output: ``[s_local, b, vocabulary / tp]``; labels: ``[b, s_local]`` and the loss mask of the
        whole sequence ``[b, s]``; result: a scalar.
    """
    if not get_state().is_sequence_parallel:
        return original(output, labels)
    targets, mask = labels
    losses = vocab_sequence_parallel_cross_entropy(
        output.contiguous().float(), targets.transpose(0, 1).contiguous()
    )
    return (losses.transpose(0, 1) * mask).sum() / mask.sum()
