"""Megatron-DeepSpeed training from initial weights that do not depend on the parallel degrees.

Megatron-DeepSpeed draws other weights under tensor parallelism. Here every matrix is seeded by its
name; other parameters start as ones and zeros. Used instead of ``megatron_patches.run``:

    python scripts/bench/deterministic_init.py $MEGATRON_DEEPSPEED_PATH/pretrain_gpt.py <its flags>
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "megatron_deepspeed")]

from mds_rank import keyed_weight, plain_name  # noqa: E402 - found through the path above

import megatron_patches  # noqa: E402
from megatron_patches import Patch, PatchSet, run  # noqa: E402


def init_by_name(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Build the framework's models, then redraw every matrix from a seed made of its name."""
    from megatron import get_args

    models = original(*args, **kwargs)
    framework_args = get_args()
    for name, parameter in models[0].named_parameters():
        if parameter.ndim > 1:
            plain = plain_name(name, framework_args.num_layers)
            with torch.no_grad():
                parameter.copy_(keyed_weight(plain, parameter, framework_args.init_method_std))
    return models


if __name__ == "__main__":
    script = Path(next(argument for argument in sys.argv[1:] if argument[0] != "-"))
    megatron_patches.prepare("megatron_deepspeed", script)
    wrap = Patch("megatron.training:get_model", init_by_name, "wrap")
    PatchSet("same weights", (wrap,)).apply()
    run.main(sys.argv[1:])
