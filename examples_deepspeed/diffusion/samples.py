"""The samples of ``train_flow_matching.py``: encoded before, one a file, or random ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ds_usp import ConfigError


def sample_of(args: argparse.Namespace, config: Any, index: int) -> dict[str, Tensor]:
    """A sample: ``latents`` and ``text``, and what Flux has besides, ``pooled``.

    Raises:
        ConfigError: there are no files in the folder ``--latents``.
    """
    if args.latents:
        files = sorted(Path(args.latents).glob("*.safetensors"))
        if not files:
            raise ConfigError(f"--latents {args.latents}: there are no *.safetensors")
        return load_file(files[index % len(files)])
    draw = torch.Generator().manual_seed(index % args.samples)
    is_flux = "axes_dims_rope" in config
    sizes = {
        "latents": (config.in_channels // (4 if is_flux else 1), *args.size),
        "text": (args.text_tokens, config.joint_attention_dim if is_flux else config.text_dim),
    }
    if is_flux:
        sizes["pooled"] = (config.pooled_projection_dim,)
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}
