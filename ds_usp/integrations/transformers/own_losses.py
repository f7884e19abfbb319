"""Searches the code of a program's own loss for reads of outputs per token. ``attach`` asks it once
a trainer, on every rank: beside labels the model gives a shard of such outputs, and a loss of them
would be wrong without a word, so they are joined where this finds one. Nothing here communicates.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedModel, Trainer

from ds_usp.integrations.transformers.model import PER_TOKEN

_LIBRARIES = frozenset({"accelerate", "ds_usp", "peft", "torch", "transformers", "trl"})
_MANY = 10_000  # elements of containers in which functions are looked for
# Names that code uses without having them: of calls, indices, delegated attributes, the argument.
_UNNAMED = frozenset({"__call__", "forward", "__getitem__", "__getattr__", "model"})
# Attributes in which methods, partials, properties, cells and decorated functions hold others.
_PARTS: tuple[str, ...] = "__func__", "__self__", "func", "fget", "args", "keywords", "__dict__"
_PARTS += "cell_contents", "__wrapped__", "__closure__", "__defaults__", "__kwdefaults__"


def reads_tokens(trainer: Trainer) -> bool:
    """Whether the program's own ``compute_loss`` or ``training_step``, or a function of the program
    that these may call, reads outputs per token."""
    places = [vars(x) for x in (trainer, *type(trainer).__mro__)]
    own = [x[name] for x in places for name in ("compute_loss", "training_step") if name in x]
    return any(_reaches_tokens(x, [*places]) for x in own if _package(x) not in _LIBRARIES)


def _reaches_tokens(step: Any, places: list[Any]) -> bool:
    """Return whether one step of the program reads outputs per token, or a function of it that it
    may call; or takes no loss, neither itself nor in what it wraps.

    ``names`` are those that the reached functions use, ``places`` dicts in which they are looked
    up: what is found is reached, and its attributes are a place. Both grow until nothing is new."""
    names, taken, seen, own = set(_UNNAMED), set[Any](), dict[int, Any](), _package(step)
    wrapped = list(_held_by([step], places, seen, own))
    for function in (reached := [*wrapped]):  # it grows meanwhile, and others do
        used = _names_in(function)
        if used.keys() & PER_TOKEN:
            return True
        if function in wrapped or _is_of_program(function, own):
            taken |= used.keys() if function in wrapped else set()
            names |= used.keys()
            for place in chain([used], places):
                reached += _held_by([place[x] for x in names & place.keys()], places, seen, own)
    return not taken & {"loss", "super", "compute_loss", "training_step"}


def _held_by(values: list[Any], places: list[Any], seen: dict[int, Any], own: str) -> Iterator[Any]:
    """Yield functions, and names of outputs per token, from ``values``, which it empties, and from
    what these hold. The attributes of modules and of the program's objects go to ``places``."""
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen[id(value)], kind = value, type(value)
        if kind is FunctionType or (kind is str and value in PER_TOKEN):
            yield value
        with suppress(Exception):  # an object of the program may raise whatever it is asked
            kinds = (value if isinstance(value, type) else kind).__mro__
            if isinstance(value, nn.Module) and PreTrainedModel not in kinds:
                values += value.children()
            if isinstance(value, (dict, MappingProxyType, list, tuple, set, frozenset, deque)):
                elements = value.values() if hasattr(value, "values") else value
                values += elements if len(value) + len(seen) < _MANY else ()
            elif kind.__module__ in {"builtins", "functools"} and kind not in (type, ModuleType):
                values += [getattr(value, x) for x in _PARTS if hasattr(value, x)]
            elif isinstance(value, ModuleType) or _is_of_program(value, own):
                if PreTrainedModel in kinds:  # whose forward pass makes the outputs
                    seen |= {id(vars(x).get("forward")): x for x in kinds}
                places += [dict(vars(x)) for x in (value, *kinds) if hasattr(x, "__dict__")]


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _is_of_program(value: Any, own: str) -> bool:
    """Whether a function, a class or an object's class is the program's; ``own`` is its package."""
    named = value if isinstance(value, (FunctionType, type)) else type(value)
    file = str(getattr(sys.modules.get(named.__module__), "__file__", ""))
    is_library = _package(named) in _LIBRARIES | sys.stdlib_module_names
    return not is_library and ("-packages" not in file or _package(named) == own)


def _names_in(function: Any) -> dict[Any, Any]:
    """Return names and constants in a program's function, of its locals those of outputs per token,
    with what they are in its module or among modules."""
    if isinstance(function, str) or _package(function) in _LIBRARIES:
        return dict.fromkeys({function} & PER_TOKEN)
    names, scope, codes = dict[Any, Any](), function.__globals__, [function.__code__]
    package = str(scope.get("__package__"))
    for code in codes:
        codes += [x for x in code.co_consts if isinstance(x, CodeType)]
        constants = (x if isinstance(x, (tuple, frozenset)) else (x,) for x in code.co_consts)
        tokens = PER_TOKEN & {*code.co_varnames, *code.co_cellvars}
        names = dict.fromkeys(chain(code.co_names, tokens, *constants)) | names
        for x in dis.get_instructions(code):
            if x.opname in {"LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME", "IMPORT_FROM"}:
                parents = "", f"{package}.", f"{package.rpartition('.')[0]}."
                modules = [sys.modules.get(f"{y}{x.argval}") for y in parents]
                names[x.argval] = [scope.get(x.argval), *modules]
    return names
