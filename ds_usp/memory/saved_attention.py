"""Activation checkpoints that save attention's results instead of recomputing attention.

A checkpoint runs a function twice: in the forward pass, saving nothing, and again in the backward
pass. Under :func:`keep_attention` the first run saves the outputs of attention and what its
backward needs; the second run replays them: no kernel, no exchange and no consistency check runs.
``functional``, ``module`` and ``custom_ops`` of :mod:`ds_usp.attention` pass each call through
:func:`compute_or_replay` or :func:`results_or_replay`, on each rank: ``compute`` communicates.

Memory that it adds, in elements per token: the output and the log-sum-exp; the recomputed q, k and
v are reused. Of a local attention between two exchanges, and of a compiled call with Ulysses, also
the results of the all-to-all, ``q + 2 k`` features, and the output before the return all-to-all.

Here too are the saved-tensor hooks that all of :mod:`ds_usp.memory` is made of. torch runs the
innermost pair of hooks alone; these nest: a pair packs what it handles and passes the rest on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch.autograd.graph import get_gradient_edge

from ds_usp.errors import RecomputeError, UnsupportedAttentionError
from ds_usp.memory.compile_guard import disable_in_compile

Params = ParamSpec("Params")
Result = TypeVar("Result")
Outputs = tuple[torch.Tensor, ...]
Compute = Callable[..., Outputs]
CallT = TypeVar("CallT", bound="_Call")


def keep_attention(run: Callable[Params, Result]) -> Callable[Params, Result]:
    """Wrap ``run`` for an activation checkpoint, so that attention in it is saved, not recomputed.

    ``checkpoint(keep_attention(layer), hidden)``: make a new one for each call of the checkpoint.
    Every :func:`ds_usp.usp_attention` and :class:`ds_usp.USPAttention` that runs in it is computed
    once. Where gradients are disabled nothing will be recomputed, and ``run`` is returned.
    Checkpoints inside of ``run`` need one of their own.

    Args:
        run: what the checkpoint runs: deterministic, as any checkpoint demands.

    Raises:
        RecomputeError: later, in the backward pass: the second run calls attention otherwise than
            the first, an output was changed in place, or backward runs twice
            (``retain_graph=True``). In the call: attention in a checkpoint inside, not reentrant,
            that has no ``keep_attention`` of its own.

    Source: selective recomputation (Korthikanti et al., 2205.05198) turned around: attention is
    what is not recomputed.
    """
    return _CheckpointedFunction(run) if torch.is_grad_enabled() else run


def compute_or_replay(
    compute: Compute, inputs: Sequence[torch.Tensor], key: object = None
) -> Outputs:
    """``compute(*inputs)``, once for both runs of a checkpoint under :func:`keep_attention`.

    Args:
        compute: differentiable in its inputs alone; collective, and its backward is.
        inputs: q, k, v, and sinks if there are any, of one device.
        key: what must be equal in both runs, besides the form of the inputs; None: no more.
    """
    run = current_run()
    if run is None:
        return compute(*inputs)
    run.refuse_checkpoint_inside()
    signature = key, _signature(inputs)
    call = run.record_or_replay(lambda: SavedCall(compute, inputs, signature), signature)
    return Replay.apply(call, *inputs)


def results_or_replay(
    compute: Callable[[], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    key: object,
    num_visible: int,
) -> Sequence[torch.Tensor]:
    """The results of a custom op, which has a backward op of its own: computed once for both runs
    of a checkpoint under :func:`keep_attention`.

    Args:
        inputs, key: as for :func:`compute_or_replay`.
        num_visible: the first results that the code around the op gets; a compiler may overwrite
            them, so they are copied. The others are for backward.
    """
    run = current_run()
    if run is None:
        return compute()
    # Not their strides and offsets, which a compiler may choose anew in the second run.
    signature = key, *((x.dtype, x.device, x.shape) for x in inputs)
    call = run.record_or_replay(lambda: SavedResults(compute(), signature), signature)
    return call.results(num_visible)


def is_saving() -> bool:
    """Whether this call is part of a run under :func:`keep_attention`."""
    return current_run() is not None


def check_only_inputs_require_grad(attention: object, args: Sequence[object]) -> None:
    """UnsupportedAttentionError under :func:`keep_attention` for trainable parameters of attention
    or further arguments that require grad: their gradient would be lost."""
    if not is_saving():
        return
    weights = attention.parameters() if isinstance(attention, torch.nn.Module) else ()
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*weights, *args)):
        raise UnsupportedAttentionError(
            f"{type(attention).__name__} has parameters or arguments that require grad besides q, "
            "k and v; under keep_attention that gradient would be lost. Checkpoint it without "
            "keep_attention"
        )


class Replay(torch.autograd.Function):
    """Returns the outputs of a :class:`SavedCall`, in both runs; backward runs its graph, once."""

    @staticmethod
    def forward(ctx: Any, call: SavedCall, *inputs: torch.Tensor) -> Outputs:
        ctx.call = call
        ctx.save_for_backward(*(inputs[i] for i in call.reused_inputs))
        outputs = call.outputs()
        ctx.mark_non_differentiable(
            *(x for x, edge in zip(outputs, call.edges, strict=True) if edge is None)
        )
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RecomputeError(
                "second derivatives of attention under keep_attention (create_graph=True) are not "
                "supported: no kernel here computes them"
            )
        return None, *ctx.call.backward(ctx.saved_tensors, grads, ctx.needs_input_grad[1:])


class _Call:
    """A saved call of attention, by what must be equal in both runs."""

    def __init__(self, signature: object) -> None:
        self._signature = signature

    def check(self, signature: object) -> None:
        if self._signature == signature:
            return
        difference = first_difference(signature, self._signature)
        if difference is not None:
            name, now, then = (" ".join(f"{x}".split())[:200] for x in difference)
            raise RecomputeError(
                f"the recomputation attends otherwise than the forward pass: {name} {now} now, "
                f"{then} then. A checkpointed function must do the same both times"
            )


def first_difference(now: object, then: object) -> tuple[str, object, object] | None:
    """Name and values of the first part in which two signatures differ; None where they are equal,
    or made anew by the same code of equal values."""
    # A function may make its attention in each run: modules, functions and closures are other
    # objects then, which compute the same. So they are compared by what they are made of.
    pairs: list[tuple[str, object, object]] = [("", now, then)]
    seen: dict[tuple[int, int], object] = {}  # keeps them alive, so that no id is used again
    while pairs:
        name, a, b = pairs.pop()
        if a is b or (id(a), id(b)) in seen:
            continue
        seen[id(a), id(b)] = a, b
        parts, others = _parts(a), _parts(b)
        if type(a) is not type(b) or parts.keys() != others.keys():
            return name, a, b
        if not parts and not _are_equal(a, b):
            return name, a, b
        named = [(name if key.isdigit() else key, parts[key], others[key]) for key in parts]
        pairs += reversed(named)
    return None


def _parts(x: Any) -> dict[str, object]:
    """Return what a value consists of, by name; nothing where ``==`` compares it."""
    if isinstance(x, FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        made_of = {"code": x.__code__, "defaults": x.__defaults__, "keywords": x.__kwdefaults__}
        return made_of | dict(zip(x.__code__.co_freevars, cells, strict=True))
    if isinstance(x, MethodType):
        return {"method": x.__func__, "self": x.__self__}
    if isinstance(x, partial):
        return {"function": x.func, "args": x.args, "keywords": x.keywords}
    if isinstance(x, dict):
        return {str(key): value for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return dict(zip(getattr(x, "_fields", map(str, range(len(x)))), x, strict=True))
    is_plain = not isinstance(x, type) and type(x).__eq__ is object.__eq__
    return {"class": type(x), **vars(x)} if is_plain and hasattr(x, "__dict__") else {}


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        same_form = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return same_form and torch.equal(a, b)
    return (a == b) is True


class SavedResults(_Call):
    """The results of one call of a custom op; freed with the checkpoint."""

    def __init__(self, results: Sequence[torch.Tensor], signature: object) -> None:
        super().__init__(signature)
        self._saved = [save_tensor(x) for x in results]

    def results(self, num_visible: int) -> list[torch.Tensor]:
        results = [unpack() for unpack in self._saved]
        return [x.clone() for x in results[:num_visible]] + results[num_visible:]


class SavedCall(_Call):
    """A call's outputs, their graph, and the random state after it."""

    def __init__(self, compute: Compute, inputs: Sequence[torch.Tensor], signature: object) -> None:
        # Note [kept attention has a graph of its own]
        #
        # A checkpoint drops the graph of the first run, and in the second run records every
        # operator anew. Attention must be in neither: its results would be freed with the one, and
        # kernels and exchanges would run again for the other. So the call runs here between leaves
        # of its own and outputs that are detached, with gradients enabled even in the first run of
        # a reentrant checkpoint. What hangs on the checkpoint is this object alone.
        #
        #   first run   q, k, v ..cut..> leaves -> attention -> outputs ..cut..> next operator
        #   second run  q, k, v -> Replay -> the same outputs -> next operator
        #   backward    next operator -> Replay.backward -> this graph, outputs to leaves -> q, k, v
        #
        # Tensors that backward needs and that are views of q, k or v are not kept: the second run
        # computes these anyway (_ReusedInputs). Backward is collective: it runs exactly once on
        # every rank, with zeros where no gradient arrives.
        super().__init__(signature)
        self._reused = _ReusedInputs(inputs)
        grad_enabled = torch.is_grad_enabled()  # not in a reentrant checkpoint's first run
        device = inputs[0].device
        before = RandomState.capture(device)
        with torch.enable_grad(), saved_tensors(self._reused.pack, self._reused.unpack):
            self._leaves = [x.new_empty(()).expand(x.shape) for x in inputs]
            pairs = list(zip(self._leaves, inputs, strict=True))
            for leaf, x in pairs:
                leaf.requires_grad_((x.requires_grad or not grad_enabled) and x.is_floating_point())
            # Detached: no edge to what computed x.
            outputs = compute(*[AttachLeaf.apply(leaf, x.detach()) for leaf, x in pairs])
        self._random = None if before.is_unchanged() else RandomState.capture(device)
        self._reused.release()
        self._outputs = [save_tensor(x.detach()) for x in outputs]
        self.edges = [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        self._backward_done = False

    @property
    def reused_inputs(self) -> tuple[int, ...]:
        """Indices of the inputs that backward needs."""
        return tuple(self._reused.indices)

    def outputs(self) -> Outputs:
        """The outputs, without gradients; sets the random state to that right after the call."""
        self._check_backward_once()
        if self._random is not None:
            self._random.restore()
        return tuple(unpack().detach() for unpack in self._outputs)

    def backward(
        self,
        reused: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs, None where they are not needed. Frees the saved tensors.

        Args:
            reused: the recomputed inputs of :attr:`reused_inputs`.
            grads: of the outputs; None where no gradient arrives.
            needed: of each input, whether its gradient is.
        """
        self._check_backward_once()
        self._backward_done = True
        pairs = zip(self.edges, grads, strict=True)
        edge_grads = [(edge, grad) for edge, grad in pairs if edge and grad is not None]
        if not edge_grads:  # other ranks may have some, and wait in the exchanges: zeros
            first = next(i for i, edge in enumerate(self.edges) if edge)
            edge = self.edges[first]
            edge_grads = [(edge, torch.zeros_like(self._outputs[first]()))] if edge else []
        self._reused.bind(reused)
        leaves = [leaf for leaf, need in zip(self._leaves, needed, strict=True) if need]
        try:
            edges, douts = zip(*edge_grads, strict=True)
            input_grads = iter(torch.autograd.grad(edges, leaves, douts, allow_unused=True))
        finally:
            self._reused.release()
            self.edges, self._outputs = [], []
        return [next(input_grads) if need else None for need in needed]

    def _check_backward_once(self) -> None:
        if self._backward_done:
            raise RecomputeError(
                "backward of kept attention ran already and freed its memory: run backward once, "
                "without retain_graph=True, or leave keep_attention out"
            )


class _ReusedInputs:
    """Saves a graph's views of its inputs as indices: the inputs are recomputed for backward. The
    graph refers to this, not to its SavedCall, which refers to the graph: no cycle."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.indices: list[int] = []  # of the inputs that the graph saves
        self._inputs = dict(enumerate(inputs))  # those that are there now, by index

    def pack(self, tensor: torch.Tensor) -> tuple[int, StorageView] | None:
        storage = storage_id(tensor)
        for index, x in self._inputs.items():
            if storage_id(x) == storage and x.dtype == tensor.dtype:
                if index not in self.indices:
                    self.indices.append(index)
                return index, StorageView.from_tensor(tensor)
        return None

    def unpack(self, packed: tuple[int, StorageView]) -> torch.Tensor:
        index, view = packed
        return view.apply_to(self._inputs[index])

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        self._inputs = dict(zip(self.indices, tensors, strict=True))  # recomputed, for backward

    def release(self) -> None:
        self._inputs = {}


class _CheckpointRun:
    """One of the two runs of a checkpointed function.

    Args:
        calls: what the first run saved; None: this is the first run.
        outer: the run inside of which this one runs.
    """

    def __init__(self, calls: Sequence[_Call] | None, outer: _CheckpointRun | None) -> None:
        self.is_first, self._outer = calls is None, outer
        self.calls: list[_Call] = list(calls or ())
        self._next = 0
        self._hooks = _top_hooks()

    def refuse_checkpoint_inside(self) -> None:
        """RecomputeError for attention in a checkpoint, not reentrant, that is inside of this run
        and has no run of its own."""
        # Such a checkpoint compares what its two runs save. Its second one comes when this run is
        # over: attention would not be replayed but computed, and torch could only say that tensors
        # differ. A reentrant one compares nothing: its attention is computed again.
        hooks = _top_hooks()
        if hooks is None or hooks == self._hooks:
            return
        if getattr(hooks[0], "__module__", None) in _CHECKPOINTS:
            raise RecomputeError(
                "a checkpoint inside of keep_attention recomputes attention without a "
                "keep_attention of its own: give it one, checkpoint(keep_attention(layer), ...), "
                "or leave out that around it"
            )

    def record_or_replay(self, make: Callable[[], CallT], signature: object) -> CallT:
        """The saved call of the attention that comes next: ``make()`` in the first run, which
        computes it; the first run's in the second; RecomputeError if its signature differs."""
        if self.is_first:
            # Note [nested checkpoints]
            # A first run may be inside of another checkpoint, whose own runs it is part of: of two
            # nested checkpoints the inner function runs three times, forward, in the outer one's
            # recomputation (a first run for the inner checkpoint, made anew by then) and in its
            # own. The outer run knows whether the call was made before: it makes or replays it,
            # and this run keeps the same object, so that attention is computed once for all three.
            outer = self._outer
            call = outer.record_or_replay(make, signature) if outer else make()
            self.calls.append(call)
            return call
        if self._next == len(self.calls):
            raise RecomputeError(
                f"the recomputation attends more often than the forward pass, which attended "
                f"{len(self.calls)} times. A checkpointed function must do the same both times"
            )
        saved = self.calls[self._next]
        self._next += 1
        saved.check(signature)
        return cast(CallT, saved)  # calls of another kind have another key


class _CheckpointedFunction:
    """A function that a checkpoint runs twice: in forward, then in backward. The checkpoint refers
    to it, and it to the saved calls: both are freed with the graph."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._calls: list[_Call] | None = None

    @disable_in_compile(
        "keep_attention runs its function itself. In a graph torch's selective checkpoint keeps "
        "attention: create_selective_checkpoint_contexts([torch.ops.ds_usp.attention.default])"
    )
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = _CheckpointRun(self._calls, current_run())
        # The second run may end early, as torch stops it when nothing is left to recompute: that
        # it makes all calls of the first is not checked.
        token = _CURRENT_RUN.set(run)
        try:
            result = self._run(*args, **kwargs)
        finally:
            _CURRENT_RUN.reset(token)
        if run.is_first:
            self._calls = run.calls
        return result


# Dynamic scope, as the grad mode is: which run a call of attention is part of.
_CURRENT_RUN: Final[ContextVar[_CheckpointRun | None]] = ContextVar("run", default=None)
current_run: Final = _CURRENT_RUN.get  # None outside of keep_attention; asked by every call


class AttachLeaf(torch.autograd.Function):
    """Makes a tensor depend on a leaf without memory: autograd keeps every leaf alive, so the leaf
    is one expanded number."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _signature(inputs: Sequence[torch.Tensor]) -> tuple[Hashable, ...]:
    """The form of inputs, in which both runs must agree: dtype, device, view in their storage, and
    which of them share one."""
    storages = [storage_id(x) for x in inputs]
    return tuple(
        (x.dtype, x.device, StorageView.from_tensor(x), storages.index(storage))
        for x, storage in zip(inputs, storages, strict=True)
    )


Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]


class StorageView(NamedTuple):
    """Shape, strides and offset of a tensor in its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> StorageView:
        return cls(tuple(tensor.size()), tensor.stride(), int(tensor.storage_offset()))

    def apply_to(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().as_strided(self.size, self.stride, self.offset)


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage as long as that lives."""
    return tensor.untyped_storage()._cdata


# Whose hooks for saved tensors mean that a function will run again.
_CHECKPOINTS = (
    "torch.utils.checkpoint",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
)


def _top_hooks() -> Any:
    """The hooks that autograd saves tensors by, here; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class _HookPair(NamedTuple):
    pack: Pack
    unpack: Unpack
    outer: _HookPair | None


# Dynamic scope, as torch's own stack of hooks is: each thread has its own.
_INNERMOST: Final[ContextVar[_HookPair | None]] = ContextVar("innermost", default=None)


@contextmanager
def saved_tensors(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """``torch.autograd.graph.saved_tensors_hooks`` that nests.

    Args:
        pack: what is saved instead of a tensor; None: the tensor is for the pair around this one.
            Never called for parameters: they live as long as the model.
        unpack: the tensor for what ``pack`` returned; each time that backward asks for it.
    """
    pair = _HookPair(pack, unpack, _INNERMOST.get())
    token = _INNERMOST.set(pair)
    try:
        with torch.autograd.graph.saved_tensors_hooks(partial(_save, pair), lambda saved: saved()):
            yield
    finally:
        _INNERMOST.reset(token)


def save_tensor(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Save a tensor, outside of autograd, as if autograd saved it here; the result returns it."""
    return _save(_INNERMOST.get(), tensor)


def _save(pair: _HookPair | None, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Pack a tensor by the first pair from ``pair`` outwards that takes it; the result unpacks."""
    if isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter):
        # The parameter itself, as it will be then: ZeRO-3 frees and reallocates its memory.
        return lambda: tensor
    # From the inside out: a recomputed layer inside an offloaded one takes what it can compute, and
    # leaves to the offload what is left. torch itself would ask the innermost pair only.
    while pair is not None:
        packed = pair.pack(tensor)
        if packed is not None:
            return partial(pair.unpack, packed)
        pair = pair.outer
    # Detached: a hook that returned its input would tie a node to its own output.
    return partial(_unchanged, tensor.detach(), tensor._version)


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    check_version(tensor, version)
    return tensor


def check_version(tensor: torch.Tensor, version: int) -> None:
    """RecomputeError for a saved tensor that was changed in place; torch checks none with hooks."""
    if tensor._version != version:
        raise RecomputeError(
            f"a tensor {list(tensor.shape)} that backward needs was changed in place "
            f"(version {tensor._version}, saved at {version})"
        )


def current_autocast(device_type: str) -> Callable[[], torch.autocast]:
    """A function that makes a context of what autocast is now on a type of device."""
    kind, cached = device_type, torch.is_autocast_cache_enabled()
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled, cached)


class RandomState(NamedTuple):
    """States of the CPU's generator and of one GPU's; None on a CPU or in a graph's capture."""

    device: torch.device
    cpu: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        gpu = None  # the CPU knows both states: nothing waits for the GPU
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            gpu = torch.cuda.get_rng_state(device)
        return cls(device, torch.get_rng_state(), gpu)

    def is_unchanged(self) -> bool:
        current = RandomState.capture(self.device)
        same_gpu = self.gpu is None or current.gpu is None or torch.equal(self.gpu, current.gpu)
        return same_gpu and torch.equal(self.cpu, current.cpu)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)
