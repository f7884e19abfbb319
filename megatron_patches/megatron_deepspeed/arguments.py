"""Arguments of Megatron-DeepSpeed: added flags, and refusals before any process group exists.

A rank calls these once, at its start, without communication; :mod:`.groups` calls
:func:`layer_memory`.
"""

from __future__ import annotations

import importlib.util
import json
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import ds_usp
from ds_usp.errors import ConfigError
from ds_usp.memory import LayerMemory, run_for_gradients
from ds_usp.planner import AUTO
from ds_usp.settings import add_settings
from ds_usp.training import check_zero_stage
from megatron_patches import flags, refusals
from megatron_patches.megatron_deepspeed import memory
from megatron_patches.megatron_deepspeed.compat import switch_off_missing_fusions
from megatron_patches.megatron_deepspeed.startup import FRAMEWORK
from megatron_patches.megatron_deepspeed.state import is_active
from megatron_patches.megatron_deepspeed.unsupported import (
    refuse,
    refuse_framework_failures,
)
from megatron_patches.patch_set import apply_later, verify_flag
from megatron_patches.settings import MeshSettings

_KEPT_FLASH = ("use_flash_attn_v1", "use_flash_attn_v2")  # by _choose_flash
_FLASH = (*_KEPT_FLASH, "use_flash_attn_triton", "use_flash_attn_builder")
_PROGRAM = "megatron-deepspeed"
_GPT2_VOCABULARY = 50257  # Megatron-DeepSpeed reads its own later; the degrees do not depend on it


def parse_args(
    original: Callable[..., Any],
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
    *,
    settings: MeshSettings,
) -> Any:
    """Megatron's ``parse_args`` with the flags that the patches add."""

    def provide(parser: ArgumentParser) -> ArgumentParser:
        add_flags(parser, settings)
        return extra_args_provider(parser) if extra_args_provider else parser

    return original(provide, ignore_unknown_args)


def add_flags(parser: ArgumentParser, settings: MeshSettings) -> None:
    """The flags that the trainer has too, with the defaults of ``settings``."""
    group = parser.add_argument_group(title="unified sequence parallel")
    for purpose in ("parallelism", "attention"):
        add_settings(group, _PROGRAM, purpose, **vars(settings))
    group = parser.add_argument_group(title="unified sequence parallel, memory")
    add_settings(group, _PROGRAM, "memory")


