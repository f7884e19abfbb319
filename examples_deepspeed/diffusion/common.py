"""What the examples need: ranks and their mesh, comparing, writing, models without a download."""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import ds_usp

HEADS = 4
LIMIT = 1e-5  # relative difference of losses in fp32
TINY: Mapping[str, Mapping[str, Any]] = {
    "flux": {
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": HEADS,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
    },
    "wan": {
        "in_channels": 4,
        "out_channels": 4,
        "attention_head_dim": 12,
        "num_attention_heads": HEADS,
        "num_layers": 2,
        "text_dim": 32,
        "freq_dim": 32,
        "ffn_dim": 32,
    },
}


def flags(description: str, samples: bool = False) -> argparse.ArgumentParser:
    """A parser with the flags of all examples, or of those that sample."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, or an id of the hub")
    parser.add_argument("--tiny", choices=TINY, help="a random tiny model instead")
    parser.add_argument("--ulysses-degree", type=int, default=0, help="ranks that exchange heads; "
                        "the rest is the ring (default: as many as divide the heads)")  # fmt: skip
    if samples:
        parser.add_argument("--cfg-degree", type=int, default=1, help="2: each branch of the "
                            "guidance on half of the ranks, for Wan")  # fmt: skip
    parser.add_argument("--kernel", default="auto", help="of attention")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="usp_output", help="folder that rank 0 writes")
    return parser


def start(args: argparse.Namespace) -> torch.device:
    """This rank's device; the ranks know each other.

    Raises:
        ConfigError: neither or both of ``--model`` and ``--tiny``.
    """
    if bool(args.model) == bool(args.tiny):
        raise ds_usp.ConfigError("give either --model (a folder, or an id of the hub) or --tiny")
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        hours = datetime.timedelta(hours=2)  # rank 0 may compute alone, to compare
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=hours)
    return device


def run(main: Callable[[], int]) -> int:
    """The exit code of ``main``; an error that the user can mend is one line, not one a rank."""
    with ds_usp.one_line_errors():
        code = main()
    dist.destroy_process_group()  # without it a process with gloo may abort at exit (SIGABRT)
    return code


def mesh_of(heads: int, ulysses_degree: int, ranks: int = 0) -> ds_usp.SequenceMesh:
    """The mesh of this rank: ``ranks`` next to each other share every batch (0: all)."""
    world = dist.get_world_size()
    size = ranks or world
    ulysses = ulysses_degree or math.gcd(size, heads)
    if world % size or size % ulysses:
        raise ds_usp.ConfigError(
            f"{world} ranks are no multiple of {size} = ulysses {ulysses} x ring"
        )
    axes = {"ulysses": ulysses, "ring": size // ulysses, "dp": world // size}
    return ds_usp.SequenceMesh.build(ds_usp.RankGrid(axes))


def print0(line: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def same_losses(losses: list[float], expected: list[float]) -> bool:
    """Whether the losses are those of one rank; prints both."""
    for step, pair in enumerate(zip(losses, expected, strict=True)):
        print("step {}: loss {:.7f}, one rank's {:.7f}".format(step, *pair))
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    passed = worst <= LIMIT  # not if it is NaN
    print(f"largest difference {worst:.1e}, limit {LIMIT:g}: {'ok' if passed else 'FAILED'}")
    return passed


def from_rank0(make: Callable[[], Any]) -> Any:
    """What rank 0 makes, on every rank; where it fails every rank raises. Collective."""
    made: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            made = [make()]
        except Exception as error:
            made = [RuntimeError(f"rank 0: {error!r}")]
    dist.broadcast_object_list(made)
    if isinstance(made[0], RuntimeError):
        raise made[0]
    return made[0]


def write(output: str, result: Any, latents: Tensor) -> None:
    """Rank 0 writes latents, and the image or the frames."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("latents.safetensors", "image.png", "video.mp4", "video.gif"):
        (folder / name).unlink(missing_ok=True)  # never through a link in a shared folder
    save_file({"latents": latents.contiguous()}, folder / "latents.safetensors")
    if not isinstance(result[0], list):
        result[0].save(folder / "image.png")
        return
    try:
        diffusers.utils.export_to_video(result[0], str(folder / "video.mp4"), fps=16)
    except (ImportError, AttributeError):  # imageio, or its ffmpeg, is not installed
        first, *others = result[0]
        options = {"save_all": True, "append_images": others, "duration": 62}  # ms a frame
        first.save(folder / "video.gif", **options)


def tiny_transformer(family: str, seed: int = 0) -> Any:
    """A random transformer, the same on every rank, none of whose weights is zero."""
    names = {"flux": "FluxTransformer2DModel", "wan": "WanTransformer3DModel"}
    torch.manual_seed(seed)
    transformer = getattr(diffusers, names[family])(**TINY[family])
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return transformer


def tiny_pipeline(family: str) -> Any:
    """A pipeline of random weights without text encoders; Wan's has two transformers (2.2)."""
    torch.manual_seed(1)
    if family == "flux":
        sizes = {"block_out_channels": (4,), "latent_channels": 1, "norm_num_groups": 1}
        scale = {"shift_factor": 0.0, "scaling_factor": 1.0}
        convolutions = {"use_quant_conv": False, "use_post_quant_conv": False}
        return diffusers.FluxPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
            vae=diffusers.AutoencoderKL(**sizes, **scale, **convolutions),
            transformer=tiny_transformer(family),
            **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
        )
    sizes = {"base_dim": 3, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    scale = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    halved = {"temperal_downsample": [False, True, True]}
    return diffusers.WanPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=diffusers.AutoencoderKLWan(**sizes, **scale, **halved),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=tiny_transformer(family),
        transformer_2=tiny_transformer(family, seed=2),
        boundary_ratio=0.875,
    )
