"""The rank and world size that a launcher assigned to this process, read without torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ds_usp import ConfigError

STOPPED_FILE = "USP_STOPPED_FILE"  # set by launch_job.py, not by users


def variables() -> dict[str, str]:
    """A copy of the environment."""
    return dict(os.environ)


def under_launcher() -> bool:
    """Whether torchrun, srun or the deepspeed launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launcher_is_parent() -> bool:
    """Whether the parent process is a launcher's agent on this node that waits for its ranks:
    torchrun's, or DeepSpeed's (``CROSS_RANK``). Under srun and in user shells it is not.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ or "CROSS_RANK" in os.environ


def note_stop() -> None:
    """Tell the script that started the launcher that a signal stopped this rank: torchrun hides its
    exit code."""
    file = os.environ.get(STOPPED_FILE)
    if file:
        with contextlib.suppress(OSError):  # of another machine
            Path(file).touch()


def rank() -> int:
    """This process's rank; 0 without a launcher or with an invalid ``RANK``, see ``check``."""
    number = _number("RANK", 0)
    return number if number < (world_size() or 1) else 0


def check() -> None:
    """Refuse a launcher's variables that are incomplete or contradict each other (ConfigError)."""
    if not under_launcher():
        return
    variables = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    for name, text in variables.items():
        if not text.isdecimal():
            raise ConfigError(
                f"{name}={text!r} must be a whole number: RANK and WORLD_SIZE are set, as under a "
                "launcher, which also sets MASTER_ADDR and MASTER_PORT. Unset both to start "
                "without one"
            )
    if int(variables["RANK"]) >= int(variables["WORLD_SIZE"]):
        raise ConfigError(
            f"RANK={variables['RANK']} must be below WORLD_SIZE={variables['WORLD_SIZE']}: ranks "
            "are counted from 0"
        )
    if not os.environ.get("MASTER_ADDR"):
        raise ConfigError("MASTER_ADDR is not set: give the host name of the node of rank 0")


def world_size() -> int | None:
    """The number of the launcher's ranks; None without a launcher."""
    return _number("WORLD_SIZE", 1) if under_launcher() else None


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
