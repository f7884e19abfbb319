"""Every pipeline of every class with a plan, made of a tiny transformer and stand-ins, and called
as the example in its docstring calls it."""

import ast
import copy
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import newest_diffusers
import numpy as np
import tiny_diffusers
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from further_diffusers import with_noise
from PIL import Image
from stand_ins import Encoder, Images, Pixels, Safety, Seconds, Siglip, Sound, Waves, Words
from torch import Tensor

from ds_usp.integrations.diffusers import PLANS

Row = Mapping[str, Any]
Made = tuple[Any, Callable[[], Tensor]]  # a pipeline, and what samples with it


@cache
def pipelines() -> Mapping[str, str]:
    """The class of the transformer by that of the pipeline."""
    found = {}
    for file in sorted((Path(diffusers.__file__).parent / "pipelines").rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            for method in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
                if getattr(method, "name", "") != "__init__" or not hasattr(diffusers, node.name):
                    continue
                kinds = [ast.unparse(x) for x in method.args.args if x.arg == "transformer"]
                for kind in re.findall(r"\w+", " ".join(kinds)):
                    if kind in PLANS:
                        found[node.name] = kind
    return {name: kind for name, kind in found.items() if name.endswith("Pipeline")}


def example(name: str) -> dict[str, Any]:
    """The arguments of the first call in the docstring's example; ``...`` for what it computes."""
    pipeline = getattr(diffusers, name)
    lines = re.findall(r"^\s*(?:>>>|\.\.\.) ?(.*)", pipeline.__call__.__doc__ or "", re.MULTILINE)
    try:
        nodes = list(ast.walk(ast.parse("\n".join(lines))))
    except SyntaxError:  # no Python: a quote within a text, a fourth >
        nodes = []
    texts = {
        node.targets[0].id: _value(node.value, {})
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("pipe", "pipeline"):
            names = list(inspect.signature(pipeline.__call__).parameters)[1:]
            given = dict(zip(names, node.args, strict=False))
            given |= {x.arg: x.value for x in node.keywords if x.arg}
            return {key: _value(x, texts) for key, x in given.items()}
    return {"prompt": "a red fox in the snow"}


def _value(node: Any, texts: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return texts.get(node.id, ...)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...


# ------------------------------------------------------------------ what pipelines are made of


def image(width: int = 112, height: int = 80, seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def mask(width: int, height: int) -> Image.Image:
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[height // 4 : 3 * height // 4] = 255
    return Image.fromarray(pixels)


def grown(net: Any) -> Any:
    """A ControlNet, none of whose weights are zero."""
    torch.manual_seed(4)
    return with_noise(net).eval()


def controlnet(kind: str, transformer: Any, **changes: Any) -> Any:
    cls = getattr(diffusers, kind)
    taken = inspect.signature(cls.__init__).parameters
    config = {key: x for key, x in transformer.config.items() if key in taken}
    layers = {"num_layers": 1, "num_single_layers": 1}
    return grown(cls(**config | {k: x for k, x in layers.items() if k in taken} | changes))


def z_image_controlnet(transformer: Any, channels: int) -> Any:
    places = {f"control_{x}layers_places": [0] for x in ("", "refiner_")}
    names = ("dim", "n_refiner_layers", "n_heads", "n_kv_heads")
    sizes = {name: transformer.config[name] for name in names}
    noise = {"add_control_noise_refiner": "control_noise_refiner"}
    return grown(
        diffusers.ZImageControlNetModel(control_in_dim=channels, **places, **sizes, **noise)
    )


def connectors(_: Any) -> Any:
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
    sizes["num_learnable_registers"] = 8
    named = {f"{x}_connector_{key}": n for x in ("video", "audio") for key, n in sizes.items()}
    torch.manual_seed(3)
    return LTX2TextConnectors(caption_channels=16, text_proj_in_factor=3, **named).eval()


def unipc() -> Any:
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def edm() -> Any:
    return diffusers.EDMEulerScheduler(sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min")


def karras() -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)


_IMAGE = {"height": 80, "width": 112}
_VIDEO = {"height": 48, "width": 80, "num_frames": 9}
_WIDE = {"height": 96, "width": 160}
_LTX = {"height": 96, "width": 160, "num_frames": 17}
_LTX_VAE = {"space": 32, "time": 8}
_ONE_TEXT = {"text_encoder": (16,)}
_SEEN = {**_ONE_TEXT, "image_encoder": (16,)}
_PACKED: Row = {"text": _ONE_TEXT, "channels": 1, "size": _IMAGE}
_OF_WAN: Row = {"text": _SEEN, "scheduler": unipc, "size": _VIDEO}
_COG = {"attention_head_dim": 16, "num_attention_heads": 4}
_LTX2 = {"num_layers": 2, **dict.fromkeys(("audio_in_channels", "audio_out_channels"), 128)}
_AUDIO = {"vae": lambda _: Waves(), "duration_embedder": lambda _: Seconds(16)}
# By class of the transformer: arguments of encoders, channels of latents (4), sizes of a call,
# changes of the transformer, of the VAE, other parts, the scheduler if not flow matching, methods
# that go into layers of an encoder.
CLASSES: Mapping[str, Row] = {
    "FluxTransformer2DModel": {
        **_PACKED,
        "text": {"text_encoder": (32, 32), "text_encoder_2": (32,)},
    },
    "Flux2Transformer2DModel": {**_PACKED, "transformer": {"joint_attention_dim": 48}},
    "WanTransformer3DModel": _OF_WAN,
    "WanVACETransformer3DModel": {**_OF_WAN, "transformer": {"vace_in_channels": 72}},
    "QwenImageTransformer2DModel": {"size": _IMAGE},
    "LTXVideoTransformer3DModel": {"size": _LTX, "vae": _LTX_VAE},
    "HunyuanVideoTransformer3DModel": {
        "text": {"text_encoder": (16,), "text_encoder_2": (8, 8)},
        "size": _VIDEO,
    },
    "CogVideoXTransformer3DModel": {
        "size": _VIDEO,
        "scheduler": diffusers.CogVideoXDDIMScheduler,
        "transformer": _COG,
    },
    "SD3Transformer2DModel": {
        "text": {
            **dict.fromkeys(("text_encoder", "text_encoder_2"), (16, 32, True)),
            "text_encoder_3": (32,),
        },
        "size": {"height": 48, "width": 80},
    },
    "PixArtTransformer2DModel": {
        "size": {"height": 256, "width": 256},
        "scheduler": diffusers.DPMSolverMultistepScheduler,
        "transformer": {"sample_size": 32},
    },
    "ChromaTransformer2DModel": _PACKED,
    "HunyuanImageTransformer2DModel": {
        "text": {"text_encoder": (16,), "text_encoder_2": (16,)},
        "size": {"height": 320, "width": 320},
        "vae": {"space": 32},
    },
    "CogView4Transformer2DModel": {"size": {"height": 96, "width": 160}},
    "CosmosTransformer3DModel": {
        "size": _VIDEO,
        "transformer": {"in_channels": 5, "out_channels": 4},
        "parts": {"safety_checker": lambda _: Safety()},
    },
    "SkyReelsV2Transformer3DModel": _OF_WAN,
    "ChronoEditTransformer3DModel": {
        **_OF_WAN,
        "transformer": {"in_channels": 12, "image_dim": 16, "added_kv_proj_dim": 96},
    },
    "AuraFlowTransformer2DModel": {"size": {"height": 48, "width": 80}},
    "LongCatImageTransformer2DModel": {
        "size": _IMAGE,
        "channels": 16,
        "transformer": {"in_channels": 64},
    },
    "OvisImageTransformer2DModel": {**_PACKED, "transformer": {"out_channels": 4}},
    "BriaTransformer2DModel": _PACKED,
    "ZImageTransformer2DModel": {
        "size": {"height": 96, "width": 160},
        "transformer": {"axes_lens": [300, 64, 64]},
    },
    "Lumina2Transformer2DModel": {
        "size": {"height": 64, "width": 96},
        "transformer": {"axes_lens": [300, 64, 64]},
    },
    "LTX2VideoTransformer3DModel": {
        "text": {"text_encoder": (16, 0, False, 3)},
        "size": _LTX,
        "vae": _LTX_VAE,
        "transformer": _LTX2,
        "parts": {
            "connectors": connectors,
            "audio_vae": lambda _: Sound(),
            "vocoder": lambda _: None,
        },
    },
    "HunyuanVideo15Transformer3DModel": {
        "text": {**_SEEN, "text_encoder_2": (16,)},
        "size": {"height": 96, "width": 160, "num_frames": 9},
        "vae": {"space": 16},
        "transformer": {"in_channels": 9, "out_channels": 4, "target_size": 160},
    },
    "AllegroTransformer3DModel": {
        "size": _VIDEO,
        "scheduler": diffusers.DPMSolverMultistepScheduler,
    },
    "AnyFlowTransformer3DModel": {"size": _VIDEO},
    "BriaFiboTransformer2DModel": {"text": {"text_encoder": (8,)}, "size": _WIDE},
    "BriaFibo2Transformer2DModel": {
        "size": _WIDE,
        "transformer": {"axes_lens": (600, 64, 64), "cap_feat_dim": 48},
    },
    "CogView3PlusTransformer2DModel": {
        "size": {"height": 64, "width": 96},
        "scheduler": diffusers.CogVideoXDDIMScheduler,
    },
    "EasyAnimateTransformer3DModel": {"size": _VIDEO},
    "ErnieImageTransformer2DModel": {"size": _WIDE},
    "HeliosTransformer3DModel": {"size": _VIDEO},
    "HunyuanVideoFramepackTransformer3DModel": {
        "text": {"text_encoder": (16,), "text_encoder_2": (8, 8), "image_encoder": (8,)},
        "size": _VIDEO,
    },
    "Kandinsky6Transformer3DModel": {
        "text": {"text_encoder": (16,), "text_encoder_2": (8, 8)},
        "size": _VIDEO,
    },
    "Krea2Transformer2DModel": {
        "size": _WIDE,
        "parts": {"text_encoder_select_layers": lambda _: (1, 2, 3)},
    },
    "LongCatAudioDiTTransformer": {"size": _WIDE},
    "LuminaNextDiT2DModel": {"size": _WIDE},
    "MotifVideoTransformer3DModel": {
        "size": _VIDEO,
        "transformer": {"in_channels": 9, "out_channels": 4},
    },
    "WanAnimateTransformer3DModel": {
        **_OF_WAN,
        "text": {"text_encoder": (16,), "image_encoder": (8,)},
    },
    "DiTTransformer2DModel": {
        "size": {"height": 64, "width": 64},
        "scheduler": diffusers.DDIMScheduler,
        "transformer": {"out_channels": 4},
    },
    "GlmImageTransformer2DModel": {"size": _WIDE},
    "HunyuanDiT2DModel": {
        "text": {"text_encoder": (16,), "text_encoder_2": (16,)},
        "size": _IMAGE,
        "scheduler": diffusers.DDPMScheduler,
        "transformer": {"text_len": 77, "text_len_t5": 256, "learn_sigma": True},
    },
    "Ideogram4Transformer2DModel": {
        "size": _WIDE,
        "transformer": {"in_channels": 16, "llm_features_dim": 13 * 16},
    },
    "JoyImageEditTransformer3DModel": {"size": _WIDE, "vae": {"space": 32}},
    "StableAudioDiTModel": {
        "size": _WIDE,
        "scheduler": diffusers.EDMDPMSolverMultistepScheduler,
        "transformer": {"sample_size": 40, "global_states_input_dim": 32},
        "parts": {**_AUDIO, "projection_model": lambda _: Seconds(16)},
    },
    "StableAudio3DiTModel": {
        "size": _WIDE,
        "parts": _AUDIO,
        "transformer": {"local_add_cond_dim": 5, "global_cond_dim": 16},
    },
}
_CONTROL = {"transformer": {"in_channels": 8, "out_channels": 4}}
_FILL = {"transformer": {"in_channels": 264, "out_channels": 4}}
_CLOZE = {**_FILL, "call": {"image": [[image(seed=1), image(seed=2)], [image(seed=3), None]]}}
_FLUX_CONTROLNET = {"parts": {"controlnet": partial(controlnet, "FluxControlNetModel")}}
_A_CAT = {"example": {"prompt": "a cat"}}
_UNBINNED = {"call": {"use_resolution_binning": False}}
_SOUND = {"call": {"audio": torch.arange(160).sin().expand(1, 2, -1)}}


def _controlnet(kind: str, **changes: Any) -> Row:
    return {"parts": {"controlnet": partial(controlnet, kind, **changes)}}


OWN: Mapping[str, Row] = {
    "FluxControlPipeline": _CONTROL,
    "FluxControlImg2ImgPipeline": _CONTROL,
    "FluxControlInpaintPipeline": {
        **_CONTROL,
        "example": {"prompt": "a cat", "image": ..., "mask_image": ..., "control_image": ...},
    },
    "FluxFillPipeline": _FILL,
    "VisualClozePipeline": _CLOZE,
    "VisualClozeGenerationPipeline": _CLOZE,
    "FluxControlNetPipeline": _FLUX_CONTROLNET,
    "FluxControlNetImg2ImgPipeline": _FLUX_CONTROLNET,
    "FluxControlNetInpaintPipeline": _FLUX_CONTROLNET,
    "FluxKontextPipeline": {"call": {"_auto_resize": False, "max_area": 96 * 96}},
    "FluxKontextInpaintPipeline": {"call": {"_auto_resize": False, "max_area": 96 * 96}},
    "Flux2Pipeline": _A_CAT,  # the example gives the text by position, where the image is
    "Flux2KleinPipeline": _A_CAT,
    "Flux2KleinKVPipeline": {"example": {"prompt": "a cat", "image": ...}},
    "WanImageToVideoPipeline": {"transformer": {"in_channels": 12}},
    "LucyEditPipeline": {"transformer": {"in_channels": 8}},
    "QwenImageControlNetPipeline": _controlnet("QwenImageControlNetModel"),
    "QwenImageControlNetInpaintPipeline": _controlnet(
        "QwenImageControlNetModel", extra_condition_channels=4
    ),
    "QwenImageLayeredPipeline": {"call": {"output_type": "pt"}},
    "StableDiffusion3ControlNetPipeline": _controlnet(
        "SD3ControlNetModel", extra_conditioning_channels=0
    ),
    "StableDiffusion3ControlNetInpaintingPipeline": _controlnet(
        "SD3ControlNetModel", extra_conditioning_channels=1
    ),
    "StableDiffusion3InpaintPipeline": {
        "transformer": {"in_channels": 16, "out_channels": 16},
        "channels": 16,
    },
    "CogVideoXFunControlPipeline": {"transformer": {**_CONTROL["transformer"], **_COG}},
    "CogVideoXImageToVideoPipeline": {"transformer": {**_CONTROL["transformer"], **_COG}},
    "CogView4ControlPipeline": _CONTROL,
    "HunyuanSkyreelsImageToVideoPipeline": _CONTROL,
    "HunyuanImageRefinerPipeline": {
        "transformer": {
            "in_channels": 16,
            "out_channels": 8,
            "patch_size": (1, 1, 1),
            "rope_axes_dim": (4, 2, 2),
        }
    },
    "CosmosTextToWorldPipeline": {
        "transformer": {"in_channels": 4, "out_channels": 4},
        "scheduler": edm,
    },
    "CosmosVideoToWorldPipeline": {"scheduler": edm},
    "Cosmos2TextToImagePipeline": {
        "transformer": {"in_channels": 4, "out_channels": 4},
        "scheduler": karras,
    },
    "Cosmos2VideoToWorldPipeline": {"scheduler": karras},
    "SkyReelsV2DiffusionForcingPipeline": {"size": {**_VIDEO, "num_frames": 97}},
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": {
        "size": {**_VIDEO, "num_frames": 33},
        "example": {"prompt": "a cat", "video": ..., "ar_step": 0, "overlap_history": 5},
    },
    "SkyReelsV2ImageToVideoPipeline": {
        "transformer": {"in_channels": 12, "image_dim": 16, "added_kv_proj_dim": 96}
    },
    "ZImageControlNetPipeline": {
        "parts": {"controlnet": partial(z_image_controlnet, channels=4)},
    },
    "ZImageControlNetInpaintPipeline": {
        "parts": {"controlnet": partial(z_image_controlnet, channels=9)},
    },
    "ZImageOmniPipeline": {
        "example": {"prompt": "a cat", "image": ...},
        "parts": {"siglip": lambda _: Encoder(16), "siglip_processor": lambda _: Siglip()},
        "transformer": {"siglip_feat_dim": 16, "axes_lens": [300, 64, 64]},
    },
    "LTX2DFRPipeline": {"transformer": {**_LTX2, "use_keyframes_abs_pos_embedding": True}},
    "LTX2ImageToVideoPipeline": {"call": {"image_crf": 0}},
    "LTX2HDRPipeline": _A_CAT,
    "Kandinsky6TI2VAPipeline": {"call": {"sample_audio": False}},
    "BriaFibo2Pipeline": _A_CAT,
    "DiTPipeline": {"example": {"class_labels": [1, 2]}},
    "GlmImagePipeline": {"call": {"prior_token_ids": torch.arange(240)[None] % 16}},
    "HunyuanDiTPipeline": _UNBINNED,
    "HunyuanDiTPAGPipeline": _UNBINNED,
    "HunyuanDiTControlNetPipeline": {
        **_UNBINNED,
        **_controlnet("HunyuanDiT2DControlNetModel", transformer_num_layers=4),
        "example": {"prompt": "a cat", "control_image": ...},
    },
    "Ideogram4Pipeline": {
        "parts": {"unconditional_transformer": lambda x: grown(copy.deepcopy(x))},
        "call": {"guidance_schedule": [4.0] * 3, "max_sequence_length": 64},
        "methods": {
            "_get_text_encoder_hidden_states": lambda encoder, ids, mask, _: list(
                encoder(ids, mask).hidden_states[:13]
            )
        },
    },
    "JoyImageEditPipeline": {
        "methods": {
            "_get_last_decoder_hidden_states": lambda encode, **given: (
                encode(**given).last_hidden_state
            )
        }
    },
    "StableAudio3AudioToAudioPipeline": _SOUND,
    "StableAudio3InpaintPipeline": _SOUND,
}
# What is not called, and why.
_NO_STAND_IN = "no stand-in for an encoder, a VAE or a call of its kind is written"
NOT_CALLED: Mapping[str, str] = {
    "ConsisIDPipeline": "needs OpenCV, and models of faces",
    "BriaFiboEditPipeline": "takes JSON of an edit",
    "HeliosPyramidPipeline": _NO_STAND_IN,
    "MotifVideoImage2VideoPipeline": _NO_STAND_IN,
    "EasyAnimateControlPipeline": "fails alone: it gives encode_prompt what that does not take",
    "EasyAnimateInpaintPipeline": _NO_STAND_IN,
    "ChromaInpaintPipeline": "fails alone: it reads guidance_embeds, which the class has not",
    "Cosmos2_5_PredictBasePipeline": "needs torchvision",
    "Cosmos2_5_TransferPipeline": "needs torchvision; the class's residuals have their own test",
    "HunyuanVideoImageToVideoPipeline": "cuts its text by tokens of LLaVA's template",
    "LTX2DFRTemporalRefinePipeline": "needs an upsampler and what LTX2DFRPipeline has made",
}


def made(name: str) -> Made:
    """A pipeline, and what samples 3 steps with it: the same again in each call."""
    kind, own = pipelines()[name], OWN.get(name, {})
    row = {"text": _ONE_TEXT, **CLASSES[kind], **own}
    row["parts"] = {**CLASSES[kind].get("parts", {}), **own.get("parts", {})}
    cls = getattr(diffusers, name)
    module: Any = importlib.import_module(cls.__module__)
    if not hasattr(module, "ftfy"):  # a package that mends texts
        module.ftfy = SimpleNamespace(fix_text=str)
    build = newest_diffusers.build if kind in newest_diffusers.CONFIGS else tiny_diffusers.build
    transformer = build(kind, **row.get("transformer", {})).eval()
    parts = {
        key: _part(key, x, transformer, row)
        for key, x in list(inspect.signature(cls.__init__).parameters.items())[1:]
    }
    pipeline = cls(**parts)
    pipeline.set_progress_bar_config(disable=True)
    vars(pipeline).update(row.get("methods", {}))
    taken = inspect.signature(cls.__call__).parameters
    size = row["size"]
    call = {key: _given(key, x, size) for key, x in (own.get("example") or example(name)).items()}
    call |= {"num_inference_steps": 3, "output_type": "latent", **size, **own.get("call", {})}
    call |= {"strength": max(call["strength"], 0.7)} if "strength" in call else {}
    call = {key: x for key, x in call.items() if key in taken and key != "return_dict"}

    def sample() -> Tensor:
        if "generator" in taken:
            call["generator"] = torch.Generator().manual_seed(5)
        torch.manual_seed(7)
        with torch.no_grad():
            return _numbers(pipeline(**call))

    return pipeline, sample


def _part(key: str, parameter: Any, transformer: Any, row: Row) -> Any:
    default = None if parameter.default is inspect.Parameter.empty else parameter.default
    if key in row["parts"]:
        return row["parts"][key](transformer)
    if key == "transformer":
        return transformer
    if key == "scheduler":
        return row.get("scheduler", diffusers.FlowMatchEulerDiscreteScheduler)()
    if key.startswith("tokenizer") or key in ("processor", "text_processor"):
        return Words()
    if key == "vae":
        return Pixels(row.get("channels", 4), **row.get("vae", {}))
    if key in row["text"]:
        return Encoder(*row["text"][key])
    if key in ("image_processor", "feature_extractor"):
        return Images()
    if key.endswith("guider") and parameter.default is inspect.Parameter.empty:
        return diffusers.ClassifierFreeGuidance()
    return default


def _given(key: str, value: Any, size: Mapping[str, int]) -> Any:
    """An image or a video in place of what the example loads or computes."""
    width, height, frames = size["width"], size["height"], size.get("num_frames", 9)
    if value is not ...:
        return value
    if "mask" in key:
        one = mask(width, height)
        return [one] * frames if key == "mask" else one
    if "video" in key:
        return [image(width, height, seed) for seed in range(frames)]
    return image(width, height) if "image" in key else None


def _numbers(out: Any) -> Tensor:
    """All numbers of what a pipeline returns, in one dim."""
    if isinstance(out, (Image.Image, np.ndarray)):
        out = torch.from_numpy(np.array(out))
    if isinstance(out, Tensor):
        return out.float().flatten()
    values = out if isinstance(out, (list, tuple)) else list(dict(out).values())
    parts = [_numbers(x) for x in values if not isinstance(x, (str, int, float, type(None)))]
    return torch.cat([x for x in parts if len(x)] or [torch.zeros(0)])
