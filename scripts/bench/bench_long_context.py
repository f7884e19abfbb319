"""Trains a whole Qwen3-8B on one long sequence a step: ds_usp beside Accelerate's cp_size and ALST.

    python scripts/bench/bench_long_context.py --case ds_usp --tokens 131072 --out r.jsonl
    python scripts/bench/bench_long_context.py --case Accelerate --tokens 131072 --out r.jsonl
    python scripts/bench/bench_long_context.py --case GRPO --layers 8 --tokens 65536 --out r.jsonl
    python scripts/bench/long_context_rows.py r.jsonl --plot r.svg   # compares and draws them

The program is that of TRL's guide to a million tokens: ``SFTTrainer``, its loss in chunks, one
sequence a row, no packing, gradient checkpointing. ds_usp is ``enable`` and ``attach`` beside it.
Weights are random (Qwen3-8B's configuration, one seed for all cases), books are synthetic, and all
is bf16: weights, gradients and AdamW's moments, under FSDP2 (ALST: ZeRO-3). The learning rate is 0:
after a warm-up step of --warm-up tokens the first loss is that of the same weights in every case.
One command is one case at one length. A row is written after each step, so a run that is cut off
keeps its rows; what a case raises (out of memory) is a row, too.

TFLOP/s count 6 N + 6 L H D T a token: N the parameters without the embedding, L layers of H heads
of D, causal attention over T tokens, forward and backward, without what is computed again.

GRPO is a step of TRL's ``GRPOTrainer`` on ds_usp's mesh, on --completions of --tokens tokens to a
prompt of --prompt that a ``rollout_func`` gives; TRL refuses cp_size and sp_size there. Each is a
micro batch, or with --share-prefixes all are one, as a tree.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_harness import Session, append_row, common_flags, start_ranks
from long_context_cases import engine, grpo, sft
from torch.distributed import ReduceOp
from transformers_cases import Settings, new_model, tiled_mlp

PACKAGES = ("trl", "transformers", "accelerate", "deepspeed")
SHAPES = {"cuda": "qwen3-8b", "cpu": "tiny"}


def main() -> int:
    """Start the ranks of a case, or be one of them."""
    args = parse()
    if not args.rank:
        return start_ranks(["--rank"], args.ranks, args.case_timeout)
    run = Run(Session.start(args.device, timeout_s=args.case_timeout), args)
    try:
        run.train()
    except Exception as error:  # whatever a peer raises
        run.write({"refused": f"{type(error).__name__}: {str(error)[:200]}"})
        raise  # the launcher ends the other ranks
    run.session.close()
    return 0


class Run(transformers.TrainerCallback):
    """One case at one length: a trainer whose steps are timed and written."""

    def __init__(self, session: Session, args: argparse.Namespace) -> None:
        self.session, self.args = session, args
        self._reserved_bytes: Callable[[], int] = int  # outside torch's allocator
        self._seconds, self._host_bytes, self._kernel = 0.0, 0, "sdpa"
        # ALST's ranks load a sequence each, and all train them one after the other.
        self._copies = session.world if args.case == "ALST" else 1
        settings = Settings(
            session.device, f"{SHAPES[args.device]}/{args.layers}", (0, 0), {}, "sdpa", True
        )
        self.model: Any = new_model(settings, "sdpa", settings.dtype)
        self.model.config.name_or_path = "random"
        self._parameters = sum(x.numel() for x in self.model.parameters())
        self._parameters -= self.model.model.embed_tokens.weight.numel()
        threading.Thread(target=self._watch_host_memory, daemon=True).start()

    def train(self) -> None:
        """Make the trainer of the case and train by it."""
        args = self.args
        if args.case == "ALST":  # with its tiled MLP; its loss is TRL's
            for layer in self.model.model.layers:
                layer.mlp.forward = types.MethodType(tiled_mlp, layer.mlp)
        options = {
            "output_dir": tempfile.mkdtemp(), "report_to": [], "save_strategy": "no",
            "max_steps": self._copies + args.steps, "per_device_train_batch_size": 1,
            "learning_rate": 0.0, "lr_scheduler_type": "constant", "logging_steps": 1,
            "disable_tqdm": True,
            "bf16": False, "use_cpu": not self.session.on_gpu, "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False, **args.checkpointing},
        }  # fmt: skip
        options |= engine(args.case, self.session)
        lengths = [args.warm_up] + [args.tokens] * args.steps
        if args.case == "GRPO":
            steps = [(min(args.prompt, args.warm_up), args.warm_up)]
            steps += [(args.prompt, args.tokens)] * args.steps
            trainer = grpo(self.model, steps, args.completions, args.share_prefixes, options)
        else:
            trainer = sft(self.model, lengths, self._copies, options)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.add_callback(self)
        if args.case in ("ds_usp", "GRPO"):
            from ds_usp import SequenceMesh
            from ds_usp.integrations.transformers import attach, enable
            from ds_usp.training import attention_kernel

            mesh = SequenceMesh.from_group(None, args.ulysses)
            enable(
                trainer.model, mesh, recompute=args.recompute, kernel=args.kernel,
                mlp_chunks=args.mlp_chunks, offload_ratio=args.offload_ratio,
                share_prefixes=args.share_prefixes,
            )  # fmt: skip
            attach(trainer, mesh)
            head_dim = self.model.model.layers[0].self_attn.head_dim
            self._kernel = attention_kernel(
                args.kernel, device=self.session.device, dtype=self.model.dtype, head_dim=head_dim
            )
            self._reserved_bytes = lambda: mesh.reserved_bytes
        trainer.train()

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Start the clock, after all that was queued."""
        self.session.synchronize()
        if self.session.on_gpu and state.global_step <= self._copies:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self._seconds = -time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clock."""
        self.session.synchronize()
        self._seconds += time.perf_counter()

    def on_log(self, _args: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
        """Write the row of the step that has ended."""
        if "loss" not in logs:
            return
        config, length, world = self.model.config, self.args.tokens, self.session.world
        on_gpu = torch.cuda.max_memory_allocated() if self.session.on_gpu else 0
        measured = [self._seconds, float(on_gpu + self._reserved_bytes())]
        seconds, peak = self.session.all_reduced(measured, ReduceOp.MAX)
        if state.global_step <= self._copies:
            self.session.print0(f"warm-up: {seconds:.1f} s, {peak / 2**30:.1f} GiB, {logs}")
            return
        tokens = length
        if self.args.case == "GRPO":  # of rows, also where these are a tree
            length += self.args.prompt
            tokens = self.args.completions * length
        heads = config.num_hidden_layers * config.num_attention_heads
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        flop = 6 * tokens * (self._parameters + heads * head_dim * length)
        self.write({
            "loss": logs["loss"], "grad_norm": float(logs.get("grad_norm", "nan")),
            "seconds": round(seconds, 3), "peak_gib": round(peak / 2**30, 2),
            "host_gib": round(self._host_bytes / 2**30, 1),
            "tokens_per_s_per_gpu": round(tokens / seconds / world, 1),
            "tflops_per_gpu": round(flop / seconds / world / 1e12, 1),
        })  # fmt: skip

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; a failure by whichever rank fails."""
        names = ("case", "tokens", "layers", "warm_up", "ulysses", "recompute", "mlp_chunks")
        given = {x: getattr(self.args, x) for x in (*names, "offload_ratio", "checkpointing")}
        if self.args.case == "GRPO":
            given |= {x: getattr(self.args, x) for x in ("prompt", "completions", "share_prefixes")}
        given["attention"] = self._kernel
        session = replace(self.session, rank=0) if "refused" in row else self.session
        note = f"{SHAPES[self.args.device]}, bf16, random weights, synthetic books"
        append_row(session, self.args.out, {**given, **row}, PACKAGES, note)
        session.print0(f"{self.args.case} {self.args.tokens}: {row}")

    def _watch_host_memory(self) -> None:
        while True:
            text = Path("/proc/meminfo").read_text(encoding="utf-8")
            kib = {x: int(y) for x, y in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
            in_use = 1024 * (kib["MemTotal"] - kib["MemAvailable"])
            self._host_bytes = max(self._host_bytes, in_use)
            time.sleep(0.5)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = common_flags(__doc__)
    parser.add_argument("--case", choices=("ds_usp", "Accelerate", "ALST", "GRPO"), required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=131072, help="of a sequence")
    parser.add_argument("--layers", type=int, default=36, help="fewer to extrapolate a time from")
    parser.add_argument("--steps", type=int, default=1, help="after the warm-up")
    parser.add_argument("--warm-up", type=int, default=32768, help="tokens of the first step")
    parser.add_argument("--prompt", type=int, default=64, help="tokens, of GRPO")
    parser.add_argument("--completions", type=int, default=2, help="of GRPO")
    parser.add_argument("--share-prefixes", action="store_true", help="GRPO's group as a tree")
    parser.add_argument("--ulysses", type=int, default=1, help="of ds_usp")
    parser.add_argument("--recompute", default="attention", help="of ds_usp")
    parser.add_argument("--kernel", default="auto", help="of ds_usp")
    parser.add_argument("--mlp-chunks", type=int, default=8, help="of ds_usp")
    parser.add_argument("--offload-ratio", type=float, default=0.0, help="of ds_usp")
    parser.add_argument(
        "--offload-checkpoints", dest="checkpointing", action="store_const", default={},
        const={"offload": True}, help="transformers' own, as TRL's guide has it at 1M",
    )  # fmt: skip
    parser.add_argument("--case-timeout", type=float, default=590.0, help="seconds of a command")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
