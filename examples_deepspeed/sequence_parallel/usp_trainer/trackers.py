"""TensorBoard and Weights & Biases, by flag, on rank 0."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Mapping
from typing import Protocol

from ds_usp import ConfigError


class Tracker(Protocol):
    """Receives the metrics of each step."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the metrics of a step, counted from 1."""

    def close(self) -> None:
        """Flush and close."""


def check_packages(args: Namespace) -> None:
    """Refuse a flag whose package is not installed. Needs no torch.

    Raises:
        ConfigError: with the command that installs it.
    """
    for flag, value, package in (
        ("--tensorboard-dir", args.tensorboard_dir, "tensorboard"),
        ("--wandb-project", args.wandb_project, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{flag} {value} needs the package {package}, which is not installed: pip install "
                f"{package}"
            )
    for flag, value in (
        ("--wandb-exp-name", args.wandb_exp_name),
        ("--wandb-save-dir", args.wandb_save_dir),
    ):
        if value and not args.wandb_project:
            raise ConfigError(f"{flag} {value} needs --wandb-project")


def trackers(args: Namespace, first_step: int) -> list[Tracker]:
    """The trackers that the flags enable; steps after ``first_step`` are replaced."""
    enabled: list[Tracker] = []
    if args.tensorboard_dir:
        enabled.append(TensorBoard(args.tensorboard_dir, first_step))
    if args.wandb_project:
        enabled.append(Wandb(args))
    return enabled


class TensorBoard:
    """Event files in ``folder``, one scalar a number."""

    def __init__(self, folder: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder, purge_step=first_step + 1 if first_step else None)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One run of a project, with the flags as its configuration."""

    def __init__(self, args: Namespace) -> None:
        import wandb

        self._run = wandb.init(
            project=args.wandb_project,
            name=args.wandb_exp_name,
            dir=args.wandb_save_dir,
            config=vars(args),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
