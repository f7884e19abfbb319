"""The classes of diffusion transformers that are served: one :class:`Plan` for each, which
``enable`` checks, and ``hooks.py`` and ``pass_state.py`` carry out in each pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import diffusers
from diffusers import ModelMixin
from torch import nn

from ds_usp.errors import ConfigError

Kind = Literal["image", "text", "joint", "audio", "reference"]
# The names of attention's projections of keys and values.
_KEYS = ("to_k", "to_v", "add_k_proj", "add_v_proj", "to_key", "to_value", "to_kv")


class Tokens(NamedTuple):
    """The kinds of tokens of an attention's queries and of its keys, in their order along dim 1."""

    queries: tuple[Kind, ...]
    keys: tuple[Kind, ...]


@dataclass(frozen=True)
class TokenDim:
    """The dim of a tensor along which its tokens lie.

    Args:
        kind: ``image`` (frames of a video too), ``text`` that takes part in the attention,
            ``audio``, ``reference``: images beside image and text, which a pass may be without, or
            ``joint``: image and text in one sequence, in which each sample may have an order of its
            own.
        dim: counted from the end if it is negative.
        ndim: only tensors of so many dims, or of one of these numbers, have tokens, and not if they
            have one for all; None: all tensors.
    """

    kind: Kind
    dim: int
    ndim: int | tuple[int, ...] | None = None


# Of a tensor, or of each entry of a tuple; None: that has no tokens.
Dims = TokenDim | tuple["Dims", ...] | None


