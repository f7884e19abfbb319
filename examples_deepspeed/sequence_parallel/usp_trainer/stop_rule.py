"""Early exit before ``--train-iters``, for job schedulers with time limits."""

from __future__ import annotations

import time
from argparse import Namespace

import torch
import torch.distributed as dist


class StopRule:
    """``--exit-interval`` and ``--exit-duration-in-mins``, counted from its construction.

    Collective with a duration: the ranks' clocks differ, and all must stop at the same step.
    """

    def __init__(self, args: Namespace) -> None:
        self._interval, self._minutes = args.exit_interval, args.exit_duration_in_mins
        self._device = torch.device(args.device)
        self._begin = time.monotonic()

    def reason(self, step: int) -> str | None:
        """Why the run ends after this step, the same on every rank; None: it continues."""
        if self._minutes:
            minutes = torch.tensor((time.monotonic() - self._begin) / 60, device=self._device)
            dist.all_reduce(minutes, op=dist.ReduceOp.MAX)
            if minutes.item() >= self._minutes:
                return f"--exit-duration-in-mins {self._minutes}"
        if self._interval and step % self._interval == 0:
            return f"--exit-interval {self._interval}"
        return None
