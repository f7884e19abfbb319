"""Layers that carry a state from token to token: their forward runs as transformers wrote it, with
other functions under the names that it calls, which communicate. ``refusals.py`` asks what is
served, then ``EnabledModel`` makes :class:`RecurrentLayers`."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CellType, MappingProxyType
from typing import Any, Final

from torch import nn
from transformers import PreTrainedModel

from ds_usp.errors import ConfigError, UnsupportedAttentionError
from ds_usp.integrations.transformers.attention import PASS, Shard, outside_of_pass
from ds_usp.integrations.transformers.recurrent_functions import FUNCTIONS, METHODS, MeshFunction
from ds_usp.integrations.transformers.text_model import text_modules
from ds_usp.lowlevel import with_globals
from ds_usp.memory.compile_guard import disable_in_compile


@dataclass(frozen=True)
class _LayerCall:
    """One forward pass of a recurrent layer.

    Args:
        shard: the tokens of this rank.
        ran: names of the functions that have run in it.
    """

    shard: Shard
    ran: set[str] = field(default_factory=set)


_CALL: Final[ContextVar[_LayerCall | None]] = ContextVar("recurrent layer", default=None)


@contextmanager
def _running(call: _LayerCall) -> Iterator[None]:
    token = _CALL.set(call)
    try:
        yield
    finally:
        _CALL.reset(token)


def recurrent_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The layers of the text model that call a function of the tables, in order."""
    return (module for module in text_modules(model) if functions_of(module))


def functions_of(layer: nn.Module) -> Mapping[str, MeshFunction]:
    """The tables' functions for a layer: by the name that its forward, or a base class's, calls in
    its module, or by the path of a method from the layer."""
    kind: Any = type(layer)
    return _functions_of(kind)


@lru_cache(maxsize=1024)
def _functions_of(kind: Any) -> Mapping[str, MeshFunction]:
    functions: dict[str, MeshFunction] = {}
    for base in kind.__mro__:
        if is_of_transformers(base):
            functions |= METHODS.get(base.__name__, {})
        if "forward" in vars(base):
            functions |= {name: FUNCTIONS[name] for name in _globals_of(base) if name in FUNCTIONS}
    return MappingProxyType(functions)


def is_of_transformers(kind: type) -> bool:
    """Whether a class is one of the package's models, not one of a checkpoint's own code."""
    return kind.__module__.startswith("transformers.models.")


def _globals_of(kind: Any) -> set[str]:
    """Name the globals that a class's own forward reads, without wrappers; none where none of them
    can be in the table."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    # To disassemble takes 2 ms a class, and few call a function of the table.
    if code is None or FUNCTIONS.keys().isdisjoint(code.co_names):
        return set()
    instructions = dis.get_instructions(code)
    return {x.argval for x in instructions if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def has_other_forward(module: nn.Module) -> bool:
    """Whether a module's forward is not that of its class; Accelerate's hooks do not count."""
    forward = vars(module).get("_old_forward", vars(module).get("forward"))
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def reason_against_layer(layer: nn.Module) -> str:
    """Why the functions of a recurrent layer cannot be replaced; "" if they can."""
    kind = type(layer)
    name = kind.__name__
    functions = functions_of(layer)
    called_by_base = functions.keys() & FUNCTIONS.keys() - _globals_of(kind)
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    if "forward" in functions and "forward" not in METHODS.get(owner.__name__, {}):
        called_by_base = {"forward"}  # which one of the table would replace
    if called_by_base or not is_of_transformers(owner):
        inside = ", ".join(sorted(called_by_base or functions))
        return f"{name} has a forward of its own around that of {inside}"
    if has_other_forward(layer):
        return (
            f"the forward of {name} was replaced (use_kernels=True does so on some GPUs), by one "
            "that is not known here: load the model without it"
        )
    return ""


class ReplacedAttributes:
    """Sets attributes of modules, for sparse layers and decoders too, until :meth:`restore`."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, str, Any]] = []

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        if name == "forward" and "_old_forward" in vars(module):
            name = "_old_forward"  # where Accelerate's hooks call it
        self._before.append((module, name, vars(module).get(name)))
        setattr(module, name, value)

    def restore(self) -> None:
        for module, name, before in reversed(self._before):
            module.__dict__.pop(name, None)
            if before is not None:
                setattr(module, name, before)
        self._before.clear()


