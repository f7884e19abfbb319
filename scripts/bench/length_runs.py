"""One run of the trainer of examples_deepspeed, recorded: what ``bench_length.py`` is made of."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from bench_harness import Session, Table, append_row
from length_record import END, GIB, Moment, StepRecord
from torch import nn
from trainer_process import built_on, collect_memory, draw_weights, free_engine
from usp_trainer.arguments import parse

import megatron_patches
from ds_usp.planner import load_cluster
from ds_usp.planner.memory import Memory

MOMENTS = ("shape", "policy", "moment", "place", "seconds", "device_gib", "peak_gib", "host_gib")
PACKAGES = ("deepspeed", "megatron-core", "flash-attn-4")


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int

    @property
    def q_width(self) -> int:
        """Features of the queries."""
        return self.hidden

    def flags(self) -> str:
        """The trainer's flags of a model of these sizes."""
        return (
            f"--hidden-size {self.hidden} --num-attention-heads {self.heads} "
            f"--num-key-value-heads {self.kv_heads} --ffn-hidden-size {self.ffn} "
            f"--vocab-size {self.vocab} --make-vocab-size-divisible-by 1 "
            "--use-rotary-position-embeddings --rotary-base 500000 --swiglu "
            "--normalization rmsnorm --untie-embeddings-and-output-weights --disable-bias-linear"
        )


