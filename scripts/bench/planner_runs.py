"""Trains many small models in one process, mesh by mesh, for the planner to be judged by.

    torchrun --nproc-per-node 4 scripts/bench/planner_runs.py --profile cluster.json \\
        --out-profile trainer.json --out runs.csv

First what the trainer adds to a profile is measured: its layers but for attention, its
embedding and head, and, from runs that are not held out, what a step costs beside them and which
memory no formula sees. Then the held-out runs, one line each. The models are the trainer's of
examples_deepspeed, on data of random tokens, with weights drawn on the device.
On CPUs (--tiny) the figures mean little: they show that the script runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_harness import Session
from planner_cases import (
    CASES,
    FITTED,
    TINY_CASES,
    TINY_FITTED,
    VOCABULARY,
    Case,
    Measured,
    write,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trainer_process import built_on, collect_memory, draw_weights, free_engine
from usp_trainer.arguments import parse
from usp_trainer.data import TrainingBatch
from usp_trainer.launch import select_device
from usp_trainer.validate_args import validate_and_derive

import megatron_patches
from ds_usp.planner import Cluster, load_cluster
from ds_usp.planner.formulas import stage_elements
from ds_usp.planner.hardware import MeasuredEmbeddingHead, MeasuredLayer, MeasuredStep
from ds_usp.planner.memory import memory
from ds_usp.planner.step_time import step_time
from ds_usp.profiling import StepTimer, layer_times
from ds_usp.training import SequenceBatch, prepare_deepspeed

LAYER_TOKENS, HEAD_TOKENS = (3072, 12288, 40960), (3072, 12288, 24576)
TINY_TOKENS = (48, 192)
SUSTAINED_S = 0.4  # of every measurement, so that the GPU runs at the rate that it keeps


class FrameworkRun:
    """The trainer's parts on one mesh."""

    def __init__(self, session: Session, mesh: tuple[int, int, int]) -> None:
        from megatron.core import parallel_state

        from megatron_patches.megatron_core.groups import initialize_groups

        tp, ulysses, ring = mesh
        parallel_state.destroy_model_parallel()
        megatron_patches.restore()
        megatron_patches.apply(
            "megatron_core", ulysses_degree=ulysses, layout="zigzag", everywhere=True
        )
        self._session = session
        self.mesh, self.groups = initialize_groups(
            tensor=tp, sequence=ulysses * ring, pipeline=1, ulysses=ulysses
        )

    def arguments(self, case: Case) -> Namespace:
        """Checked, as the trainer has them."""
        args = parse(case.flags(self._session.device.type))
        args = validate_and_derive(args, self._session.world)
        step = args.make_vocab_size_divisible_by
        args.padded_vocab_size = -(-VOCABULARY // step) * step
        return args

    def model(self, case: Case) -> nn.Module:
        """The trainer's GPT, its weights made on the device: a CPU would draw them for minutes."""
        from usp_trainer import model as trainer_model

        args = self.arguments(case)
        layout = self.mesh.layout("zigzag", case.seq_len)
        with built_on(self._session.device):
            gpt = trainer_model.build_model(
                args, self.mesh, layout, self.groups, self._session.device
            )
        draw_weights(gpt, seed=0)
        if case.recompute == "full":
            gpt.calls = [
                partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
                if isinstance(call, trainer_model.Layer)
                else call
                for call in gpt.calls
            ]
        return gpt

    def run(self, case: Case, steps: int) -> Measured:
        """Train so many steps after two to warm up; their median seconds and the peak memory."""
        from usp_trainer.engine import Trainer

        session = self._session
        baseline_bytes = collect_memory()
        trainer = Trainer(
            self.arguments(case), self.model(case), self.groups, session.device, VOCABULARY
        )
        batch = self.batch(case)
        timer = StepTimer(session.device, 3600.0)
        for _ in range(2):
            trainer.train([batch], 1e-5)
        if session.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(steps):
            timer.synchronize()
            dist.barrier()
            begin = timer.elapsed_s
            trainer.train([batch], 1e-5)
            timer.synchronize()
            seconds.append(session.all_reduced([timer.elapsed_s - begin], dist.ReduceOp.MAX)[0])
        peak_bytes = torch.cuda.max_memory_allocated() - baseline_bytes if session.on_gpu else 0
        peak_bytes = int(session.all_reduced([peak_bytes], dist.ReduceOp.MAX)[0])
        free_engine(trainer.engine)
        return Measured(case, statistics.median(seconds), peak_bytes)

    def batch(self, case: Case) -> TrainingBatch:
        """Random tokens, this rank's shard."""
        length = self.mesh.layout("zigzag", case.seq_len).length(self.mesh.rank)
        tokens = torch.randint(VOCABULARY, (1, length))
        return TrainingBatch(SequenceBatch(tokens, tokens.roll(-1, 1), torch.ones(1, length)))

    # -------------------------------------------------------------- what the framework adds

    def layers(
        self, case: Case, tokens: Sequence[int], timer: StepTimer
    ) -> Iterator[MeasuredLayer]:
        """Rows of one layer whose attention returns the queries."""
        from usp_trainer.model import Layer

        dtype = torch.bfloat16 if self._session.on_gpu else torch.float32
        layer = next(part for part in self.model(case).layers if isinstance(part, Layer)).to(dtype)
        layer.layer.self_attention.core_attention = _Queries()
        shape = case.shape()
        sizes = shape.hidden, shape.ffn, shape.q_width, shape.kv_width, shape.gated, case.tp
        for count in tokens:
            x = torch.randn(count, 1, shape.hidden, dtype=dtype, device=self._session.device)
            times = layer_times(timer, layer, list(layer.parameters()), x, SUSTAINED_S)
            yield MeasuredLayer(*sizes, count, *times)

    def embedding_and_head(
        self, case: Case, tokens: Sequence[int], timer: StepTimer
    ) -> Iterator[MeasuredEmbeddingHead]:
        """Rows of embedding, last norm, head and loss: the model without its layers."""
        from usp_trainer.model import Layer

        dtype = torch.bfloat16 if self._session.on_gpu else torch.float32
        for count in tokens:
            resized = replace(case, seq_len=count * case.ulysses * case.ring)
            gpt = self.model(resized).to(dtype)
            gpt.calls = [call for call in gpt.calls if not isinstance(call, Layer)]
            parameters = [
                p for part in gpt.layers if not isinstance(part, Layer) for p in part.parameters()
            ]
            ids = torch.randint(VOCABULARY, (1, count), device=self._session.device)

            def step(
                gpt: nn.Module = gpt, ids: Tensor = ids, wanted: list[Tensor] = parameters
            ) -> None:
                torch.autograd.grad(gpt(ids, ids, torch.ones_like(ids)), wanted)

            times = timer.times(step, SUSTAINED_S)
            shape = case.shape()
            sizes = shape.hidden, shape.vocab, case.tp, count
            yield MeasuredEmbeddingHead(*sizes, times.device_s, times.host_s)


class _Queries(nn.Module):
    """Replaces attention: returns the queries, so that keys and values get zero gradients."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return query.contiguous().flatten(2)


# ------------------------------------------------------------------ the framework's profile


def add_rows(profile: dict[str, Any], name: str, rows: Iterable[object], source: str) -> None:
    """Rows of a kind, in place of all that were there."""
    profile[name] = {
        "value": [asdict(row) for row in rows],  # type: ignore[call-overload]
        "origin": "measured",
        "source": source,
    }


def step_row(cluster: Cluster, run: Measured) -> MeasuredStep:
    """Seconds of a run that the profile's layers, embedding and head do not explain."""
    work, config = run.case.plan()
    predicted = step_time(replace(cluster, steps=()), work, config)
    rest = max(run.seconds - predicted.layers - predicted.head - predicted.host, 1e-6)
    elements = stage_elements(work, config, 0)
    return MeasuredStep(elements, config.zero, config.zero_ranks, rest)


def workspace_bytes(runs: Sequence[Measured]) -> float:
    """The mean memory that no formula explains."""
    return statistics.fmean(run.memory_bytes - memory(*run.case.plan()).formula for run in runs)


def measure_framework(
    session: Session, profile: dict[str, Any], fitted: Sequence[Case], tiny: bool, path: Path
) -> None:
    """Layers, ends, steps and workspace of the trainer into the profile's file."""
    source, timer = "the trainer of examples_deepspeed", StepTimer(session.device, 3600.0)
    layers, embedding_and_head, runs = [], [], []
    for mesh, cases in by_mesh(fitted):
        framework_run = FrameworkRun(session, mesh)
        for model in sorted({case.model for case in cases}):
            case = next(case for case in cases if case.model == model)
            single_layer = replace(case, layers=1)
            layers += list(
                framework_run.layers(single_layer, TINY_TOKENS if tiny else LAYER_TOKENS, timer)
            )
            embedding_and_head += list(
                framework_run.embedding_and_head(
                    single_layer, TINY_TOKENS if tiny else HEAD_TOKENS, timer
                )
            )
            session.print0(f"[{timer.elapsed_s:5.1f} s] layers and ends of {model}, tp {case.tp}")
            collect_memory()
        for case in cases:
            runs.append(framework_run.run(case, 3))
            session.print0(f"[{timer.elapsed_s:5.1f} s] {line(runs[-1])} (fitted)")
        framework_run.mesh.release()
    add_rows(profile, "layers", layers, source)
    add_rows(profile, "ends", embedding_and_head, source)
    _write(session, profile, path)
    cluster = load_cluster(str(path))
    add_rows(profile, "steps", [step_row(cluster, run) for run in runs], source)
    if session.rank == 0:
        write(
            path.with_name("fitted.csv"),
            f"runs of {source}, from which {path.name} has steps",
            runs,
        )
    if session.on_gpu:
        kept = {"value": max(workspace_bytes(runs), 0.0), "origin": "measured", "source": source}
        profile["workspace_bytes"] = kept
    _write(session, profile, path)


def _write(session: Session, profile: dict[str, Any], path: Path) -> None:
    if session.rank == 0:
        path.write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    dist.barrier()


def by_mesh(cases: Iterable[Case]) -> Iterator[tuple[tuple[int, int, int], list[Case]]]:
    """The cases of each mesh."""
    for mesh, group in groupby(sorted(cases, key=lambda case: case.mesh), lambda case: case.mesh):
        yield mesh, list(group)


def line(run: Measured) -> str:
    """One run as a line of text."""
    case = run.case
    return (
        f"{case.model} x {case.layers} layers, {case.seq_len} tokens, tp {case.tp}, ulysses "
        f"{case.ulysses}, ring {case.ring}, recompute {case.recompute}: "
        f"{run.seconds * 1e3:.1f} ms, {run.memory_bytes / 2**30:.2f} GiB"
    )


def main() -> None:
    """Measure the framework, then run the held-out cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--profile", type=Path, required=True, help="of this machine, from the planner's profile")
    add("--out-profile", type=Path, required=True, help="the same with the trainer's rows")
    add("--out", type=Path, required=True, help="the table of the held-out runs")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="what trains")
    add("--tiny", action="store_true", help="models that a CPU trains")
    add("--steps", type=int, default=4, help="of each run, after two")
    add("--seconds", type=float, default=400.0, help="after which no further run begins")
    args = parser.parse_args()
    select_device(args.device)
    prepare_deepspeed()
    session = Session.start(args.device)
    torch.manual_seed(session.rank)
    if not session.on_gpu:
        torch.set_num_threads(1)
    timer = StepTimer(session.device, 3600.0)
    fitted, held_out = (TINY_FITTED, TINY_CASES) if args.tiny else (FITTED, CASES)
    profile = json.loads(args.profile.read_text(encoding="utf-8"))
    measure_framework(session, profile, fitted, args.tiny, args.out_profile)
    runs: list[Measured] = []
    where = torch.cuda.get_device_name() if session.on_gpu else "CPU"
    comment = (
        f"torchrun --nproc-per-node {session.world} {' '.join(sys.argv)}\n"
        f"{session.world} x {where}, torch {torch.__version__}; trainer of examples_deepspeed, "
        "bf16, ZeRO-1, one sequence a step"
    )
    for mesh, cases in by_mesh(held_out):
        framework_run = FrameworkRun(session, mesh)
        for case in cases:
            if session.all_reduced([timer.elapsed_s], dist.ReduceOp.MAX)[0] > args.seconds:
                session.print0(f"left out, after {args.seconds:g} s: {case}")
                continue
            runs.append(framework_run.run(case, args.steps))
            session.print0(f"[{timer.elapsed_s:5.1f} s] {line(runs[-1])}")
            if session.rank == 0:
                write(args.out, comment, runs)
        framework_run.mesh.release()
    dist.barrier()
    session.close()


if __name__ == "__main__":
    main()
