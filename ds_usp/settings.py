"""The settings of USP, one row each.

From a row the programs derive the flag, its check and its help, the options of functions, and what
the planner searches and prints, when they start. What a setting does, and with which options of a
program it does not go together, stands where it is done: ARCHITECTURE.md names what a new row needs
in other files.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, _ArgumentGroup
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError

# ------------------------------------------------------------------ what a setting takes


@dataclass(frozen=True)
class Kind:
    """A ``type`` of argparse; its text says what it takes."""

    def parse(self, text: str) -> Any:
        """The value of a flag's text; ValueError: there is none."""
        return text

    def accepts(self, value: Any) -> bool:
        raise NotImplementedError

    def __call__(self, text: str) -> Any:
        """The value of a flag's text; ``ArgumentTypeError`` for one that is not accepted."""
        try:
            value = self.parse(text)
        except ValueError:
            value = None
        if not self.accepts(value):
            raise ArgumentTypeError(f"{text!r} is not {self}")
        return value


@dataclass(frozen=True)
class Integer(Kind):
    """An integer from ``low`` to ``high``, both included; None: no limit.

    Args:
        zero: what 0 means, for messages.
    """

    low: int | None = 1
    high: int | None = None
    zero: str = ""

    def parse(self, text: str) -> int:
        return int(text)

    def accepts(self, value: Any) -> bool:
        whole = isinstance(value, int) and not isinstance(value, bool)
        above = self.low is None or (whole and value >= self.low)
        return whole and above and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.low is None:
            return "a whole number"
        if self.high is not None:
            return f"a whole number from {self.low} to {self.high}"
        return f"a whole number of {self.low}{f' ({self.zero})' * bool(self.zero)} or more"


