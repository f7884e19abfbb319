"""Recomputation that does not compute attention again.

An activation checkpoint runs a function twice: in the forward pass, keeping nothing, and again in
the backward pass. Under :func:`keep_attention` the first run keeps what attention computed, and
what its backward needs; the second one is handed that: no kernel runs, nothing is sent, no rank is
asked. It works with every checkpoint (torch's two, DeepSpeed's, Megatron's), because all of them
call the function they are given, once and once more.

What is kept in place of nothing, in elements per token: the output, and with Ulysses also what the
exchange brought, ``q + 2 k`` features, and the output before the way home, because to bring them
again is an exchange. Without Ulysses the recomputed q, k and v serve.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from torch.autograd.graph import get_gradient_edge

from ds_usp.errors import RecomputeError, UnsupportedAttentionError
from ds_usp.memory.compile_guard import disable_in_compile
from ds_usp.memory.random_state import RandomState
from ds_usp.memory.saved_tensor_hooks import save_tensor, saved_tensors, storage_id
from ds_usp.memory.views import StorageView

Params = ParamSpec("Params")
Result = TypeVar("Result")
Outputs = tuple[torch.Tensor, ...]
Compute = Callable[..., Outputs]
CallT = TypeVar("CallT", bound="_Call")


def keep_attention(run: Callable[Params, Result]) -> Callable[Params, Result]:
    """What to give to an activation checkpoint instead of ``run``.

    ``checkpoint(keep_attention(layer), hidden)``: make a new one for each call of the checkpoint.
    Every :func:`ds_usp.usp_attention` and :class:`ds_usp.USPAttention` that runs in it is computed
    once. Where gradients are switched off nothing will be computed again, and ``run`` comes back.
    Checkpoints inside of ``run`` need one of their own.

    Args:
        run: what the checkpoint runs: deterministic, as any checkpoint demands.

    Raises:
        RecomputeError: later, in the backward pass: the second run attends otherwise than the
            first, an output was changed in place, or one graph is walked twice
            (``retain_graph=True``).

    Source: selective recomputation (Korthikanti et al., 2205.05198) turned around: attention is
    what is not computed again.
    """
    return _CheckpointedFunction(run) if torch.is_grad_enabled() else run


def compute_or_replay(
    compute: Compute, inputs: Sequence[torch.Tensor], key: object = None
) -> Outputs:
    """``compute(*inputs)``, once for both runs of a checkpoint under :func:`keep_attention`.

    Args:
        compute: differentiable in its inputs alone.
        key: what must be the same in both runs, besides shapes and dtypes.
    """
    run = _CURRENT_RUN.get()
    if run is None:
        return compute(*inputs)
    signature = key, _signature(inputs)
    entry = run.entry(lambda: SavedCall(compute, inputs, signature), signature)
    outputs: Outputs = Replay.apply(entry, *inputs)
    return outputs


def results_or_replay(
    compute: Callable[[], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    key: object,
    num_visible: int,
) -> Sequence[torch.Tensor]:
    """The results of an op, which has a backward op of its own: computed once for both runs of a
    checkpoint under :func:`keep_attention`.

    Args:
        inputs, key: as for :func:`kept`.
        shown: as many of the first results are seen by the code around the op, which a compiler
            may let write over them; it gets copies. The others are for backward.
    """
    run = _CURRENT_RUN.get()
    if run is None:
        return compute()
    # Not their places in memory, which a compiler may choose anew in the second run.
    signature = key, *((x.dtype, x.device, x.shape) for x in inputs)
    return run.entry(lambda: SavedResults(compute(), signature), signature).num_visible(num_visible)


def is_saving() -> bool:
    """Whether a call now is one of a run under :func:`keep_attention`."""
    return _CURRENT_RUN.get() is not None


def refuse_saving(feature: str) -> None:
    """Refuse what cannot be kept.

    Raises:
        UnsupportedAttentionError: it runs under :func:`keep_attention`.
    """
    if is_saving():
        raise UnsupportedAttentionError(
            f"{feature} cannot be kept by keep_attention, which would run it twice. Checkpoint it "
            "without keep_attention, or leave torch.compile out"
        )


def check_only_inputs_require_grad(attention: object, args: Sequence[object]) -> None:
    """Refuse to keep an attention that has weights, or is given what has a gradient.

    Raises:
        UnsupportedAttentionError: its gradient would get lost, under :func:`keep_attention`.
    """
    if _CURRENT_RUN.get() is None:
        return
    weights = attention.parameters() if isinstance(attention, torch.nn.Module) else ()
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*weights, *args)):
        raise UnsupportedAttentionError(
            f"{type(attention).__name__} learns, or is given what does, besides q, k and v; under "
            "keep_attention that gradient would be lost. Checkpoint it without keep_attention"
        )


class Replay(torch.autograd.Function):
    """Hands out what an entry kept, and walks its graph in the backward pass."""

    @staticmethod
    def forward(ctx: Any, entry: SavedCall, *inputs: torch.Tensor) -> Outputs:
        """The outputs of the entry. Saves the inputs that its graph borrows: recomputed ones."""
        ctx.entry = entry
        ctx.save_for_backward(*(inputs[i] for i in entry.reused_inputs))
        outputs = entry.outputs()
        ctx.mark_non_differentiable(
            *(x for x, edge in zip(outputs, entry.edges, strict=True) if edge is None)
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """See :meth:`Entry.backward`."""
        if torch.is_grad_enabled():
            raise RecomputeError(
                "the gradient of kept attention was asked to be differentiable itself "
                "(create_graph=True), which no kernel here computes"
            )
        return None, *ctx.entry.backward(ctx.saved_tensors, grads, ctx.needs_input_grad[1:])


class _Call:
    """A call of attention that is kept.

    Args:
        said: what must be the same in both runs.
    """

    def __init__(self, signature: object) -> None:
        self._signature = signature

    def check(self, signature_now: object) -> None:
        """Raise unless this is the call that was kept."""
        if self._signature != signature_now:
            raise RecomputeError(
                f"the recomputation attends otherwise than the forward pass: {signature_now} now, "
                f"{self._signature} then. A checkpointed function must do the same both times"
            )


class SavedResults(_Call):
    """The results of one call of an op; they go when the checkpoint does."""

    def __init__(self, results: Sequence[torch.Tensor], signature: object) -> None:
        super().__init__(signature)
        self._saved = [save_tensor(x) for x in results]

    def num_visible(self, count: int) -> list[torch.Tensor]:
        """All of them, so many of the first ones as copies."""
        results = [x() for x in self._saved]
        return [x.clone() for x in results[:count]] + results[count:]


class SavedCall(_Call):
    """One result: its outputs, the graph behind them, and the random state that it left.

    Args:
        compute, inputs: as for :func:`kept`.
        said: what must be the same in both runs.
    """

    def __init__(self, compute: Compute, inputs: Sequence[torch.Tensor], signature: object) -> None:
        super().__init__(signature)
        self._reused = _ReusedInputs(inputs)
        grad_enabled = torch.is_grad_enabled()  # without: a reentrant checkpoint, which asks later
        device = inputs[0].device
        before = RandomState.capture(device)
        with torch.enable_grad(), saved_tensors(self._reused.pack, self._reused.unpack):
            self._leaves = [_make_leaf(x, x.requires_grad or not grad_enabled) for x in inputs]
            outputs = compute(*map(_attach, self._leaves, inputs))
        self._random = None if before.is_unchanged() else RandomState.capture(device)
        self._reused.release()
        self._outputs = [save_tensor(x.detach()) for x in outputs]
        self.edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        self._backward_done = False

    @property
    def reused_inputs(self) -> tuple[int, ...]:
        """Numbers of the inputs that backward needs."""
        return tuple(self._reused.wanted)

    def outputs(self) -> Outputs:
        """The outputs, without gradients; sets the random state that is right after them."""
        if self._backward_done:
            raise RecomputeError(_BACKWARD_TWICE_ERROR)
        if self._random is not None:
            self._random.restore()
        return tuple(x().detach() for x in self._outputs)

    def backward(
        self,
        reused_inputs: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs, None where they are not needed. Frees what was kept.

        Args:
            lent: the inputs that are borrowed.
            grads: of the outputs.
        """
        if self._backward_done:
            raise RecomputeError(_BACKWARD_TWICE_ERROR)
        self._backward_done = True
        pairs = zip(self.edges, grads, strict=True)
        edge_grads = [(edge, grad) for edge, grad in pairs if edge and grad is not None]
        if not edge_grads:  # attention over ranks runs backward on all of them, or they wait
            first = next(i for i, edge in enumerate(self.edges) if edge)
            edge = self.edges[first]
            edge_grads = [(edge, torch.zeros_like(self._outputs[first]()))] if edge else []
        self._reused.bind(reused_inputs)
        leaves = [leaf for leaf, need in zip(self._leaves, needed, strict=True) if need]
        try:
            edges, douts = zip(*edge_grads, strict=True)
            input_grads = iter(torch.autograd.grad(edges, leaves, douts, allow_unused=True))
        finally:
            self._reused.release()
            self.edges, self._outputs = [], []
        return [next(input_grads) if need else None for need in needed]


