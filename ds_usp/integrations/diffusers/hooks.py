"""The hooks that shard a transformer's forward passes: called on every rank of the mesh in each
pass, and those inside again where a checkpoint computes blocks again in backward."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from ds_usp.comm.mesh import SequenceMesh
from ds_usp.errors import ConfigError, UnsupportedAttentionError, USPError
from ds_usp.integrations.diffusers.branches import BranchCalls, Branches, WaitingCall
from ds_usp.integrations.diffusers.caches import CACHES, FOLLOWERS, Caches, hooks_of
from ds_usp.integrations.diffusers.derived_plans import NO_PLAN, DerivedPlan, check_first_pass
from ds_usp.integrations.diffusers.graphs import (
    ForwardGraphs,
    Mode,
    check_compiled,
    is_called_compiled,
    refuse_capture,
)
from ds_usp.integrations.diffusers.pass_state import Options, PassState, bind, check_arguments
from ds_usp.integrations.diffusers.plans import (
    Dims,
    Kind,
    Plan,
    TokenDim,
    modules_at,
    parameters_of,
)
from ds_usp.integrations.diffusers.processor import check_backend_of, check_processor, sharded
from ds_usp.integrations.model_comparison import ModelComparison
from ds_usp.integrations.replicas import ValuesComparison, same_on_all_ranks
from ds_usp.integrations.shard_noise import ShardNoise
from ds_usp.memory.compile_guard import disable_in_compile

# Hooks of diffusers that move or cast weights and leave tokens alone; others may compare, blur or
# leave out tokens of a whole sequence, which here are a shard's.
_HARMLESS_HOOKS = frozenset(
    {
        *("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"),
        *("lazy_leafs", "layerwise_casting", "peft_autocast_disable"),
    }
)
_MAX_PASS_KINDS = 64  # whose numbers of attentions are remembered
_CHECKPOINT = "_gradient_checkpointing_func"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_transformer(transformer: nn.Module) -> Caches:
    """Refuse what diffusers may have switched on: its parallelism (ConfigError), and hooks that see
    tokens (UnsupportedAttentionError) but for known caches, which it returns. Before each pass
    too."""
    name = type(transformer).__name__
    if getattr(transformer, "_parallel_config", None) is not None:
        raise ConfigError(
            f"{name} has diffusers' own parallelism (enable_parallelism, parallel_config): load "
            "the transformer without it"
        )
    hooks = list(hooks_of(transformer))
    for path, hook, _ in hooks:
        if hook in _HARMLESS_HOOKS or hook in CACHES or hook in FOLLOWERS:
            continue
        if getattr(transformer, "is_cache_enabled", False):
            raise UnsupportedAttentionError(
                f"{name} has a cache of its blocks ({hook}), whose choices would differ between "
                "shards: call disable_cache(), or enable FirstBlockCache, MagCache, TaylorSeer, "
                "FasterCache or PyramidAttentionBroadcast"
            )
        raise UnsupportedAttentionError(
            f"{name} has diffusers' {hook} (at {path or 'the transformer'}), which would see the "
            "tokens of a shard. Remove it: skipped layers and guidance by changed attention are "
            "not served"
        )
    return Caches(transformer, hooks)


def check_attention(transformer: nn.Module, plan: Plan, ulysses_degree: int) -> None:
    """UnsupportedAttentionError for a processor that cannot be sharded, or too few heads."""
    for path in plan.attention:
        for module in modules_at(transformer, path):
            check_processor(module)
    check_heads(transformer, plan, ulysses_degree)


def check_heads(transformer: nn.Module, plan: Plan, ulysses_degree: int, why: str = "") -> None:
    """UnsupportedAttentionError for fewer heads than Ulysses ranks, where a module has a number.

    Args:
        why: what besides the mesh makes so many ranks share the heads, for the message.
    """
    for path in plan.attention:
        for module in modules_at(transformer, path):
            heads = getattr(module, "heads", ulysses_degree)
            if heads < ulysses_degree:
                raise UnsupportedAttentionError(
                    f"{type(transformer).__name__} has {heads} heads, fewer than the Ulysses "
                    f"degree {ulysses_degree}{why}: use a Ulysses degree of {heads} or less, and "
                    "the ring for the other ranks"
                )


class ShardedTransformer:
    """One transformer whose forward passes are sharded; whole arguments, whole outputs.

    Args:
        branches: the parts of ``mesh`` for passes with several branches of the guidance; others are
            computed by all of ``mesh``, as all passes are with ``cfg_degree=1``.
        comparison: of the transformer over ``mesh``, begun by ``enable``; left by :meth:`remove`.

    Attributes:
        mesh: the ranks that share each batch.
        state: of the pass that runs, or of the one whose blocks backward computes again; else None.
    """

    def __init__(
        self,
        transformer: nn.Module,
        mesh: SequenceMesh,
        branches: Branches,
        plan: Plan,
        options: Options,
        comparison: ModelComparison,
    ) -> None:
        self.transformer, self._comparison = transformer, comparison
        self.mesh, self._branches = mesh, branches
        self._plan, self._options = plan, options
        self._noise = ShardNoise(mesh.rank)
        self._is_plan_proven = not isinstance(plan, DerivedPlan)  # else its first pass is compared
        self._first_arguments: dict[str, Any] = {}  # of the pass that is to be compared
        self.install()

    def install(self) -> None:
        """Shard the transformer's passes; again after :meth:`restore`."""
        transformer, branches, plan = self.transformer, self._branches, self._plan
        self._parts = branches  # of the pass that runs, or has run last
        self.state: PassState | None = None
        self._removed = False
        self._given_tokens: dict[nn.Module, bool] = {}
        self._stock_checkpoints: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._processors: list[tuple[nn.Module, Any, Any]] = []
        for path, tokens in plan.tokens.items():
            for module in modules_at(transformer, path):
                processor = sharded(module.processor, tokens, self, 1 + (path in plan.twice))
                self._processors.append((module, module.processor, processor))
                module.processor = processor
        self._graphs: ForwardGraphs | None = None
        if self._options.cuda_graphs:
            transformer.forward = self._graphs = ForwardGraphs(transformer)
        # Around the transformer it is the last hook before and the first after: other hooks, if
        # they were there before, see whole tensors. _end runs after an error too: a pass that
        # failed must not be taken for one that runs.
        self._handles = [
            transformer.register_forward_pre_hook(self._begin, with_kwargs=True),
            transformer.register_forward_hook(self._end, always_call=True, prepend=True),
        ]
        self._inner_handles: list[RemovableHandle] = []
        self._hook_modules()
        # The calls that have waited and run in this pass; none in that of a call by itself.
        self._step: tuple[WaitingCall, ...] = ()
        self._caches = check_transformer(transformer)
        # How the pass before was: degree of the parts, and whether each had a call of its own.
        self._divided: tuple[int, bool] | None = None
        self._pass_kind = ""  # plain arguments, which may decide how many attentions a pass has
        self._max_attended: dict[str, int] = {}  # by kind of pass, attentions so far
        self._branch_calls: BranchCalls | None = None
        if branches.degree > 1 and plan.shared_by_branches:
            hook_ids = frozenset(handle.id for handle in self._handles)
            functions = self._as_pass_of, self._state_and_problem
            self._branch_calls = BranchCalls(transformer, branches, plan, *functions, hook_ids)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTransformer:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            shared = name in ("mesh", "_branches", "_parts", "_plan", "_options")
            setattr(twin, name, value if shared else copy.deepcopy(value, memo))
        return twin

    def __getstate__(self) -> Any:
        raise ConfigError(
            f"an enabled {type(self.transformer).__name__} cannot be pickled, for its mesh belongs "
            "to these processes: save its state_dict(), use save_pretrained, or disable() first"
        )

    def _modules_of_plan(self) -> Iterator[nn.Module]:
        plan = self._plan
        named = (*plan.inputs, *plan.outputs, *plan.masks, *plan.gathered, *plan.joins)
        for path in (*named, *plan.whole_inputs, *plan.counts):
            yield from modules_at(self.transformer, path)

    def _hook_modules(self) -> None:
        """Put the hooks on the modules that are at the plan's paths now, and on no others."""
        for handle in self._inner_handles:
            handle.remove()
        self._inner_handles = list(self._register_inside())
        self._modules = list(self._modules_of_plan())
        if self._graphs is not None:
            handles = (*self._handles, *self._inner_handles)
            self._graphs.own_hooks = frozenset(handle.id for handle in handles)

    def check_idle(self) -> None:
        """ConfigError within a forward pass, which would return a shard if hooks were removed."""
        if self.state is not None and _is_running(self.transformer):
            raise ConfigError(
                f"disable() within a forward pass of {type(self.transformer).__name__}: call it "
                "after the pass, not in a hook or a callback inside"
            )

    def remove(self) -> None:
        """Leave the transformer as it was, for good: no :meth:`install` may follow."""
        self._comparison.leave()
        self.restore()

    def restore(self) -> None:
        """Leave the transformer as it was, until :meth:`install`; still compared on ``mesh``."""
        if self._removed:  # and the transformer may be sharded over another mesh since
            return
        self._removed = True
        if self._branch_calls is not None:
            self._branch_calls.remove()
        self.state = None  # of a pass that was interrupted
        self._restore_checkpoints()
        self._caches.release()
        if self._graphs is not None:
            self._graphs.clear()
            if vars(self.transformer).get("forward") is self._graphs:  # else it was replaced
                del self.transformer.forward
        for handle in (*self._handles, *self._inner_handles):
            handle.remove()
        self._handles.clear()
        self._inner_handles.clear()
        for module, original, processor in self._processors:
            if module.processor is processor:  # else it was replaced since
                module.processor = original
        self._processors.clear()

    def _register_inside(self) -> Iterator[RemovableHandle]:
        plan, transformer = self._plan, self.transformer
        before: list[tuple[str, Callable[[PassState, dict[str, Any]], None]]] = []
        # Pre-hooks are prepended, so those added last run first: masks need the shards' lengths.
        before += [(p, partial(_count_last, counts)) for p, counts in plan.counts.items()]
        before += [(p, partial(self._join_inputs, dims)) for p, dims in plan.whole_inputs.items()]
        for path, argument in plan.masks.items():
            before.append((path, partial(self._take_mask, argument, plan.order_of_mask(path))))
        for path, entries in plan.inputs.items():
            if path:
                before.append((path, partial(self._shard_inputs, entries, path == plan.joined)))
        for path, change in before:
            hook = partial(self._change_inputs, change)
            for module in modules_at(transformer, path):
                yield module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        for path, outputs in plan.outputs.items():
            for module in modules_at(transformer, path):
                if self._graphs is not None:
                    yield module.register_forward_pre_hook(self._graphs.watch)
                    yield module.register_forward_hook(self._graphs.unwatch, always_call=True)
                yield module.register_forward_hook(partial(self._shard_outputs, outputs))
        within = {path: (kind,) for path, kind in plan.gathered.items()}
        for last, joins in ((False, within), (True, plan.joins)):
            for path, kinds in joins.items():
                dims = tuple(kind and TokenDim(kind, plan.joined_dim) for kind in kinds)
                for module in modules_at(transformer, path):
                    yield module.register_forward_hook(partial(self._join, dims, last))

    # ------------------------------------------------------------------ around the transformer

    @disable_in_compile("the ranks compare their arguments before a forward pass")
    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # Whole arguments come in: positions are made from frames, height and width of all tokens,
        # and embeddings of patches from whole latents. What has tokens is sharded where the plan
        # says so, which for many classes is only at the first block. In the pass of a step
        # `arguments` are those of this rank's branch, and the ranks compare those of all branches.
        arguments, step = bind(self.transformer, args, kwargs), self._step
        name = type(self.transformer).__name__
        refuse_capture(name)
        self._first_arguments = {} if self._is_plan_proven else dict(arguments)  # kept until _end
        advice = "give every rank the same weights and batch, and noise from generators of one seed"
        call = f"a forward pass of {name} ({advice}),"
        self._restore_checkpoints()  # of a pass that was interrupted
        self._caches.release()
        if self.state is not None and self._graphs is not None:  # interrupted, too
            self._graphs.clear()
        compared, mode = dict(arguments), Mode.GRADIENTS  # a mode without any graph
        if len(step) > 1:
            compared = {f"branch {i}": call.arguments for i, call in enumerate(step)}
        model = self._comparison
        with same_on_all_ranks(self.mesh, call, compared, model, deferred=True) as values:
            self._caches = caches = self._check_unchanged()
            self._check_step(step)
            for each in [call.arguments for call in step] or [arguments]:
                check_arguments(self.transformer, self._plan, each)
            parts = self._branches if len(step) > 1 else self._parts_of(arguments)
            self._check_caches(caches, parts, step)
            self._parts = parts
            compared["parts of the mesh"], compared["caches"] = parts.degree, caches.text
            # Arguments that are absent, and plain ones, may make a pass leave out attentions.
            self._pass_kind = ", ".join(sorted(f"{k} {_plain(x)}" for k, x in arguments.items()))
            self._pass_kind += f", compiled {self._compiled_parts()}"
            share = "some samples of the batch"  # of this part of the mesh, whose ranks compare it
            if len(step) > 1:
                inputs, share = arguments, f"branch {parts.index} of a step"
            else:
                inputs = parts.split(name, arguments, self._plan)
            inputs = {k: x for k, x in inputs.items() if k not in self._plan.all_real}
            if self._graphs is not None:
                mode, text = self._graphs.choose(inputs, parts.mesh)
                if len(step) > 1:  # texts of other lengths make passes of other kinds
                    share += f", {text}"
                else:
                    compared["the pass is"] = text
        with self._declared_to_ranks():
            return (), self._begin_pass(name, values, mode, inputs, share)

    def _begin_pass(
        self, name: str, values: ValuesComparison, mode: Mode, inputs: dict[str, Any], share: str
    ) -> dict[str, Any]:
        parts = self._parts
        if parts.degree > 1:  # attention is compared in a part of the mesh
            parts.mesh.agree(f"a forward pass of {name}, {share}")
        # Both branches in a batch are one decision; calls of their own have one each.
        self._caches.decide_on(parts.mesh if len(self._step) > 1 else self.mesh)
        tokens = frozenset(self._plan.tokens.values())
        self.state = PassState(name, parts.mesh, self._options, tokens, values)
        self.state.joined = mode is Mode.REPLAY  # as it was when it was captured
        if self._plan.gathered_if is not None:
            self.state.gathers = bool(inputs.get(self._plan.gathered_if))
        if torch.is_grad_enabled() or self.transformer.training:
            self._wrap_checkpoints(self.state)
            self._hook_dropouts()
        _shard_named(self.state, inputs, self._plan.inputs.get("", {}))
        return inputs

    @contextmanager
    def _declared_to_ranks(self) -> Iterator[None]:
        # An error in the body is declared to the ranks of the part and of the mesh; no collective.
        name = type(self.transformer).__name__
        part, whole = self._parts.mesh.consistency, self.mesh.consistency
        with whole.forward_pass_of(name), part.forward_pass_of(name):
            yield

    @disable_in_compile("a forward pass ends")
    def _end(self, _: nn.Module, __: Any, out: Any) -> Any:
        # Returns the outputs whole, of all samples; collective. `out` is None if the pass raised.
        state, self.state = self.state, None
        name, error = type(self.transformer).__name__, cast(Any, sys.exc_info()[1])
        self._noise.end()  # of a dropout that has raised
        self._restore_checkpoints()
        self._caches.release()
        if out is None and self._graphs is not None:
            self._graphs.clear()  # of all ranks: one may have none, or have begun an exchange
        if out is None and error is not None and not self._is_plan_proven:
            error.add_note(NO_PLAN.format(name))
        if out is None:
            # A pass that was refused before it began has no state, and its ranks may have chosen
            # different parts of the mesh: they have left none of them.
            for mesh in (self.mesh,) if state is None else (self._parts.mesh, self.mesh):
                mesh.consistency.leave_forward_pass(name, error)
            return None
        with self._declared_to_ranks():
            if state is not None:
                state.values.finish()  # compares arguments' values: collective
                self._comparison.end_of_forward()
                if not state.joined:
                    raise UnsupportedAttentionError(
                        f"{name} has not called {self._plan.joined}, whose output its plan joins: "
                        "what it returns is a shard"
                    )
                if torch.is_grad_enabled():
                    out = tree_map_only(Tensor, state.output, out)  # for gradients="sum"
                else:
                    self._check_attended(state)
            joined = self._parts.join(out, self.mesh)
            if not self._is_plan_proven:
                self._compare_first_pass(joined)
            return joined

    def _compare_first_pass(self, out: Any) -> None:
        """Compute the pass again as one process does, on each rank, and compare ``out``, the whole
        outputs of the mesh. Collective; an error on one rank raises on every rank."""
        arguments, self._first_arguments = self._first_arguments, {}
        name = type(self.transformer).__name__
        with self.mesh.agreeing(f"the first pass of {name}"):
            if self._caches:
                raise UnsupportedAttentionError(
                    f"{name}: its plan is made from diffusers' own parallelism, and its first pass "
                    "is compared with one process: make it without a cache"
                )
            self.restore()
            try:
                with torch.no_grad(), torch.random.fork_rng(enabled=self.transformer.training):
                    want = self.transformer(**arguments)
            finally:
                self.install()
            check_first_pass(name, out, want)
        self._is_plan_proven = True

    # ------------------------------------------------------------------ calls of a step

    @contextmanager
    def _as_pass_of(self, calls: Sequence[WaitingCall]) -> Iterator[None]:
        """Run the body as the pass of calls that have waited: of a step, or a single one."""
        self._step = tuple(calls)
        try:
            yield
        finally:
            self._step = ()

    def _state_and_problem(self) -> tuple[object, Exception | None]:
        # Of the model now, and what refuses a call now: `WaitingCall` keeps both for _check_step.
        try:
            check_transformer(self.transformer)
            check_compiled(self.transformer, f"cfg_degree={self._branches.degree}")
        except USPError as problem:
            return self._comparison.state(), problem
        return self._comparison.state(), None

    def _check_step(self, step: Sequence[WaitingCall]) -> None:
        # The calls run only now, and must compute what they would have when they came.
        name, state = type(self.transformer).__name__, self._comparison.state() if step else None
        for call in step:
            if call.problem is not None:
                raise call.problem
            if call.state != state:
                raise UnsupportedAttentionError(
                    f"{name}: weights or settings were changed between two branches of a step, "
                    f"and cfg_degree={self._branches.degree} computes both after the change. "
                    "Change them between steps, or use cfg_degree=1"
                )

    def _parts_of(self, arguments: dict[str, Any]) -> Branches:
        """Return, without communication, the parts for a call that is none of a step: those of the
        branches if they divide its batch, else the mesh; UnsupportedAttentionError if neither."""
        name, degree = type(self.transformer).__name__, self._branches.degree
        parts = self._branches.of_batch(name, arguments, self._plan, self.mesh)
        calls = self._branch_calls
        if parts is not self._branches and calls is not None and not calls.is_called:
            raise UnsupportedAttentionError(
                f"{name}.compile() after enable takes the place of what lets the calls of a step "
                f"wait for each other with cfg_degree={degree}: use compile_repeated_blocks()"
            )
        if parts is not self._branches:
            batch, ulysses = len(arguments[self._plan.batched]), self.mesh.ulysses_degree
            why = f" of the whole mesh, which computes a batch of {batch} with cfg_degree={degree}"
            check_heads(self.transformer, self._plan, ulysses, why)
        return parts

    def _compiled_parts(self) -> int:
        # How many of the transformer and its blocks are compiled: their attentions are not counted.
        blocks = {path.rpartition(".")[0] for path in self._plan.attention}
        modules = [x for path in blocks for x in modules_at(self.transformer, path)]
        calls = [vars(x).get("_compiled_call_impl") for x in (*modules, self.transformer)]
        return is_called_compiled(self.transformer) + sum(
            not (call is None or isinstance(call, BranchCalls)) for call in calls
        )

    def _check_attended(self, state: PassState) -> None:
        # A cache of another package may have wrapped blocks in any way, but blocks that it skips do
        # not attend. It decides by this rank's tokens: where ranks decide otherwise, the
        # comparison in attention raises, and where they agree, one process might have not.
        max_attended = max(self._max_attended.get(self._pass_kind, 0), state.attended)
        if len(self._max_attended) >= _MAX_PASS_KINDS:  # as of a number that each step changes
            self._max_attended.clear()
        self._max_attended[self._pass_kind] = max_attended
        fewer_expected = self._caches or self._options.step_cache or self._graphs is not None
        if state.joined and state.attended < max_attended and not fewer_expected:
            raise UnsupportedAttentionError(
                f"{type(self.transformer).__name__}: {state.attended} attentions in a pass, and "
                f"{max_attended} in an earlier one of the same arguments: something skips blocks, "
                "and may decide by the tokens of a shard. If it decides by the step or the time "
                "alone, enable(step_cache=True); else remove it: diffusers' FirstBlockCache, "
                "MagCache and TaylorSeer and cache-dit decide for all ranks"
            )

    def _check_caches(self, caches: Caches, parts: Branches, step: Sequence[WaitingCall]) -> None:
        splits_branches = len(step) > 1
        splits_samples = parts.degree > 1 and not splits_branches
        divided = parts.degree, splits_branches
        has_context = all(call.context is not None for call in step)
        caches.check(splits_branches, splits_samples, has_context)
        caches.check_same_parts(self._divided in (None, divided))
        self._divided = divided

    def _check_unchanged(self) -> Caches:
        # Attention of a new module would not be sharded, and would compute with a shard as if it
        # were all tokens: refused. Other modules of the plan, as LoRA and quantization wrap and
        # replace them, are hooked anew: hooks on an old module may run within the new one.
        caches = check_transformer(self.transformer)
        name = type(self.transformer).__name__
        attention = [x for path in self._plan.attention for x in modules_at(self.transformer, path)]
        if not _same(attention, [module for module, *_ in self._processors]):
            raise ConfigError(
                f"modules of {name} were replaced since enable, as changed blocks do (attention, "
                "or what is around it): disable(), change them, and enable again"
            )
        if not _same(list(self._modules_of_plan()), self._modules):
            self._plan.check(self.transformer)
            self._hook_modules()
        for module, _, processor in self._processors:
            if module.processor is not processor:
                new = type(module.processor).__name__
                raise ConfigError(
                    f"the attention processors of {name} were replaced since enable (there is a "
                    f"{new}): disable(), change them, and enable again. Guidance by changed "
                    "attention (PAG), which does so in each call, is not served: pag_scale=0"
                )
            check_backend_of(processor)
        return caches

    def _wrap_checkpoints(self, state: PassState) -> None:
        # Blocks that a checkpoint runs again in backward find the state of their own pass, even if
        # another pass came between.
        def checkpointed(
            original: Callable[..., Any], block: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            return original(partial(self._resume, state, block), *args, **kwargs)

        for module in self.transformer.modules():
            original = vars(module).get(_CHECKPOINT)
            if original is not None:
                self._stock_checkpoints.append((module, original))
                setattr(module, _CHECKPOINT, partial(checkpointed, original))

    def _restore_checkpoints(self) -> None:
        for module, original in self._stock_checkpoints:
            setattr(module, _CHECKPOINT, original)
        self._stock_checkpoints.clear()

    def _resume(
        self, state: PassState, block: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._removed:
            raise ConfigError(
                f"{type(self.transformer).__name__} was disabled between a forward pass and the "
                "backward pass that computes its blocks again: call disable(), or leave the with "
                "block, after backward"
            )
        before, self.state = self.state, state
        try:
            return block(*args, **kwargs)
        finally:
            self.state = before

    # ------------------------------------------------------------------ inside

    def _active(self, module: nn.Module) -> PassState:
        # The state of the pass in which a hook of `module` runs.
        if self.state is None:
            raise ConfigError(
                f"{type(module).__name__} of an enabled {type(self.transformer).__name__} runs "
                "outside of a forward pass of it. Call the transformer, not a part of it; "
                "checkpoint by its enable_gradient_checkpointing()"
            )
        return self.state

    def _is_apart(self) -> bool:
        """Return whether a module is called outside of any pass and without gradients, with whole
        tensors, so that hooks leave it alone: Z-Image's ControlNet calls a part of Z-Image."""
        return self.state is None and not torch.is_grad_enabled()

    # `_register_inside` binds what comes before `module` in the hooks below. `change` edits the
    # module's arguments, by their names, in place.
    @disable_in_compile("a module's arguments are counted, sharded or joined")
    def _change_inputs(
        self,
        change: Callable[[PassState, dict[str, Any]], None],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Arguments | None:
        if self._is_apart():
            return None
        arguments = bind(module, args, kwargs)
        change(self._active(module), arguments)
        # By position again where they were so: a forward that was replaced may have other names.
        names = parameters_of(module)[: len(args)]
        return tuple(arguments.pop(name) for name in names), arguments

    def _shard_inputs(
        self, entries: Mapping[str, Dims], again: bool, state: PassState, arguments: dict[str, Any]
    ) -> None:
        # `again`: they are whole only in passes that have gathered them (`gathered_if` of a plan).
        if state.gathers or not again:
            _shard_named(state, arguments, entries)

    @disable_in_compile("tokens are counted and sharded")
    def _shard_outputs(
        self, entries: tuple[TokenDim | None, ...], module: nn.Module, _: Any, out: Any
    ) -> Any:
        if self._is_apart():
            return out
        return _each(partial(_shard_value, self._active(module)), out, entries)

    # Note [noise inside of blocks]
    # Blocks have whole tensors beside shards: the conditioning that scales them, text that is
    # attended to. Their dropout must be equal on all ranks, and that of shards must not. The plan
    # says by path which modules are given tokens, as sizes do not: a whole tensor may be as long as
    # a shard of some ranks. Again in a block that a checkpoint computes again.
    def _hook_dropouts(self) -> None:
        """Hook those that drop now: adapters may have come since the pass before."""
        handles = []
        for module in self.transformer.modules():
            if not isinstance(module, _DropoutNd) or not module.p:
                continue
            hooks = module._forward_pre_hooks.values()
            if any(getattr(hook, "__self__", None) is self for hook in hooks):
                continue
            handles += [
                module.register_forward_pre_hook(self._before_dropout),
                module.register_forward_hook(self._after_dropout, prepend=True),
            ]
        if handles:
            self._given_tokens = self._plan.given_tokens(self.transformer)
        self._inner_handles += handles
        if self._graphs is not None:
            self._graphs.own_hooks |= {handle.id for handle in handles}

    def is_shard(self, module: nn.Module, x: Tensor) -> bool:
        """Return whether ``x``, the input of a module in the pass that runs, is this rank's
        tokens, and not a tensor that all ranks have."""
        flat = self._given_tokens.get(module)
        return flat is not None and self.state is not None and self.state.is_shard(x, flat)

    @disable_in_compile("each rank draws noise of its own")
    def _before_dropout(self, dropout: nn.Module, args: tuple[Any, ...]) -> None:
        if dropout.training and self.state is not None:
            is_shard = self.is_shard(dropout, args[0])
            self._noise.begin(args[0].device, draws=True, is_shard=is_shard)

    @disable_in_compile("each rank draws noise of its own")
    def _after_dropout(self, *_: Any) -> None:
        self._noise.end()

    def _take_mask(
        self, argument: str, order: tuple[Kind, ...], state: PassState, arguments: dict[str, Any]
    ) -> None:
        # The pass reads the mask once, whole; the module gets none, or one without values.
        mask = arguments.get(argument)
        if mask is None:
            return
        if self._graphs is not None and not torch.is_grad_enabled():
            raise UnsupportedAttentionError(
                f"{type(self.transformer).__name__} with cuda_graphs=True was given a mask of "
                "text, whose padding is counted on the host: leave the mask out where no text "
                "is padded, or use cuda_graphs=False"
            )
        state.read_mask(mask, order, self._plan.added_products)
        needed = self._plan.needs_mask
        arguments[argument] = state.mask_without_values(mask, order) if needed else None

    @disable_in_compile("outputs are joined over the ranks")
    def _join(
        self, dims: tuple[TokenDim | None, ...], last: bool, module: nn.Module, _: Any, out: Any
    ) -> Any:
        # Collective. `last`: an output of `plan.joins`, else of `plan.gathered`.
        if self._is_apart() or not (last or self._active(module).gathers):
            return out
        return _each(partial(self._join_one, self._active(module), last), out, dims)

    def _join_one(
        self, state: PassState, last: bool, x: Tensor | None, token_dim: TokenDim | None
    ) -> Tensor | None:
        if x is None or token_dim is None:
            return x
        join = partial(state.join, token_dim=token_dim, last=last)
        return join(x) if self._graphs is None else self._graphs.outside(join, x)

    def _join_inputs(
        self, entries: Mapping[str, TokenDim], state: PassState, arguments: dict[str, Any]
    ) -> None:
        for name, token_dim in entries.items():
            arguments[name] = self._join_one(state, False, arguments[name], token_dim)


def _count_last(counts: Mapping[str, Kind], state: PassState, arguments: dict[str, Any]) -> None:
    for name, kind in counts.items():
        arguments[name] = state.count_last(arguments[name], kind)


def leave_other_mesh(transformer: nn.Module, mesh: SequenceMesh) -> list[ShardedTransformer]:
    """Restore a transformer that is sharded over another mesh, and return what has sharded it, to
    ``remove`` or ``install`` again; ConfigError for one of this mesh, or in a pass of it."""
    hook_owners = [getattr(x, "__self__", None) for x in transformer._forward_pre_hooks.values()]
    on_other_mesh = [x for x in hook_owners if isinstance(x, ShardedTransformer)]
    for owner in on_other_mesh:
        if owner.mesh is mesh:
            raise ConfigError(
                f"{type(transformer).__name__} is enabled on this mesh already: disable() it "
                "before you enable it with other options; enable(model, new_mesh) moves it to "
                "another mesh"
            )
        owner.check_idle()
        owner.restore()
    return on_other_mesh


def _plain(value: Any) -> str:
    """Return the plain values of an argument; nothing of tensors and other objects."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value) if isinstance(value, (bool, int, float, str, type(None))) else ""


def _same(some: Sequence[nn.Module], others: Sequence[nn.Module]) -> bool:
    return len(some) == len(others) and all(x is y for x, y in zip(some, others, strict=True))


def _is_running(transformer: nn.Module) -> bool:
    """Return whether this thread is in ``forward`` of the transformer. It is not after Ctrl-C,
    which may leave the pass's state as it was."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is transformer:
            return True
        frame = frame.f_back
    return False


def _shard_named(state: PassState, arguments: dict[str, Any], entries: Mapping[str, Dims]) -> None:
    # In place. "" among the entries is the first argument, see `inputs` of `Plan`.
    for named, dims in entries.items():
        name = named or next(iter(arguments))
        if name in arguments:
            arguments[name] = _shard_value(state, arguments[name], dims, argument=True)


def _each(change: Callable[[Any, Any], Any], out: Any, dims: Sequence[Dims]) -> Any:
    # Outputs of a module: one tensor, or as many in a tuple or list as `dims` has entries.
    if isinstance(out, Tensor):
        return change(out, dims[0])
    return type(out)(change(x, token_dim) for x, token_dim in zip(out, dims, strict=True))


def _shard_value(state: PassState, value: Any, dims: Dims, *, argument: bool = False) -> Any:
    # `dims`: of all tensors in a tuple, list or dictionary; a tuple of them has one for each.
    if dims is None:
        return value
    if isinstance(value, Mapping):
        return {key: _shard_value(state, x, dims, argument=argument) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        each = dims if isinstance(dims, tuple) else (dims,) * len(value)
        pairs = zip(value, each, strict=True)
        return type(value)(_shard_value(state, x, x_dims, argument=argument) for x, x_dims in pairs)
    if isinstance(value, Tensor) and isinstance(dims, TokenDim):
        return state.shard(value, dims, argument=argument)
    return value