# Note [why a plan of a class]
# Models of transformers take positions as an argument and hand keyword arguments to one attention
# interface; diffusers' classes do neither. Where a class makes positions, where text joins the
# image and which module has all tokens last is code of its own forward pass, and the classes differ
# in all three. So a plan says by modules' names where tokens are, enable checks that these exist
# and that no other module attends, and a class without a plan is refused: what comes out of shards
# that are computed as if they were all tokens may look right.
@dataclass(frozen=True)
class Plan:
    """The places where a class of transformers has tokens: what is sharded, attends, is joined.

    Modules are named by their path in the transformer, "" is itself, ``*`` every child and ``-1``
    the last one. A module that is None there (as an optional one) is left out.

    Args:
        inputs: by module, its arguments that are sharded when it is called: tensors, or tuples,
            lists and dictionaries of them; "" is the first one, for modules that LoRA wraps in
            others with other names.
        outputs: by module, the same for each of its outputs; None: it stays whole.
        attention: by attention module, its tokens in the order of its keys.
        keys: by attention module, the tokens of its keys if they are others than its queries'
            (cross-attention), which are those in ``attention``.
        local: the other attention modules, which are local to each rank: their keys are text that
            stays whole.
        masks: by module, its argument that marks padding of the text: 0 or False for padding, which
            comes last. Its last columns, or the first, are the text's, as in ``attention``, of
            which the first entry below the module counts.
        whole: arguments of the transformer that every rank takes whole. All but these, those of
            ``inputs``, the attention arguments' LoRA scale and ``adapters`` are refused.
        unbatched: those of all arguments that have no batch; the others have it as their dim 0.
        batched: an argument whose dim 0 is the batch, or that is a list of samples.
        zero_or_not: arguments of which the pass asks whether all samples are zero.
        all_real: arguments that are masks of image tokens: without any padding they are left out,
            else refused.
        shared_by_branches: for pipelines that call the transformer once for each branch of the
            guidance, the argument that is one and the same tensor in all calls of a step; None:
            calls never wait for each other. Such a class returns one tensor.
        joined: the module whose output becomes whole again: of ``joint`` tokens if the plan has
            them, else of the image's. What comes after it is computed with all tokens on each rank.
        joined_kinds: the tokens of each output of that module if it has several; None: it is left.
        joined_dim: the dim of the tokens of that output.
        also_joined: by module, the tokens of further outputs that become whole.
        gathered: by module within the transformer, the tokens of its output that become whole, as
            they are sharded otherwise afterwards.
        gathered_if: an argument of the transformer: passes that it is not given to leave out
            ``gathered`` and what is sharded again, ``inputs`` of ``joined``.
        whole_inputs: by module, its arguments that become whole before it is called: a module that
            mixes tokens. ``outputs`` shards what it returns.
        counts: by module, its whole numbers that say how many tokens come last, which become this
            rank's share of them.
        twice: the attention modules whose processors attend twice in a call.
        needs_mask: whether attention processors cannot do without the mask: they are given one that
            has no values (on the device ``meta``), and what they make of it is not looked at.
        added_products: whether a mask of floats is added to the scores, as the product of the
            query's and the key's number.
        adapters: keys of the attention arguments whose values are keys of their own for every
            image token (IP-Adapters); they stay whole.
        split: modules outside of the blocks that are given this rank's tokens: those that embed
            them, ``[b, tokens, c]``, or what conditions each, which may be ``[b * tokens, c]``.
            Their dropout, and that of their adapters, is this rank's own.
        conditions: modules within blocks that are given what conditions all tokens, and may have as
            many dims as tokens have.
        refused: by option of the configuration, the value that gives tokens a meaning by index.
    """

    inputs: Mapping[str, Mapping[str, Dims]]
    attention: Mapping[str, tuple[Kind, ...]]
    outputs: Mapping[str, tuple[TokenDim | None, ...]] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    joined: str = "proj_out"
    local: tuple[str, ...] = ()
    unbatched: tuple[str, ...] = ()
    refused: Mapping[str, Any] = field(default_factory=dict)
    gathered: Mapping[str, Kind] = field(default_factory=dict)
    gathered_if: str | None = None
    needs_mask: bool = False
    added_products: bool = False
    batched: str = "hidden_states"
    zero_or_not: tuple[str, ...] = ()
    all_real: tuple[str, ...] = ()
    keys: Mapping[str, Kind] = field(default_factory=dict)
    also_joined: Mapping[str, Kind] = field(default_factory=dict)
    shared_by_branches: str | None = None
    adapters: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    joined_kinds: tuple[Kind | None, ...] = ()
    joined_dim: int = 1
    whole_inputs: Mapping[str, Mapping[str, TokenDim]] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, Kind]] = field(default_factory=dict)
    twice: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()

    @property
    def tokens(self) -> Mapping[str, Tokens]:
        keys = {path: (kind,) for path, kind in self.keys.items()}
        return {path: Tokens(q, keys.get(path, q)) for path, q in self.attention.items()}

    @property
    def joins(self) -> Mapping[str, tuple[Kind | None, ...]]:
        """The kinds of tokens that are joined of each module's outputs."""
        last: Kind = "joint" if ("joint",) in self.attention.values() else "image"
        also = {path: (kind,) for path, kind in self.also_joined.items()}
        return {self.joined: self.joined_kinds or (last,), **also}

    def order_of_mask(self, path: str) -> tuple[Kind, ...]:
        """The tokens of the keys that the mask at a module is of."""
        orders = [order for name, order in self.attention.items() if name.startswith(path)]
        return (orders or list(self.attention.values()))[0]

    @property
    def arguments(self) -> frozenset[str]:
        return frozenset({*self.whole, *self.inputs.get("", ())})

    def given_tokens(self, transformer: nn.Module) -> dict[nn.Module, bool]:
        """Return the modules whose inputs are this rank's tokens: blocks, what ``inputs`` and
        ``joined`` name, and ``split``; with True if its input may be ``[b * tokens, c]``."""
        blocks = [path.rpartition(".")[0] or path for path in self.attention]
        named = [path for path in (*blocks, *self.inputs, *self.also_joined, self.joined) if path]
        may_be_flat: dict[nn.Module, bool] = {}
        for path in (*named, *self.split):
            for module in modules_at(transformer, path, optional=True):
                may_be_flat |= dict.fromkeys(module.modules(), path in self.split)
        local = [x for path in self.local for x in modules_at(transformer, path, optional=True)]
        keys = [getattr(module, name, None) for module in local for name in _KEYS]
        keys += [module for path in self.conditions for module in modules_at(transformer, path)]
        whole = {x for module in keys if module is not None for x in module.modules()}
        return {module: flat for module, flat in may_be_flat.items() if module not in whole}

    def check(self, transformer: ModelMixin) -> None:
        """ConfigError for a module, argument or option that the transformer lacks, and attention
        modules beside the plan's. In ``enable``, and before a pass if modules were replaced."""
        named: dict[str, tuple[str, ...]] = {}
        taken = *self.inputs.items(), *self.whole_inputs.items(), *self.counts.items()
        for path, its_arguments in (*taken, *((path, (x,)) for path, x in self.masks.items())):
            named[path] = (*named.get(path, ()), *its_arguments)
        shared = (self.shared_by_branches,) if self.shared_by_branches else ()
        named[""] = (
            *named.get("", ()),
            *(*self.whole, *self.unbatched, *self.zero_or_not, *self.all_real, *shared),
        )
        for path, arguments in named.items():
            for module in modules_at(transformer, path):
                missing = [x for x in arguments if x and x not in parameters_of(module)]
                if missing:
                    raise _differs(
                        transformer, f"{path or 'the transformer'} takes no {', '.join(missing)}"
                    )
        for path in (*self.attention, *self.keys):
            for module in modules_at(transformer, path):
                if not hasattr(module, "processor"):
                    raise _differs(transformer, f"{path} has no attention processor")
        self._check_attention(transformer)
        named_only = *self.split, *self.conditions
        for path in (*self.outputs, *self.gathered, *self.also_joined, *named_only, self.joined):
            if not list(modules_at(transformer, path)) and path not in self.outputs:
                raise _differs(transformer, f"there is no module {path}")
        for option in self.refused:
            if option not in transformer.config:
                raise _differs(transformer, f"the configuration has no option {option}")

    def _check_attention(self, transformer: ModelMixin) -> None:
        planned_ids = {
            id(module)
            for path in (*self.attention, *self.local)
            for module in modules_at(transformer, path, optional=path in self.local)
        }
        for name, module in transformer.named_modules():
            if getattr(module, "processor", None) is not None and id(module) not in planned_ids:
                raise _differs(
                    transformer,
                    f"{name} is an attention module that it names neither in attention nor in "
                    "local, and would attend to the tokens of a shard only",
                )


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's arguments in order, of its class even if ``forward`` is replaced."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def modules_at(transformer: nn.Module, path: str, optional: bool = False) -> Iterator[nn.Module]:
    """Yield the modules that a path of a :class:`Plan` names, none under what is None or empty;
    ConfigError, when the first is asked for, if a name is missing and it is not optional."""
    modules: list[Any] = [transformer]
    for part in path.split(".") if path else ():
        if part == "*":
            modules = [child for module in modules for child in module.children()]
            continue
        if part == "-1":
            modules = [child for module in modules for child in list(module.children())[-1:]]
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


