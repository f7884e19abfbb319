"""Messages to the user: every exception of the package, and warnings once a process.

All exceptions are ``ValueError``: the user can mend what they report.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.util import find_spec


class USPError(ValueError):
    """Base class: a request that cannot be served exactly. Messages name numbers and the fix."""


class ConfigError(USPError):
    """Arguments that contradict each other, the model or the number of ranks."""


class LayoutError(USPError):
    """Tokens and ranks that do not fit each other."""


class MeshError(USPError):
    """Process groups that cannot form the mesh, or ranks that disagree about a call.

    Args:
        message: for the user.
        signatures: each rank's text of the call, where the ranks disagree.
        layouts: likewise, kind and length of each of its token layouts.
    """

    def __init__(
        self,
        message: str = "",
        signatures: tuple[str, ...] = (),
        layouts: tuple[tuple[tuple[str, int], ...], ...] = (),
    ) -> None:
        super().__init__(message)
        self.signatures, self.layouts = signatures, layouts


class UnsupportedAttentionError(USPError):
    """An attention that no kernel here computes exactly under the requested degrees."""


class RecomputeError(USPError):
    """A backward pass whose saved tensors are missing, or a recomputation that differs."""


class DataError(USPError):
    """Training data that cannot be read as what it claims to be."""


class CheckpointError(USPError):
    """A checkpoint that does not belong to this model or this parallel layout."""


class PatchError(USPError):
    """A framework whose code its patches do not fit, or that is patched already."""


def warn_once(text: str, *, rank: int) -> None:
    """Log a line as a warning of the logger ``ds_usp``, once a process, if ``rank`` is 0: the
    caller's, among those that all know of it."""
    if rank == 0:
        _emit_once(text)


@cache
def _emit_once(text: str) -> None:
    logging.getLogger("ds_usp").warning("%s", text)


def require_package(name: str, needed_by: str) -> None:
    """ModuleNotFoundError, in one line with the command that installs it, where a package of the
    extra of the same name is missing."""
    try:
        is_installed = find_spec(name) is not None
    except ValueError:  # a stand-in without a spec, as tests put into sys.modules
        is_installed = True
    if not is_installed:
        raise ModuleNotFoundError(
            f"{needed_by} needs {name}, which is not installed: pip install 'ds-usp[{name}]'",
            name=name,
        )
