"""Outputs of a forward pass: which have a value for each token of this rank, and how they join."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.transformers.refusals import holds_tensor

# What TRL's fused head returns for every token, of which trainers make losses: always joined.
_LOG_PROBABILITIES = frozenset(
    {"log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"}
)
_PER_TOKEN = frozenset({"logits", "last_hidden_state", "hidden_states", *_LOG_PROBABILITIES})


def check_outputs(out: Mapping[str, Any], model: str, shape: tuple[int, int]) -> None:
    """Refuse an output that is not known to have a value for each token of this rank.

    Args:
        model: the name of the model.
        shape: rows and tokens of this rank.

    Raises:
        UnsupportedAttentionError: which one.
    """
    for key in out.keys() - {"loss"}:
        value = out[key]
        tensors = value if isinstance(value, tuple) else (value,)
        ndim = 2 if key in _LOG_PROBABILITIES else 3
        has_tokens = key in _PER_TOKEN and all(
            x is None or (isinstance(x, Tensor) and x.ndim == ndim and tuple(x.shape[:2]) == shape)
            for x in tensors
        )
        if not has_tokens and holds_tensor(value):
            raise UnsupportedAttentionError(
                f"{model} returns {key}, which is not known to have a value for each of this "
                f"rank's tokens {list(shape)} and may be made of single ones, of which each rank "
                "has others (as a pooled output is of the first): use a model without it; "
                f"{', '.join(sorted(_PER_TOKEN))} are served"
            )


def join_outputs(
    out: MutableMapping[str, Any],
    join: Callable[[Tensor], Tensor],
    *,
    join_all: bool,
    drop_last: bool,
) -> None:
    """Replace outputs per token by those of the whole batch; collective.

    Args:
        join: makes a whole tensor of this rank's shard and the others'.
        join_all: all of them, not only log-probabilities.
        drop_last: log-probabilities have none for the last token, whose label is not known.
    """
    for key in [key for key in out if key in _PER_TOKEN and out[key] is not None]:
        value = out[key]
        if key in _LOG_PROBABILITIES:
            out[key] = join(value)[:, :-1] if drop_last else join(value)
        elif join_all and isinstance(value, tuple):
            out[key] = tuple(x if x is None else join(x) for x in value)
        elif join_all:
            out[key] = join(value)