_IMAGE, _TEXT, _SEQUENCE = (TokenDim(kind, 1) for kind in ("image", "text", "joint"))
_JOINT: Mapping[str, TokenDim] = MappingProxyType(
    {"hidden_states": _IMAGE, "encoder_hidden_states": _TEXT}
)
_IMAGE_ROW, _SEQUENCE_ROW = TokenDim("image", 0), TokenDim("joint", 0)
_IMAGE_ROWS, _SEQUENCE_ROWS = (_IMAGE_ROW, _IMAGE_ROW), (_SEQUENCE_ROW, _SEQUENCE_ROW)
_IMAGE_IN: Mapping[str, TokenDim] = MappingProxyType({"hidden_states": _IMAGE})
_SEQUENCE_IN: Mapping[str, TokenDim] = MappingProxyType({"hidden_states": _SEQUENCE})
_TEXT_ROWS = TokenDim("text", 0), TokenDim("text", 0)
_PACKED = (
    *("timestep_indices", "token_tags", "position_ids"),
    *("video_indices", "audio_indices", "text_indices"),
)
_OPTIONAL_IMAGE = TokenDim("image", 1, ndim=2)
_IMAGE_TIMESTEP = TokenDim("image", 1, ndim=3)
_BLOCKS, _SINGLE_BLOCKS = "transformer_blocks.*", "single_transformer_blocks.*"
_FIRST_BLOCK, _LAST_BLOCK = "transformer_blocks.0", "transformer_blocks.-1"
_USUAL = "hidden_states", "encoder_hidden_states", "timestep"
_KANDINSKY = "visual_transformer_blocks.*"


def _with_audio(image: str, audio: str, to_image: str, to_audio: str) -> dict[str, Any]:
    """Return the attention of image and of audio, each to itself and to the other's keys."""
    of_image = dict.fromkeys((image, to_image), ("image",))
    of_audio = dict.fromkeys((audio, to_audio), ("audio",))
    return {"attention": of_image | of_audio, "keys": {to_image: "audio", to_audio: "image"}}


def _with_text(blocks: str) -> dict[str, Any]:
    """Return the attention of the image to itself, ``attn1``, and that to whole text, ``attn2``."""
    return {"attention": {f"{blocks}.attn1": ("image",)}, "local": (f"{blocks}.attn2",)}


