"""The loss of the whole batch, where a model computes its loss from this rank's shard. The model
calls it in each pass, on every rank; only ``sum_of_shards`` communicates, in forward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import UnsupportedAttentionError
from ds_usp.integrations.replicas import Reduction, sum_of_shards
from ds_usp.integrations.transformers.attention import RunningPass, StandIn
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.training import chunked_weighted_loss, weighted_loss
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
        # Labels were shifted whole; a model that shifts its shard, or leaves some out, is wrong.
        is_another = shift_labels is not None and shift_labels is not targets.labels
        if is_another or not targets.is_given(labels):
            raise UnsupportedAttentionError(
                "the model changes its labels before it computes its loss, which is not served"
            )
        kwargs |= {"num_items_in_batch": targets.count}
        if self.shifts:
            kwargs["shift_labels"] = targets.labels
        original: Loss = self.original
        if targets.weights is not None:
            original, kwargs["loss_weights"] = _weighted, targets.weights
        if isinstance(logits, ChunkedLogits):
            share = logits.loss(original, targets.labels, *args, **kwargs)
        else:
            share = original(logits, targets.labels, *args, **kwargs)
        # Summed with gradients times the ranks: without that each rank would back-propagate its own
        # tokens' share, and data parallelism's mean would be sp_degree times too small.
        loss = sum_of_shards(share, self._mesh, self._gradients)
        self.running.loss = loss
        return loss


def _weighted(
    logits: Tensor,
    labels: Tensor,
    *_: Any,
    loss_weights: Tensor,
    num_items_in_batch: Tensor | int,
    **__: Any,
) -> Tensor:
    """A sum over tokens as those of :data:`SUMS_OVER_TOKENS`, each loss times its weight, by the
    sum of the whole batch's weights, ``num_items_in_batch``."""
    # In fp32, as the model's own loss is. Labels that do not count have a loss of 0.
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    losses = cross_entropy(scores, labels.flatten().to(scores.device), reduction="none")
    return weighted_loss(losses, loss_weights.flatten().to(losses)) / num_items_in_batch


# The function of the auxiliary loss of routers, in the module of each model that has one.
ROUTER_LOSS = "load_balancing_loss_func"
# Where TRL's fused head takes it from, for all models.
_OF_FUSED_HEADS = "transformers.models.mixtral.modeling_mixtral"


