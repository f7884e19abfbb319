"""The flags that are added to the host's, and everything that is refused before a group exists."""

from __future__ import annotations

import importlib.util
import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import ds_usp
from ds_usp.errors import ConfigError
from ds_usp.planner import AUTO, degree_or_auto
from ds_usp.training import check_zero_stage
from megatron_patches.megatron_deepspeed import memory
from megatron_patches.megatron_deepspeed.auto_args import auto_degree
from megatron_patches.megatron_deepspeed.kernels import switch_off_missing_fusions
from megatron_patches.megatron_deepspeed.script import patch_script, verify_flag
from megatron_patches.megatron_deepspeed.state import is_active
from megatron_patches.megatron_deepspeed.unsupported import refuse, refuse_framework_failures
from megatron_patches.settings import MeshSettings

_FLASH = (
    "use_flash_attn_v1",
    "use_flash_attn_v2",
    "use_flash_attn_triton",
    "use_flash_attn_builder",
)
LAYOUTS = ("zigzag", "contiguous")


def parse_args(
    original: Callable[..., Any],
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
    *,
    settings: MeshSettings,
) -> Any:
    """The host's arguments and ours."""

    def provide(parser: ArgumentParser) -> ArgumentParser:
        _add_flags(parser, settings)
        return extra_args_provider(parser) if extra_args_provider else parser

    return original(provide, ignore_unknown_args)


def _add_flags(parser: ArgumentParser, settings: MeshSettings) -> None:
    group = parser.add_argument_group(title="unified sequence parallel")
    group.add_argument(
        "--ulysses-degree",
        type=degree_or_auto,
        default=settings.ulysses_degree,
        help="Ranks of --ds-sequence-parallel-size that exchange heads; the ring takes the rest. "
        "auto: what the planner finds fastest. Default: all of them.",
    )
    group.add_argument(
        "--usp-cluster",
        help="What auto plans for: a built-in cluster of ds_usp.planner, or a profile. Default: by "
        "the GPU's name.",
    )
    group.add_argument(
        "--usp-layout",
        choices=LAYOUTS,
        default=settings.layout,
        help="Which tokens a rank holds. zigzag balances causal work over the ring.",
    )
    group.add_argument(
        "--usp-kernel",
        default=settings.kernel,
        help="What computes attention; auto takes the fastest that can.",
    )
    memory.add_flags(parser)


def validate_args(
    original: Callable[..., Any], args: Any, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """The host's checks, and ours where attention is ours.

    Raises:
        ConfigError, LayoutError: what cannot be trained exactly; the message says what can.
        PatchError: a script whose batches are not the stock ones.
    """
    _refuse_before(args)
    switch_off_missing_fusions(args)
    validated = original(args, defaults)
    memory.check_flags(args)
    if args.usp_loss_chunks:
        verify_flag("--usp-loss-chunks")
    stage = _zero_stage(args)
    if args.ulysses_degree == AUTO:
        args.ulysses_degree = auto_degree(args, stage)
    if is_active(args):
        config = ds_usp.USPConfig.from_args(args)
        _check_heads(args, config)
        ds_usp.TokenLayout(config.layout, args.seq_length, config.ulysses, config.ring)
        _choose_flash(args, config)
        check_zero_stage(stage, stages=args.pipeline_model_parallel_size, bf16=False)
        refuse(args, _deepspeed_config(args))
        patch_script()
    return validated


def _refuse_before(args: Any) -> None:
    """What the host's own checks would overwrite or trip over."""
    refuse_framework_failures(args)
    sp = args.ds_sequence_parallel_size
    if args.ulysses_degree != AUTO:
        ds_usp.USPConfig.from_args(args)
        if args.usp_cluster:
            raise ConfigError(
                f"--usp-cluster {args.usp_cluster} is for --ulysses-degree auto; leave it out"
            )
    if sp > 1 and args.sequence_parallel:
        raise ConfigError(
            f"--sequence-parallel (Megatron's) cuts the sequence over tensor-parallel ranks, and "
            f"--ds-sequence-parallel-size {sp} over others. Leave --sequence-parallel out"
        )


def _check_heads(args: Any, config: ds_usp.USPConfig) -> None:
    tp, heads = args.tensor_model_parallel_size, args.num_attention_heads
    kv_heads = args.num_key_value_heads
    if heads % tp or kv_heads % tp or heads % kv_heads:
        raise ConfigError(
            f"{heads} query heads of {kv_heads} key/value heads on {tp} tensor-parallel ranks: "
            "both numbers must be multiples of the ranks, and the first of the second"
        )
    local, sp = heads // tp, config.sp_degree
    if config.ulysses > local:
        valid_degrees = [
            f"{u} (ring {sp // u})" for u in range(min(local, sp), 0, -1) if sp % u == 0
        ]
        raise ConfigError(
            f"--ulysses-degree {config.ulysses} needs at least {config.ulysses} query heads on "
            f"each tensor-parallel rank, there are {local} ({heads} heads, tp={tp}). For "
            f"--ds-sequence-parallel-size {sp} use --ulysses-degree {', '.join(valid_degrees)}"
        )


def _deepspeed_config(args: Any) -> Mapping[str, Any]:
    """DeepSpeed's configuration, which a flag names."""
    config = args.deepspeed_config
    if isinstance(config, str):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    return config or {}


def _zero_stage(args: Any) -> int:
    return int(_deepspeed_config(args).get("zero_optimization", {}).get("stage", 0))


def _choose_flash(args: Any, config: ds_usp.USPConfig) -> None:
    """Keep a flash attention that was asked for where it exists and can serve: without a ring.

    Elsewhere rank 0 says what computes attention in its place. It is not refused: the loss is the
    same, and so is the memory, and a script that names it runs on machines without it.
    """
    installed = importlib.util.find_spec("flash_attn") is not None
    keep = installed and config.ring == 1 and config.kernel == "auto"
    requested = [name for name in _FLASH if getattr(args, name)]
    unused = [name for name in requested if not keep or name not in _FLASH[:2]]
    if unused and args.rank == 0:
        flag = f"--{unused[0].replace('_', '-')}"
        print(f"{flag}: {_flash_unused_reason(installed, config)}", flush=True)  # noqa: T201 - beside the host's
    args.use_flash_attn_v1 &= keep
    args.use_flash_attn_v2 &= keep
    args.use_flash_attn_triton = args.use_flash_attn_builder = False
    args.use_flash_attn = args.use_flash_attn_v1 or args.use_flash_attn_v2


def _flash_unused_reason(installed: bool, config: ds_usp.USPConfig) -> str:
    """Why a flash attention of the host's is not used, and what is."""
    if not installed:
        reason = "flash-attn is not installed"
    elif config.ring > 1:
        reason = f"it cannot be joined over a ring of {config.ring}"
    elif config.kernel != "auto":
        reason = f"--usp-kernel {config.kernel} was asked for"
    else:
        reason = "it takes batches in an order of its own"
    return f"not used, because {reason}; usp_attention computes the same (kernel {config.kernel})"


def flags(settings: MeshSettings) -> Callable[..., Any]:
    """:func:`parse_args` with the defaults of ``settings``."""
    return partial(parse_args, settings=settings)