MODELS = {
    "llama3-8b": Model(4096, 32, 8, 14336, 128256),
    "tiny": Model(256, 8, 4, 896, 503),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        name: of its rows.
        window: tokens before a token that attention sees; 0: all.
        ulysses: its degree; the ring takes the other ranks.
        settings: the trainer's flags that save memory.
        samples: different sequences, shuffled anew when they are used up.
    """

    name: str
    model: str
    layers: int
    tokens: int
    steps: int
    ulysses: int
    window: int = 0
    settings: str = ""
    seed: int = 1234
    samples: int = 1

    def layout(self, world: int) -> str:
        """The token layout that balances attention: a window sees equally much anywhere."""
        return "contiguous" if self.window or self.ulysses == world else "zigzag"

    def flags(self, session: Session, folder: Path) -> list[str]:
        """The trainer's command line."""
        text = (
            f"{MODELS[self.model].flags()} --num-layers {self.layers} --seq-length {self.tokens} "
            f"--zero-stage 3 --ds-sequence-parallel-size {session.world} "
            f"--ulysses-degree {self.ulysses} --usp-layout {self.layout(session.world)} "
            f"--train-iters {self.steps} --lr 1e-4 --lr-decay-style constant --split 100,0,0 "
            f"--seed {self.seed} --device {session.device.type} --quiet --transformer-impl local "
            f"--output-dir {folder / self.name.replace(' ', '-')} {self.settings}"
        )
        text += f" --window-size {self.window}" if self.window else ""
        text += " --bf16" if session.on_gpu else ""
        data = tokens_file(session, folder, MODELS[self.model].vocab, self.tokens * self.samples)
        return [*text.split(), "--data-path", data, "--data-cache-path", str(folder / "cache")]


def tokens_file(session: Session, folder: Path, vocab: int, count: int) -> str:
    """Prefix of a .bin/.idx pair of ``count`` tokens and one. Half of them follow from the token
    before, the others are rarer the larger they are: a model learns both."""
    from megatron.core.datasets.indexed_dataset import (
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

    prefix = str(folder / f"tokens-{vocab}-{count}")
    if session.rank == 0 and not Path(get_idx_path(prefix)).exists():
        draw = numpy.random.default_rng(0)
        tokens = (vocab ** draw.random(count + 1)).astype(numpy.int32) - 1
        follows = numpy.flatnonzero(draw.random(count) < 0.5)
        tokens[follows + 1] = (tokens[follows] * 5 + 3) % (vocab - 1)
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.int32)
        builder.add_item(torch.from_numpy(numpy.minimum(tokens, vocab - 2)))
        builder.end_document()
        builder.finalize(get_idx_path(prefix))
    dist.barrier()
    return prefix


def predicted(flags: Sequence[str], world: int, window: int) -> tuple[Memory, float]:
    """What the planner says of a command line; and the total where the exchange of a ring, which it
    counts for attention to all tokens, has the tokens of a window alone."""
    from usp_trainer.auto_args import planned_run
    from usp_trainer.validate_args import validate_and_derive

    from ds_usp.planner import memory as planner_memory

    run = planned_run(validate_and_derive(parse(flags), world))
    work, config = run.workload(), run.parallel_config()
    workspace = load_cluster("h200").workspace_bytes
    needs = planner_memory.memory(work, config, workspace)
    if not window or config.ring == 1:
        return needs, needs.total
    short = replace(work, seq_len=min(work.seq_len, window * config.ring))
    exchange = planner_memory.exchange_bytes(short, config)
    with mock.patch.object(planner_memory, "exchange_bytes", lambda *_: exchange):
        return needs, planner_memory.memory(work, config, workspace).total


class Trained:
    """A run of the trainer's own ``pretrain`` on this rank, with a row for every step.

    Args:
        part: of the benchmark, for the rows.
        moments: for a row of each moment of each step, by columns :data:`MOMENTS`.

    Attributes:
        rows: on rank 0 written to the folder's ``length.jsonl`` as well, each after its step.
    """

    def __init__(
        self,
        session: Session,
        run: Run,
        folder: Path,
        begin: float,
        part: str,
        moments: Table | None = None,
    ) -> None:
        self.session, self.run, self.folder, self.part = session, run, folder, part
        self._moments = moments
        self.record = StepRecord(session, begin, self._add_moment)
        self.rows: list[dict[str, Any]] = []
        self._loop: Any = None

    def train(self) -> list[dict[str, Any]]:
        """Train all steps; the engine's memory is free afterwards. Collective."""
        from usp_trainer import loop as trainer_loop

        self._forget_groups()
        flags = self.run.flags(self.session, self.folder)
        self._predict(flags)
        build = partial(self._build, trainer_loop.build_model)
        with (
            mock.patch.object(trainer_loop, "build_model", build),
            mock.patch.object(trainer_loop, "TrainingLoop", self._recorded(trainer_loop)),
        ):
            try:
                trainer_loop.pretrain(parse(flags))
            except Exception as error:
                self._failed(error)
                raise
            finally:
                self._free()
        return self.rows

    def _forget_groups(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        megatron_patches.restore()
        self.before = collect_memory()

    def _predict(self, flags: Sequence[str]) -> None:
        self.needs, self.in_window = predicted(flags, self.session.world, self.run.window)
        parts = ", ".join(f"{n} {v / GIB:.2f}" for n, v in self.needs.components().items())
        self.record.print(
            f"{self.run.name}: the planner says {self.needs.total / GIB:.2f} GiB of a GPU "
            f"({parts}), {self.in_window / GIB:.2f} with a window's exchange; host "
            f"{self.needs.host / GIB:.2f} a GPU, {self.needs.host_states / GIB:.2f} of them "
            "optimizer states"
        )

    def _build(self, original: Any, *args: Any, **kwargs: Any) -> nn.Module:
        """The trainer's model with weights drawn on the device."""
        with built_on(self.session.device):
            model: nn.Module = original(*args, **kwargs)
        draw_weights(model, self.run.seed)
        return model

    def _recorded(self, trainer_loop: Any) -> type:
        outer = self

        class RecordedLoop(trainer_loop.TrainingLoop):  # type: ignore[misc]
            def __init__(self, args: Any) -> None:
                super().__init__(args)
                outer._begin(self)

            def step(self) -> dict[str, Any]:
                outer.record.begin_step(f"{outer.run.name} step {self.progress.step + 1}")
                row: dict[str, Any] = super().step()
                outer.end_step(row)
                return row

        return RecordedLoop

    def _begin(self, loop: Any) -> None:
        self._loop = loop
        self.record.attach(loop, attention=self.part == "layer")
        left = collect_memory()
        self.record.print(f"{self.run.name}: model and engine are ready, {left / GIB:.2f} GiB")

    def end_step(self, row: dict[str, Any]) -> None:
        """Write the row of a step; sizes are the largest of the ranks'."""
        session, record = self.session, self.record
        record.sample(END)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        staging = self._loop.mesh.reserved_bytes
        sizes = {
            "peak_gib": record.peak,
            "before_gib": self.before,
            "reserved_gib": record.reserved,
            "used_gib": record.used,
            "outside_gib": record.outside,
            "staging_gib": staging,
            "host_gib": record.host,
            "states_gib": record.states,
            "pinned_gib": record.pinned,
            "rss_gib": rss,
            "machine_gib": record.node,
        }
        largest = session.all_reduced(list(sizes.values()), dist.ReduceOp.MAX)
        result: dict[str, Any] = {"part": self.part, "name": self.run.name, "step": row["step"]}
        result |= {name: row[name] for name in ("loss", "grad_norm", "seconds", "tokens_per_s")}
        result |= {name: round(v / GIB, 3) for name, v in zip(sizes, largest, strict=True)}
        result["predicted_gib"] = round(self.needs.total / GIB, 3)
        result["predicted_window_gib"] = round(self.in_window / GIB, 3)
        result["predicted_host_gib"] = round(self.needs.host / GIB, 3)
        times = record.seconds()
        longest = session.all_reduced(list(times.values()), dist.ReduceOp.MAX)
        result["of_layers_s"] = dict(zip(times, (round(x, 5) for x in longest), strict=True))
        self.rows.append(result)
        append_row(session, self.folder / "length.jsonl", result, PACKAGES, str(self.run))
        record.print(summary(result))

    def _add_moment(self, moment: Moment) -> None:
        if self._moments is not None and self._loop is not None:
            shape = f"{self.run.tokens} tokens, {self.run.layers} layers of {self.run.model}"
            step, number = self._loop.progress.step, len(self.record.moments) - 1
            step += moment.place != END  # the last moment comes after the count
            self._moments.add([shape, f"step {step}", str(number), *moment.cells()])

    def _failed(self, error: Exception) -> None:
        """What was reached, on rank 0, without a word to the other ranks."""
        record = self.record
        place = record.moments[-1].place if record.moments else "start"
        peak = torch.cuda.max_memory_allocated() if self.session.on_gpu else 0
        row = {
            "part": self.part,
            "name": self.run.name,
            "failed": f"{type(error).__name__}: {error}"[:300],
            "after": f"{record.title} {place}",
            "peak_gib": round(max(peak, record.peak) / GIB, 3),
            "predicted_gib": round(self.needs.total / GIB, 3),
        }
        append_row(self.session, self.folder / "length.jsonl", row, PACKAGES, str(self.run))
        record.print(f"{row['name']} failed after {row['after']}, at most {row['peak_gib']} GiB")

    def _free(self) -> None:
        if self._loop is not None:
            mesh, engine = self._loop.mesh, self._loop.trainer.engine
            free_engine(engine)
            self._loop.trainer.engine = self._loop = None
            mesh.release()
        self.record.detach()
        collect_memory()


def summary(row: dict[str, Any]) -> str:
    """A step's row as text."""
    return (
        f"{row['name']} step {row['step']}: loss {row['loss']:.6f}, gradient norm "
        f"{row['grad_norm']:.6f}, {row['seconds']:.2f} s, {row['tokens_per_s']:,.0f} tokens/s; "
        f"peak {row['peak_gib']:.2f} GiB (planner {row['predicted_gib']:.2f}, with a window's "
        f"exchange {row['predicted_window_gib']:.2f}), staging {row['staging_gib']:.2f}, used "
        f"{row['used_gib']:.2f}, outside torch {row['outside_gib']:.2f}; host "
        f"{row['host_gib']:.2f} + {row['states_gib']:.2f} (planner "
        f"{row['predicted_host_gib']:.2f}), RSS {row['rss_gib']:.2f}, machine "
        f"{row['machine_gib']:.2f}"
    )