class RouterLoss:
    """The load-balancing loss of a model's routers over the whole batch, on every rank.

    Args:
        model: whose forward, or TRL's in its place, calls a function of its module for it.
        running: the forward pass that runs, which has the tokens that count.
    """

    # Note [the router loss in shards]
    # With T tokens times layers, C_e of their choices for expert e and P_e the sum of its
    # probabilities, the loss is E * sum_e (C_e / T) * (P_e / T) (Switch Transformer, arXiv
    # 2101.03961, eq. 4 to 6): no sum over tokens, but made of three. Ranks sum these, 2 E + 1
    # numbers, and no rank has the routers' logits of all tokens. Models call the function by its
    # name in their module, as TRL's fused head does in the place of their forward: in a forward
    # pass of this model that name is another function, which is called with what the model gives.
    # An original with another formula is found by a trial, and refused.
    def __init__(
        self, model: nn.Module, mesh: SequenceMesh, gradients: Reduction, running: RunningPass
    ) -> None:
        self._model, self._mesh, self._gradients = model, mesh, gradients
        self._running = running
        self._before: list[tuple[Any, Any]] = []
        self._counts: Tensor | None = None
        self._in_fused_head = self._is_tree = False

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterLoss:
        model, running = deepcopy(self._model, memo), deepcopy(self._running, memo)
        return RouterLoss(model, self._mesh, self._gradients, running)

    def begin(self, counts: Tensor | None, *, in_fused_head: bool, is_tree: bool) -> None:
        """Prepare a forward pass that computes the loss of the whole batch.

        Args:
            counts: how often each of this rank's tokens counts, ``[b, s_local]``: 0 for padding, in
                a tree of rows as often as rows have it; None: each once.
            in_fused_head: TRL's head adds it to this rank's share of a loss, which is summed.
            is_tree: the tokens are a tree of rows.
        """
        self.end()  # of a pass that was interrupted
        self._counts, self._in_fused_head, self._is_tree = counts, in_fused_head, is_tree
        modules = [sys.modules.get(kind.__module__) for kind in type(self._model).__mro__]
        modules += [import_module(_OF_FUSED_HEADS)] if in_fused_head else []
        for module in dict.fromkeys(modules):
            original = getattr(module, ROUTER_LOSS, None)
            if original is not None:
                self._before.append((module, original))
                setattr(module, ROUTER_LOSS, partial(self._of_the_batch, original))

    def end(self) -> None:
        for module, original in self._before:
            setattr(module, ROUTER_LOSS, original)
        self._before.clear()
        self._counts = None

    @disable_in_compile("the sums of routers are summed over the ranks")
    def _of_the_batch(
        self,
        original: Callable[..., Any],
        gate_logits: Any,
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Shapes: gate_logits a tuple of ``[b * s_local, experts]``; a scalar."""
        # A mask says only that padding is left out: how often tokens count is known by `begin`.
        if not self._before or not gate_logits:  # not in a forward pass; no layer has a router
            return original(gate_logits, num_experts, top_k, attention_mask)
        if not _is_load_balancing(original):
            raise UnsupportedAttentionError(
                f"{original.__module__}.{ROUTER_LOSS} is another loss than Switch Transformer's, "
                "whose sums over tokens are known: leave output_router_logits out"
            )
        if attention_mask is None and self._is_tree:
            raise UnsupportedAttentionError(
                "the model counts padding in the loss of its routers, and a tree of rows has none: "
                "leave share_prefixes or output_router_logits out"
            )
        counts = None if attention_mask is None or self._counts is None else self._counts.flatten()
        sums = _router_sums(gate_logits, num_experts, top_k, counts)
        loss = _load_balancing(sum_of_shards(sums, self._mesh, self._gradients))
        self._running.router_loss = loss
        if not self._in_fused_head:
            return loss
        # TRL's head adds this to what is summed over the ranks again: the values must sum to one
        # loss. Gradients are divided too where that sum multiplies them, as "mean" does.
        degree = self._mesh.sp_degree
        share = loss / degree if self._gradients == "mean" else loss
        return share + (loss / degree - share).detach()


def _router_sums(
    scores: tuple[Tensor, ...], num_experts: int, top_k: int, counts: Tensor | None
) -> Tensor:
    """Sum each expert's choices, its probabilities, and tokens over all layers: ``[2 * E + 1]``."""
    if counts is None:  # how often each token counts, [tokens]
        counts = scores[0].new_ones(len(scores[0]))
    weights = counts.to(scores[0].device, torch.float32)
    chosen = torch.zeros(num_experts, dtype=torch.float32, device=weights.device)
    probabilities = torch.zeros_like(chosen)
    for layer_scores in scores:
        each = layer_scores.to(chosen.device).softmax(-1)
        choices = each.topk(top_k, -1).indices
        chosen = chosen.scatter_add(0, choices.flatten(), weights.repeat_interleave(top_k))
        # No product of matrices, which autocast would compute in half precision.
        probabilities = probabilities + (each.float() * weights[:, None]).sum(0)
    return torch.cat([chosen, probabilities, (weights.sum() * len(scores))[None]])


def _load_balancing(sums: Tensor) -> Tensor:
    experts = len(sums) // 2
    chosen, probabilities, tokens = sums.split([experts, experts, 1])
    return (chosen / tokens * (probabilities / tokens)).sum() * experts


@lru_cache(maxsize=64)
def _is_load_balancing(function: Callable[..., Any]) -> bool:
    """Whether a function is the loss that the sums make, tried on two layers of a few tokens."""
    scores = tuple(torch.arange(24.0).mul(i).sin().view(6, 4) for i in (1.3, 2.1))
    real = torch.tensor([1, 1, 0, 1, 1, 1])
    try:
        losses = [function(scores, 4, 2, x) for x in (None, real.view(2, 3))]
    except (TypeError, ValueError, RuntimeError):  # of other arguments
        return False
    ours = [_load_balancing(_router_sums(scores, 4, 2, x)) for x in (None, real)]
    pairs = zip(losses, ours, strict=True)
    return all(isinstance(x, Tensor) and torch.allclose(x, y, rtol=1e-5) for x, y in pairs)


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
        """Shapes: hidden ``[b, s_local, h]``; returns what stands for their logits, inside of
        :meth:`loss` a scalar, and the logits themselves in passes without labels."""
        if self._job is not None:
            return self._job(hidden)
        in_chunks = self._running.targets is not None and self._running.targets.in_chunks
        return ChunkedLogits(self, hidden) if in_chunks else self._logits(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        run = self._before or partial(type(self._head).forward, self._head)
        return cast(Tensor, run(hidden))

    def loss(
        self, logits: ChunkedLogits, original: Loss, labels: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """``original(logits, labels, *args, **kwargs)``, chunk by chunk: a sum over tokens by
        ``num_items_in_batch``. Shapes: labels ``[b, s_local]``; a scalar."""

        def job(hidden: Tensor) -> Tensor:
            if self._is_linear(logits, args, kwargs):
                weights, count = kwargs.get("loss_weights"), kwargs["num_items_in_batch"]
                return self._linear_loss(hidden, labels, count, weights)
            return self._any_loss(hidden, labels, logits, original, args, kwargs)

        self._job = job
        try:
            loss: Tensor = self._head(logits.hidden)
        finally:
            self._job = None
        return loss

    def _is_linear(self, logits: ChunkedLogits, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Whether the loss is a cross entropy of one product with the weight, and nothing else."""
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
            and (dtype == weight.dtype or torch.is_autocast_enabled(logits.hidden.device.type))
        )

    # A product alone has its gradients computed in the forward pass; whatever else a model does to
    # its logits is left to autograd, which computes each chunk's logits again in backward.
    def _linear_loss(
        self, hidden: Tensor, labels: Tensor, count: Tensor | int, loss_weights: Tensor | None
    ) -> Tensor:
        dtype = _compute_dtype(hidden)
        weight = cast(nn.Linear, self._head).weight
        accumulated = torch.promote_types(dtype, torch.float32)
        count = torch.as_tensor(count, dtype=accumulated, device=hidden.device)
        weights = torch.where(labels != IGNORE_INDEX, 1 / count, 0.0)
        weights = weights if loss_weights is None else weights * loss_weights.to(weights)
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
        # Of these each chunk has its part.
        token_names = [x for x in ("shift_labels", "loss_weights") if x in kwargs]

        def run(hidden: Tensor, labels: Tensor, *parts: Tensor) -> Tensor:
            scores = logits.finish(self._logits(hidden))
            chunk_arguments: dict[str, Any] = dict(zip(token_names, parts, strict=True))
            return original(scores, labels, *args, **{**kwargs, **chunk_arguments})

        hidden_chunks = hidden.reshape(1, -1, hidden.shape[-1]).tensor_split(self._chunks, 1)
        tokens = [labels, *(kwargs[x] for x in token_names)]
        token_chunks = [x.reshape(1, -1).tensor_split(self._chunks, 1) for x in tokens]
        losses = [
            checkpoint(run, *chunk, use_reentrant=False)
            for chunk in zip(hidden_chunks, *token_chunks, strict=True)
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
    def refusal(use: str) -> UnsupportedAttentionError:
        return UnsupportedAttentionError(
            f"loss_chunks: the model computes with its logits ({use}) before its loss, or beside "
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


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
