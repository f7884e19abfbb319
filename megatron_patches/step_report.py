"""``--usp-report-communication``: one traced step of a patched framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_usp.profiling import exposed

FOLDER = "usp_communication"  # in --save, or where the program was started


def run_step(flags: Any, step: Callable[[], Any], roles: Callable[[], Mapping[str, Any]]) -> Any:
    """The result of ``step``, which is traced and reported if it is the one that was asked for.

    Args:
        flags: the framework's arguments.
        roles: makes the process groups of each role.
    """
    number = flags.curr_iteration + 1
    if number != flags.usp_report_communication:
        return step()
    folder = Path(flags.save or ".") / FOLDER
    with exposed.report(folder, groups=roles(), title=f"step {number}"):
        return step()
