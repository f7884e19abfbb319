"""The progress line of a step."""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ds_usp import ConfigError
from ds_usp.planner import model_flop_per_token
from ds_usp.training import this_cluster
from usp_trainer.memory import model_shape
from usp_trainer.validate_args import model_parallel_size

STEPS_OF_MEAN = 20  # last steps whose mean time predicts that of the remaining ones


class StepLine:
    """Loss, learning rate, gradient norm, speed, memory and remaining time of each step.

    Speed is in tokens/s of all ranks; on GPUs also in TFLOP/s per GPU, counting model FLOP by
    ``ds_usp.planner`` without recomputation, and in bf16 as a fraction of the peak (MFU) if the
    planner's table has the GPU. With documents no FLOP are shown: they depend on their lengths.
    """

    def __init__(self, args: Namespace) -> None:
        self._total = args.train_iters
        self._seconds: deque[float] = deque(maxlen=STEPS_OF_MEAN)
        self._steps = 0
        self._flop_per_token, self._peak = 0.0, None
        if args.device == "cuda" and not args.reset_attention_mask:
            ranks = model_parallel_size(args) * args.data_parallel_size
            self._flop_per_token = model_flop_per_token(model_shape(args), args.seq_length) / ranks
            self._peak = _peak_flop_per_s(ranks) if args.bf16 else None

    def speed(self, row: Mapping[str, Any]) -> dict[str, float]:
        """``tflops_per_gpu`` and ``mfu``, as far as they are known."""
        if not self._flop_per_token:
            return {}
        flop_per_s = row["tokens_per_s"] * self._flop_per_token
        speed = {"tflops_per_gpu": flop_per_s / 1e12}
        return speed | ({"mfu": flop_per_s / self._peak} if self._peak else {})

    def text(self, row: Mapping[str, Any]) -> str:
        """The line, without the remaining time."""
        parts = [f"loss {row['loss']:.3f}"]
        if "valid_loss" in row:
            parts.append(f"validation loss {row['valid_loss']:.3f}")
        parts.append(f"lr {row['lr']:.3g}")
        parts.append(f"gradient norm {row['grad_norm']:.3g}")
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
        speed = self.speed(row)
        if speed:
            parts.append(f"{speed['tflops_per_gpu']:.0f} TFLOP/s a GPU")
        if "mfu" in speed:
            parts.append(f"MFU {100 * speed['mfu']:.1f} %")
        parts.append(f"{row['memory_bytes'] / 2**20:,.0f} MiB")
        return ", ".join(parts)

    def time_left(self, row: Mapping[str, Any]) -> str:
        """Remaining time, from the mean of the last steps; the first step, which compiles, is
        dropped after the second. Must be called once per step."""
        self._steps += 1
        if self._steps == 2:
            self._seconds.clear()
        self._seconds.append(row["seconds"])
        mean = sum(self._seconds) / len(self._seconds)
        return str(timedelta(seconds=round(mean * (self._total - row["step"]))))


def _peak_flop_per_s(ranks: int) -> float | None:
    """Dense bf16 peak of the GPU here by the planner's table, or None if it does not have it."""
    try:
        return this_cluster(None, ranks, on_gpu=True).peak_flop_per_s
    except ConfigError:
        return None