def validate_args(
    original: Callable[..., Any], args: Any, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """``validate_args``, and checks of what the patches compute; then patches the script. In
    ``args`` fusions, flash attention and the degree that ``auto`` stands for are set.

    Raises:
        ConfigError, LayoutError: what cannot be trained exactly.
        PatchError: a script that does not match.
    """
    _refuse_before(args)
    switch_off_missing_fusions(args)
    validated = original(args, defaults)
    memory.check_flags(args)
    if args.usp_loss_chunks:
        verify_flag(FRAMEWORK, "--usp-loss-chunks")
    run = planned_run(args)
    if args.ulysses_degree == AUTO:
        args.ulysses_degree = _auto_degree(run)
    layout = ds_usp.TokenLayout("contiguous", args.seq_length)
    if is_active(args):
        config = ds_usp.USPConfig.from_args(args)
        ds_usp.Degrees(
            sp=config.sp_degree,
            ulysses=config.ulysses,
            tp=args.tensor_model_parallel_size,
            heads=args.num_attention_heads,
            kv_heads=args.num_key_value_heads,
        ).check(ds_usp.Degrees.FLAGS)
        layout = ds_usp.TokenLayout(config.layout, args.seq_length, config.ulysses, config.ring)
        _choose_flash(args, config)
        # bf16 does not matter here: ZeRO-0 sums its gradients in bf16, and so do ZeRO-1 and 2, with
        # the same losses, unless data_types of DeepSpeed's configuration says fp32.
        check_zero_stage(run.zero, stages=args.pipeline_model_parallel_size, bf16=False)
        refuse(args, _deepspeed_config(args))  # behind _choose_flash, whose result it reads
        apply_later(FRAMEWORK)
    flags.check_mlp_chunks(args, min(map(layout.length, range(layout.degree))))
    return validated


def _refuse_before(args: Any) -> None:
    """Checks before Megatron-DeepSpeed's own, which overwrite these flags or fail on them."""
    refuse_framework_failures(args)
    sp = args.ds_sequence_parallel_size
    if args.ulysses_degree != AUTO:
        ds_usp.USPConfig.from_args(args)
    refusals.refuse(flags.SHARED_REFUSALS, args)
    if sp > 1 and args.sequence_parallel:
        raise ConfigError(
            f"--sequence-parallel (Megatron's) shards the sequence over tensor-parallel ranks, and "
            f"--ds-sequence-parallel-size {sp} over others. Leave --sequence-parallel out"
        )


def _deepspeed_config(args: Any) -> Mapping[str, Any]:
    """The contents of ``--deepspeed_config``."""
    config = args.deepspeed_config
    if isinstance(config, str):
        with open(config, encoding="utf-8") as file:
            config = json.load(file)
    return config or {}


def planned_run(args: Any) -> flags.PlannedRun:
    """The run of validated arguments, as the planner and the transformer layers read it."""
    stage = int(_deepspeed_config(args).get("zero_optimization", {}).get("stage", 0))
    return flags.PlannedRun(
        args=args, zero=stage, world_size=args.world_size, default_vocab=_GPT2_VOCABULARY
    )


def layer_memory(args: Any) -> LayerMemory:
    """Decide what layers save for backward, with Megatron-DeepSpeed's own activation checkpoint;
    ConfigError where ``--usp-offload-ratio auto`` has no answer."""
    from deepspeed.accelerator import get_accelerator
    from megatron.core import tensor_parallel

    def checkpoint(run: Callable[..., Any], hidden: Tensor) -> Any:
        # It holds the recomputed output during the layer's whole backward pass.
        return tensor_parallel.checkpoint(partial(run_for_gradients, run), False, hidden)

    device = torch.device(get_accelerator().current_device_name())
    return planned_run(args).layer_memory(
        device, checkpoint=checkpoint, random_tracker=tensor_parallel.get_cuda_rng_tracker
    )


def _auto_degree(run: flags.PlannedRun) -> int:
    """The planner's degree; rank 0 prints why."""
    # Ranks on GPUs of different kinds whose degrees differ are refused when they make groups.
    choice = run.choose_degree(on_gpu=torch.cuda.is_available())
    if run.args.rank == 0:
        print("\n".join(choice.why), flush=True)  # noqa: T201 - as Megatron-DeepSpeed prints
    return choice.ulysses


def _choose_flash(args: Any, config: ds_usp.USPConfig) -> None:
    """Keep a requested flash attention in ``args`` where it is installed and there is no ring."""
    # Elsewhere it is not refused: loss and memory are the same without it, and a script that asks
    # for it also runs on machines that lack it.
    installed = importlib.util.find_spec("flash_attn") is not None
    keep = installed and config.ring == 1 and config.kernel == "auto"
    requested = [name for name in _FLASH if getattr(args, name)]
    unused = [name for name in requested if not keep or name not in _KEPT_FLASH]
    if unused and args.rank == 0:
        line = f"--{unused[0].replace('_', '-')}: {_flash_unused_reason(installed, config)}"
        print(line, flush=True)  # noqa: T201 - as Megatron-DeepSpeed prints
    args.use_flash_attn_v1 &= keep
    args.use_flash_attn_v2 &= keep
    args.use_flash_attn_triton = args.use_flash_attn_builder = False
    args.use_flash_attn = args.use_flash_attn_v1 or args.use_flash_attn_v2


def _flash_unused_reason(installed: bool, config: ds_usp.USPConfig) -> str:
    """Why a requested flash attention is not used, and what is."""
    if not installed:
        reason = "flash-attn is not installed"
    elif config.ring > 1:
        reason = f"it cannot serve a ring of {config.ring}"
    elif config.kernel != "auto":
        reason = f"--usp-kernel {config.kernel} was given"
    else:
        reason = "its batch layout is another"
    return f"not used, because {reason}; usp_attention computes the same (kernel {config.kernel})"
