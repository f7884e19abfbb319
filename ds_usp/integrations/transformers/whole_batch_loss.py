"""The loss of the whole batch, where a model computes its loss from this rank's shard."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.replicas import Reduction, sum_of_shards
from ds_usp.integrations.transformers.attention import RunningPass, StandIn
from ds_usp.training import chunked_weighted_loss
from ds_usp.training.whole_batch import IGNORE_INDEX

# Sums over tokens, divided by their number: a shard gives the sum of its tokens over all tokens.
SUMS_OVER_TOKENS: tuple[Callable[..., Tensor], ...] = (ForCausalLMLoss, ForMaskedLMLoss)


class WholeBatchLoss:
    """``model.loss_function`` of an enabled model: the whole batch's loss, on every rank.

    Args:
        original: the model's own function, one of :data:`SUMS_OVER_TOKENS`.
        running: the forward pass that runs, which has the labels.
    """

    def __init__(
        self,
        original: Callable[..., Tensor],
        mesh: SequenceMesh,
        gradients: Reduction,
        running: RunningPass,
    ) -> None:
        self.original, self.running = original, running
        self._mesh, self._gradients = mesh, gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeBatchLoss:
        running = deepcopy(self.running, memo)
        return WholeBatchLoss(self.original, self._mesh, self._gradients, running)

    @property
    def shifts(self) -> bool:
        return self.original is ForCausalLMLoss

    def __call__(
        self,
        logits: Tensor | ChunkedLogits,
        labels: Tensor | None,
        *args: Any,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Shapes: logits ``[b, s_local, v]``; a scalar."""
        targets = self.running.targets
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
        # Labels were shifted while they were whole; a model that shifts its shard again, or leaves
        # some out, computes another loss.
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
        # Summed with gradients times the ranks: without that each rank would back-propagate its own
        # tokens' share, and data parallelism's mean would be sp_degree times too small.
        loss = sum_of_shards(share, self._mesh, self._gradients)
        self.running.loss = loss
        return loss


Loss = Callable[..., Tensor]
# What some models do to logits: each number by itself, so that it can be done to a chunk's.
_ELEMENTWISE = frozenset({torch.tanh, torch.mul, torch.div})


