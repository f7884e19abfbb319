"""Branches of classifier-free guidance on ranks of their own: samples of a batch that holds both,
or calls of a step, one for each branch.

``enable`` makes the parts; ``ShardedTransformer`` splits and joins by them around each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.comm.process_groups import align_group_counters, all_gather_bytes, subgroup
from ds_usp.comm.shards import all_gather_shards
from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.geometry.layout import TokenLayout
from ds_usp.integrations.diffusers.pass_state import ATTENTION_KWARGS
from ds_usp.integrations.diffusers.plans import Plan, parameters_of
from ds_usp.integrations.model_comparison import is_observer
from ds_usp.memory.compile_guard import disable_in_compile


@dataclass(frozen=True, eq=False)
class Branches:
    """The ranks of a mesh in ``degree`` parts, each of which computes as many samples of a batch.

    Attributes:
        degree: how many parts; 1: the mesh itself computes the whole batch.
        index: this rank's part, and the index of its samples among those of the others.
        mesh: the ranks of this part, which share the tokens of its samples.
        group: the ranks that hold the same tokens of other samples, by ``index``; None for one.
    """

    degree: int
    index: int
    mesh: SequenceMesh
    group: dist.ProcessGroup | None = None

    def of_batch(
        self, class_name: str, arguments: dict[str, Any], plan: Plan, whole: SequenceMesh
    ) -> Branches:
        """These parts of ``whole``, or all of it as one part for a batch that they cannot share: an
        odd one, and one branch by itself, as where guidance has ended. UnsupportedAttentionError
        if autograd is on, or nothing says how large the batch is."""
        if self.degree == 1:
            return self
        if torch.is_grad_enabled():
            raise UnsupportedAttentionError(
                f"{class_name}: cfg_degree={self.degree} is for sampling, and autograd is on: call "
                "it under torch.no_grad(), or enable it with cfg_degree=1"
            )
        batched = plan.batched
        if batched not in arguments:
            raise UnsupportedAttentionError(
                f"{class_name}: cfg_degree={self.degree} splits the batch, and {batched} is not "
                "given: name an argument that has it (batched= of the plan), or use cfg_degree=1"
            )
        return Branches(1, 0, whole) if len(arguments[batched]) % self.degree else self

    def split(self, class_name: str, arguments: dict[str, Any], plan: Plan) -> dict[str, Any]:
        """The arguments with this part's samples of those that the plan says have a batch;
        UnsupportedAttentionError for one that the parts cannot share."""
        if self.degree == 1:
            return arguments
        batched = plan.batched
        batch = len(arguments[batched])
        for key in plan.zero_or_not:
            value: Tensor | None = arguments.get(key)
            if value is not None and len(set((value != 0).flatten(1).any(1).tolist())) > 1:
                raise UnsupportedAttentionError(
                    f"{class_name}: {key} is zero for some samples and not for others, and the "
                    "pass asks whether it is for all: a part of the batch may have another answer. "
                    "Use cfg_degree=1"
                )
        is_list = isinstance(arguments[batched], list)  # of samples, as other lists are then
        inputs = dict(arguments)
        for key, value in arguments.items():
            if key not in plan.unbatched:
                take = self._slice if is_list and isinstance(value, list) else self._samples_of
                inputs[key] = take(f"{class_name}: {key}", value, batch)
        return inputs

    def _slice(self, name: str, value: Any, batch: int) -> Any:
        """This part's samples of a list or a tensor, ``name`` in errors, that has all ``batch``."""
        if len(value) != batch:
            described = f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name
            raise UnsupportedAttentionError(
                f"{described} has {len(value)} samples, where the batch has {batch}: "
                f"cfg_degree={self.degree} cannot split it; use cfg_degree=1"
            )
        size = batch // self.degree
        return value[self.index * size : (self.index + 1) * size]

    def _samples_of(self, name: str, value: Any, batch: int) -> Any:
        """This part's samples of an argument, of all ``batch``; what is one for all as it is."""
        if isinstance(value, Mapping):
            return {key: self._samples_of(f"{name}.{key}", x, batch) for key, x in value.items()}
        if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value):
            return type(value)(self._samples_of(name, x, batch) for x in value)
        if isinstance(value, Tensor):
            is_one_for_all = value.ndim == 0 or value.shape[0] == 1
            return value if is_one_for_all else self._slice(name, value, batch)
        if isinstance(value, (list, tuple)) and len(value) == batch:
            if any(x != value[0] for x in value):  # diffusers reads the first one for all
                raise UnsupportedAttentionError(
                    f"{name} differs between samples of a batch: use cfg_degree=1"
                )
            return value[: batch // self.degree]
        return value

    def join(self, out: Any, whole: SequenceMesh) -> Any:
        """The outputs of all samples, from those of the parts of ``whole``. Collective; MeshError
        for other shapes or dtypes on some ranks."""
        if self.degree == 1:
            return out
        # With other shapes on some ranks the gather would hang, or mix up what they send.
        whole.agree(f"outputs of a part, {', '.join(_shapes(out))}")
        return self._join(out)

    def _join(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            layout = TokenLayout("contiguous", out.shape[0] * self.degree, self.degree, 1)
            group = cast(dist.ProcessGroup, self.group)
            return layout.gather(all_gather_shards(layout, out, 0, group), 0)
        if isinstance(out, Mapping):  # the outputs of diffusers, which are dataclasses too
            return type(out)(**{key: self._join(value) for key, value in out.items()})
        if isinstance(out, list):  # of samples, all of one shape
            return list(self._join(torch.stack(out)).unbind())
        if isinstance(out, tuple):
            return tuple(self._join(value) for value in out)
        return out


def _shapes(out: Any) -> Iterator[str]:
    if isinstance(out, Tensor):
        yield f"{list(out.shape)} {out.dtype}"
    elif isinstance(out, (Mapping, list, tuple)):
        for value in out.values() if isinstance(out, Mapping) else out:
            yield from _shapes(value)


_MADE: WeakKeyDictionary[SequenceMesh, dict[int, Branches]] = WeakKeyDictionary()


def branches_of(mesh: SequenceMesh, degree: int) -> Branches:
    """The parts of a mesh, each of consecutive ranks with the degrees of :func:`degrees_of_branch`;
    kept for later calls. Collective over the mesh."""
    if degree == 1:
        return Branches(1, 0, mesh)
    ulysses, ring = degrees_of_branch(mesh, degree)
    by_degree = _MADE.setdefault(mesh, {})
    branches = by_degree.get(degree)
    # Made anew, as SequenceMesh.from_group makes a mesh, if a part has failed for good on any rank.
    usable = branches is not None and not branches.mesh.consistency.has_failed
    flags = [] if mesh.sp_group is None else all_gather_bytes(bytes([usable]), mesh.sp_group)
    if branches is None or b"\0" in flags:
        by_degree[degree] = branches = _create(mesh, degree, ulysses, ring)
    return branches


def degrees_of_branch(mesh: SequenceMesh, degree: int) -> tuple[int, int]:
    """Ulysses and ring degree of one part: the ring is divided by ``degree`` if possible, else the
    Ulysses axis. ConfigError for a degree that divides neither."""
    ulysses, ring = mesh.ulysses_degree, mesh.ring_degree
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
        raise ConfigError(f"cfg_degree={degree!r} must be a whole number of 1 or more")
    if ring % degree == 0:
        return ulysses, ring // degree
    if ulysses % degree == 0:
        return ulysses // degree, ring
    raise ConfigError(
        f"cfg_degree={degree} divides neither the ring degree {ring} nor the Ulysses degree "
        f"{ulysses} of the mesh, which is of all ranks that share a batch. Use {degree} times as "
        "many ranks as a branch needs"
    )


def _create(mesh: SequenceMesh, degree: int, ulysses: int, ring: int) -> Branches:
    # Collective over the mesh: each rank creates the group of its part, then the one across parts.
    # torch names groups that only their members create by how many the process has, so these
    # numbers are aligned first. A part of one rank has no group; across parts there is always one.
    sp_group = mesh.sp_group
    if sp_group is None:
        raise ConfigError(f"cfg_degree={degree}: the mesh has no process group")
    ranks, size = dist.get_process_group_ranks(sp_group), ulysses * ring
    index, rank_in_part = divmod(mesh.rank, size)
    align_group_counters(sp_group)
    group = subgroup(sp_group, ranks[index * size : (index + 1) * size])
    across = subgroup(sp_group, ranks[rank_in_part::size])
    if group is None:
        return Branches(degree, index, SequenceMesh.single(), across)
    return Branches(degree, index, SequenceMesh.from_group(group, ulysses, mesh.order), across)


# ------------------------------------------------------------------ one call a branch


# Note [a call that waits for its step's other branches]
# Pipelines of Wan, Flux or QwenImage call the transformer for the prompt, then for the negative
# prompt, and combine. While half of the ranks compute the first call the others could compute the
# second, whose arguments no rank has yet. So the first call computes nothing. It returns a promise,
# and when the second one comes both run at once, each on its own part of the mesh.
#
# Nothing is guessed about the pipeline. A promise that is read before the second call has come, as
# where guidance is off in a step or a callback prints the prediction, runs its call there and then,
# by itself on the whole mesh. What a call needs from an earlier one it reads, so calls that run
# together do not depend on each other. Which calls do is the plan's word: those that are given one
# and the same tensor as `shared_by_branches`, under different names of the cache context if any.
#
# A later run must compute what the call would have computed. Its tensors are copied, for pipelines
# write into some in place; grad mode, autocast and cache context are entered again; and hooks,
# settings and weights must be what they were, or the run is refused (`_check_step` of hooks.py).
class _Promise(Tensor):
    """The output of a call that waits: any operation that reads it runs the call first."""

    value: Callable[[], Tensor]  # runs the call if it has not run: collective then
    is_known: Callable[[], bool]  # whether the call has run

    @staticmethod
    def of(value: Callable[[], Tensor], is_known: Callable[[], bool]) -> _Promise:
        # No kernel takes it: what does not ask __torch_function__ fails on the meta device.
        promise: _Promise = Tensor._make_subclass(_Promise, torch.empty(0, device="meta"))
        promise.value, promise.is_known = value, is_known
        return promise

    @classmethod
    @disable_in_compile("the output of a call that waits is read")
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, edits = kwargs or {}, getattr(func, "__name__", "") in _OF_EDIT_PIPELINES
        promise = args[0] if args else None
        if edits and isinstance(promise, _Promise) and not promise.is_known():
            others = (*args[1:], *kwargs.values())
            if not any(isinstance(x, Tensor) for x in _pytree.tree_leaves(others)):
                # Once: what is written into the result must be there when it is read again.
                later = cache(lambda: func(promise.value(), *args[1:], **kwargs))
                return _Promise.of(later, promise.is_known)
        return func(*_without_promises(args), **_without_promises(kwargs))


# Pipelines that edit images cut the tokens of these images off before they call the other branch,
# and get a promise. Arithmetic reads: its promise might leave the pipeline, to be read on one rank.
_OF_EDIT_PIPELINES = frozenset({"__getitem__", "float", "to"})


def _without_promises(values: Any) -> Any:
    """Return ``values`` with tensors in place of promises, whose calls run if they have not."""
    return _pytree.tree_map_only(_Promise, lambda promise: promise.value(), values)


class WaitingCall:
    """A call of a transformer that has not run.

    Attributes:
        arguments: by their names; of tensors copies. {} once it has run.
        shared: the tensor by which it is known to belong to a step, see ``shared_by_branches``.
        context: name and arguments of diffusers' cache context, or None.
        state: ``ModelComparison.state`` when it was called.
        problem: why a call then was refused; it is raised where ranks compare.
        out, error: what :meth:`finish` was given; None both while it waits.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        shared: Any,
        context: tuple[str, dict[str, Any]] | None,
        state: object,
        problem: Exception | None,
    ) -> None:
        self.arguments = _pytree.tree_map_only(Tensor, Tensor.clone, arguments)
        self.shared, self.context = shared, context
        self.state, self.problem = state, problem
        self._device = device = shared.device.type
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        self.out: Tensor | None = None
        self.error: BaseException | None = None

    def belongs_with(self, other: WaitingCall) -> bool:
        """Return whether both are calls of one step, for other branches."""
        names = [call.context and call.context[0] for call in (self, other)]
        return self.shared is other.shared and (None in names or names[0] != names[1])

    @contextmanager
    def modes(self) -> Iterator[None]:
        """The modes of torch under which it was called."""
        dtype, enabled = self._autocast
        with (
            torch.inference_mode(self._inference),
            torch.no_grad(),
            torch.autocast(self._device, dtype, enabled),
        ):
            yield

    def finish(self, out: Tensor | None, error: BaseException | None = None) -> None:
        self.out, self.error = out, error
        self.arguments, self.shared = {}, None  # a scheduler may hold the promise


class BranchCalls:
    """Takes the place of ``_call_impl`` of an enabled transformer: calls of one step wait for each
    other, and run at once.

    Args:
        parts: of the mesh, which compute a call each.
        run: ``_as_pass_of`` of the :class:`ShardedTransformer`: its body is the pass of the calls.
        note: returns the state of the model, and the error by which a call now would be refused.
        own_hooks: the ids of the hooks on the transformer that do not keep a call from waiting.
    """

    def __init__(
        self,
        transformer: nn.Module,
        parts: Branches,
        plan: Plan,
        run: Callable[[Sequence[WaitingCall]], AbstractContextManager[None]],
        note: Callable[[], tuple[object, Exception | None]],
        own_hooks: frozenset[int],
    ) -> None:
        self._transformer, self._plan = transformer, plan
        self._degree, self._index = parts.degree, parts.index
        self._run, self._note, self._own_hooks = run, note, own_hooks
        self._before = vars(transformer).get("_compiled_call_impl")  # of transformer.compile()
        self._call: Callable[..., Any] = self._before or transformer._call_impl
        self._waiting: list[WaitingCall] = []
        self._context: tuple[str, dict[str, Any]] | None = None
        self._removed = False
        transformer._compiled_call_impl = self
        if hasattr(transformer, "cache_context"):
            vars(transformer)["cache_context"] = self._noted_context

    def __deepcopy__(self, memo: dict[int, Any]) -> BranchCalls:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, value if name == "_plan" else deepcopy(value, memo))
        # torch leaves it out of a copy of the module.
        vars(twin._transformer)["_compiled_call_impl"] = twin
        return twin

    @property
    def is_called(self) -> bool:
        """Whether calls of the transformer come here: ``transformer.compile()`` takes its place."""
        return vars(self._transformer).get("_compiled_call_impl") is self

    def remove(self) -> None:
        self._removed = True
        if self.is_called:
            del self._transformer._compiled_call_impl
            if self._before is not None:
                self._transformer._compiled_call_impl = self._before
        vars(self._transformer).pop("cache_context", None)

    # In place of the transformer's `cache_context`, by which pipelines name a branch.
    @contextmanager
    def _noted_context(self, name: str, **keywords: Any) -> Iterator[None]:
        self._context = name, keywords
        try:
            with self._enter(self._context):
                yield
        finally:
            self._context = None

    @contextmanager
    def _enter(self, context: tuple[str, dict[str, Any]] | None) -> Iterator[None]:
        if context is None:
            yield
            return
        name, keywords = context
        enter = type(self._transformer).cache_context  # type: ignore[attr-defined]
        with enter(self._transformer, name, **keywords):
            yield

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, out = self._joined_step(args, kwargs)
        return self._call(*args, **kwargs) if out is None else out

    @disable_in_compile("a call waits for the other branches of its step")
    def _joined_step(self, args: Any, kwargs: Any) -> tuple[Any, Any, tuple[Tensor] | None]:
        """Return args, kwargs and None of a call that runs by itself. Else the output is last: a
        promise, or that of the step's last call, with which all run: collective then."""
        if self._removed or torch.is_grad_enabled():
            return args, kwargs, None
        args, kwargs = _without_promises((args, kwargs))
        arguments = dict(zip(parameters_of(self._transformer), args, strict=False)) | kwargs
        if not self._may_wait(arguments):
            return args, kwargs, None
        shared = arguments[self._plan.shared_by_branches or ""]
        call = WaitingCall(arguments, shared, self._context, *self._note())
        self._waiting = [x for x in self._waiting if x.out is None and x.belongs_with(call)]
        self._waiting.append(call)
        if len(self._waiting) < self._degree:
            promise = _Promise.of(lambda: self._value(call), lambda: call.out is not None)
            return (), {}, (promise,)
        calls, self._waiting = self._waiting, []
        self._run_now(calls)
        return (), {}, (self._value(call),)

    def _may_wait(self, arguments: Mapping[str, Any]) -> bool:
        batch = arguments.get(self._plan.batched)
        shared = arguments.get(self._plan.shared_by_branches or "")
        if not isinstance(shared, Tensor) or batch is None:
            return False
        # Hooks of the user's are called with one call's arguments and see its output. Observers do
        # not count: they may be on one rank alone, whose call would run while the others' wait.
        transformer = self._transformer
        hooks = {**transformer._forward_pre_hooks, **transformer._forward_hooks}
        foreign = any(
            not (number in self._own_hooks or is_observer(hook))
            # FSDP gathers and frees weights around every pass.
            and not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
            for number, hook in hooks.items()
        )
        # As pipelines call it: a tuple of one tensor. Others' calls are refused, or return more.
        accepted = self._plan.arguments | ATTENTION_KWARGS | {"return_dict"}
        present = {name for name, value in arguments.items() if value is not None}
        is_known = present <= accepted and arguments.get("return_dict") is False
        return is_known and not foreign and len(batch) % self._degree != 0

    def _run_now(self, calls: Sequence[WaitingCall]) -> None:
        # Collective. Several calls run one on each part, a single one on the whole mesh. Outputs of
        # several come joined along the batch, in the order of the parts.
        if self._removed:
            raise ConfigError(
                f"{type(self._transformer).__name__} was disabled before the output of a call with "
                "cfg_degree was read: call disable(), or leave the with block, after the step"
            )
        branch_call = calls[self._index if len(calls) > 1 else 0]
        try:
            with self._run(calls), branch_call.modes(), self._enter(branch_call.context):
                outs = self._call(**branch_call.arguments)[0].chunk(len(calls))
        except BaseException as error:
            for call in calls:
                call.finish(None, error)
            raise
        for call, out in zip(calls, outs, strict=True):
            call.finish(out)

    def _value(self, call: WaitingCall) -> Tensor:
        if call.error is not None:
            raise call.error
        if call.out is None:
            self._waiting = [x for x in self._waiting if x is not call]
            self._run_now([call])
        return cast(Tensor, call.out)
