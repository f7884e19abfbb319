"""``python -m megatron_patches.run PATH/pretrain_gpt.py <flags>``: run a stock script, patched.

Under ``torchrun --nproc_per_node N -m megatron_patches.run ...`` and under DeepSpeed's launcher:
``deepspeed --module megatron_patches.run ...``, which puts ``--local_rank`` before the script.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import megatron_patches
from ds_usp.errors import ConfigError, PatchError, USPError
from megatron_patches.patch_set import UNCHECKED_FLAG


def main(argv: list[str] | None = None) -> None:
    """Patch the framework in whose checkout a script is, and run the script as ``__main__``, with
    all other arguments, until training has ended. The script is the first argument without ``-``.

    Raises:
        ConfigError: no script, or one that is in no checkout.
        PatchError: a checkout, or a package, that the patches do not know or cannot reach.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    unchecked = UNCHECKED_FLAG in arguments
    arguments = [argument for argument in arguments if argument != UNCHECKED_FLAG]
    script = next((argument for argument in arguments if not argument.startswith("-")), None)
    if script is None:
        raise ConfigError(f"no script to run. {__doc__}")
    arguments.remove(script)
    framework = megatron_patches.framework_of(Path(script))
    megatron_patches.prepare(framework, Path(script))
    stale = megatron_patches.apply(framework, unchecked=unchecked).stale()
    if stale:
        raise PatchError(
            f"{', '.join(stale)} hold replaced objects: a module imported them by name before the "
            "patches were applied. Add the names to also_in of their rows"
        )
    sys.argv = [script, *arguments]
    run_as_main(Path(script))


def run_as_main(script: Path) -> None:
    """Run a script as ``__main__``. Processes that it spawns, as to save a checkpoint, import this
    module for it: the script, unpatched there, would fail for a package that has a stub here."""
    module = ModuleType("__main__")
    module.__file__ = str(script)
    module.__spec__ = importlib.util.find_spec("megatron_patches.run")  # read by multiprocessing
    outer, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
    finally:
        sys.modules["__main__"] = outer


if __name__ == "__main__":
    try:
        main()
    except USPError as error:
        sys.exit(f"error: {error}")
