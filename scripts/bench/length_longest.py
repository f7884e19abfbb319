"""Trials of the longest sequence that trains a step, and ALST as one of the cases."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_harness import Session, append_row
from length_runs import GIB, PACKAGES
from length_search import Search
from torch import Tensor
from trainer_process import collect_memory, free_engine
from transformers_cases import Settings, Training, alst_case, new_batch

# A step of so many tokens; the row of it, with its peak and what is not torch's own in GiB.
Trial = Callable[[int], dict[str, Any]]
_KERNEL = "window"


def longest(session: Session, args: argparse.Namespace, trial: Trial, begin: float) -> int:
    """Search the longest sequence of a case; every trial leaves rows before and after it."""
    capacity = float("inf")
    if session.on_gpu:
        collect_memory()
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        capacity = -session.all_reduced([-float(free)], dist.ReduceOp.MAX)[0]
    search = Search(capacity, args.first, args.unit)
    for _ in range(args.trials):
        tokens = search.next()
        spent = session.all_reduced([time.monotonic() - begin], dist.ReduceOp.MAX)[0]
        if tokens is None or spent > args.seconds:
            break
        _write(session, args, {"tokens": tokens, "state": "begins"}, spent)
        outcome = session.try_all_ranks(lambda tokens=tokens: trial(tokens))
        if isinstance(outcome, str):
            search.failed = tokens
            row = {"tokens": tokens, "state": "failed", "why": outcome}
        else:
            search.peaks[tokens] = (outcome["peak_gib"] + outcome["staging_gib"]) * GIB
            row = {"tokens": tokens, "state": "trained"}
            row |= {name: outcome[name] for name in ("peak_gib", "seconds", "loss")}
        collect_memory()
        _write(session, args, row, time.monotonic() - begin)
    row = {"state": "longest", "tokens": search.longest, "failed": search.failed}
    _write(session, args, row, time.monotonic() - begin)
    return search.longest


def _write(session: Session, args: argparse.Namespace, row: dict[str, Any], seconds: float) -> None:
    row = {"part": "longest", "name": args.case, **row}
    note = f"{args.model}, {args.layers} layers, window {args.window}"
    append_row(session, args.out / "length.jsonl", row, PACKAGES, note)
    text = ", ".join(f"{name} {value}" for name, value in row.items())
    session.print0(f"[{seconds:6.1f} s] {text}")


class ALSTTrial:
    """A step of ALST, whose core attention is the window's FlashAttention kernel, as in ds_usp.

    Args:
        model: as of ``transformers_cases``.
        window: tokens before a token that attention sees.
        first: tokens of an engine's first step, after which Adam has its moments.
    """

    def __init__(self, session: Session, model: str, window: int, first: int) -> None:
        self._session, self._window, self._first = session, window, first
        self._settings = Settings(session.device, model, (1, 1), {}, _KERNEL)
        self._training: Training | None = None

    def __call__(self, tokens: int) -> dict[str, Any]:
        """Loss, seconds and peak of a step; the engine is built anew after one that failed."""
        if self._training is None:
            register_window(self._window)
            self._training = alst_case(self._settings, cpu_checkpoints=True)
            self._training.step(new_batch(self._settings, f"plain:{self._first}"))
        session, batch = self._session, new_batch(self._settings, f"plain:{tokens}")
        if session.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.monotonic()
        try:
            self._training.step(batch, report=True)
            session.synchronize()
        except Exception:
            engine, self._training = self._training.engine, None
            free_engine(engine)
            _forget_sequence_groups()
            raise
        peak = torch.cuda.max_memory_allocated() if session.on_gpu else 0
        return {
            "loss": self._training.loss,
            "seconds": time.monotonic() - begin,
            "peak_gib": session.all_reduced([peak], dist.ReduceOp.MAX)[0] / GIB,
            "staging_gib": 0.0,
        }


def _forget_sequence_groups() -> None:
    """DeepSpeed refuses to make its sequence-parallel groups twice."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
    parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None


def register_window(window: int) -> None:
    """Make the kernel one of transformers' attention implementations, without a mask tensor."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        """Heads before tokens in, tokens before heads out."""
        out = _window_attention(*(x.transpose(1, 2) for x in (q, k, v)), window, scaling)
        return out, None

    # As DeepSpeed replaces it; a registered one would not undo that.
    ALL_ATTENTION_FUNCTIONS[_KERNEL] = attend
    ALL_MASK_ATTENTION_FUNCTIONS.register(_KERNEL, lambda *_, **__: None)


def _window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    if q.is_cuda:
        from flash_attn.cute import flash_attn_func

        out: Tensor = flash_attn_func(q, k, v, softmax_scale=scale, window_size=(window, 0))[0]
        return out
    import ds_usp

    single = ds_usp.SequenceMesh.single()
    layout, mask = single.layout("contiguous", q.shape[1]), ds_usp.MaskSpec.window(window)
    return ds_usp.usp_attention(q, k, v, mesh=single, layout=layout, mask=mask, softmax_scale=scale)
