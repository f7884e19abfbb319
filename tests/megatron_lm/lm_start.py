"""Starts of patched Megatron-LM: what it parses, checks and refuses before it makes any group.

As a program, ``lm_start.py CHECKOUT``, it imports the checkout once, reads one JSON request a line
and answers each from a fork with one line.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_patches
from ds_usp.errors import USPError

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data "
    "--vocab-size 128 --attention-dropout 0"
)
LOCAL = "--transformer-impl local"


READ = (
    *("cp_comm_type", "ulysses_degree", "usp_kernel", "usp_recompute", "attention_dropout"),
    *("create_attention_mask_in_dataloader", "context_parallel_size"),
)
SETTINGS = ("ulysses_degree", "layout", "kernel", "everywhere")
REFUSED = (USPError, AssertionError, SystemExit)


def without_queue_limit() -> dict[str, str]:
    """The environment, without what Megatron-LM may demand in it."""
    return {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}


class Starts:
    """Answers what the start of a run does with its flags, before any process group exists."""

    def __init__(self, checkout: Path) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(checkout)],
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


def answer(request: dict[str, Any], patches: megatron_patches.PatchSet) -> dict[str, Any]:
    """What the start of a run does with these flags, before any process group exists."""
    from megatron.training import arguments

    os.environ |= {"RANK": str(request["rank"]), "WORLD_SIZE": str(request["ranks"])}
    if request.get("hopper"):
        arguments.get_device_arch_version = lambda: 9
    sys.argv = ["pretrain_gpt.py", *request["flags"]]
    if "installed" in request:
        pretend_installed(request["installed"])
    printed = io.StringIO()
    try:
        if request.get("settings"):
            megatron_patches.restore()
            patches = megatron_patches.apply("megatron_lm", **request["settings"])
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            args = arguments.parse_args()
            arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    except REFUSED as error:
        return {"error": f"{type(error).__name__}: {error}", "printed": printed.getvalue()}
    assert not dist.is_initialized()
    assert type(args.cp_comm_type) is list  # a stock run loads the arguments of checkpoints
    start = next(x.replacement for x in patches.patches if x.target.endswith(":validate_args"))
    settings = start.keywords["context_parallel"].settings
    return {
        "args": {name: getattr(args, name) for name in READ},
        "settings": settings and {name: getattr(settings, name) for name in SETTINGS},
        "printed": printed.getvalue(),
    }


def pretend_installed(version: str) -> None:
    """Let the check of TransformerEngine find a version of it; it is not imported here."""
    find_spec, version_of = importlib.util.find_spec, importlib.metadata.version

    def find(name: str, *args: Any) -> Any:
        return find_spec("sys" if name == "transformer_engine" else name, *args)

    def version_found(name: str) -> str:
        is_it = name.replace("_", "-") == "transformer-engine"
        return version if is_it else version_of(name)

    importlib.util.find_spec, importlib.metadata.version = find, version_found


def main(checkout: Path) -> None:
    megatron_patches.prepare("megatron_lm", checkout)
    import pretrain_gpt

    patches = megatron_patches.apply("megatron_lm")
    sys.modules["__main__"] = pretrain_gpt  # where the patches look for the script's functions
    for line in sys.stdin:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            sys.stdout.write("\n@" + json.dumps(answer(json.loads(line), patches)) + "\n")
            sys.stdout.flush()
            os._exit(0)
        if os.waitpid(pid, 0)[1]:
            sys.stdout.write('@{"error": "the start crashed", "printed": ""}\n')
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
