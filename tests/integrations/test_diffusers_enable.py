"""``enable`` of diffusers by itself, on one rank: what it refuses, what it leaves behind."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from model_runs import relative
from tiny_diffusers import CLASSES, arguments, build, flux_pipeline, output_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel

import ds_usp
from ds_usp import ConfigError, USPError
from ds_usp import UnsupportedAttentionError as Unsupported
from ds_usp.integrations.diffusers import PLANS, Plan, TokenDim, enable
from ds_usp.integrations.diffusers.hooks import check_attention
from ds_usp.integrations.diffusers.pass_state import Options, PassState
from ds_usp.integrations.diffusers.plans import Tokens
from ds_usp.integrations.diffusers.processor import AttentionMode
from ds_usp.integrations.replicas import ValuesComparison

FLUX, WAN, PIXART = "FluxTransformer2DModel", "WanTransformer3DModel", "PixArtTransformer2DModel"
MESH = ds_usp.SequenceMesh.single()


@pytest.mark.parametrize("gradients", [False, True])
def test_a_shard_of_an_argument_is_a_view_where_nothing_keeps_it(gradients):
    """The caller holds the whole tensor anyway; backward would keep it longer than its shard."""
    values = ValuesComparison()
    attentions = frozenset({Tokens(("image",), ("image",))})
    state = PassState("model", MESH, Options(), attentions, values)
    x, image = torch.randn(1, 6, 4), TokenDim("image", 1)
    storage = x.untyped_storage().data_ptr()
    with torch.set_grad_enabled(gradients):
        for value, argument in ((x, True), (x, False), (x.mT.contiguous().mT, True)):
            shard = state.shard(value, image, argument=argument)
            assert torch.equal(shard, x) and shard.is_contiguous()
            shared = shard.untyped_storage().data_ptr() == storage
            assert shared == (argument and value is x and not gradients)


def hooks_of(transformer: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in transformer.modules())


@pytest.mark.parametrize("name", CLASSES)
def test_no_processor_needs_a_mode_and_disable_leaves_the_transformer_as_it_was(name):
    transformer, given = build(name), arguments(name, padded=True)
    before = output_of(transformer, given)
    processors = {m: m.processor for m in transformer.modules() if hasattr(m, "processor")}
    attributes = {m: set(vars(m)) for m in transformer.modules()}
    with enable(transformer, MESH) as enabled:
        assert enabled.transformers == (transformer,)
        assert hooks_of(transformer) > 0
        # A mode costs microseconds for every function of torch; compiled models alone take it.
        with mock.patch.object(AttentionMode, "__enter__", side_effect=AssertionError):
            assert relative(output_of(transformer, given), before) < 1e-6
    assert enabled.transformers == () and hooks_of(transformer) == 0
    assert all(m.processor is processor for m, processor in processors.items())
    assert all(set(vars(m)) == attributes[m] for m in transformer.modules())
    assert torch.equal(output_of(transformer, given), before)


def test_a_pipeline_is_restored_where_its_second_transformer_is_refused():
    pipeline, _ = flux_pipeline()
    pipeline.transformer_2 = build(WAN)
    pipeline.transformer_2.blocks[0].attn1.processor._attention_backend = "flash"
    with pytest.raises(Unsupported, match="'flash'"):
        enable(pipeline, MESH)
    assert hooks_of(pipeline.transformer) == 0


# ------------------------------------------------------------------ refused by enable


class IPAdapterAttnProcessor:
    def __call__(self, *_: Any) -> Any: ...


def with_an_ip_adapter() -> Any:
    transformer = build(FLUX)
    transformer.transformer_blocks[0].attn.processor = IPAdapterAttnProcessor()
    return transformer


def set_backend(transformer: Any, backend: Any) -> None:
    """As set_attention_backend does, which sets it for all transformers of the process too."""
    for processor in transformer.attn_processors.values():
        processor._attention_backend = backend


def with_a_backend() -> Any:
    transformer = build(FLUX)
    set_backend(transformer, AttentionBackendName.FLASH)
    return transformer


def with_a_group_norm() -> Any:
    transformer = build(PIXART)
    transformer.transformer_blocks[1].attn1.group_norm = nn.GroupNorm(8, 64)
    return transformer


def with_parallelism() -> Any:
    transformer = build(FLUX)
    transformer._parallel_config = diffusers.ParallelConfig()
    return transformer


def with_a_cache() -> Any:
    transformer = build(FLUX)
    transformer.enable_cache(diffusers.SeaCacheConfig())
    return transformer


def with_a_cache_by_function() -> Any:
    transformer = build(FLUX)
    diffusers.hooks.apply_sea_cache(transformer, diffusers.SeaCacheConfig())
    return transformer


def without_attention_scores() -> Any:
    transformer = build("QwenImageTransformer2DModel")
    config = diffusers.hooks.LayerSkipConfig(
        [0], "transformer_blocks", skip_attention=False, skip_attention_scores=True, skip_ff=False
    )
    diffusers.hooks.apply_layer_skip(transformer, config)
    return transformer


def attend(*_: Any) -> Any: ...


class Slotted:
    __slots__ = ()

    def __call__(self, *_: Any) -> Any: ...


def with_processor(processor: Any) -> Any:
    transformer = build(FLUX)
    transformer.transformer_blocks[0].attn.processor = processor
    return transformer


def compiled_pipeline() -> Any:
    pipeline, _ = flux_pipeline()
    pipeline.transformer = torch.compile(pipeline.transformer)
    return pipeline


def enabled_before() -> Any:
    transformer = build(FLUX)
    enable(transformer, MESH)
    return transformer


def token_replace() -> Any:
    return build("HunyuanVideoTransformer3DModel", image_condition_type="token_replace")


def unet_pipeline() -> Any:
    return diffusers.DDPMPipeline(unet=None, scheduler=diffusers.DDPMScheduler())


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        lambda: diffusers.TransformerTemporalModel(in_channels=32, num_layers=0),
        Unsupported,
        "no plan for TransformerTemporalModel: its tokens are frames.*; there are plans for Flux",
    ),
    (token_replace, Unsupported, "image_condition_type='token_replace'"),
    (with_an_ip_adapter, Unsupported, "IP-Adapters"),
    (with_a_backend, Unsupported, r"set_attention_backend\('native'\)"),
    (with_a_group_norm, Unsupported, "group_norm"),
    (with_parallelism, ConfigError, "enable_parallelism"),
    (with_a_cache, Unsupported, "disable_cache"),
    (with_a_cache_by_function, Unsupported, "sea_cache_root"),
    (without_attention_scores, Unsupported, "layer_skip_hook"),
    *(
        (partial(with_processor, processor), Unsupported, "class of its own")
        for processor in (attend, partial(attend), Slotted().__call__, Slotted())
    ),
    (enabled_before, ConfigError, r"enabled on this mesh already.*enable\(model, new_mesh\)"),
    (unet_pipeline, ConfigError, "neither transformer nor transformer_2"),
    (lambda: nn.Linear(2, 2), ConfigError, "Linear is no transformer .* ModularPipeline"),
    (lambda: PreTrainedModel(PreTrainedConfig()), ConfigError, "integrations.transformers.enable"),
    (compiled_pipeline, ConfigError, "OptimizedModule is no transformer .* torch.compile"),
]


@pytest.mark.parametrize(("make", "kind", "text"), REFUSED)
def test_enable_refuses(make, kind, text):
    with pytest.raises(kind, match=text):
        enable(make(), MESH)


WAN_PLAN = PLANS[WAN]
BAD_PLANS: dict[str, tuple[Plan, str]] = {
    "module": (replace(WAN_PLAN, joined="proj"), "no module proj"),
    "attention": (replace(WAN_PLAN, attention={"blocks.*.attn9": ("image",)}), "blocks.*.attn9"),
    "processor": (replace(WAN_PLAN, attention={"blocks.*.ffn": ("image",)}), "no attention proc"),
    "argument": (
        replace(WAN_PLAN, inputs={"blocks.0": {"hidden": TokenDim("image", 1)}}),
        "takes no hidden",
    ),
    "gathered": (replace(WAN_PLAN, gathered={"norm": "image"}), "no module norm"),
    "last child": (replace(WAN_PLAN, gathered={"norm_out.-1": "image"}), "no module norm_out.-1"),
    "joined too": (replace(WAN_PLAN, also_joined={"norm": "audio"}), "no module norm"),
    "keys": (replace(WAN_PLAN, keys={"blocks.*.attn9": "audio"}), "blocks.*.attn9"),
    "forgotten": (replace(WAN_PLAN, local=()), "blocks.0.attn2 is an attention module"),
    "whole": (replace(WAN_PLAN, whole=("guidance",)), "takes no guidance"),
    "mask": (replace(WAN_PLAN, masks={"blocks.*": "mask"}), "takes no mask"),
    "option": (replace(WAN_PLAN, refused={"no_option": 1}), "no option no_option"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_is_compared_with_the_class(case):
    plan, text = BAD_PLANS[case]
    with pytest.raises(ConfigError) as error:
        enable(build(WAN), MESH, plan=plan)
    assert text in str(error.value) and diffusers.__version__ in str(error.value)


def test_options_that_do_not_exist_are_refused():
    with pytest.raises(ConfigError, match="'mean'"):
        enable(build(PIXART), MESH, gradients="max")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="unknown attention kernel 'best'"):
        enable(build(PIXART), MESH, kernel="best")
    with pytest.raises(ConfigError, match="mesh=None must be a SequenceMesh"):
        enable(build(PIXART), None)  # type: ignore[arg-type]


def test_fewer_heads_than_the_ulysses_degree_are_refused():
    transformer = build(FLUX, num_attention_heads=3)
    check_attention(transformer, PLANS[FLUX], 3)
    with pytest.raises(Unsupported, match="3 heads, fewer than the Ulysses"):
        check_attention(transformer, PLANS[FLUX], 4)


# ------------------------------------------------------------------ refused by a forward pass


NOT_SERVED: dict[str, dict[str, Any]] = {
    "ip adapter": {"joint_attention_kwargs": {"ip_adapter_image_embeds": [torch.zeros(2, 1, 4)]}},
    "mask": {"joint_attention_kwargs": {"attention_mask": torch.ones(2, 42, dtype=torch.bool)}},
    "ControlNet": {"controlnet_single_block_samples": [torch.zeros(35)]},
    "unknown": {"txt_seq_lens": [7, 7]},
}


def changed(transformer: Any, given: dict[str, Any], what: str) -> dict[str, Any]:
    """Arguments of a forward pass, once something was changed since enable."""
    if what == "processors":
        transformer.set_attn_processor(type(build(FLUX).transformer_blocks[0].attn.processor)())
    elif what == "cache":
        transformer.enable_cache(diffusers.SeaCacheConfig())
    elif what == "parallelism":
        transformer._parallel_config = diffusers.ParallelConfig()
    elif what == "backend":
        set_backend(transformer, "_native_math")
    elif what == "module":
        block = transformer.transformer_blocks[0]
        block.attn = copy.deepcopy(block.attn)
    elif what == "wrapped block":
        blocks = transformer.transformer_blocks
        blocks[0] = nn.Sequential(blocks[0])
    elif what == "block":
        transformer.transformer_blocks.append(build(FLUX).transformer_blocks[0])
    elif what == "skipped layer":
        config = diffusers.hooks.LayerSkipConfig(indices=[0], fqn="transformer_blocks")
        diffusers.hooks.apply_layer_skip(transformer, config)
    elif what == "tokens":
        return given | {"img_ids": given["img_ids"][:-1]}
    return given | NOT_SERVED.get(what, {})


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("processors", "were replaced since enable"),
        ("module", "modules of FluxTransformer2DModel were replaced since enable"),
        ("block", "modules of FluxTransformer2DModel were replaced since enable"),
        ("wrapped block", "no module transformer_blocks"),
        ("skipped layer", "layer_skip_hook"),
        ("cache", "disable_cache"),
        ("parallelism", "enable_parallelism"),
        ("backend", "set_attention_backend"),
        ("ip adapter", "ip_adapter_image_embeds in joint_attention_kwargs"),
        ("mask", "attention_mask in joint_attention_kwargs"),
        ("ControlNet", r"a tensor \[35\] has no dim 1 of image tokens"),
        ("unknown", "txt_seq_lens: diffusers .* knows no such argument"),
        ("tokens", "34 image tokens"),
    ],
)
def test_a_forward_pass_refuses(what, text):
    transformer, given = build(FLUX), arguments(FLUX)
    enable(transformer, MESH)
    given = changed(transformer, given, what)
    with pytest.raises(USPError, match=text):
        transformer(**given)


def test_blocks_are_computed_again_before_disable_only():
    transformer, given = build(FLUX), arguments(FLUX)
    transformer.enable_gradient_checkpointing(
        lambda block, *args: checkpoint(block, *args, use_reentrant=True)
    )
    given["hidden_states"].requires_grad_()
    with enable(transformer, MESH):
        loss = transformer(**given).sample.sum()
    with pytest.raises(ConfigError, match="after backward"):
        loss.backward()


def test_a_copy_is_enabled_too_and_cannot_be_pickled(tmp_path):
    transformer, given = build(FLUX), arguments(FLUX)
    wanted = transformer(**given).sample
    with enable(transformer, MESH):
        twin = copy.deepcopy(transformer)
        with pytest.raises(ConfigError, match="save_pretrained"):
            torch.save(transformer, tmp_path / "transformer.pt")
    assert hooks_of(transformer) == 0 < hooks_of(twin)
    assert relative(twin(**given).sample, wanted) < 1e-6


def test_hooks_of_before_see_whole_arguments_and_outputs():
    transformer, given = build(FLUX), arguments(FLUX)
    seen = []

    def before(_: Any, __: Any, kwargs: Any) -> None:
        seen.append(kwargs["hidden_states"].shape)

    transformer.register_forward_pre_hook(before, with_kwargs=True)
    transformer.register_forward_hook(lambda _, __, out: seen.append(out.sample.shape))
    with enable(transformer, MESH, plan=replace(PLANS[FLUX])):
        assert next(iter(transformer._forward_pre_hooks.values())) is before
        transformer(**given)
    assert [shape[1] for shape in seen] == [35, 35]


def test_a_lora_scale_is_served():
    transformer, given = build(FLUX), arguments(FLUX)
    with enable(transformer, MESH):
        scaled = transformer(**given, joint_attention_kwargs={"scale": 0.5}).sample
        assert torch.equal(scaled, transformer(**given).sample)


def test_masks_dropout_and_causality_of_attention_are_refused():
    """Of a plan that does not name the mask: attention gets it."""
    name = "QwenImageTransformer2DModel"
    transformer = build(name)
    enable(transformer, MESH, plan=replace(PLANS[name], masks={}))
    with pytest.raises(Unsupported, match=r"a mask \[2, 1, 1, 42\]"):
        transformer(**arguments(name, padded=True))


def test_a_mask_of_floats_is_refused_where_nothing_says_what_it_does():
    """Chroma's plan does."""
    name = "ChromaTransformer2DModel"
    transformer, given = build(name), arguments(name, padded=True)
    plan = replace(PLANS[name], added_products=False)
    with enable(transformer, MESH, plan=plan), pytest.raises(Unsupported, match="boolean mask"):
        transformer(**given | {"attention_mask": given["attention_mask"].float()})


def test_parts_of_a_transformer_are_called_alone_without_gradients_only():
    transformer = build(WAN)
    hidden, text, temb = torch.ones(2, 8, 96), torch.ones(2, 7, 96), torch.ones(2, 6, 96)
    block = transformer.blocks[0]
    rope = transformer.rope(torch.ones(2, 4, 1, 4, 8))
    want = block(hidden, text, temb, rope)
    enable(transformer, MESH)
    with pytest.raises(ConfigError, match="outside of a forward pass"):
        block(hidden, text, temb, rope)
    with torch.no_grad():
        assert torch.equal(block(hidden, text, temb, rope), want)
