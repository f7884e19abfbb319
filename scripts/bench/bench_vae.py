"""Decoding and encoding by tiles, shared by GPUs, beside diffusers' tiling on one GPU.

    torchrun --nproc-per-node 2 scripts/bench/bench_vae.py --out vae.csv

Random weights of the sizes of Wan 2.1's VAE (127 million) and of Flux's, diffusers' default tiles,
the same latents on all ranks. ``one GPU``: every rank does all by itself, as pipelines do today.
``error`` is the relative difference to it, ``extra_gib`` the peak above what was allocated before,
the largest of all ranks. Not measured: a first pass of a few frames and four tiles, one of each
shape that tiles have (the largest, those of the last row and column, and of both).

Smallest run, on CPUs: --device cpu --smoke.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import diffusers
import torch
import torch.distributed as dist
from bench_harness import Session, Table, common_flags
from torch import Tensor

import ds_usp
from ds_usp.integrations.diffusers import enable_vae
from ds_usp.testing import relative_error

COLUMNS = ("model", "what", "pixels", "frames", "dtype", "contender", "s", "speedup", "error")
COLUMNS = (*COLUMNS, "extra_gib")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAN_SMOKE = {"base_dim": 3, "num_res_blocks": 1, "z_dim": 4, "dim_mult": [1, 1, 1, 1]}
WAN_SMOKE |= {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
_FLUX = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16}
_FLUX |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "sample_size": 1024}
_FLUX |= {"up_block_types": ("UpDecoderBlock2D",) * 4, "use_quant_conv": False}
_FLUX |= {"use_post_quant_conv": False}
STRIDES = {"wan": 192, "flux": 768}  # pixels from a tile to the next, diffusers' default
BEGIN = time.perf_counter()


def vae_of(model: str, dtype: torch.dtype, session: Session, smoke: bool) -> diffusers.ModelMixin:
    """A VAE with the same random weights on every rank, which tiles."""
    torch.manual_seed(0)
    small = {"block_out_channels": (32,) * 4, "sample_size": 64} if smoke else {}
    with session.device:
        if model == "wan":
            vae = diffusers.AutoencoderKLWan(**(WAN_SMOKE if smoke else {}))
        else:
            vae = diffusers.AutoencoderKL(**_FLUX | small)
    vae.enable_tiling()
    return vae.to(session.device, dtype).eval()


def given(model: str, what: str, height: int, width: int, frames: int, channels: int) -> Tensor:
    """Latents, or pixels, of an image or a video."""
    draw = torch.Generator().manual_seed(1)
    size = (1, 3, frames, height, width)
    if what == "decode":
        size = (1, channels, 1 + (frames - 1) // 4, height // 8, width // 8)
    x = torch.randn(size, generator=draw)
    return x if model == "wan" else x[:, :, 0]


def run(vae: diffusers.ModelMixin, what: str, x: Tensor) -> Tensor:
    """Decode, or encode to the parameters of the posterior."""
    return vae.decode(x).sample if what == "decode" else vae.encode(x).latent_dist.parameters


@torch.no_grad()
def compare(session: Session, args: argparse.Namespace, table: Table, workload: str) -> None:
    """Measure a workload, ``model:what:height x width:frames:dtype``, both ways."""
    model, what, pixels, frames, dtype = workload.split(":")
    height, width = map(int, pixels.split("x"))
    vae = vae_of(model, DTYPES[dtype], session, args.smoke)
    stride, channels = STRIDES[model], vae.config.get("z_dim", 16)
    four_tiles = height % stride + stride, width % stride + stride, min(5, int(frames))
    x, short = (
        given(model, what, *size, channels).to(session.device, DTYPES[dtype])
        for size in ((height, width, int(frames)), four_tiles)
    )
    mesh = ds_usp.SequenceMesh.from_group(None, ulysses_degree=1)
    one_gpu, want = 0.0, torch.zeros(())
    for name in ("one GPU", "ds_usp"):
        enabled = enable_vae(vae, mesh) if name == "ds_usp" else None
        run(vae, what, short)
        seconds, extra, out = measured(session, lambda: run(vae, what, x))
        if enabled is None:
            one_gpu, want = seconds, out
        else:
            enabled.disable()
        error = relative_error(out, want)
        numbers = f"{seconds:.3f}", f"{one_gpu / seconds:.3f}", f"{error:.1e}", f"{extra:.2f}"
        table.add((model, what, pixels, frames, dtype, name, *numbers))
        line = "{} s, {} x one GPU, error {}, {} GiB".format(*numbers)
        since = time.perf_counter() - BEGIN
        session.print0(f"{since:6.1f} s {'RATIO ' if enabled else ''}{workload} {name}: {line}")
        del out


def measured(session: Session, step: Callable[[], Tensor]) -> tuple[float, float, Tensor]:
    """Seconds, GiB above what was allocated, and the result of a step."""
    out: list[Tensor] = []
    before = torch.cuda.memory_allocated() if session.on_gpu else 0
    if session.on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = session.seconds(lambda: out.append(step()))
    peak = torch.cuda.max_memory_allocated() - before if session.on_gpu else float("nan")
    largest = session.all_reduced([peak], dist.ReduceOp.MAX)[0]
    return seconds, largest / 2**30, out[0]


def main() -> None:
    """Measure all workloads; rank 0 prints and writes."""
    parser = common_flags(__doc__)
    parser.add_argument("--smoke", action="store_true", help="tiny models and sizes")
    parser.add_argument("--workloads", nargs="+", default=[])
    args = parser.parse_args()
    default = ["wan:decode:720x1280:33:bf16", "wan:decode:720x1280:81:bf16"]
    default += ["wan:decode:720x1280:17:fp32", "wan:encode:720x1280:33:bf16"]
    default += ["flux:decode:2048x2048:1:bf16"]
    if args.smoke:
        default = ["wan:decode:288x352:5:fp32", "wan:encode:288x352:5:fp32"]
        default += ["flux:decode:96x128:1:fp32"]
    session = Session.start(args.device)
    table = Table(session, args.out, COLUMNS, f"diffusers {diffusers.__version__}, batch 1")
    for workload in args.workloads or default:
        compare(session, args, table, workload)
    session.close()


if __name__ == "__main__":
    main()
