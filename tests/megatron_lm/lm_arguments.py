"""Parses and checks arguments as patched Megatron-LM does at its start: one fork a request.

Started as ``lm_arguments.py CHECKOUT``; reads one JSON request a line and answers with one line.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

import megatron_patches
from ds_usp.errors import USPError

READ = (
    *("cp_comm_type", "ulysses_degree", "usp_kernel", "usp_recompute", "attention_dropout"),
    *("create_attention_mask_in_dataloader", "context_parallel_size"),
)
SETTINGS = ("ulysses_degree", "layout", "kernel", "everywhere")
REFUSED = (USPError, AssertionError, SystemExit)


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
