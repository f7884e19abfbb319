"""VAEs whose tiles ranks share: every class with a row, against diffusers' own tiling."""

import copy
import gc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
from cases import mesh_of
from harness import RankContext
from model_runs import BOUND, relative
from torch import Tensor

import ds_usp
from ds_usp import ConfigError, MeshError, UnsupportedAttentionError, USPError
from ds_usp.integrations.diffusers import enable_vae
from ds_usp.integrations.diffusers.vae import TILED, _Deferred, assign

WORLD = 4


class Vae(NamedTuple):
    """A tiny VAE: its configuration, its tiles, latents of an odd number of tiles."""

    config: Mapping[str, Any]
    tiles: Mapping[str, float]
    latents: tuple[int, ...]
    encodes: bool = True


def tiles(size: int, stride: int, frames: int = 0, frame_stride: int = 0) -> dict[str, int]:
    numbers = {"min_height": size, "min_width": size, "stride_height": stride}
    numbers |= {"stride_width": stride}
    if frames:
        numbers |= {"min_num_frames": frames, "stride_num_frames": frame_stride}
    return {f"tile_sample_{name}": number for name, number in numbers.items()}


_IMAGE = {
    "block_out_channels": (4,) * 3,
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "latent_channels": 4,
    "norm_num_groups": 1,
    "sample_size": 32,
}
_WAN = {
    "base_dim": 3,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}
_LTX = {
    "latent_channels": 8,
    "block_out_channels": (8,) * 4,
    "layers_per_block": (1,) * 5,
    "patch_size": 1,
    "patch_size_t": 1,
}
VAES: Mapping[str, Vae] = {
    "AutoencoderKL": Vae(_IMAGE, {}, (2, 4, 13, 11)),
    "AutoencoderKLFlux2": Vae(_IMAGE, {}, (1, 4, 13, 11)),
    "AutoencoderKLWan": Vae(_WAN, tiles(32, 24), (1, 4, 3, 7, 9)),
    "AutoencoderKLWan, 2.2": Vae(
        {
            **_WAN,
            "is_residual": True,
            "patch_size": 2,
            "scale_factor_spatial": 16,
            **dict.fromkeys(("in_channels", "out_channels"), 12),
        },
        tiles(64, 48),
        (1, 4, 2, 6, 5),
    ),
    "AutoencoderKLQwenImage": Vae(_WAN, tiles(32, 24), (1, 4, 1, 7, 9)),
    "AutoencoderKLHunyuanVideo": Vae(
        {
            "latent_channels": 4,
            "block_out_channels": (4,) * 4,
            "layers_per_block": 1,
            "norm_num_groups": 2,
        },
        tiles(32, 24, 8, 4),
        (1, 4, 3, 5, 4),
    ),
    "AutoencoderKLHunyuanVideo15": Vae(
        {"latent_channels": 4, "block_out_channels": (8,) * 5, "layers_per_block": 1},
        {
            **dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), 64),
            **dict.fromkeys(("tile_latent_min_height", "tile_latent_min_width"), 4),
        },
        (1, 4, 1, 5, 4),
    ),
    # diffusers' tiled_encode of it takes videos, and its encode gives it images.
    "AutoencoderKLHunyuanImage": Vae(
        {
            **dict.fromkeys(("in_channels", "out_channels"), 3),
            "latent_channels": 8,
            "block_out_channels": (32,) * 3,
            "layers_per_block": 1,
            "spatial_compression_ratio": 4,
            "sample_size": 32,
        },
        {},
        (1, 8, 13, 8),
        encodes=False,
    ),
    "AutoencoderKLCogVideoX": Vae(
        {
            "latent_channels": 4,
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
            "block_out_channels": (8,) * 4,
            "norm_num_groups": 2,
            "layers_per_block": 1,
        },
        {
            **dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), 32),
            **dict.fromkeys(("tile_overlap_factor_height", "tile_overlap_factor_width"), 0.25),
        },
        (1, 4, 4, 5, 4),
    ),
    "AutoencoderKLLTXVideo": Vae(
        {**_LTX, "decoder_block_out_channels": (8,) * 4, "decoder_layers_per_block": (1,) * 5},
        tiles(32, 24, 16, 8),
        (1, 8, 3, 6, 5),
    ),
    "AutoencoderKLLTX2Video": Vae(
        {
            **_LTX,
            "decoder_block_out_channels": (8, 16, 32),
            "decoder_layers_per_block": (1,) * 4,
            **dict.fromkeys(("spatial_compression_ratio", "temporal_compression_ratio"), 8),
        },
        tiles(32, 24, 16, 8),
        (1, 8, 3, 6, 5),
    ),
    "AutoencoderDC": Vae(
        {
            "latent_channels": 4,
            "downsample_block_type": "pixel_unshuffle",
            "upsample_block_type": "pixel_shuffle",
            "attention_head_dim": 4,
            "decoder_norm_types": "rms_norm",
            "decoder_act_fns": "silu",
            **{
                f"{way}_{option}": value
                for way in ("encoder", "decoder")
                for option, value in {
                    "block_out_channels": (8,) * 3,
                    "block_types": ("ResBlock",) * 3,
                    "layers_per_block": (1,) * 3,
                    "qkv_multiscales": ((),) * 3,
                }.items()
            },
        },
        tiles(32, 24),
        (1, 4, 13, 11),
    ),
}


