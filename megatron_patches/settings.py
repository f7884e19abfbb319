"""The settings of ``megatron_patches.apply``: a frozen dataclass for each framework, which its
``patches(keywords)`` makes by :func:`read_settings`, on each rank by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import ds_usp
from ds_usp.errors import ConfigError

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Settings of every framework: how attention is split and computed.

    Args:
        ulysses_degree: ranks of each sequence-parallel group that exchange heads; the ring takes
            the rest. None: the framework's own setting for it, or all of them.
        layout: which rank holds which token: a kind, or a ``TokenLayout``, which also states the
            length of a sequence that does not divide. Default: the order in which the program
            shards its tokens; where the patches shard the batches it is another.
        kernel: the attention kernel; ``auto``: the fastest that serves.

    Raises:
        ConfigError, LayoutError: a degree that is none, or an unknown layout.
    """

    ulysses_degree: int | None = None
    layout: str | ds_usp.TokenLayout = ds_usp.TokenLayout.CALLERS_KIND
    kernel: str = "auto"

    def __post_init__(self) -> None:
        degree = self.ulysses_degree
        is_positive = isinstance(degree, int) and not isinstance(degree, bool) and degree >= 1
        if degree is not None and not is_positive:
            raise ConfigError(f"ulysses_degree={degree!r} must be a whole number of 1 or more")
        if isinstance(self.layout, str):
            ds_usp.TokenLayout(self.layout, seq_len=2)  # validates the kind


def read_settings(
    framework: str, settings_class: type[Settings], keywords: Mapping[str, Any]
) -> Settings:
    """Make ``settings_class`` of the keywords of ``apply``; ConfigError for one that it lacks."""
    names = [field.name for field in fields(settings_class)]  # type: ignore[arg-type]
    unknown = sorted(set(keywords) - set(names))
    if unknown:
        raise ConfigError(
            f"unknown setting {unknown[0]!r} of {framework}; there are {', '.join(names)}"
        )
    return settings_class(**keywords)