_FLUX = Plan(
    inputs={"": {**_JOINT, "img_ids": TokenDim("image", -2), "txt_ids": TokenDim("text", -2)}},
    attention={f"{_BLOCKS}.attn": ("text", "image"), f"{_SINGLE_BLOCKS}.attn": ("text", "image")},
    whole=("timestep", "guidance", "pooled_projections"),
    unbatched=("img_ids", "txt_ids"),
    shared_by_branches="hidden_states",
    split=("x_embedder", "context_embedder"),
)
# A ControlNet's, one tensor for some blocks: of all image tokens, in their order.
_RESIDUALS = dict.fromkeys(("controlnet_block_samples", "controlnet_single_block_samples"), _IMAGE)
_FLUX_CONTROLLED = replace(_FLUX, inputs={"": {**_FLUX.inputs[""], **_RESIDUALS}})
_WAN = Plan(
    inputs={
        "": {"timestep": _OPTIONAL_IMAGE},  # Wan 2.2: one for each token
        "blocks.0": {"hidden_states": _IMAGE},
    },
    outputs={"rope": (_IMAGE, _IMAGE)},
    **_with_text("blocks.*"),
    whole=("hidden_states", "encoder_hidden_states", "encoder_hidden_states_image"),
    shared_by_branches="hidden_states",
    split=("condition_embedder.time_embedder", "condition_embedder.time_proj"),
)
_HUNYUAN = Plan(
    inputs={_FIRST_BLOCK: _JOINT},
    outputs={"rope": _IMAGE_ROWS},
    attention={f"{_BLOCKS}.attn": ("image", "text"), f"{_SINGLE_BLOCKS}.attn": ("image", "text")},
    masks={_BLOCKS: "attention_mask", _SINGLE_BLOCKS: "attention_mask"},
    local=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    whole=(*_USUAL, "encoder_attention_mask", "pooled_projections", "guidance"),
    shared_by_branches="hidden_states",
)
_TWO_TEXTS = (
    *(*_USUAL, "timestep_r", "encoder_attention_mask"),
    *("encoder_hidden_states_2", "encoder_attention_mask_2"),
)
PLANS: Mapping[str, Plan] = MappingProxyType(
    {
        "FluxTransformer2DModel": replace(
            _FLUX_CONTROLLED,
            whole=(*_FLUX.whole, "controlnet_blocks_repeat"),
            adapters=("ip_adapter_image_embeds",),
        ),
        "Flux2Transformer2DModel": replace(_FLUX, whole=("timestep", "guidance")),
        "WanTransformer3DModel": _WAN,
        "WanVACETransformer3DModel": replace(
            _WAN,
            inputs={
                "vace_blocks.*": {"hidden_states": _IMAGE},
                "vace_blocks.0": {"control_hidden_states": _IMAGE},
                "blocks.0": {"hidden_states": _IMAGE},
            },
            attention={"vace_blocks.*.attn1": ("image",), "blocks.*.attn1": ("image",)},
            local=("vace_blocks.*.attn2", "blocks.*.attn2"),
            whole=(
                *(*_WAN.whole, "timestep", "control_hidden_states"),
                "control_hidden_states_scale",
            ),
            unbatched=("control_hidden_states_scale",),
        ),
        "QwenImageTransformer2DModel": Plan(
            inputs={
                "": {"hidden_states": _IMAGE, "controlnet_block_samples": _IMAGE},
                _FIRST_BLOCK: {"encoder_hidden_states": _TEXT},
                _BLOCKS: {"modulate_index": _OPTIONAL_IMAGE},
            },
            outputs={"pos_embed": (TokenDim("image", 0), TokenDim("text", 0))},
            attention={f"{_BLOCKS}.attn": ("text", "image")},
            masks={_BLOCKS: "encoder_hidden_states_mask"},
            whole=(
                *("encoder_hidden_states", "encoder_hidden_states_mask", "timestep"),
                *("img_shapes", "guidance", "additional_t_cond"),
            ),
            shared_by_branches="hidden_states",
            split=("img_in",),
        ),
        "LTXVideoTransformer3DModel": Plan(
            inputs={"": {"hidden_states": _IMAGE, "timestep": TokenDim("image", 1, ndim=(2, 3))}},
            outputs={"rope": (_IMAGE, _IMAGE)},
            **_with_text(_BLOCKS),
            whole=(
                *("encoder_hidden_states", "encoder_attention_mask", "num_frames", "height"),
                *("width", "rope_interpolation_scale", "video_coords"),
            ),
            unbatched=("rope_interpolation_scale",),
            split=("proj_in", "time_embed"),
        ),
        "HunyuanVideoTransformer3DModel": replace(
            _HUNYUAN, refused={"image_condition_type": "token_replace"}
        ),
        "CogVideoXTransformer3DModel": Plan(
            inputs={"": {"image_rotary_emb": TokenDim("image", 0)}, _FIRST_BLOCK: _JOINT},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=(*_USUAL, "timestep_cond", "ofs"),
            unbatched=("image_rotary_emb", "ofs"),
        ),
        "SD3Transformer2DModel": Plan(
            inputs={"": {"block_controlnet_hidden_states": _IMAGE}},
            outputs={"pos_embed": (_IMAGE,), "context_embedder": (_TEXT,)},
            attention={f"{_BLOCKS}.attn": ("image", "text"), f"{_BLOCKS}.attn2": ("image",)},
            whole=(*_USUAL, "pooled_projections", "skip_layers"),
            unbatched=("skip_layers",),
        ),
        "PixArtTransformer2DModel": Plan(
            inputs={},
            outputs={"pos_embed": (_IMAGE,)},
            **_with_text(_BLOCKS),
            whole=(*_USUAL, "added_cond_kwargs", "encoder_attention_mask"),
        ),
        "ChromaTransformer2DModel": replace(
            _FLUX_CONTROLLED,
            masks={_BLOCKS: "attention_mask", _SINGLE_BLOCKS: "attention_mask"},
            whole=("timestep", "attention_mask", "controlnet_blocks_repeat"),
            added_products=True,
        ),
        "Flux3Transformer2DModel": Plan(
            inputs={
                "": {
                    **_FLUX.inputs[""],
                    "image_cond_hidden_states": TokenDim("reference", 1),
                    "image_cond_ids": TokenDim("reference", -2),
                }
            },
            attention={
                "txt_mode_blocks.*.attn": ("text",),
                "mode_blocks.image.*.attn": ("image",),
                "mode_blocks.image_cond.*.attn": ("reference",),
                f"{_SINGLE_BLOCKS}.attn": ("text", "image", "reference"),
            },
            whole=("timestep", "target_timestep"),
            unbatched=(*_FLUX.unbatched, "image_cond_ids"),
            split=(
                *("x_embedders", "context_embedder", "norm_out"),
                *("early_stream_modulations", "single_stream_modulations"),
            ),
        ),
        "HunyuanImageTransformer2DModel": replace(_HUNYUAN, whole=(*_TWO_TEXTS, "guidance")),
        "CogView4Transformer2DModel": Plan(
            inputs={},
            outputs={"rope": _IMAGE_ROWS, "patch_embed": (_IMAGE, _TEXT)},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=(*_USUAL, "original_size", "target_size", "crop_coords"),
            shared_by_branches="hidden_states",
        ),
        "CosmosTransformer3DModel": Plan(
            inputs={
                "": {"block_controlnet_hidden_states": _IMAGE},
                _FIRST_BLOCK: {"hidden_states": _IMAGE},
                # One for each token where it is one for each frame.
                _BLOCKS: {"embedded_timestep": _IMAGE_TIMESTEP, "temb": _IMAGE_TIMESTEP},
                "norm_out": {"embedded_timestep": _IMAGE_TIMESTEP, "temb": _IMAGE_TIMESTEP},
            },
            outputs={"rope": _IMAGE_ROWS, "learnable_pos_embed": (_IMAGE,)},
            **_with_text(_BLOCKS),
            whole=(*_USUAL, "attention_mask", "fps", "condition_mask", "padding_mask"),
            shared_by_branches="hidden_states",
        ),
        "SkyReelsV2Transformer3DModel": replace(
            _WAN,
            inputs={
                "blocks.0": {"hidden_states": _IMAGE},
                "blocks.*": {"temb": TokenDim("image", 2, ndim=4)},  # one for each token
                "proj_out": {"": _IMAGE},
            },
            whole=(*_WAN.whole, "timestep", "fps", "enable_diffusion_forcing"),
            unbatched=("fps",),
            # Which scales the last norm's output by what was made of whole frames.
            gathered={"norm_out": "image"},
            gathered_if="enable_diffusion_forcing",
        ),
        "ChronoEditTransformer3DModel": _WAN,
        "AuraFlowTransformer2DModel": Plan(
            inputs={"joint_transformer_blocks.0": _JOINT},
            attention={
                "joint_transformer_blocks.*.attn": ("text", "image"),
                f"{_SINGLE_BLOCKS}.attn": ("text", "image"),
            },
            whole=_USUAL,
        ),
        "LongCatImageTransformer2DModel": replace(_FLUX, whole=("timestep", "guidance")),
        "OvisImageTransformer2DModel": replace(_FLUX, whole=("timestep",)),
        # diffusers adds the single blocks' residuals from the text's length on.
        "BriaTransformer2DModel": replace(
            _FLUX, inputs={"": {**_FLUX.inputs[""], "controlnet_block_samples": _IMAGE}}
        ),
        "ZImageTransformer2DModel": Plan(
            inputs={
                "": {"controlnet_block_samples": _SEQUENCE},
                "noise_refiner.0": {"x": _IMAGE},
                "noise_refiner.*": {"freqs_cis": _IMAGE},
                "layers.0": {"x": _SEQUENCE},
                "layers.*": {"freqs_cis": _SEQUENCE},
            },
            attention={"noise_refiner.*.attention": ("image",), "layers.*.attention": ("joint",)},
            local=("context_refiner.*.attention", "siglip_refiner.*.attention"),
            masks={"layers.*": "attn_mask"},
            whole=("x", "t", "cap_feats", "patch_size", "f_patch_size"),
            batched="x",
            gathered={"noise_refiner.-1": "image"},
            joined="all_final_layer.*",
        ),
        "Lumina2Transformer2DModel": Plan(
            inputs={
                "noise_refiner.0": {"hidden_states": _IMAGE},
                "noise_refiner.*": {"image_rotary_emb": _IMAGE},
                "layers.0": {"hidden_states": _SEQUENCE},
                "layers.*": {"image_rotary_emb": _SEQUENCE},
            },
            attention={"noise_refiner.*.attn": ("image",), "layers.*.attn": ("joint",)},
            local=("context_refiner.*.attn",),
            masks={"layers.*": "attention_mask"},
            whole=(*_USUAL, "encoder_attention_mask"),
            gathered={"noise_refiner.-1": "image"},
            joined="norm_out",
            shared_by_branches="hidden_states",
        ),
        "LTX2VideoTransformer3DModel": Plan(
            inputs={
                "": {
                    "hidden_states": _IMAGE,
                    "timestep": _OPTIONAL_IMAGE,
                    "video_keyframes_mask": _IMAGE,
                    "audio_hidden_states": TokenDim("audio", 1),
                    "audio_timestep": TokenDim("audio", 1, ndim=2),
                }
            },
            outputs={
                "rope": (TokenDim("image", -2),) * 2,
                "cross_attn_rope": (TokenDim("image", -2),) * 2,
                "audio_rope": (TokenDim("audio", -2),) * 2,
                "cross_attn_audio_rope": (TokenDim("audio", -2),) * 2,
            },
            **_with_audio(
                *(f"{_BLOCKS}.{x}attn1" for x in ("", "audio_")),
                *(f"{_BLOCKS}.{x}_attn" for x in ("audio_to_video", "video_to_audio")),
            ),
            local=(f"{_BLOCKS}.attn2", f"{_BLOCKS}.audio_attn2"),
            whole=(
                *("encoder_hidden_states", "audio_encoder_hidden_states", "encoder_attention_mask"),
                *("audio_encoder_attention_mask", "sigma", "audio_sigma", "num_frames", "height"),
                *("width", "fps", "audio_num_frames", "video_coords", "audio_coords"),
                *("isolate_modalities", "use_cross_timestep"),
                *("spatio_temporal_guidance_blocks", "perturbation_mask"),
            ),
            unbatched=("spatio_temporal_guidance_blocks",),
            also_joined={"audio_proj_out": "audio"},
            split=(
                *("proj_in", "audio_proj_in", "time_embed", "audio_time_embed"),
                *("av_cross_attn_video_scale_shift", "av_cross_attn_video_a2v_gate"),
                *("av_cross_attn_audio_scale_shift", "av_cross_attn_audio_v2a_gate"),
            ),
        ),
        "HunyuanVideo15Transformer3DModel": replace(
            _HUNYUAN,
            attention={f"{_BLOCKS}.attn": ("image", "text")},
            masks={_BLOCKS: "attention_mask"},
            needs_mask=True,
            whole=(*_TWO_TEXTS, "image_embeds"),
            zero_or_not=("image_embeds",),
        ),
        "Krea2Transformer2DModel": Plan(
            inputs={_FIRST_BLOCK: _SEQUENCE_IN},
            outputs={"rotary_emb": _SEQUENCE_ROWS},
            attention={f"{_BLOCKS}.attn": ("joint",)},
            local=("text_fusion.layerwise_blocks.*.attn", "text_fusion.refiner_blocks.*.attn"),
            masks={_BLOCKS: "attention_mask"},
            whole=(*_USUAL, "position_ids", "encoder_attention_mask"),
            unbatched=("position_ids",),
            joined=_LAST_BLOCK,
            shared_by_branches="hidden_states",
        ),
        "CogView3PlusTransformer2DModel": Plan(
            inputs={_FIRST_BLOCK: _JOINT},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=(*_USUAL, "original_size", "target_size", "crop_coords"),
        ),
        "ErnieImageTransformer2DModel": Plan(  # [tokens, b, c]
            inputs={
                "layers.0": {"x": _SEQUENCE_ROW},
                "layers.*": {"rotary_pos_emb": _SEQUENCE, "temb": _SEQUENCE_ROW},
            },
            attention={"layers.*.self_attention": ("joint",)},
            masks={"layers.*": "attention_mask"},
            whole=("hidden_states", "timestep", "text_bth", "text_lens"),
            joined="layers.-1",
            joined_dim=0,
        ),
        "Ideogram4Transformer2DModel": Plan(
            inputs={"layers.0": _SEQUENCE_IN},
            outputs={"rotary_emb": (_SEQUENCE, _SEQUENCE)},
            attention={"layers.*.attention": ("joint",)},
            masks={"layers.*": "attention_mask"},
            conditions=("layers.*.adaln_modulation",),
            whole=(*_USUAL, "position_ids", "segment_ids", "indicator"),
            joined="layers.-1",
        ),
        "MiniMaxH3Transformer3DModel": Plan(
            inputs={
                _FIRST_BLOCK: _SEQUENCE_IN,
                _BLOCKS: {"adaln_indices": _SEQUENCE_ROW},
                "norm_out": {"timestep_indices": _SEQUENCE_ROW},
            },
            outputs={"rope": _SEQUENCE_ROWS},
            attention={f"{_BLOCKS}.attn": ("joint",)},
            local=("token_refiner.refiner_blocks.*.attn",),
            whole=(*_USUAL, "audio_hidden_states", *_PACKED),
            unbatched=("timestep", *_PACKED),
            also_joined={"audio_proj_out": "joint"},
        ),
        "Kandinsky6Transformer3DModel": Plan(
            inputs={
                "visual_transformer_blocks.0": {"vis": _IMAGE, "aud": TokenDim("audio", 1)},
                _KANDINSKY: {"vis_rope": _IMAGE_ROW, "aud_rope": TokenDim("audio", 0)},
            },
            **_with_audio(
                *(f"{_KANDINSKY}.{x}_dec_block.self_attention" for x in ("video", "audio")),
                *(f"{_KANDINSKY}.{x}_cross_attention" for x in ("va", "av")),
            ),
            local=(
                *(f"{_KANDINSKY}.{x}_dec_block.cross_attention" for x in ("video", "audio")),
                *(f"{x}_text_transformer_blocks.*.attn" for x in ("video", "audio")),
            ),
            whole=(
                *(*_USUAL, "pooled_projections", "audio_hidden_states", "visual_rope_pos"),
                *("encoder_attention_mask", "visual_token_type_ids"),
            ),
            unbatched=("visual_rope_pos",),
            joined="visual_transformer_blocks.-1",
            joined_kinds=("image", "audio"),
        ),
        "GlmImageTransformer2DModel": Plan(
            inputs={"": {"image_rotary_emb": _IMAGE_ROW}, _FIRST_BLOCK: _JOINT},
            outputs={"rope": _IMAGE_ROWS},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=(*_USUAL, "prior_token_id", "prior_token_drop", "target_size", "crop_coords"),
            unbatched=("image_rotary_emb",),
            shared_by_branches="hidden_states",
        ),
        "BriaFiboTransformer2DModel": replace(
            _FLUX,
            inputs={"": {**_FLUX.inputs[""], "text_encoder_layers": _TEXT}},
            split=(*_FLUX.split, "caption_projection"),
        ),
        "BriaFibo2Transformer2DModel": Plan(
            inputs={
                "noise_refiner.0": {"x": _IMAGE},
                "noise_refiner.*": {"freqs_cis": _IMAGE, "noise_mask": _IMAGE},
                "layers.0": {"x": _SEQUENCE},
                "layers.*": {"freqs_cis": _SEQUENCE, "noise_mask": _SEQUENCE},
            },
            attention={"noise_refiner.*.attention": ("image",), "layers.*.attention": ("joint",)},
            local=(
                *("layers.*.cross_attention", "perceiver.layers.*.cross_attention"),
                "perceiver.layers.*.self_attention",
            ),
            masks={"layers.*": "attn_mask"},
            whole=(*_USUAL, "encoder_attention_mask", "context_latents"),
            gathered={"noise_refiner.-1": "image"},
            joined="layers.-1",
        ),
        "WanAnimateTransformer3DModel": replace(
            _WAN,
            inputs={"blocks.0": _IMAGE_IN},
            outputs={**_WAN.outputs, "face_adapter.*": (_IMAGE,)},
            # Attends to the face of each frame, for which it knows tokens by their index.
            whole_inputs={"face_adapter.*": _IMAGE_IN},
            local=(*_WAN.local, "face_adapter.*"),
            whole=(
                *(*_WAN.whole, "timestep", "pose_hidden_states", "face_pixel_values"),
                "motion_encode_batch_size",
            ),
            unbatched=("motion_encode_batch_size",),
        ),
        "HeliosTransformer3DModel": Plan(
            inputs={
                "blocks.0": _SEQUENCE_IN,
                "blocks.*": {"rotary_emb": _SEQUENCE, "temb": _SEQUENCE},
            },
            attention={"blocks.*.attn1": ("joint",)},
            local=("blocks.*.attn2",),
            counts={"blocks.*": {"original_context_length": "joint"}},
            whole=(
                *(*_USUAL, "indices_hidden_states"),
                *(f"indices_latents_history_{x}" for x in ("short", "mid", "long")),
                *(f"latents_history_{x}" for x in ("short", "mid", "long")),
            ),
            joined="blocks.-1",
            shared_by_branches="hidden_states",
        ),
        "HunyuanVideoFramepackTransformer3DModel": replace(
            _HUNYUAN,
            inputs={
                _FIRST_BLOCK: _JOINT,
                _BLOCKS: {"freqs_cis": _IMAGE_ROW},
                _SINGLE_BLOCKS: {"image_rotary_emb": _IMAGE_ROW},
            },
            outputs={},
            whole=(
                *(*_HUNYUAN.whole, "image_embeds", "indices_latents"),
                *("latents_clean", "indices_latents_clean"),
                *("latents_history_2x", "indices_latents_history_2x"),
                *("latents_history_4x", "indices_latents_history_4x"),
            ),
            joined="single_transformer_blocks.-1",
            joined_kinds=("image", "text"),
            refused={"has_clean_x_embedder": False},
        ),
        "StableAudioDiTModel": Plan(
            inputs={"": {"rotary_embedding": _IMAGE_ROW}, _FIRST_BLOCK: _IMAGE_IN},
            **_with_text(_BLOCKS),
            whole=(*_USUAL, "global_hidden_states", "encoder_attention_mask"),
            unbatched=("rotary_embedding",),
        ),
        "StableAudio3DiTModel": Plan(
            inputs={_FIRST_BLOCK: _IMAGE_IN},
            outputs={"rotary_pos_emb": (_IMAGE_ROW,)},
            attention={f"{_BLOCKS}.self_attn": ("image",)},
            local=(f"{_BLOCKS}.cross_attn",),
            whole=(*_USUAL, "global_hidden_states", "encoder_attention_mask"),
            twice=(f"{_BLOCKS}.self_attn",),
            joined=_LAST_BLOCK,
        ),
        "MiniMaxMusic3Transformer1DModel": Plan(
            inputs={_FIRST_BLOCK: _IMAGE_IN},
            outputs={"rotary_emb": _IMAGE_ROWS},
            attention={f"{_BLOCKS}.attn": ("image",)},
            whole=_USUAL,
            joined=_LAST_BLOCK,
        ),
        "LongCatAudioDiTTransformer": Plan(
            inputs={"blocks.0": _IMAGE_IN, "blocks.*": {"rope": _IMAGE_ROW}},
            attention={"blocks.*.self_attn": ("image",)},
            local=("blocks.*.cross_attn",),
            whole=(*_USUAL, "encoder_attention_mask", "latent_cond", "attention_mask"),
            all_real=("attention_mask",),
            joined="blocks.-1",
        ),
        "MotifVideoTransformer3DModel": replace(
            _HUNYUAN,
            local=(),
            whole=(*_USUAL, "encoder_attention_mask"),
            attention={
                **_HUNYUAN.attention,
                f"{_BLOCKS}.cross_attn": ("image",),
                f"{_SINGLE_BLOCKS}.cross_attn": ("image",),
            },
            keys={f"{_BLOCKS}.cross_attn": "text", f"{_SINGLE_BLOCKS}.cross_attn": "text"},
        ),
        "JoyImageEditTransformer3DModel": Plan(
            inputs={
                "double_blocks.0": _JOINT,
                "double_blocks.*": {"image_rotary_emb": (_IMAGE_ROWS, _TEXT_ROWS)},
            },
            attention={"double_blocks.*.attn": ("image", "text")},
            whole=_USUAL,
        ),
        "HunyuanDiT2DModel": Plan(
            inputs={"": {"image_rotary_emb": _IMAGE_ROW, "controlnet_block_samples": _IMAGE}},
            outputs={"pos_embed": (_IMAGE,)},
            **_with_text("blocks.*"),
            whole=(
                *(*_USUAL, "text_embedding_mask", "encoder_hidden_states_t5"),
                *("text_embedding_mask_t5", "image_meta_size", "style"),
            ),
            unbatched=("image_rotary_emb",),
        ),
        "EasyAnimateTransformer3DModel": Plan(
            inputs={_FIRST_BLOCK: _JOINT},
            outputs={"rope_embedding": _IMAGE_ROWS},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=(
                *(*_USUAL, "timestep_cond", "encoder_hidden_states_t5"),
                *("inpaint_latents", "control_latents"),
            ),
        ),
        "LuminaNextDiT2DModel": Plan(
            inputs={},
            outputs={"patch_embedder": (_IMAGE, None, None, _IMAGE)},
            **_with_text("layers.*"),
            masks={"layers.*": "attention_mask"},
            needs_mask=True,
            whole=(*_USUAL, "encoder_mask", "image_rotary_emb"),
            unbatched=("image_rotary_emb",),
            joined="norm_out",
        ),
        "DiTTransformer2DModel": Plan(
            inputs={},
            outputs={"pos_embed": (_IMAGE,)},
            attention={f"{_BLOCKS}.attn1": ("image",)},
            whole=("hidden_states", "timestep", "class_labels"),
            joined="proj_out_2",
        ),
        "AllegroTransformer3DModel": Plan(
            # Tables of rotations, and each token's rows of them.
            inputs={
                "": {"image_rotary_emb": (None, TokenDim("image", -1))},
                _FIRST_BLOCK: _IMAGE_IN,
            },
            **_with_text(_BLOCKS),
            whole=(*_USUAL, "encoder_attention_mask"),
            unbatched=("image_rotary_emb",),
        ),
        "AnyFlowTransformer3DModel": Plan(
            inputs={
                "blocks.0": _IMAGE_IN,
                "blocks.*": {"rotary_emb": TokenDim("image", 2), "temb": _IMAGE},
            },
            **_with_text("blocks.*"),
            whole=(*_USUAL, "r_timestep", "encoder_hidden_states_image"),
            joined="blocks.-1",
            shared_by_branches="hidden_states",
        ),
        "ConsisIDTransformer3DModel": Plan(
            inputs={"": {"image_rotary_emb": _IMAGE_ROW}, _FIRST_BLOCK: _JOINT},
            attention={f"{_BLOCKS}.attn1": ("text", "image")},
            whole=(*_USUAL, "timestep_cond", "id_cond", "id_vit_hidden"),
            unbatched=("image_rotary_emb",),
            split=("perceiver_cross_attention.*.to_q", "perceiver_cross_attention.*.to_out"),
            joined=_LAST_BLOCK,
            joined_kinds=("image", "text"),
        ),
        "DreamLiteTransformer2DModel": Plan(
            inputs={_FIRST_BLOCK: _IMAGE_IN},
            **_with_text(_BLOCKS),
            whole=(*_USUAL, "class_labels", "added_cond_kwargs", "encoder_attention_mask"),
            joined=_LAST_BLOCK,
        ),
    }
)

