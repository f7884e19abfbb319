"""Starts of patched Megatron-LM in a process of its own, which imports the checkout once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("lm_arguments.py")
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data "
    "--vocab-size 128 --attention-dropout 0"
)
LOCAL = "--transformer-impl local"


def without_queue_limit() -> dict[str, str]:
    """The environment, without what Megatron-LM may demand in it."""
    return {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}


class Starts:
    """Answers what the start of a run does with its flags, before any process group exists."""

    def __init__(self, checkout: Path) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SERVER), str(checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**without_queue_limit(), "OMP_NUM_THREADS": "1"},
        )

    def start(self, flags: str, *, ranks: int = 8, rank: int = 0, **more: Any) -> dict[str, Any]:
        """The answer to one start with the flags of a small model and these.

        Args:
            more: ``settings`` of ``megatron_patches.apply``; ``installed``, the version that
                TransformerEngine pretends to have; ``hopper``, to pretend that there is such a GPU.
        """
        request = {"flags": f"{MODEL} {flags}".split(), "ranks": ranks, "rank": rank, **more}
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        for line in self._server.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                return answer
        raise AssertionError("the server of starts ended")

    def error(self, flags: str, **more: Any) -> str:
        answer = self.start(flags, **more)
        assert "error" in answer, answer["args"]
        return str(answer["error"])

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(30)
