"""Random numbers of dropout: other ones on every rank that holds other tokens, where sequences are
spread: of the same sequence (sequence-parallel ranks) and of other ones (data-parallel ranks).

The host seeds all of them alike, so the same places of each shard would be dropped; with one rank a
sequence it still seeds its data-parallel ranks alike, unless --data-parallel-random-init is given.
Seeds are made anew from the number of the step: a resumed run draws what an uninterrupted one does,
whatever the checkpoint holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from megatron_patches.megatron_deepspeed.state import get_state


def train_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The host's ``train_step`` on fresh seeds, where a sequence is spread and dropout is on."""
    from megatron import get_args

    flags = get_args()
    if get_state().is_sequence_parallel and max(flags.hidden_dropout, flags.attention_dropout) > 0:
        _seed(flags.seed, flags.curr_iteration)
    return original(*args, **kwargs)


def _seed(seed: int, step: int) -> None:
    from deepspeed.accelerator import get_accelerator
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import random as host_random

    replicated, tensor_parallel_seed = dropout_seeds(
        seed,
        step,
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        sp=parallel_state.get_sequence_parallel_rank(),
        tp=parallel_state.get_tensor_model_parallel_rank(),
    )
    get_accelerator().manual_seed(replicated)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(host_random._MODEL_PARALLEL_RNG_TRACKER_NAME, tensor_parallel_seed)


def dropout_seeds(seed: int, step: int, *, pp: int, dp: int, sp: int, tp: int) -> tuple[int, int]:
    """The seeds of one rank for one step, from its rank along each axis.

    Returns:
        That of activations which all tensor-parallel ranks hold, the same on those ranks, and that
        of activations which are split over them.
    """
    return _hash_mix(seed, step, pp, dp, sp), _hash_mix(seed, step, pp, dp, sp, tp)


def _hash_mix(*numbers: int) -> int:
    """A seed of 63 bits that looks nothing like that of other numbers."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
