"""Where a class of diffusion transformers has its tokens: a :class:`Plan`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import diffusers
from diffusers import ModelMixin
from torch import nn

from ds_usp.errors import ConfigError

Kind = Literal["image", "text", "joint", "audio", "reference"]


class Tokens(NamedTuple):
    """The tokens of an attention, in the order in which it has them."""

    queries: tuple[Kind, ...]
    keys: tuple[Kind, ...]


@dataclass(frozen=True)
class TokenDim:
    """The dim of a tensor along which its tokens lie.

    Args:
        kind: ``image`` (frames of a video too), ``text`` that takes part in the attention,
            ``audio``, ``reference``: images beside image and text, which a pass may be without, or
            ``joint``: image and text in one sequence, in which each sample may have an order of its
            own.
        dim: counted from the end if it is negative.
        ndim: only tensors of so many dims have tokens, and not if they have one for all; None: all
            tensors.
    """

    kind: Kind
    dim: int
    ndim: int | None = None


@dataclass(frozen=True)
class Plan:
    """Where a class of transformers has its tokens: what is sharded, attends, and is joined.

    Modules are named by their path in the transformer, "" is itself, ``*`` every child and ``-1``
    the last one. A module that is None there (as an optional one) is left out.

    Args:
        inputs: by module, its arguments that are sharded when it is called: tensors, or tuples of
            them.
        outputs: by module, the same for each of its outputs; None: it stays whole.
        attention: by attention module, its tokens in the order of its keys.
        keys: by attention module, the tokens of its keys if they are others than its queries'
            (cross-attention), which are those in ``attention``.
        local: the other attention modules, which are local to each rank: their keys are text that
            stays whole.
        masks: by module, its argument that tells text from padding: 0 or False for padding, which
            comes last. Its last columns, or the first, are the text's, as in ``attention``, of
            which the first entry below the module counts.
        whole: arguments of the transformer that every rank takes whole. All but these, those of
            ``inputs`` and the attention arguments' LoRA scale are refused.
        unbatched: those of all arguments that have no batch; the others have it as their dim 0.
        batched: an argument whose dim 0 is the batch, or that is a list of samples.
        zero_or_not: arguments of which the pass asks whether all samples are zero.
        joined: the module whose output ``[b, tokens, ...]``, of ``joint`` tokens if the plan has
            them, else of the image's, becomes whole again.
        also_joined: by module, the tokens of further outputs that become whole.
        gathered: by module within the transformer, the tokens of its output that become whole, as
            they are sharded otherwise afterwards.
        needs_mask: whether attention processors cannot do without the mask: they are given one that
            has no values (on the device ``meta``), and what they make of it is not looked at.
        refused: by option of the configuration, the value that gives tokens a meaning by index.
    """

    inputs: Mapping[str, Mapping[str, TokenDim]]
    attention: Mapping[str, tuple[Kind, ...]]
    outputs: Mapping[str, tuple[TokenDim | None, ...]] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    joined: str = "proj_out"
    local: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()
    refused: Mapping[str, Any] = field(default_factory=dict)
    gathered: Mapping[str, Kind] = field(default_factory=dict)
    needs_mask: bool = False
    batched: str = "hidden_states"
    zero_or_not: tuple[str, ...] = ()
    keys: Mapping[str, Kind] = field(default_factory=dict)
    also_joined: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def tokens(self) -> Mapping[str, Tokens]:
        """By attention module, its tokens."""
        keys = {path: (kind,) for path, kind in self.keys.items()}
        return {path: Tokens(q, keys.get(path, q)) for path, q in self.attention.items()}

    @property
    def joined_kind(self) -> Kind:
        """The tokens of the output."""
        return "joint" if ("joint",) in self.attention.values() else "image"

    def order_of_mask(self, path: str) -> tuple[Kind, ...]:
        """The tokens of the keys that the mask at a module is of."""
        orders = [self.attention[name] for name in self.attention if name.startswith(path)]
        return (orders or list(self.attention.values()))[0]

    @property
    def arguments(self) -> frozenset[str]:
        """The arguments of the transformer that may be given."""
        return frozenset({*self.whole, *self.inputs.get("", ())})

    def check(self, transformer: ModelMixin) -> None:
        """Compare the plan with a transformer.

        Raises:
            ConfigError: a module, an argument or an option that the transformer does not have.
        """
        named = {path: tuple(arguments) for path, arguments in self.inputs.items()}
        for path, argument in self.masks.items():
            named[path] = (*named.get(path, ()), argument)
        named[""] = (*named.get("", ()), *self.whole, *self.unbatched, *self.zero_or_not)
        for path, arguments in named.items():
            for module in modules_at(transformer, path):
                missing = [name for name in arguments if name not in parameters_of(module)]
                if missing:
                    raise _differs(
                        transformer,
                        f"{path or 'the transformer'} takes no {', '.join(missing)}",
                    )
        for path in (*self.attention, *self.keys):
            for module in modules_at(transformer, path):
                if not hasattr(module, "processor"):
                    raise _differs(transformer, f"{path} has no attention processor")
        self._check_attention(transformer)
        for path in (*self.outputs, *self.gathered, *self.also_joined, self.joined):
            if not list(modules_at(transformer, path)) and path not in self.outputs:
                raise _differs(transformer, f"there is no module {path}")
        for option in self.refused:
            if option not in transformer.config:
                raise _differs(transformer, f"the configuration has no option {option}")

    def _check_attention(self, transformer: ModelMixin) -> None:
        """Compare the attention modules of the plan with those of the transformer.

        Raises:
            ConfigError: one that is in neither ``attention`` nor ``local``.
        """
        known = {
            id(module)
            for path in (*self.attention, *self.local)
            for module in modules_at(transformer, path, optional=path in self.local)
        }
        for name, module in transformer.named_modules():
            if getattr(module, "processor", None) is not None and id(module) not in known:
                raise _differs(
                    transformer,
                    f"{name} is an attention module that it names neither in attention nor in "
                    "local, and would attend to the tokens of a shard only",
                )


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's arguments, as its class has them."""
    return parameters_of_class(type(module))


def parameters_of_class(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of the arguments of a class's forward pass."""
    return tuple(inspect.signature(cls.forward).parameters)[1:]


def modules_at(transformer: nn.Module, path: str, optional: bool = False) -> Iterator[nn.Module]:
    """The modules that a plan's path names.

    Raises:
        ConfigError: there is no such attribute, unless it is optional.
    """
    modules: list[Any] = [transformer]
    for part in path.split(".") if path else ():
        if part == "*":
            modules = [child for module in modules for child in module.children()]
            continue
        if part == "-1":
            modules = [child for module in modules for child in list(module.children())[-1:]]
            continue
        for module in modules:
            if not hasattr(module, part) and not optional:
                raise _differs(transformer, f"there is no module {path}")
        modules = [
            child for module in modules if (child := getattr(module, part, None)) is not None
        ]
    yield from modules


def _differs(transformer: nn.Module, difference: str) -> ConfigError:
    return ConfigError(
        f"the plan of {type(transformer).__name__} does not fit it: {difference}. The plans of "
        f"ds_usp were made for diffusers 0.42, this is {diffusers.__version__}; a plan of "
        "your own is an argument of enable (plan=...)"
    )