class _ReusedInputs:
    """Tensors that a graph needs and does not keep, because they will be there again: its inputs.

    The graph refers to this, not to its entry, which refers to the graph: no cycle.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.wanted: list[int] = []
        self._inputs: Sequence[torch.Tensor] = inputs

    def pack(self, tensor: torch.Tensor) -> tuple[int, StorageView] | None:
        """The place of a tensor in an input."""
        storage = storage_id(tensor)
        for index, x in enumerate(self._inputs):
            if storage_id(x) == storage and x.dtype == tensor.dtype:
                if index not in self.wanted:
                    self.wanted.append(index)
                return self.wanted.index(index), StorageView.from_tensor(tensor)
        return None

    def unpack(self, packed: tuple[int, StorageView]) -> torch.Tensor:
        """The tensor, from what is lent."""
        index, view = packed
        return view.apply_to(self._inputs[index])

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """The inputs that are wanted, in that order."""
        self._inputs = tensors

    def release(self) -> None:
        """Let go of all of them."""
        self._inputs = ()


class _CheckpointRun:
    """One of the two runs of a checkpointed function.

    Args:
        entries: what the first run kept; None: this is the first run.
        around: the run in which this one takes place.
    """

    def __init__(self, entries: Sequence[_Call] | None, outer: _CheckpointRun | None) -> None:
        self.first, self._outer = entries is None, outer
        self.entries: list[_Call] = list(entries or ())
        self._next = 0

    def entry(self, make: Callable[[], CallT], signature: object) -> CallT:
        """What the next call of attention gives."""
        if self.first:  # which may be part of another one's second run
            outer = self._outer
            call = outer.entry(make, signature) if outer else make()
            self.entries.append(call)
            return call
        if self._next == len(self.entries):
            raise RecomputeError(
                f"the recomputation attends more often than the forward pass, which attended "
                f"{len(self.entries)} times. A checkpointed function must do the same both times"
            )
        saved = self.entries[self._next]
        self._next += 1
        saved.check(signature)
        return cast(CallT, saved)  # calls of another kind have another key


class _CheckpointedFunction:
    """A function that a checkpoint runs twice. The checkpoint holds it, and it holds what is kept:
    both go with the graph."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._entries: list[_Call] | None = None

    @disable_in_compile(
        "keep_attention runs its function itself. In a graph torch's selective checkpoint keeps "
        "attention: create_selective_checkpoint_contexts([torch.ops.ds_usp.attention.default])"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = _CheckpointRun(self._entries, _CURRENT_RUN.get())
        token = _CURRENT_RUN.set(run)
        try:
            result = self._run(*args, **kwargs)
        finally:
            _CURRENT_RUN.reset(token)
        if run.first:
            self._entries = run.entries
        return result


# Dynamic scope, as the grad mode is: which run a call of attention is part of.
_CURRENT_RUN: Final[ContextVar[_CheckpointRun | None]] = ContextVar("run", default=None)
_BACKWARD_TWICE_ERROR = (
    "kept attention was walked backward already, and its memory is free: run backward once, "
    "without retain_graph=True, or leave keep_attention out"
)


class AttachLeaf(torch.autograd.Function):
    """A tensor at the start of a graph that does not keep it: the engine keeps every leaf, so the
    leaf is one number, expanded."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient goes to the leaf."""
        return grad, None


def _make_leaf(x: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    leaf = x.new_empty(()).expand(x.shape)
    return leaf.requires_grad_(requires_grad and x.is_floating_point())


def _attach(leaf: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    attached: torch.Tensor = AttachLeaf.apply(leaf, x.detach())  # no edge to what made x
    return attached


def _signature(inputs: Sequence[torch.Tensor]) -> tuple[Hashable, ...]:
    """What a tensor must have in common with the one it stands for, its place in memory too."""
    storages = [storage_id(x) for x in inputs]
    return tuple(
        (x.dtype, x.device, StorageView.from_tensor(x), storages.index(storage))
        for x, storage in zip(inputs, storages, strict=True)
    )
