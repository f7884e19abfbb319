"""The loss of the whole batch, where a model computes its loss from this rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.replicas import Reduction, SumOfShards
from ds_usp.integrations.transformers.chunked_head import ChunkedLogits

# Sums over tokens, divided by their number: a shard gives the sum of its tokens over all tokens.
SUMS_OVER_TOKENS: tuple[Callable[..., Tensor], ...] = (ForCausalLMLoss, ForMaskedLMLoss)


@dataclass(frozen=True, eq=False)
class Targets:
    """Labels of one forward pass.

    Args:
        given: this rank's shard of ``labels``, as the model gets it.
        labels: what its logits are compared with: shifted by a token if the model is causal.
        count: tokens of the whole batch that the loss is divided by.

    Shapes:
        given, labels: ``[b, s_local]``.
    """

    given: Tensor
    labels: Tensor
    count: Tensor | int


class WholeBatchLoss:
    """``model.loss_function`` of an enabled model: the whole batch's loss, on every rank.

    Args:
        original: the model's own function, one of :data:`SUMS_OVER_TOKENS`.

    Attributes:
        targets: of the forward pass that runs; None where no labels were given, and after it.
        result: what the last call returned.
    """

    def __init__(
        self, original: Callable[..., Tensor], mesh: SequenceMesh, gradients: Reduction
    ) -> None:
        self.original, self._mesh, self._gradients = original, mesh, gradients
        self.targets: Targets | None = None
        self.result: Tensor | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> WholeBatchLoss:
        """That of a copied model, on the same ranks."""
        return WholeBatchLoss(self.original, self._mesh, self._gradients)

    @property
    def shifts(self) -> bool:
        """Whether a token's label is the next token."""
        return self.original is ForCausalLMLoss

    def __call__(
        self,
        logits: Tensor | ChunkedLogits,
        labels: Tensor | None,
        *args: Any,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Shapes: logits ``[b, s_local, v]``; a scalar.

        Raises:
            UnsupportedAttentionError: the model has changed the tokens before its loss.
        """
        targets = self.targets
        if targets is None:  # not in a forward pass: of logits and labels of the caller's own
            if shift_labels is not None:
                kwargs["shift_labels"] = shift_labels
            return self.original(logits, labels, *args, **kwargs)
        if logits.shape[:2] != targets.labels.shape:
            raise UnsupportedAttentionError(
                f"the model computes a loss of logits {list(logits.shape)}, this rank's labels are "
                f"{list(targets.labels.shape)}: its head chooses or adds tokens, which is not "
                "served"
            )
        if (
            labels is None
            or labels.data_ptr() != targets.given.data_ptr()
            or labels.shape != targets.given.shape
            or (shift_labels is not None and shift_labels is not targets.labels)
        ):
            raise UnsupportedAttentionError(
                "the model changes its labels before it computes its loss, which is not served"
            )
        kwargs |= {"num_items_in_batch": targets.count}
        if self.shifts:
            kwargs["shift_labels"] = targets.labels
        if isinstance(logits, ChunkedLogits):
            share = logits.loss(self.original, targets.labels, *args, **kwargs)
        else:
            share = self.original(logits, targets.labels, *args, **kwargs)
        self.result = SumOfShards.apply(share, self._mesh, self._gradients)
        return self.result
