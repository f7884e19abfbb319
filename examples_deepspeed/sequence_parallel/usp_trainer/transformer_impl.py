"""``--transformer-impl``: whose linear layers and norms the model has; decided without torch."""

from __future__ import annotations

from argparse import Namespace

from ds_usp import ConfigError
from megatron_patches import transformer_engine

LOCAL, TRANSFORMER_ENGINE = "local", "transformer_engine"
CHOICES = (LOCAL, TRANSFORMER_ENGINE)


def check(args: Namespace) -> None:
    """ConfigError where TransformerEngine's layers are asked for and cannot train this model."""
    reason = _obstacle(args)
    if args.transformer_impl == TRANSFORMER_ENGINE and reason:
        raise ConfigError(f"--transformer-impl {TRANSFORMER_ENGINE} {reason}")


def chosen(args: Namespace) -> str:
    """The flag, or by default TransformerEngine's layers where they can train this model."""
    default = LOCAL if _obstacle(args) else TRANSFORMER_ENGINE
    return args.transformer_impl or default


def _obstacle(args: Namespace) -> str:
    """Why TransformerEngine's layers cannot train this model, and what can; "" if they can."""
    otherwise = f"or use --transformer-impl {LOCAL}"
    if args.device == "cpu":
        return f"needs GPUs, and this is --device cpu. Use --device cuda, {otherwise}"
    if missing := transformer_engine.what_is_missing():
        return (
            f"needs TransformerEngine {transformer_engine.OLDEST} or newer, which {missing}. "
            f"Install it, {otherwise}"
        )
    if not args.bf16:
        return f"multiplies fp32 matrices in TF32, which is not fp32. Add --bf16, {otherwise}"
    if args.zero_stage == 3:
        return f"was not tested with the weights of ZeRO-3. Use --zero-stage 2, {otherwise}"
    return ""