# The other classes of diffusers, and why none of them has a plan.
WITHOUT_PLAN: Mapping[str, str] = MappingProxyType(
    {
        "Cosmos3OmniTransformer": "attends causally to text, and again to text and image",
        "WanAnimate2Transformer3DModel": "a cache of keys, and a block mask of FlexAttention",
        "SanaWMTransformer3DModel": "recurrent attention, and convolutions over the grid of tokens",
        "SanaWMLTX2RefinerTransformer3DModel": "a cache of keys of earlier frames",
        "SanaTransformer2DModel": "linear attention, and a convolution over the grid of tokens",
        "SanaVideoTransformer3DModel": "linear attention, and convolutions over the grid of tokens",
        "Kandinsky6SRTransformer3DModel": "attention to blocks chosen from all queries and keys",
        "Kandinsky5Transformer3DModel": "rounds queries and keys to bf16 in fp32 passes too, so no "
        "pass could be compared to 1e-5",
        "QwenImage21Transformer2DModel": "attention is causal between images",
        "AnyFlowFARTransformer3DModel": "attention is causal between frames, with a cache of keys",
        "JoyImageEditPlusTransformer3DModel": "pads the images of a batch, each to its own length",
        "NucleusMoEImageTransformer2DModel": "experts choose their tokens among all of the image",
        "AceStepTransformer1DModel": "every second layer attends within a window",
        "PRXTransformer2DModel": "the image attends to text that is no query itself",
        "OmniGenTransformer2DModel": "a mask of any shape over text, which is causal, and images",
        "HiDreamImageTransformer2DModel": "every block joins other text to the tokens",
        "MochiTransformer3DModel": "attention runs for one sample at a time, over its real text",
        "LatteTransformer3DModel": "blocks attend over space and over time by turns",
        "RFD4ProteinaTransformer": "a bias of its own for each pair of tokens",
        "PriorTransformer": "attention is causal, over some 80 tokens",
        "TransformerTemporalModel": "its tokens are frames, of one position at a time",
        "Transformer2DModel": "it is several classes by its options, and a part of UNets",
        "T5FilmDecoder": "a decoder of spectrograms of a few hundred tokens",
        "MiniMaxMusic3RVQDepthDecoder": "a causal decoder of the codes of one frame",
    }
)