def build(name: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    vae = getattr(diffusers, name.split(",")[0])(**{**VAES[name].config, **changes}).eval()
    vae.enable_tiling(**VAES[name].tiles)
    for option in ("use_framewise_decoding", "use_framewise_encoding"):
        if hasattr(vae, option):  # tiles of frames too
            setattr(vae, option, True)
    return vae


def latents_of(name: str, seed: int = 1) -> Tensor:
    return torch.randn(VAES[name].latents, generator=torch.Generator().manual_seed(seed))


def both_ways(name: str, vae: Any) -> list[Tensor]:
    decoded = vae.decode(latents_of(name)).sample
    if not VAES[name].encodes:
        return [decoded]
    encoded = vae.encode(decoded)
    return [decoded, encoded.latent if "latent" in encoded else encoded.latent_dist.parameters]


class Outcome(NamedTuple):
    """Of a rank; errors on the one that has computed the truth."""

    have: list[Tensor]
    errors: tuple[float, float]  # to diffusers' tiling, and of that to none: tiles are blended
    alone: int  # calls of encoder and decoder on one rank
    here: int


@torch.no_grad()
def shared(ctx: RankContext, names: list[str]) -> list[Outcome]:
    outcomes = []
    for index, name in enumerate(names):
        vae, calls, errors, alone = build(name), [], (0.0, 1.0), 0
        for module in (vae.encoder, vae.decoder):
            module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with enable_vae(vae, mesh_of(2)):
            have = both_ways(name, vae)
        here = len(calls)
        if index % ctx.world == ctx.rank:
            calls.clear()
            want = both_ways(name, vae)
            alone = len(calls)
            vae.disable_tiling()
            whole = vae.decode(latents_of(name)).sample
            errors = max(map(relative, have, want)), relative(want[0], whole)
        assert not {"decoder", "decode", "tiled_decode"} & {*vars(vae)}
        outcomes.append(Outcome(have, errors, alone, here))
    return outcomes


FIRST = ["AutoencoderKL", "AutoencoderKLWan", "AutoencoderKLCogVideoX", "AutoencoderKLQwenImage"]


@pytest.mark.parametrize("names", [FIRST, [x for x in VAES if x not in FIRST]], ids=["4", "others"])
def test_tiles_of_every_class_are_dealt_and_blended_as_on_one_rank(pool, names):
    assert {name.split(",")[0] for name in VAES} == set(TILED)
    ranks = pool.run(shared, WORLD, names=names)
    for name, *of_ranks in zip(names, *ranks, strict=True):
        for x in of_ranks:
            assert x.errors[0] <= BOUND and x.errors[1] > 1e-3, (name, x.errors)
            assert all(map(torch.equal, x.have, of_ranks[0].have)), name
        alone, here = max(x.alone for x in of_ranks), [x.here for x in of_ranks]
        assert sum(here) == alone and max(here) < 0.6 * alone, (name, here, alone)


def test_large_tiles_are_given_out_first():
    """28 tiles of a 720p video of Wan, of which those at the edges are smaller."""
    sizes = [h * w for h in (32, 32, 32, 18) for w in (*[32] * 6, 16)]
    owners = assign(sizes, 2)
    loads = [sum(s for s, owner in zip(sizes, owners, strict=True) if owner == r) for r in (0, 1)]
    assert max(loads) < 1.03 * sum(sizes) / 2
    assert assign([5], 4) == [0] and assign([], 4) == []


# ------------------------------------------------------------------ refused

WAN = "AutoencoderKLWan"


def message(act: Callable[[], Any]) -> str:
    with torch.no_grad(), pytest.raises(USPError) as error:
        act()
    return f"{type(error.value).__name__}: {error.value}"


def refused(ctx: RankContext) -> dict[str, str]:
    """What each rank says where rank 1 differs; then all decode as one rank does."""
    vae, latents, one, mesh = build(WAN), latents_of(WAN), ctx.rank == 1, mesh_of(2)
    want = vae.decode(latents).sample.detach()
    said = {"no tiling": ""}
    if one:
        vae.disable_tiling()
    said["no tiling"] = message(lambda: enable_vae(vae, mesh))
    vae.enable_tiling()
    other = build(WAN, dim_mult=[1, 1, 1, 2]) if one else vae
    said["another VAE"] = message(lambda: enable_vae(other, mesh))
    enabled = enable_vae(vae, mesh)
    said["latents"] = message(lambda: vae.decode(latents + one))
    vae.enable_tiling(tile_sample_stride_height=16 if one else 24)
    said["tiles"] = message(lambda: vae.decode(latents))
    vae.enable_tiling(tile_sample_stride_height=20)
    said["tiles that do not divide"] = message(lambda: vae.decode(latents))
    vae.enable_tiling(**VAES[WAN].tiles)

    def fails(*_: Any) -> None:
        if one:
            raise MemoryError("no memory")

    handle = vae.decoder.register_forward_pre_hook(fails)
    with torch.no_grad(), pytest.raises((MeshError, MemoryError)) as error:
        vae.decode(latents)
    said["a tile"] = f"{type(error.value).__name__}: {error.value}"
    handle.remove()
    vae.decoder.mid_block.resnets[0].dropout.p = 0.5
    vae.train()
    said["noise"] = message(lambda: vae.decode(latents))
    vae.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        assert relative(vae.decode(latents).sample, want) <= BOUND
        twin = copy.deepcopy(vae)
        twin.decoder.conv_out.weight.mul_(2)
        assert relative(twin.decode(latents).sample, want) > 0.1
        assert relative(vae.decode(latents).sample, want) <= BOUND
    enabled.disable()
    assert relative(vae.decode(latents).sample, want) <= BOUND
    return said


REFUSED = {
    "no tiling": "call enable_tiling() first",
    "another VAE": "config.dim_mult.3",
    "latents": "decode of AutoencoderKLWan (call it on every rank, with the same values)",
    "tiles": "tile_sample_stride_height",
    "tiles that do not divide": "tiles of height 32, one each 20, do not fit its latents",
    "a tile": "no memory",
    "noise": "draws random numbers for each tile",
}


def test_every_rank_refuses_and_decodes_the_next(pool):
    for rank, said in enumerate(pool.run(refused, WORLD)):
        for case, text in REFUSED.items():
            assert text in said[case], (rank, case, said[case])


class AutoencoderKL(diffusers.AutoencoderKL):
    """What no class of diffusers does: an output that a call of the tile has taken is used again,
    which other ranks than the tile's do not have."""

    def _tiled_encode(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        return torch.add(self.quant_conv(encoded), encoded)


@torch.no_grad()
def test_a_part_of_a_tile_is_not_used_outside_of_it():
    vae = AutoencoderKL(**VAES["AutoencoderKL"].config).eval()
    vae.enable_tiling()
    with (
        enable_vae(vae, ds_usp.SequenceMesh.single()),
        pytest.raises(UnsupportedAttentionError, match="uses a part of a tile outside of it"),
    ):
        vae.encode(torch.zeros(1, 3, 52, 44))


@torch.no_grad()
def test_tiles_are_freed_when_they_are_blended():
    """Not when Python next looks for cycles: those of a video are as large as it."""
    vae = build(WAN)
    gc.collect()
    gc.disable()
    try:
        with enable_vae(vae, ds_usp.SequenceMesh.single()):
            vae.decode(latents_of(WAN))
            assert not [x for x in gc.get_objects() if type(x) is _Deferred]
    finally:
        gc.enable()


def test_refused_on_one_rank_too():
    mesh, vae = ds_usp.SequenceMesh.single(), build(WAN)
    with pytest.raises(UnsupportedAttentionError, match="AutoencoderTiny is no VAE whose tiles"):
        enable_vae(diffusers.AutoencoderTiny(), mesh)
    for factor, fits in ((0.25, True), (0.3, False)):
        image = build("AutoencoderKL")
        image.tile_overlap_factor = factor
        if fits:
            enable_vae(image, mesh).disable()
            continue
        with pytest.raises(ConfigError, match="tiles of size 32, one each 22, do not fit"):
            enable_vae(image, mesh)
    with enable_vae(vae, mesh):
        with pytest.raises(ConfigError, match="enabled already"):
            enable_vae(vae, mesh)
        with pytest.raises(UnsupportedAttentionError, match=r"under torch\.no_grad"):
            vae.decode(latents_of(WAN))
        with torch.no_grad():  # too small for tiles: computed whole
            assert vae.decode(latents_of(WAN)[..., :2, :2]).sample.shape[-1] == 16