@dataclass(frozen=True)
class Number(Kind):
    """A finite number from ``low`` to ``high``.

    Args:
        above: ``low`` itself is out of range.
        below: ``high`` itself is out of range.
    """

    low: float = 0.0
    high: float | None = None
    above: bool = False
    below: bool = False

    def parse(self, text: str) -> float:
        return float(text)

    def accepts(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            return False
        if value < self.low or (self.above and value == self.low):
            return False
        if self.high is None:
            return True
        return bool(value < self.high or (value == self.high and not self.below))

    def __str__(self) -> str:
        if self.high is not None and not (self.above or self.below):
            return f"a number from {self.low:g} to {self.high:g}"
        low = f"above {self.low:g}" if self.above else f"of {self.low:g} or more"
        if self.high is None:
            return f"a finite number {low}"
        return f"a number {low} and {'below' if self.below else 'at most'} {self.high:g}"


@dataclass(frozen=True)
class KeywordOr(Kind):
    """A keyword such as ``auto``, or a value of kind ``otherwise``."""

    keyword: str
    otherwise: Kind

    def accepts(self, value: Any) -> bool:
        return value == self.keyword or self.otherwise.accepts(value)

    def __call__(self, text: str) -> Any:
        if text == self.keyword:
            return text
        try:
            return self.otherwise(text)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{error}, and not {self.keyword!r}") from None

    def __str__(self) -> str:
        return f"{self.keyword}, or {self.otherwise}"


@dataclass(frozen=True)
class Text(Kind):
    """A path or a name that is not empty."""

    noun: str = "a path"

    def __call__(self, text: str) -> str:
        if not text.strip():
            raise ArgumentTypeError(f"{text!r} is empty; give {self.noun}")
        return text

    def accepts(self, value: Any) -> bool:
        return isinstance(value, str) and bool(value.strip())

    def __str__(self) -> str:
        return self.noun


@dataclass(frozen=True)
class Choices(Kind):
    """One of several texts.

    Args:
        values: the texts.
        others: why there are no more, for messages.
    """

    values: tuple[str, ...]
    others: str = ""

    def accepts(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(self.values)}{f' ({self.others})' * bool(self.others)}"


@dataclass(frozen=True)
class Switch(Kind):
    """A setting that is on or off."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "a switch"


# ------------------------------------------------------------------ the rows

AUTO = "auto"
MEGATRON = ("trainer", "megatron-deepspeed", "megatron-lm")
_PATCHES = MEGATRON[1:]  # check their numbers after parsing, with those of the framework
PROGRAMS = (*MEGATRON, "transformers", "planner")
_KERNELS = ("auto", "flash4", "flash3", "cudnn", "flash2", "efficient", "sdpa", "eager")
# What `{names}` stand for in help texts, and what they are in programs where that differs.
_WORDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "": {
            "sp_flag": "--ds-sequence-parallel-size",
            "ulysses": "all of them",
            "ratio": "; auto: the least with which the model fits by the planner's formulas",
        },
        "trainer": {"ulysses": "as many as the heads allow"},
        "megatron-lm": {"sp_flag": "--context-parallel-size"},
        "transformers": {"ratio": ""},
    }
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting.

    Args:
        name: the keyword of functions and the field of the planner's ``ParallelConfig``.
        kind, default: what it takes; ``kinds`` and ``defaults``: in programs where that differs.
        help: what ``--help`` says; ``metavar``: what stands there for the value.
        off: values with which it is as if there were no such setting.
        purpose: parallelism | attention | memory.
        programs: which of :data:`PROGRAMS` have it.
        spelling: of the flag, where it is not ``--usp-`` and the name.
        words: how a report of the planner names it, ``{}`` being the value.
        length_rank: it trades time for length, and the planner's search switches it on as the so
            manieth, the cheapest first; 0: it does not.
        keeps_host_memory: it keeps tensors in (pinned) host memory.
    """

    name: str
    kind: Kind
    default: Any = None
    help: str
    purpose: str
    programs: tuple[str, ...] = MEGATRON
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    off: tuple[Any, ...] = ()
    metavar: str | None = None
    spelling: str = ""
    words: str = ""
    length_rank: int = 0
    keeps_host_memory: bool = False

    @property
    def flag(self) -> str:
        return self.spelling or f"--usp-{self.name.replace('_', '-')}"

    @property
    def dest(self) -> str:
        return self.flag[2:].replace("-", "_")

    def is_used(self, value: object) -> bool:
        """Whether a value asks for something."""
        return value is not None and value not in self.off

    def value_in(self, args: object) -> Any:
        """The value in a namespace; the default of a program that lacks it."""
        return getattr(args, self.dest, self.default)

    def kind_in(self, program: str) -> Kind:
        return self.kinds.get(program, self.kind)

    def default_in(self, program: str) -> Any:
        return self.defaults.get(program, self.default)

    def help_in(self, program: str) -> str:
        return self.help.format_map({**_WORDS[""], **_WORDS.get(program, {})})

    def check(self, value: object, program: str) -> None:
        """Refuse a value that a program's function does not take.

        Raises:
            ConfigError: with the name, the value and what would do.
        """
        kind = self.kind_in(program)
        if not kind.accepts(value):
            raise ConfigError(f"{self.name}={value!r} must be {kind}")


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="ulysses_degree",
        spelling="--ulysses-degree",
        kind=KeywordOr(AUTO, Integer()),
        metavar="U",
        help="ranks of {sp_flag} that exchange heads; the ring takes the rest; auto: what the "
        "planner finds fastest (default: {ulysses})",
        purpose="parallelism",
    ),
    Setting(
        name="cluster",
        kind=Text("a name or a file"),
        metavar="NAME",
        help="what auto plans for: a built-in cluster of ds_usp.planner, or a JSON file of its "
        "numbers (default: by the GPU's name)",
        purpose="parallelism",
    ),
    Setting(
        name="layout",
        # 'balanced' is missing: it is built for one list of documents, and every step has another.
        kind=Choices(("zigzag", "contiguous", "striped", "context_parallel")),
        kinds={
            "megatron-deepspeed": Choices(("zigzag", "contiguous")),
            "transformers": Text("auto or a kind of TokenLayout"),
        },
        default="zigzag",
        defaults={"transformers": AUTO},
        help="which tokens a rank holds; zigzag balances causal work over the ring",
        purpose="attention",
        programs=("trainer", "megatron-deepspeed", "transformers"),
    ),
    Setting(
        name="kernel",
        kind=Choices(_KERNELS),
        kinds=dict.fromkeys((*_PATCHES, "transformers"), Text("a kernel")),
        default=AUTO,
        off=(AUTO,),
        help="attention kernel; auto: the fastest that serves the dtype and the head dim here",
        purpose="attention",
        programs=(*MEGATRON, "transformers"),
    ),
    Setting(
        name="recompute",
        kind=Choices(("none", "gemm-last", "attention", "full")),
        kinds={
            "transformers": Choices(
                ("none", "attention", "full"), "gemm-last needs layers of Megatron"
            )
        },
        default="none",
        off=("none",),
        help="what each layer computes again in backward: nothing, norms and activation functions "
        "(gemm-last), all but attention (attention), or all (full)",
        purpose="memory",
        programs=(*MEGATRON, "transformers"),
    ),
    Setting(
        name="offload_ratio",
        kind=KeywordOr(AUTO, Number(0, 1)),
        kinds={"transformers": Number(0, 1)},
        default=0.0,
        off=(0,),
        metavar="R",
        help="fraction, 0 to 1, of what layers save for backward that is offloaded to host memory"
        "{ratio}",
        purpose="memory",
        programs=("trainer", "megatron-deepspeed", "transformers"),
        keeps_host_memory=True,
    ),
    Setting(
        name="loss_chunks",
        kind=Integer(0, zero="not in chunks"),
        default=0,
        off=(0,),
        metavar="N",
        help="compute the loss in N chunks of the tokens and never hold all logits; 0: in one",
        purpose="memory",
        programs=("trainer", "megatron-deepspeed", "transformers"),
    ),
    Setting(
        name="mlp_chunks",
        kind=Integer(0, zero="not in chunks"),
        default=0,
        off=(0, 1),
        metavar="N",
        help="compute each layer's MLP in N chunks of a rank's tokens and again in backward, so "
        "that its wide tensors never exist for all tokens; 0: in one, saved for backward",
        purpose="memory",
        programs=PROGRAMS,
        words="MLP in {} chunks",
        length_rank=1,
    ),
    Setting(
        name="query_chunks",
        kind=KeywordOr(AUTO, Integer(1)),
        default=AUTO,
        off=(AUTO, 1),
        metavar="N",
        help="attention of layers whose indexer picks the keys in N chunks of a rank's queries, "
        "and again in backward; auto: as many as keep what scores all keys within 2 GiB",
        purpose="memory",
        programs=("transformers",),
    ),
    Setting(
        name="checkpoint_layers",
        kind=Integer(),
        default=1,
        off=(1,),
        metavar="K",
        help="with recompute=full or attention: save the input of one of K consecutive layers, "
        "and run the other K - 1 once more in backward for their inputs",
        purpose="memory",
        programs=("trainer", "megatron-deepspeed", "planner"),
        words="{} layers a checkpoint",
        length_rank=3,
    ),
    Setting(
        name="states_on_host",
        kind=Switch(),
        default=False,
        off=(False,),
        help="optimizer states and fp32 master weights wait in host memory during forward and "
        "backward, and are copied back for the optimizer step",
        purpose="memory",
        programs=("trainer", "megatron-deepspeed", "planner"),
        words="states on the host",
        length_rank=2,
        keeps_host_memory=True,
    ),
)
LENGTH_SETTINGS: tuple[Setting, ...] = tuple(
    sorted((row for row in SETTINGS if row.length_rank), key=lambda row: row.length_rank)
)


