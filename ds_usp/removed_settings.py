"""Settings that earlier versions had, refused with the reason and the last commit that had them.

A setting leaves by the rule of CONTRIBUTING.md: no committed result shows that it pays. Who used it
is told so by the program or the function that had it, not that there is no such flag.
"""

from __future__ import annotations

from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

_D5079BE = "d5079be, of 2026-11-26"


class Removed(NamedTuple):
    """Why a setting, or one of its values, is no more; what to do instead; who had it last."""

    reason: str
    instead: str
    last_commit: str = _D5079BE


_SHARDED_TOKENS = Removed(
    "a step with tokens sharded over tensor-parallel ranks took 1.03 to 1.22 times as long as with "
    "all-reduces in all cases timed (2 H200), and no peak of memory was measured",
    "Leave it out. Megatron-LM with TransformerEngine's layers has its own: --sequence-parallel "
    "--tp-comm-overlap",
)
_OVERLAPPED = Removed(
    "products under the exchanges of attention made a layer 0.6 to 4.9 % slower in 12 of 12 cases "
    "over NVLink (2 H200), and no two nodes have shown a gain",
    "Use off, or recompute, which saves memory",
)
# A flag and one of its values; None: all of it.
REMOVED: Mapping[tuple[str, str | None], Removed] = MappingProxyType(
    {
        ("--usp-tp-shard-tokens", None): _SHARDED_TOKENS,
        ("--tp-shard-tokens", None): _SHARDED_TOKENS._replace(
            instead="Leave it out: --engine megatron-lm forecasts Megatron-LM's --sequence-parallel"
        ),
        ("--usp-projection-overlap", "on"): _OVERLAPPED,
        ("--usp-projection-overlap", "auto"): _OVERLAPPED,
        ("--projections", "on"): _OVERLAPPED,
        ("overlap", "auto"): _OVERLAPPED._replace(
            instead="Use overlap=False, or overlap=True, which keeps the input only: less memory"
        ),
        ("keep", "arrivals"): _OVERLAPPED._replace(
            instead="Use keep='input', which saves memory, or linear layers around usp_attention"
        ),
    }
)


def removal(setting: str, value: object = None) -> str | None:
    """The sentence that refuses a setting, or one of its values; None of one that was not removed.

    Args:
        value: None: the setting at all.
    """
    removed = REMOVED.get((setting, value if value is None else str(value)))
    if removed is None:
        return None
    given = setting if value is None else f"{setting} {value}"
    if value is not None and not setting.startswith("-"):
        given = f"{setting}={value!r}"
    return (
        f"{given} was removed: {removed.reason}. The last commit that has it is "
        f"{removed.last_commit}. {removed.instead}"
    )


def kept_value(flag: str) -> Callable[[str], str]:
    """An argparse ``type`` of a flag with ``choices``: refuses those of its values that were
    removed, before argparse says that there is no such choice."""

    def value_of(text: str) -> str:
        if (reason := removal(flag, text)) is not None:
            raise ArgumentTypeError(reason)
        return text

    return value_of


class _RemovedFlag(Action):
    """A flag that ends its program with the reason, with a value or without."""

    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        parser.error(removal(self.option_strings[0]) or "")


def add_removed_flag(parser: ArgumentParser | _ArgumentGroup, flag: str) -> None:
    """Let a program refuse a flag that it had; its help does not list it, its arguments have no
    value of it."""
    parser.add_argument(flag, action=_RemovedFlag, nargs="?", default=SUPPRESS, help=SUPPRESS)
