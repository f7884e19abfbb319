"""Degrees for the pipelines of diffusers, by the rule, without times and memory: what
``ds-usp plan --engine diffusers`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from types import MappingProxyType
from typing import Any

from ds_usp.errors import ConfigError
from ds_usp.planner.arguments import counted, read_json
from ds_usp.planner.degree_rule import RULE, rule_degrees
from ds_usp.planner.emit import diffusers
from ds_usp.planner.models import built_in

# Attention heads of a transformer, by the name of its repository on the hub, as published.
_HEADS: Mapping[str, int] = MappingProxyType(
    {
        "flux.1-dev": 24,
        "flux.1-schnell": 24,
        "stable-diffusion-3.5-large": 38,
        "stable-diffusion-3.5-medium": 24,
        "qwen-image": 24,
        "wan2.1-t2v-14b-diffusers": 40,
        "wan2.1-t2v-1.3b-diffusers": 12,
        "hunyuanvideo": 24,
        "cogvideox-5b": 48,
    }
)


def known_heads(model: str) -> int | None:
    """Return the attention heads of a known repository; None of another one."""
    return _HEADS.get(model.strip().lower().rpartition("/")[2])


def heads_of(model: str) -> int:
    """Attention heads of a diffusion transformer: a known repository, or its config.json.

    Raises:
        ConfigError: neither, or a model of text.
    """
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json":
        heads = read_json(path, "model").get("num_attention_heads")
        if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
            raise ConfigError(f"{path} has no num_attention_heads: give transformer/config.json")
        return heads
    if heads := known_heads(model):
        return heads
    if built_in(model):
        raise ConfigError(f"{model} is a model of text: leave --engine diffusers out")
    raise ConfigError(
        f"no diffusion transformer {model!r}; there are {', '.join(_HEADS)}. Any other is planned "
        "by its transformer/config.json"
    )


def diffusion_plan(
    model: str, gpus: int, gpus_per_node: int
) -> tuple[dict[str, Any], Iterator[str]]:
    """The degrees of a pipeline whose images all GPUs share, as JSON and as text."""
    heads = heads_of(model)
    ulysses, ring = rule_degrees(gpus, heads, gpus_per_node)
    node = counted(gpus_per_node, "GPU")
    why = f"{RULE[1]}, {RULE[2]} ({counted(gpus, 'GPU')}, {counted(heads, 'head')}, {node} a node)"
    content = {"model": model, "engine": "diffusers", "gpus": gpus, "ulysses": ulysses}
    content |= {"ring": ring, "why": [why], "lines": diffusers(gpus, ulysses)}
    text = (
        f"take    Ulysses {ulysses} x ring {ring}",
        fill(f"why     {why}", 100, subsequent_indent=10 * " "),
        "step    outside the estimate, and so is memory: both are of models of text",
        f"\n{content['lines']}",
    )
    return content, iter(text)
