"""Arguments of Megatron-LM: added flags, and refusals before any process group exists.

A rank calls these once, at its start, without communication.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ds_usp import Degrees
from ds_usp.errors import ConfigError
from ds_usp.planner import AUTO
from ds_usp.settings import add_settings
from megatron_patches import flags
from megatron_patches.megatron_core.context_parallel import (
    ContextParallel,
    Settings,
    check_degrees,
)
from megatron_patches.megatron_core.groups import LAYOUT
from megatron_patches.megatron_lm import context_parallel_kind, memory, unsupported
from megatron_patches.megatron_lm.connections import not_demanded
from megatron_patches.megatron_lm.planned import key_value_heads, planned_run
from megatron_patches.megatron_lm.relied_on import FRAMEWORK
from megatron_patches.patch_set import apply_later
from megatron_patches.refusals import refuse
from megatron_patches.settings import MeshSettings

_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        **Degrees.FLAGS,
        "sp": "--context-parallel-size",
        "levels": "--hierarchical-context-parallel-sizes",
    }
)


def parse_args(
    original: Callable[..., Any],
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    ignore_unknown_args: bool = False,
    *,
    settings: MeshSettings,
) -> Any:
    """Megatron-LM's ``parse_args`` with the flags that the patches add.

    Raises:
        ConfigError: ``--yaml-cfg``, which replaces all other flags.
    """

    def provide(parser: ArgumentParser) -> ArgumentParser:
        add_flags(parser, settings)
        return extra_args_provider(parser) if extra_args_provider else parser

    _refuse_file_of_flags()
    return original(provide, ignore_unknown_args)


def _refuse_file_of_flags() -> None:
    """ConfigError for ``--yaml-cfg`` in ``sys.argv``, before Megatron-LM reads the file."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg")
    path = parser.parse_known_args()[0].yaml_cfg
    if path is not None:
        raise ConfigError(
            f"--yaml-cfg {path} replaces all flags, those of the patches too. Give flags instead"
        )


def add_flags(parser: ArgumentParser, settings: MeshSettings) -> None:
    """The flags that the patches serve, with the defaults of ``settings``, and a default of
    ``--cp-comm-type`` that :func:`.context_parallel_kind.resolve` knows."""
    group = parser.add_argument_group(title="unified sequence parallel")
    for purpose in ("parallelism", "attention", "memory"):
        add_settings(group, "megatron-lm", purpose, **vars(settings))
    default = parser.get_default("cp_comm_type")
    parser.set_defaults(cp_comm_type=context_parallel_kind.NotGiven(default))


def validate_args(
    original: Callable[..., Any],
    args: Any,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    *,
    context_parallel: ContextParallel,
) -> Any:
    """``validate_args``, and checks of what the patches compute. In ``args`` the kinds of context
    parallelism, the degree that ``auto`` stands for and the data loader's mask are set.

    Args:
        context_parallel: that of megatron-core's patches, which read its settings later.

    Raises:
        ConfigError: what cannot be trained exactly.
        PatchError: a script that does not match.
    """
    unsupported.refuse_transformer_engine(args)
    context_parallel_kind.resolve(args)
    refuse(flags.SHARED_REFUSALS, args)
    if args.ulysses_degree != AUTO:
        _check_degrees(args)
    with not_demanded(args):
        validated = original(args, defaults)
    memory.check_flags(args)
    unsupported.refuse(args)
    if args.ulysses_degree == AUTO:
        args.ulysses_degree = _auto_degree(args)
        _check_degrees(args)
    context_parallel.settings = _settings(args)
    usp = context_parallel_kind.uses_usp(args)
    if context_parallel_kind.attends_on_one_rank(args) or (
        usp and not context_parallel_kind.is_mixed(args)
    ):
        # A causal mask, seq_length x seq_length bytes, that every layer would compare.
        args.create_attention_mask_in_dataloader = False
    if usp:
        apply_later(FRAMEWORK)
    return validated


def _check_degrees(args: Any) -> None:
    """Refuse degrees that do not fit each other or the model, with the flags' names."""
    levels = args.hierarchical_context_parallel_sizes
    if not context_parallel_kind.uses_usp(args):
        levels = None
    model = {"tp": args.tensor_model_parallel_size}
    if args.num_attention_heads is not None:
        model |= {"heads": args.num_attention_heads, "kv_heads": key_value_heads(args)}
    check_degrees(args.context_parallel_size, args.ulysses_degree, levels, _FLAGS, **model)


def _settings(args: Any) -> Settings | None:
    """Return the settings of USP attention; None where all layers have TransformerEngine's own
    context parallelism."""
    usp = context_parallel_kind.uses_usp(args)
    if args.context_parallel_size > 1 and not usp:
        kinds = " ".join(args.cp_comm_type)
        _print_once(
            args,
            f"--cp-comm-type {kinds}: context parallelism is TransformerEngine's own, not USP's. "
            "Leave it out for USP",
        )
        return None
    # One rank a sequence has USP attention only where recomputation keeps its results.
    everywhere = context_parallel_kind.attends_on_one_rank(args)
    if args.usp_kernel != "auto" and not usp and not everywhere:
        _print_once(
            args,
            f"--usp-kernel {args.usp_kernel} has no effect with --context-parallel-size 1",
        )
    return Settings(
        ulysses_degree=args.ulysses_degree if usp else None,
        layout=LAYOUT,
        kernel=args.usp_kernel,
        everywhere=everywhere,
    )


def _auto_degree(args: Any) -> int | None:
    """The planner's degree, None with one rank a sequence; rank 0 prints why.

    Raises:
        ConfigError: a model that the planner does not know, or that fits with no degree.
    """
    if args.context_parallel_size == 1:
        return None
    # Ranks on GPUs of different kinds whose degrees differ are refused when they make groups.
    refuse(unsupported.UNKNOWN_TO_PLANNER, args)
    choice = planned_run(args).choose_degree(on_gpu=torch.cuda.is_available())
    _print_once(args, *choice.why)
    return choice.ulysses


def _print_once(args: Any, *lines: str) -> None:
    if args.rank == 0 and lines:
        print("\n".join(lines), flush=True)  # noqa: T201 - as Megatron-LM prints
