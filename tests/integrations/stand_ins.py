"""What a diffusion pipeline has beside its transformer, without weights: tokenizers and processors,
encoders of text and images, VAEs. They give tensors of the right shapes that depend on what they
are given, so that a pipeline is called by its own defaults, with strings and images."""

import re
import zlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding as _BatchEncoding
from transformers.utils import ModelOutput


class BatchEncoding(_BatchEncoding):
    def to(self, *_: Any, **__: Any) -> "BatchEncoding":
        return self


_TOKENS = re.compile(r"<\|?\w+\|?>|\w+|[^\w\s]|\n\n|\n")
LAYERS = 40  # pipelines take some by their index


class Words:
    """A tokenizer, or the processor of a model of texts and images: a token for each word."""

    padding_side = "right"
    pad_token, pad_token_id, eos_token, model_max_length = "<pad>", 0, "<eos>", 64
    bos_token_id, eos_token_id, image_token, image_token_id = 2, 1, "<image>", 3
    num_image_tokens = 4
    added_tokens_encoder: Any = {}  # noqa: RUF012

    @property
    def tokenizer(self) -> "Words":
        return self

    @property
    def image_processor(self) -> Any:
        return Images()

    def ids(self, text: str) -> list[int]:
        return [*map(self.convert_tokens_to_ids, _TOKENS.findall(text)), 1]

    def __call__(
        self,
        text: Any = None,
        images: Any = None,
        padding: Any = False,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: str | None = None,
        **_: Any,
    ) -> BatchEncoding:
        texts = [""] if text is None else [text] if isinstance(text, str) else list(text)
        rows = [self.ids(x) if isinstance(x, str) else list(x) for x in texts]
        if truncation and max_length:
            rows = [row[:max_length] for row in rows]
        length = max(map(len, rows))
        if padding == "max_length":
            length = max_length or self.model_max_length
        ids, mask = [], []
        for row in rows:
            pad = [self.pad_token_id] * (length - len(row))
            real, none = [1] * len(row), [0] * len(pad)
            right = self.padding_side == "right"
            ids.append(row + pad if right else pad + row)
            mask.append(real + none if right else none + real)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if isinstance(text, str) and return_tensors is None:
            given = {name: rows[0] for name, rows in given.items()}
        if return_tensors is not None:
            given = {name: torch.tensor(rows) for name, rows in given.items()}
        if images is not None:
            given |= {"pixel_values": torch.ones(4, 8), "image_grid_thw": torch.tensor([[1, 4, 4]])}
        return BatchEncoding(given)

    def pad(self, given: Any, **how: Any) -> BatchEncoding:
        return self([list(row) for row in given["input_ids"]], **how)

    def apply_chat_template(self, messages: Any, tokenize: bool = True, **how: Any) -> Any:
        def texts(x: Any) -> str:
            if isinstance(x, str):
                return x
            if isinstance(x, dict):
                return texts(x.get("content", x.get("text", "")))
            return " ".join(map(texts, x))

        many = bool(messages) and isinstance(messages[0], list)
        whole = list(map(texts, messages)) if many else texts(messages)
        return self(whole, **how) if tokenize else whole

    def batch_decode(self, ids: Any, **_: Any) -> list[str]:
        return ["decoded"] * len(ids)

    def decode(self, ids: Any, **_: Any) -> str:
        return "decoded"

    def convert_tokens_to_ids(self, token: str) -> int:
        return 271 if token == "\n\n" else 10 + zlib.crc32(token.encode()) % 900

    def tokenize(self, text: str, **_: Any) -> list[str]:
        return _TOKENS.findall(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.ids(text)


@dataclass
class Encoded(ModelOutput):
    """Of a model that ends with a projection the pooled one is the first."""

    first: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    pooler_output: Tensor | None = None
    text_embeds: Tensor | None = None
    image_embeds: Tensor | None = None


class Encoder(nn.Module):
    """A text encoder, or one of images.

    Args:
        dim: of what it gives.
        pooled: of what it gives for all tokens.
        projected: the output at index 0 is the pooled one.
    """

    def __init__(self, dim: int, pooled: int = 0, projected: bool = False, layers: int = LAYERS):
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(1000, dim)
        self.layers, self.projected = layers, projected
        self.to_pooled = nn.Linear(dim, pooled or dim)
        settings = {
            "hidden_size": dim,
            "projection_dim": pooled or dim,
            "num_hidden_layers": LAYERS,
            "d_model": dim,
        }
        self.config = SimpleNamespace(
            **settings,
            image_token_id=3,
            image_token_index=3,
            pad_token_id=0,
            use_attention_mask=False,
        )
        self.config.text_config = self.config
        self.config.image_size = 8

    dtype, device = torch.float32, torch.device("cpu")

    @property
    def model(self) -> "Encoder":
        return self

    @property
    def language_model(self) -> "Encoder":
        return self

    def generate(self, input_ids: Tensor | None = None, **_: Any) -> Tensor:
        return torch.full((1, 60), 5) if input_ids is None else input_ids.repeat(1, 2)

    def get_image_features(self, *_: Any, **__: Any) -> Tensor:
        return self.embedding.weight[:4]

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, *_: Any, **how: Any
    ) -> Any:
        if input_ids is None or input_ids.is_floating_point():
            images = how.get("pixel_values", input_ids)
            shift = 0.0 if images is None else images.float().mean()
            input_ids = torch.arange(5).expand(1 if images is None else len(images), -1)
        else:
            shift = 0.0
        x = self.embedding(input_ids % 1000) + shift
        if attention_mask is not None:  # padding has other states where it is not attended to
            x = x * (1 + 0.1 * attention_mask[..., None])
        states = tuple(x * (1 + 0.02 * i) for i in range(self.layers))
        pooled = self.to_pooled(x.mean(1))
        first = pooled if self.projected else states[-1]
        return Encoded(first, states[-1], states, pooled, pooled, pooled)