class RecurrentLayers:
    """The recurrent layers of a model, whose functions run over the mesh until :meth:`restore`.

    Attributes:
        layers: in order.
        forgets_at_0: one begins a state where a position is 0, and nowhere else.
    """

    # Note [one layer, other functions]
    # The functions that carry a state (a causal convolution, a scan) are called by name from the
    # module of the layer's class. For the layers of this model those names are bound to functions
    # of `recurrent_functions`: the same code with other globals, as an attribute of the layer.
    # Nothing of transformers is changed, and other models call what they called. What stands under
    # a name is looked up at the call: the package `kernels` exchanges it after a model is made.
    def __init__(self, model: PreTrainedModel) -> None:
        self._replaced = ReplacedAttributes()
        self.layers = list(recurrent_layers(model))
        self.forgets_at_0 = any("rg_lru._rnn_scan" in functions_of(x) for x in self.layers)
        for layer in self.layers:
            kind, functions = type(layer), functions_of(layer)
            forward = rebound(kind.forward, {x: functions[x] for x in functions if x in FUNCTIONS})
            for path, function in functions.items():
                if path in FUNCTIONS:
                    continue
                owner, _, name = path.rpartition(".")
                module = layer.get_submodule(owner)
                method = partial(_run_method, path, function, getattr(type(module), name), module)
                if path == "forward":
                    forward = partial(_run_method, path, function, kind.forward)
                else:
                    self._replaced.set(module, name, method)
            needed = frozenset(name for name, function in functions.items() if function.is_needed)
            run = partial(_run_layer, layer, forward, needed)
            self._replaced.set(layer, "forward", run)

    def restore(self) -> None:
        self._replaced.restore()


@disable_in_compile("a recurrent layer's states are exchanged between its functions")
def _run_layer(
    layer: nn.Module,
    forward: Callable[..., Any],
    needed: frozenset[str],
    *args: Any,
    usp: Shard | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``forward``, not bound, over the mesh; refuse it if it calls not all of ``needed``."""
    name = type(layer).__name__
    shard = usp if usp is not None else PASS.get()
    if shard is None:  # it would be a state within a shard, or of the whole batch on every rank
        raise outside_of_pass(layer)
    call = _LayerCall(shard)
    with _running(call):
        out = forward(layer, *args, **kwargs)
    missing = needed - call.ran
    if missing:
        raise UnsupportedAttentionError(
            f"{name} has not called {', '.join(sorted(missing))}: it carries its state from token "
            "to token in another way, which is not served"
        )
    shard.layers.append(name)
    return out


def rebound(function: Any, replacements: Mapping[str, MeshFunction]) -> Any:
    """Return the function with ``replacements`` in the place of globals; its wrappers stay."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        module_globals = function.__globals__
        bound = {
            name: partial(_run_function, name, replacement, module_globals)
            for name, replacement in replacements.items()
        }
        return with_globals(function, {**module_globals, **bound})
    inner_cell = CellType(rebound(inner, replacements))
    cells = (inner_cell if cell.cell_contents is inner else cell for cell in function.__closure__)
    return with_globals(function, function.__globals__, *cells)


def _run_function(
    name: str, function: MeshFunction, names: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    return _run_over_mesh(name, function, names[name], *args, **kwargs)


def _run_method(
    name: str, function: MeshFunction, original: Any, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    return _run_over_mesh(name, function, partial(original, module), module, *args, **kwargs)


def _run_over_mesh(
    name: str, function: MeshFunction, original: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run ``function`` in the place of ``original``, with its arguments; notes ``name`` as run."""
    call = _CALL.get()
    if call is None:
        raise ConfigError(f"{name} of a recurrent layer runs outside of the layer's forward")
    call.ran.add(name)
    shard = call.shard
    documents = shard.packing.causal_mask  # a mask, which has the parents of a tree too
    sharding = {"mesh": shard.call.mesh, "layout": shard.layout, "documents": documents}
    return function.run(sharding, original, *args, **kwargs)
