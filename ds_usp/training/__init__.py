"""Parts of a training loop around the attention: batches, the loss and DeepSpeed's engine."""

from ds_usp.kernels.rotary import RotaryPositions, apply_rotary, rotate_projected
from ds_usp.training.auto_settings import attention_kernel, offload_ratio
from ds_usp.training.data_loader import (
    DataParallelRanks,
    SequenceParallelDataLoader,
    ShardedBatch,
    data_parallel_ranks,
)
from ds_usp.training.deepspeed import (
    GradientRule,
    ParallelGroups,
    check_zero_stage,
    deepspeed_mpu,
    global_gradient_norm,
    gradient_rule,
    initialize_deepspeed,
    own_clipping,
    owned_parameters,
    prepare_deepspeed,
    with_large_enough_buckets,
)
from ds_usp.training.host_states import StatesOnHost, keep_states_on_host
from ds_usp.training.loss import (
    chunked_token_losses,
    chunked_weighted_loss,
    loss_token_weight,
    mean_loss,
    weighted_loss,
)
from ds_usp.training.prefix_tree import PrefixTree
from ds_usp.training.whole_batch import (
    IGNORE_INDEX,
    SequenceBatch,
    borders_of_positions,
    document_borders,
    document_positions,
    local_document_positions,
    local_positions,
    next_token_labels,
    rotary_frequencies,
    shard_batch,
)

__all__ = [
    "DataParallelRanks",
    "GradientRule",
    "IGNORE_INDEX",
    "ParallelGroups",
    "PrefixTree",
    "RotaryPositions",
    "SequenceBatch",
    "SequenceParallelDataLoader",
    "ShardedBatch",
    "StatesOnHost",
    "apply_rotary",
    "attention_kernel",
    "borders_of_positions",
    "check_zero_stage",
    "chunked_token_losses",
    "chunked_weighted_loss",
    "data_parallel_ranks",
    "deepspeed_mpu",
    "document_borders",
    "document_positions",
    "global_gradient_norm",
    "gradient_rule",
    "initialize_deepspeed",
    "keep_states_on_host",
    "local_document_positions",
    "local_positions",
    "loss_token_weight",
    "mean_loss",
    "next_token_labels",
    "own_clipping",
    "offload_ratio",
    "owned_parameters",
    "prepare_deepspeed",
    "rotary_frequencies",
    "rotate_projected",
    "shard_batch",
    "weighted_loss",
    "with_large_enough_buckets",
]