class Images:
    """What makes pixels for an image encoder."""

    size: Any = {"height": 8, "width": 8}  # noqa: RUF012
    merge_size = 2

    def __call__(self, images: Any = None, **_: Any) -> BatchEncoding:
        many = len(images) if isinstance(images, (list, tuple)) else 1
        seen = {"pixel_values": torch.ones(many, 3, 8, 8)}
        return BatchEncoding(seen | {"image_grid_thw": torch.tensor([[1, 4, 4]] * many)})

    preprocess = __call__


class Latents:
    """Of an encoder that is sure of them."""

    def __init__(self, x: Tensor) -> None:
        self.mean, self.parameters = x, torch.cat([x, torch.zeros_like(x)], 1)

    def sample(self, generator: Any = None) -> Tensor:
        return self.mean

    mode = sample


class Sound(nn.Module):
    """The VAE of LTX 2's sound, which is not decoded."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.latents_mean, self.latents_std = torch.zeros(128), torch.ones(128)
        sizes = {"mel_bins": 64, "sample_rate": 16000, "mel_hop_length": 160, "latent_channels": 8}
        self.config = SimpleNamespace(**sizes)
        self.temporal_compression_ratio = self.mel_compression_ratio = 4


class Waves(nn.Module):
    """A VAE of sound: a latent for two samples of each of its two channels."""

    dtype, device = torch.float32, torch.device("cpu")
    sampling_rate = 8
    hop_length = downsampling_ratio = 2

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        sizes = {"sampling_rate": 8, "latent_dim": channels, "audio_channels": 2}
        self.config = SimpleNamespace(**sizes)
        self.weight = nn.Parameter(torch.zeros(1))

    def encode(self, x: Tensor, **_: Any) -> Any:
        scale = torch.linspace(0.5, 1.5, self.config.latent_dim)
        mean = nn.functional.avg_pool1d(x.mean(1, keepdim=True), 2) * scale[:, None]
        return SimpleNamespace(latents=mean, latent_dist=Latents(mean))


class Seconds(nn.Module):
    """Embeds how long a sound is, or when it begins and ends, in ``dim`` numbers."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.config = dim, SimpleNamespace(min_value=0, max_value=512)

    def forward(self, seconds: Any = None, **given: Any) -> Any:
        if seconds is not None:
            return torch.as_tensor(seconds).float()[:, None].expand(-1, self.dim) / 100
        known = {key: x for key, x in given.items() if x is not None and "seconds" in key}
        embedded = {f"{key[:-8]}_hidden_states": self(x)[:, None] for key, x in known.items()}
        embedded = {f"seconds_{key}": x for key, x in embedded.items()}
        return SimpleNamespace(text_hidden_states=given.get("text_hidden_states"), **embedded)


