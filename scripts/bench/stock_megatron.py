"""Unpatched Megatron-DeepSpeed on a chosen attention kernel: the baseline of ``step_factors.py``.

The framework calls ``flash_attn_varlen_func`` of the package flash-attn. This runs its script
without any patch and implements that one function with a kernel of :mod:`ds_usp.kernels`, so that
both programs are timed on the same kernel. Packages that the framework imports and that are not
installed are replaced by stubs. Used instead of ``megatron_patches.run``:

    USP_STOCK_KERNEL=cudnn deepspeed --module stock_megatron \
        $MEGATRON_DEEPSPEED_PATH/pretrain_gpt.py --use-flash-attn-v2 <the framework's flags>
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import megatron_patches  # noqa: E402 - found through the path above
from ds_usp import MaskSpec, SequenceMesh, usp_attention  # noqa: E402
from megatron_patches.megatron_deepspeed.startup import FRAMEWORK  # noqa: E402

KERNEL = os.environ.get("USP_STOCK_KERNEL", "flash2")
MESH = SequenceMesh.single()


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Attention of samples of one length, ``[b * s, h, d]`` -> ``[b * s, h, d]``."""
    q, k, v = (x.unflatten(0, (-1, max_seqlen_q)) for x in (q, k, v))
    out = usp_attention(
        q,
        k,
        v,
        mesh=MESH,
        layout=MESH.layout("contiguous", max_seqlen_q),
        mask=MaskSpec.causal() if causal else MaskSpec.full(),
        softmax_scale=softmax_scale,
        dropout_p=dropout_p,
        kernel=KERNEL,
    )
    return out.flatten(0, 1)


def main() -> None:
    """Run the script (the first argument that is no flag) with all other arguments."""
    arguments = sys.argv[1:]
    script = next(argument for argument in arguments if not argument.startswith("-"))
    arguments.remove(script)
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    sys.modules["flash_attn.flash_attn_interface"] = interface
    megatron_patches.prepare(FRAMEWORK, Path(script))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
