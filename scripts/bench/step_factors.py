"""Step time of Megatron-DeepSpeed by factor: attention kernel, recomputation, megatron_patches.

Trains GPT 1.3B on the GPUs of this machine once for each row of :data:`ROWS`: the unpatched
framework on three attention kernels, with and without activation checkpointing, then the framework
under ``megatron_patches``. Needs ``MEGATRON_DEEPSPEED_PATH`` and the prefix of encoded data:

    python scripts/bench/step_factors.py --data-path PREFIX --gpus 2 --seq-len 16384 --out F.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPT = "examples_deepspeed/sequence_parallel/ds_pretrain_gpt_1.3B_usp_32k.sh"
USP_FLAGS = ("--ulysses-degree", "--usp-layout", "--usp-kernel")
ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
LOSS = re.compile(r"lm loss: ([0-9.E+-]+)")
WARMUP_STEPS = 2
COLUMNS = (
    "program",
    "kernel",
    "activation_checkpointing",
    "loss_chunks",
    "ms_per_iteration",
    "tokens_per_s_per_gpu",
    "losses",
)


@dataclass(frozen=True)
class Row:
    """One training run."""

    program: str
    kernel: str
    checkpointing: bool
    loss_chunks: int = 1

    def command(self, args: argparse.Namespace) -> list[str]:
        """Launcher command line, from the dry run of the example script."""
        settings = {
            "DRY_RUN": 1,
            "TOKENIZER_TYPE": "NullTokenizer",
            "VOCAB_SIZE": 50256,
            "NUM_GPUS": args.gpus,
            "SP_SIZE": args.gpus,
            "ULYSSES_DEGREE": args.gpus,
            "SEQ_LENGTH": args.seq_len,
            "GLOBAL_BATCH_SIZE": 2,
            "TRAIN_ITERS": args.steps,
            "LR": 5e-5,
            "LR_WARMUP_ITERS": args.steps,
            "LR_DECAY_ITERS": 100,
            "LOG_INTERVAL": 1,
            "EVAL_INTERVAL": 100000,
            "SAVE_INTERVAL": 100000,
            "ACTIVATION_CHECKPOINT": str(self.checkpointing).lower(),
            "USP_KERNEL": self.kernel,
            "DATA_PATH": args.data_path,
            "OUTPUT_HOME": args.folder,
        }
        environment = os.environ | {name: str(value) for name, value in settings.items()}
        text = subprocess.run(
            ["bash", str(ROOT / SCRIPT)],
            env=environment,
            check=True,
            text=True,
            capture_output=True,
        ).stdout.replace("\\\n", "")
        command, _, config = text.partition("\n\n# ")
        path, _, content = config.partition("\n")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(content)
        argv = shlex.split(command)
        argv[:1] = [sys.executable, "-m", "deepspeed.launcher.runner"]
        save = argv.index("--save")
        del argv[save : save + 2]
        if self.program == "stock":
            for flag in USP_FLAGS:
                index = argv.index(flag)
                del argv[index : index + 2]
            argv[argv.index("megatron_patches.run")] = "stock_megatron"
            argv += ["--use-flash-attn-v2", "--no-masked-softmax-fusion"]
        elif self.loss_chunks > 1:
            argv += ["--usp-loss-chunks", str(self.loss_chunks)]
        return argv


ROWS = (
    Row("stock", "flash2", True),
    Row("stock", "cudnn", True),
    Row("stock", "flash4", True),
    Row("stock", "flash4", False),
    Row("ours", "flash4", True),
    Row("ours", "flash4", False),
    Row("ours", "flash4", False, loss_chunks=8),
)


def measure(row: Row, args: argparse.Namespace) -> list[object]:
    """Train one row in a subprocess and return its cells of the table.

    Returns:
        The median ms of an iteration after the warm-up, tokens/s per GPU, and the losses of all
        iterations. If the run ends with an error or times no iteration: "failed" and empty cells,
        and the end of its output goes to stderr.

    Raises:
        subprocess.TimeoutExpired: the run takes longer than ``--timeout``.
    """
    paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "USP_STOCK_KERNEL": row.kernel,  # read by stock_megatron.py only
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }
    run = subprocess.run(
        row.command(args), env=environment, text=True, capture_output=True, timeout=args.timeout
    )
    milliseconds = [float(text) for text in ELAPSED.findall(run.stdout)][WARMUP_STEPS:]
    if run.returncode or not milliseconds:
        print((run.stdout + run.stderr)[-3000:], file=sys.stderr)
        return ["failed", "", ""]
    median = statistics.median(milliseconds)
    tokens = 2 * args.seq_len / (median / 1000) / args.gpus
    return [f"{median:.1f}", f"{tokens:.0f}", " ".join(LOSS.findall(run.stdout))]


def main() -> None:
    """Run every row and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-path", required=True, help="prefix of encoded data")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each run")
    parser.add_argument("--folder", default="usp_output", help="for the DeepSpeed configuration")
    parser.add_argument("--rows", type=int, nargs="+", help="these of the rows; default: all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not os.environ.get("MEGATRON_DEEPSPEED_PATH"):
        parser.error("MEGATRON_DEEPSPEED_PATH must name a checkout of Megatron-DeepSpeed")
    with args.out.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        file.write(f"# python scripts/bench/step_factors.py {shlex.join(sys.argv[1:])}\n")
        table.writerow(COLUMNS)
        for row in [ROWS[index] for index in args.rows] if args.rows else ROWS:
            facts = [row.program, row.kernel, row.checkpointing, row.loss_chunks]
            line = [*facts, *measure(row, args)]
            table.writerow(line)
            file.flush()
            print(*line, flush=True)


if __name__ == "__main__":
    main()
