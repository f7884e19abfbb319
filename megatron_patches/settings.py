"""What ``megatron_patches.apply(host, **settings)`` takes, as a frozen dataclass for each host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import ds_usp
from ds_usp.errors import ConfigError

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """What every host takes whose groups exist without us.

    Args:
        ulysses_degree: ranks of each sequence-parallel group that exchange heads; the ring takes
            the rest. None: the host's own word for it, or all of them.
        layout: which rank holds which token: a kind, or a ``TokenLayout``, which also says the
            length of a sequence that does not divide. The default keeps the order in which the
            program shards its tokens; a host whose batches we shard has another one.
        kernel: what computes attention; ``auto``: the fastest that can.

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
            ds_usp.TokenLayout(self.layout, seq_len=2)  # knows the names


def read_settings(
    framework: str, settings_class: type[Settings], keywords: Mapping[str, Any]
) -> Settings:
    """The settings of a host from keywords.

    Raises:
        ConfigError: a keyword that is no setting of this host.
    """
    known = [field.name for field in fields(settings_class)]  # type: ignore[arg-type]
    unknown = sorted(set(keywords) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown setting {unknown[0]!r} of {framework}; there are {', '.join(known)}"
        )
    return settings_class(**keywords)
