"""Parses and checks arguments as patched Megatron-LM does at its start: one fork a request.

Started as ``lm_arguments.py CHECKOUT``; reads one JSON request a line and answers with one line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import megatron_patches
from ds_usp.errors import USPError

READ = (
    *("cp_comm_type", "ulysses_degree", "usp_kernel", "usp_recompute", "attention_dropout"),
    *("create_attention_mask_in_dataloader", "context_parallel_size"),
)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What the start of a run does with these flags, before any process group exists."""
    from megatron.training import arguments

    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": str(request["ranks"]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    sys.argv = ["pretrain_gpt.py", *request["flags"]]
    printed = io.StringIO()
    patches = megatron_patches.apply("megatron_lm", **request["settings"])
    try:
        with contextlib.redirect_stdout(printed):
            args = arguments.parse_args()
            arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
    except (USPError, AssertionError, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    start = next(x.replacement for x in patches.patches if x.target.endswith(":validate_args"))
    settings = start.keywords["context_parallel"].settings
    return {
        "args": {name: getattr(args, name) for name in READ},
        "settings": settings and {name: getattr(settings, name) for name in SETTINGS},
        "printed": printed.getvalue(),
    }


SETTINGS = ("ulysses_degree", "layout", "kernel", "everywhere")


def main(checkout: Path) -> None:
    """Answer requests until the input ends."""
    megatron_patches.prepare("megatron_lm", checkout)
    import pretrain_gpt

    sys.modules["__main__"] = pretrain_gpt
    for line in sys.stdin:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            sys.stdout.write("\n@" + json.dumps(answer(json.loads(line))) + "\n")
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
