"""Where the classes of diffusion transformers have their tokens: one :class:`Plan` for each."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import diffusers
from diffusers import ModelMixin
from torch import nn

from ds_usp.errors import ConfigError

Kind = Literal["image", "text"]


@dataclass(frozen=True)
class TokenDim:
    """The dim of a tensor along which its tokens lie.

    Args:
        kind: ``image`` (frames of a video too) or ``text`` that takes part in the attention.
        dim: counted from the end if it is negative.
        ndim: only tensors of so many dims have tokens, and not if they have one for all; None: all
            tensors.
    """

    kind: Kind
    dim: int
    ndim: int | None = None


@dataclass(frozen=True)
class Plan:
    """Where a class of transformers has its tokens: what is sharded, attends, and is joined.

    Modules are named by their path in the transformer, "" is itself and ``*`` every child. A module
    that is None there (as an optional one) is left out.

    Args:
        inputs: by module, its arguments that are sharded when it is called: tensors, or tuples of
            them.
        outputs: by module, the same for each of its outputs; None: it stays whole.
        attention: by attention module, its tokens in the order of its keys.
        local: the other attention modules, which are local to each rank: their keys are text that
            stays whole.
        masks: by module, its argument that tells text from padding: 0 or False for padding, which
            comes last. Its last columns, or the first, are the text's, as in ``attention``.
        whole: arguments of the transformer that every rank takes whole. All but these, those of
            ``inputs`` and the attention arguments' LoRA scale are refused.
        unbatched: those of all arguments that have no batch; the others have it as their dim 0.
        joined: the module whose output ``[b, image tokens, ...]`` becomes whole again.
        refused: by option of the configuration, the value that gives tokens a meaning by index.
    """

    inputs: Mapping[str, Mapping[str, TokenDim]]
    attention: Mapping[str, tuple[Kind, ...]]
    outputs: Mapping[str, tuple[TokenDim | None, ...]] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    joined: str = "proj_out"
    local: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()
    refused: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> frozenset[str]:
        """The arguments of the transformer that may be given."""
        return frozenset({*self.whole, *self.inputs.get("", ())})

    def check(self, transformer: ModelMixin) -> None:
        """Compare the plan with a transformer.

        Raises:
            ConfigError: a module, an argument or an option that the transformer does not have.
        """
        named = {path: tuple(arguments) for path, arguments in self.inputs.items()}
        for path, argument in self.masks.items():
            named[path] = (*named.get(path, ()), argument)
        named[""] = (*named.get("", ()), *self.whole, *self.unbatched)
        for path, arguments in named.items():
            for module in modules_at(transformer, path):
                missing = [name for name in arguments if name not in parameters_of(module)]
                if missing:
                    raise _differs(
                        transformer,
                        f"{path or 'the transformer'} takes no {', '.join(missing)}",
                    )
        for path in self.attention:
            for module in modules_at(transformer, path):
                if not hasattr(module, "processor"):
                    raise _differs(transformer, f"{path} has no attention processor")
        self._check_attention(transformer)
        for path in (*self.outputs, self.joined):
            if not list(modules_at(transformer, path)):
                raise _differs(transformer, f"there is no module {path}")
        for option in self.refused:
            if option not in transformer.config:
                raise _differs(transformer, f"the configuration has no option {option}")

    def _check_attention(self, transformer: ModelMixin) -> None:
        """Compare the attention modules of the plan with those of the transformer.

        Raises:
            ConfigError: one that is in neither ``attention`` nor ``local``.
        """
        known = {
            id(module)
            for path in (*self.attention, *self.local)
            for module in modules_at(transformer, path, optional=path in self.local)
        }
        for name, module in transformer.named_modules():
            if getattr(module, "processor", None) is not None and id(module) not in known:
                raise _differs(
                    transformer,
                    f"{name} is an attention module that it names neither in attention nor in "
                    "local, and would attend to the tokens of a shard only",
                )


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's arguments, as its class has them."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def modules_at(transformer: nn.Module, path: str, optional: bool = False) -> Iterator[nn.Module]:
    """The modules that a plan's path names.

    Raises:
        ConfigError: there is no such attribute, unless it is optional.
    """
    modules: list[Any] = [transformer]
    for part in path.split(".") if path else ():
        if part == "*":
            modules = [child for module in modules for child in module.children()]
            continue
        for module in modules:
            if not hasattr(module, part) and not optional:
                raise _differs(transformer, f"there is no module {path}")
        modules = [
            child for module in modules if (child := getattr(module, part, None)) is not None
        ]
    yield from modules


def _differs(transformer: nn.Module, difference: str) -> ConfigError:
    return ConfigError(
        f"the plan of {type(transformer).__name__} does not fit it: {difference}. The plans of "
        f"ds_usp were made for diffusers 0.42, this is {diffusers.__version__}; a plan of "
        "your own is an argument of enable (plan=...)"
    )


_IMAGE, _TEXT = TokenDim("image", 1), TokenDim("text", 1)
_JOINT: Mapping[str, TokenDim] = MappingProxyType(
    {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT}
)
_OPTIONAL_IMAGE = TokenDim("image", 1, ndim=2)
_BLOCKS, _SINGLE_BLOCKS = "transformer_blocks.*", "single_transformer_blocks.*"

_FLUX = Plan(
    inputs={"": {**_JOINT, "img_ids": TokenDim("image", -2), "txt_ids": TokenDim("text", -2)}},
    attention={f"{_BLOCKS}.attn": ("text", "image"), f"{_SINGLE_BLOCKS}.attn": ("text", "image")},
    whole=("timestep", "guidance", "pooled_projections"),
    unbatched=("img_ids", "txt_ids"),
)
PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "FluxTransformer2DModel": _FLUX,
        "Flux2Transformer2DModel": Plan(
            inputs=_FLUX.inputs,
            attention=_FLUX.attention,
            whole=("timestep", "guidance"),
            unbatched=_FLUX.unbatched,
        ),
        "WanTransformer3DModel": Plan(
            inputs={
                "": {"timestep": _OPTIONAL_IMAGE},  # Wan 2.2: one for each token
                "blocks.0": {"hidden_states": _IMAGE},
            },
            outputs={"rope": (_IMAGE, _IMAGE)},
            attention={"blocks.*.attn1": ("image",)},
            local=("blocks.*.attn2",),
            whole=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image"),
        ),
        "WanVACETransformer3DModel": Plan(
            inputs={
                "vace_blocks.*": {"hidden_states": _IMAGE},
                "vace_blocks.0": {"control_hidden_states": _IMAGE},
                "blocks.0": {"hidden_states": _IMAGE},
            },
            outputs={"rope": (_IMAGE, _IMAGE)},
            attention={"vace_blocks.*.attn1": ("image",), "blocks.*.attn1": ("image",)},
            local=("vace_blocks.*.attn2", "blocks.*.attn2"),
            whole=(
                *("hidden_states", "timestep", "encoder_hidden_states"),
                *("encoder_hidden_states_image", "control_hidden_states"),
                "control_hidden_states_scale",
            ),
            unbatched=("control_hidden_states_scale",),
        ),
        "QwenImageTransformer2DModel": Plan(
            inputs={
                "": {"hidden_states": _IMAGE},
                "transformer_blocks.0": {"encoder_hidden_states": _TEXT},
                _BLOCKS: {"modulate_index": _OPTIONAL_IMAGE},
            },
            outputs={"pos_embed": (TokenDim("image", 0), TokenDim("text", 0))},
            attention={f"{_BLOCKS}.attn": ("text", "image")},
            masks={_BLOCKS: "encoder_hidden_states_mask"},
            whole=(
                *("encoder_hidden_states", "encoder_hidden_states_mask", "timestep"),
                *("img_shapes", "guidance", "additional_t_cond"),
            ),
        ),
        "LTXVideoTransformer3DModel": Plan(
            inputs={"": {"hidden_states": _IMAGE, "timestep": _OPTIONAL_IMAGE}},
            outputs={"rope": (_IMAGE, _IMAGE)},
            attention={f"{_BLOCKS}.attn1": ("image",)},
            local=(f"{_BLOCKS}.attn2",),
            whole=(
                *("encoder_hidden_states", "encoder_attention_mask", "num_frames", "height"),
                *("width", "rope_interpolation_scale", "video_coords"),
            ),
            unbatched=("rope_interpolation_scale",),
        ),
        "HunyuanVideoTransformer3DModel": Plan(
            inputs={"transformer_blocks.0": _JOINT},
            outputs={"rope": (TokenDim("image", 0), TokenDim("image", 0))},
            attention={
                f"{_BLOCKS}.attn": ("image", "text"),
                f"{_SINGLE_BLOCKS}.attn": ("image", "text"),
            },
            masks={_BLOCKS: "attention_mask", _SINGLE_BLOCKS: "attention_mask"},
            local=("context_embedder.token_refiner.refiner_blocks.*.attn",),
            whole=(
                *("hidden_states", "timestep", "encoder_hidden_states"),
                *("encoder_attention_mask", "pooled_projections", "guidance"),
            ),
            refused={"image_condition_type": "token_replace"},
        ),
        "CogVideoXTransformer3DModel": Plan(
            inputs={
                "": {"image_rotary_emb": TokenDim("image", 0)},
                "transformer_blocks.0": _JOINT,
            },
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=("hidden_states", "encoder_hidden_states", "timestep", "timestep_cond", "ofs"),
            unbatched=("image_rotary_emb", "ofs"),
        ),
        "SD3Transformer2DModel": Plan(
            inputs={},
            outputs={"pos_embed": (_IMAGE,), "context_embedder": (_TEXT,)},
            attention={f"{_BLOCKS}.attn": ("image", "text"), f"{_BLOCKS}.attn2": ("image",)},
            whole=(
                *("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"),
                "skip_layers",
            ),
            unbatched=("skip_layers",),
        ),
        "PixArtTransformer2DModel": Plan(
            inputs={},
            outputs={"pos_embed": (_IMAGE,)},
            attention={f"{_BLOCKS}.attn1": ("image",)},
            local=(f"{_BLOCKS}.attn2",),
            whole=(
                *("hidden_states", "encoder_hidden_states", "timestep", "added_cond_kwargs"),
                "encoder_attention_mask",
            ),
        ),
    }
)