def settings_of(program: str, purpose: str = "") -> Iterator[Setting]:
    """The rows of a program, or those of one purpose."""
    return (row for row in SETTINGS if program in row.programs and purpose in ("", row.purpose))


def setting(name: str) -> Setting:
    """The row of a name."""
    return next(row for row in SETTINGS if row.name == name)


def keeps_host_memory(args: object) -> bool:
    """Whether the flags of a namespace ask for tensors in host memory."""
    return any(row.keeps_host_memory and row.is_used(row.value_in(args)) for row in SETTINGS)


# ------------------------------------------------------------------ what is made of them


def add_settings(
    parser: ArgumentParser | _ArgumentGroup, program: str, purpose: str, **defaults: Any
) -> None:
    """Add the flags of a program's settings of one purpose to its parser.

    Args:
        defaults: by name, of settings whose default is the program's own.
    """
    for row in settings_of(program, purpose):
        options: dict[str, Any] = {"help": row.help_in(program)}
        kind = row.kind_in(program)
        if isinstance(kind, Switch):
            options["action"] = "store_true"
        else:
            options["default"] = defaults.get(row.name, row.default_in(program))
            options["metavar"] = row.metavar
        if isinstance(kind, Choices):
            options["choices"] = kind.values
        elif not isinstance(kind, Switch):
            options["type"] = _any_integer(kind) if program in _PATCHES else kind
        parser.add_argument(row.flag, **options)


def _any_integer(kind: Kind) -> Kind:
    """A kind that leaves the bounds of integers to ``megatron_patches``, after parsing."""
    if isinstance(kind, KeywordOr) and isinstance(kind.otherwise, Integer):
        return KeywordOr(kind.keyword, Integer(None))
    return Integer(None) if isinstance(kind, Integer) else kind


def dataclass_of(program: str, name: str) -> type:
    """A dataclass whose fields are a program's settings: for ``transformers.HfArgumentParser``,
    which reads types, defaults, help and choices from it."""
    fields = []
    for row in settings_of(program):
        kind, metadata = row.kind_in(program), {"help": row.help_in(program)}
        options = {"choices": list(kind.values)} if isinstance(kind, Choices) else {}
        default = row.default_in(program)
        fields.append(
            (row.dest, type(default), field(default=default, metadata=metadata | options))
        )
    return make_dataclass(name, fields)


def table() -> str:
    """All settings as a table of Markdown, for the reference pages of the docs."""
    lines = ["| flag | default | takes | programs | what for |", "|---|---|---|---|---|"]
    for row in SETTINGS:
        shown = "" if row.default is None else f"`{row.default}`"
        programs = ", ".join(row.programs)
        text = row.help_in("trainer")
        lines.append(f"| `{row.flag}` | {shown} | {row.kind} | {programs} | {text} |")
    return "\n".join(lines)
