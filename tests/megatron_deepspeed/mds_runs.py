"""Tiny runs of Megatron-DeepSpeed, on gloo ranks that are forked from one server."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mds_rank import Request

HERE = Path(__file__).resolve().parent
START_S, RUN_S = 180.0, 150.0

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --min-lr 1e-4 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0
    --seed 1234 --log-interval 1 --eval-interval 1000 --eval-iters 1 --data-impl mmap
    --split 90,5,5 --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 256
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
    --no-gradient-accumulation-fusion --distributed-backend gloo --deepspeed
"""
# Sensitive to the scale of gradients, which Adam and clipping hide.
SGD = "--optimizer sgd --sgd-momentum 0 --lr 0.1 --weight-decay 0 --clip-grad 0"


def flags(
    *,
    sp: int = 1,
    u: int | str | None = None,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    more: str = "",
    config: dict[str, Any] | None = None,
    pipe: bool | None = None,
) -> str:
    """Flags for parallel degrees; ``pipe``: DeepSpeed's pipeline engine, by default if pp > 1."""
    use_pipe = pp > 1 if pipe is None else pipe
    degrees = (
        f"--ds-sequence-parallel-size {sp} --tensor-model-parallel-size {tp} "
        f"--pipeline-model-parallel-size {pp} --zero-stage {zero} "
        f"--make-vocab-size-divisible-by {128 // tp} --config {zero}"
    )
    if u is not None:
        degrees += f" --ulysses-degree {u}"
    if not use_pipe:
        degrees += " --no-pipeline-parallel"
    text = json.dumps(config or {}).replace(" ", "")
    return f"{degrees} --json {text} {more}"


class TrainingServer:
    """The server process, and the folders of its runs."""

    def __init__(self, checkout: Path) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="usp-mds-")
        self.folder = Path(self._folder.name)
        self.checkout = checkout
        self._names = itertools.count()
        path = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron wants it under tensor parallelism
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._errors = open(self.folder / "errors", "w+")  # noqa: SIM115 - as long as the server
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "mds_server.py"), str(checkout), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **settings},
            text=True,
        )
        self._wait("ready", START_S)

    def run(self, world: int, text: str, **options: Any) -> list[dict[str, Any]]:
        """Train; each rank's record. A rank that raises fails the test with its traceback."""
        ranks = self.attempt(world, text, **options)
        for seen in ranks:
            if "traceback" in seen or "refused" in seen:
                raise AssertionError(seen.get("traceback") or repr(seen["refused"]))
        return ranks

    def attempt(self, world: int, text: str, **options: Any) -> list[dict[str, Any]]:
        """Train; each rank's record, with its error."""
        folder = self.folder / f"run{next(self._names)}"
        folder.mkdir()
        request = Request(
            world,
            str(self.checkout / "pretrain_gpt.py"),
            self.arguments(text, folder),
            folder,
            **options,
        )
        (folder / "request").write_bytes(pickle.dumps(request))
        print(folder / "request", file=self._process.stdin, flush=True)
        self._wait("done", RUN_S, folder)
        return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]

    def arguments(self, text: str, folder: Path) -> tuple[str, ...]:
        """The script's arguments; ``--config ZERO`` and ``--json TEXT`` become DeepSpeed's file."""
        arguments = text.replace("{folder}", str(folder)).split()
        settings = {}
        for name in ("--config", "--json"):
            index = arguments.index(name)
            settings[name] = arguments[index + 1]
            del arguments[index : index + 2]
        arguments = [*TINY.split(), *arguments]
        if "--optimizer" not in arguments:
            arguments = [*SGD.split(), *arguments]

        def last(flag: str) -> str:
            return arguments[len(arguments) - 1 - arguments[::-1].index(flag) + 1]

        config = {
            "train_batch_size": int(last("--global-batch-size")),
            "train_micro_batch_size_per_gpu": int(last("--micro-batch-size")),
            "steps_per_print": 1000,
            "gradient_clipping": float(last("--clip-grad")),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": int(settings["--config"])},
            "bf16": {"enabled": "--bf16" in arguments},
            **json.loads(settings["--json"]),
        }
        path = folder / "deepspeed.json"
        path.write_text(json.dumps(config))
        arguments += ["--deepspeed_config", str(path), "--data-path", str(self.folder / "text")]
        return tuple(arguments)

    def _wait(self, answer: str, seconds: float, folder: Path | None = None) -> None:
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline().strip() if ready else ""
        if line != answer:
            self.close()
            logs = sorted(folder.glob("log*")) if folder else [self.folder / "errors"]
            tails = "".join(f"---- {log.name}\n{log.read_text()[-2000:]}\n" for log in logs)
            raise AssertionError(f"{answer!r} expected within {seconds:g} s, got {line!r}\n{tails}")

    def close(self) -> None:
        """End the server and the ranks that it forked."""
        self._process.kill()
        self._process.wait()


def losses_of(ranks: list[dict[str, Any]]) -> list[float]:
    """Losses and evaluations, after checking that every rank saw the same."""
    for seen in ranks:
        assert seen["losses"] == ranks[0]["losses"], [each["losses"] for each in ranks]
    return ranks[0]["losses"] + ranks[-1]["evaluations"]


def relative_difference(values: list[float], expected: list[float]) -> float:
    """The maximum over all values."""
    assert len(values) == len(expected), (values, expected)
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