class Safety(nn.Module):
    """What asks of Cosmos whether a text is safe; its package is not needed."""

    dtype, device = torch.float32, torch.device("cpu")

    def check_text_safety(self, _: str) -> bool:
        return True


class Siglip:
    def __call__(self, **_: Any) -> BatchEncoding:
        shapes = torch.tensor([[1, 5]])
        return BatchEncoding({"pixel_values": torch.ones(1, 3, 8, 8), "spatial_shapes": shapes})


class _Out(SimpleNamespace):
    def __getitem__(self, index: int) -> Any:
        return self.latent_dist


class Pixels(nn.Module):
    """A VAE: latents are means of patches of pixels, ``space`` x ``space`` of ``time`` frames."""

    dtype, device = torch.float32, torch.device("cpu")
    use_slicing = use_tiling = use_framewise_decoding = False

    def __init__(self, channels: int, space: int = 8, time: int = 4, **config: Any) -> None:
        super().__init__()
        self.channels, self.space, self.time = channels, space, time
        self.spatial_compression_ratio, self.temporal_compression_ratio = space, time
        levels = space.bit_length()
        settings = {
            **dict.fromkeys(("latent_channels", "z_dim", "out_channels"), channels),
            "in_channels": 3,
            "scaling_factor": 1.0,
            "shift_factor": 0.0,
            "invert_scale_latents": False,
            "block_out_channels": (1,) * levels,
            "dim_mult": (1,) * levels,
            "latents_mean": [0.0] * channels,
            "latents_std": [1.0] * channels,
            "spatial_compression_ratio": space,
            "temporal_compression_ratio": time,
            "scale_factor_temporal": time,
            "scale_factor_spatial": space,
            "temperal_downsample": [False, True, True],
            "timestep_conditioning": False,
            "batch_norm_eps": 1e-4,
            "patch_size": (2, 2),
            "sample_size": 64,
            "force_upcast": False,
            **config,
        }
        self.config = SimpleNamespace(**settings)
        self.config.get = settings.get
        self.temperal_downsample = settings["temperal_downsample"]
        self.z_dim = channels
        self.latents_mean, self.latents_std = torch.zeros(channels), torch.ones(channels)
        self.bn = nn.BatchNorm2d(4 * channels)
        self.weight = nn.Parameter(torch.zeros(1))

    def encode(self, x: Tensor, **_: Any) -> Any:
        frames = ((x.shape[2] - 1) // self.time + 1,) if x.ndim == 5 else ()
        size = (*frames, x.shape[-2] // self.space, x.shape[-1] // self.space)
        pool = nn.functional.adaptive_avg_pool3d if frames else nn.functional.adaptive_avg_pool2d
        mean = pool(x.float(), size).mean(1, keepdim=True)
        scale = torch.linspace(0.5, 1.5, self.channels).view(-1, *(1 for _ in size))
        return _Out(latent_dist=Latents(mean * scale), latents=mean * scale)

    def decode(self, x: Tensor, *_: Any, return_dict: bool = True, **__: Any) -> Any:
        frames = ((x.shape[2] - 1) * self.time + 1,) if x.ndim == 5 else ()
        size = (*frames, x.shape[-2] * self.space, x.shape[-1] * self.space)
        image = nn.functional.interpolate(x.mean(1, keepdim=True), size).expand(-1, 3, *size[0:])
        return SimpleNamespace(sample=image) if return_dict else (image,)