class ChunkedHead:
    """Head and loss in chunks of tokens; in the place of ``head.forward`` until :meth:`remove`.

    Args:
        head: the output embeddings.
        chunks: of the tokens, as equal as can be.
    """

    def __init__(self, head: nn.Module, chunks: int, running: RunningPass) -> None:
        self._head, self._chunks, self._running = head, chunks, running
        self._before = head.__dict__.get("forward")
        self._job: Callable[[Tensor], Tensor] | None = None
        head.forward = self.forward

    def remove(self) -> None:
        self._head.__dict__.pop("forward", None)
        if self._before is not None:
            self._head.forward = self._before

    def forward(self, hidden: Tensor) -> Any:
        """Shapes: hidden ``[b, s_local, h]``; returns as many :class:`ChunkedLogits`, a loss inside
        of :meth:`loss`, or logits without labels."""
        if self._job is not None:
            return self._job(hidden)
        in_chunks = self._running.targets is not None and self._running.targets.in_chunks
        return ChunkedLogits(self, hidden) if in_chunks else self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = (
            self._before(hidden) if self._before else type(self._head).forward(self._head, hidden)
        )
        return logits

    def loss(
        self, logits: ChunkedLogits, original: Loss, labels: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """``original(logits, labels, *args, **kwargs)``, chunk by chunk: a sum over tokens by
        ``num_items_in_batch``. Shapes: labels ``[b, s_local]``; a scalar."""

        def job(hidden: Tensor) -> Tensor:
            if self._is_linear(logits, args, kwargs):
                return self._linear_loss(hidden, labels, kwargs["num_items_in_batch"])
            return self._any_loss(hidden, labels, logits, original, args, kwargs)

        self._job = job
        try:
            loss: Tensor = self._head(logits.hidden)
        finally:
            self._job = None
        return loss

    def _is_linear(self, logits: ChunkedLogits, args: tuple[Any, ...], kwargs: Any) -> bool:
        head, dtype = self._head, _compute_dtype(logits.hidden)
        weight: Any = getattr(head, "weight", None)
        bias: Any = getattr(head, "bias", None)
        return (
            self._before is None
            and type(head).forward is nn.Linear.forward
            and bias is None
            and type(weight) is nn.Parameter  # neither quantized nor sharded
            and not logits.steps
            and kwargs.get("vocab_size", args[0] if args else None) == weight.shape[0]
            and kwargs.get("ignore_index", IGNORE_INDEX) == IGNORE_INDEX
            and dtype != torch.float16
            and (dtype == weight.dtype or _is_autocast(logits.hidden))
        )

    # A product alone has its gradients computed in the forward pass; whatever else a model does to
    # its logits is left to autograd, which computes each chunk's logits again in backward.
    def _linear_loss(self, hidden: Tensor, labels: Tensor, count: Tensor | int) -> Tensor:
        dtype = _compute_dtype(hidden)
        weight = cast(nn.Linear, self._head).weight
        accumulated = torch.promote_types(dtype, torch.float32)
        count = torch.as_tensor(count, dtype=accumulated, device=hidden.device)
        weights = torch.where(labels != IGNORE_INDEX, 1 / count, 0.0)
        with torch.autocast(hidden.device.type, enabled=False):
            loss = chunked_weighted_loss(
                hidden.to(dtype), weight.to(dtype), labels, weights, chunks=self._chunks
            )
        # Without a token that counts the loss is nan, and the gradients are 0, as without chunks.
        return loss + 0.0 / count

    def _any_loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        logits: ChunkedLogits,
        original: Loss,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        def run(hidden: Tensor, labels: Tensor) -> Tensor:
            scores = logits.finish(self._logits(hidden))
            shifted = {"shift_labels": labels} if "shift_labels" in kwargs else {}
            return original(scores, labels, *args, **{**kwargs, **shifted})

        rows = hidden.reshape(1, -1, hidden.shape[-1]).tensor_split(self._chunks, 1)
        of_rows = labels.reshape(1, -1).tensor_split(self._chunks, 1)
        losses = [
            checkpoint(run, *chunk, use_reentrant=False)
            for chunk in zip(rows, of_rows, strict=True)
        ]
        return torch.stack(losses).sum()


class ChunkedLogits(StandIn):
    """Stands where a model expects its logits, between its head and its loss function.

    Scaling and capping are done to every chunk later; whatever else raises.

    Attributes:
        steps: what is done to the logits of each chunk.
    """

    def __init__(
        self, head: ChunkedHead, hidden: Tensor, steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    ) -> None:
        self._head, self.hidden, self.steps = head, hidden, steps

    @property
    def shape(self) -> torch.Size:
        return self.hidden.shape[:-1]

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    def loss(self, original: Loss, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._head.loss(self, original, labels, *args, **kwargs)

    def finish(self, scores: Tensor) -> Tensor:
        for step in self.steps:
            scores = step(scores)
        return scores

    def _then(self, step: Callable[[Tensor], Tensor]) -> ChunkedLogits:
        return ChunkedLogits(self._head, self.hidden, (*self.steps, step))

    @staticmethod
    def refusal(what: str) -> UnsupportedAttentionError:
        return UnsupportedAttentionError(
            f"loss_chunks: the model computes with its logits ({what}) before its loss, or beside "
            "it; served are heads whose logits are scaled by a number, capped by tanh, or not "
            "changed. Leave loss_chunks out"
        )

    def __getitem__(self, index: Any) -> Any:
        raise self.refusal(f"logits[{index!r}]")

    def __mul__(self, factor: Any) -> ChunkedLogits:
        _check_number(factor)
        return self._then(lambda scores: scores * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> ChunkedLogits:
        _check_number(divisor)
        return self._then(lambda scores: scores / divisor)

    def float(self) -> ChunkedLogits:
        return self._then(lambda scores: scores.float())

    def to(self, dtype: torch.dtype) -> ChunkedLogits:
        if not isinstance(dtype, torch.dtype):
            raise ChunkedLogits.refusal(f"to({dtype!r})")
        return self._then(lambda scores: scores.to(dtype))

    def tanh(self) -> ChunkedLogits:
        return self._then(torch.tanh)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _ELEMENTWISE or kwargs or not isinstance(args[0], cls):
            raise ChunkedLogits.refusal(getattr(function, "__name__", str(function)))
        for number in args[1:]:
            _check_number(number)
        return args[0]._then(lambda scores: function(scores, *args[1:]))


def _check_number(x: Any) -> None:
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise ChunkedLogits.refusal(f"arithmetic with a {type(x).__name__}")


def _is_autocast(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype(hidden.device.type) if _is_autocast(hidden) else hidden.dtype
