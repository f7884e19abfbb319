"""A plan as the flags, the configuration or the script that runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import DEFAULT_SP_ORDER
from ds_usp.planner.split import Split, Workload

_CHUNK_TOKENS = 1024  # of a loss in chunks: plans count no logits; these are 0.8 GB of 128K words


def emit(kind: str, work: Workload, split: Split) -> str:
    """A plan in the language of a host.

    Args:
        kind: one of :data:`KINDS`.

    Raises:
        ConfigError: a kind that is unknown, or a plan that the host cannot run.
    """
    if kind not in KINDS:
        raise ConfigError(f"--emit {kind} is none of {', '.join(KINDS)}")
    if split.offload_ratio:
        raise ConfigError(f"{kind} has no switch for offload_ratio={split.offload_ratio}")
    if min(split.ulysses, split.ring) > 1 and split.order != DEFAULT_SP_ORDER:
        raise ConfigError(
            f"{kind} lays ulysses and ring out as {DEFAULT_SP_ORDER} and has no switch for "
            f"{split.order}: leave --order out"
        )
    return KINDS[kind](work, split)


def _joined(flags: list[str]) -> str:
    lines: list[str] = []
    for flag in flags:
        if flag.startswith("--") or not lines:
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    return " \\\n".join(lines)


def _shape_flags(work: Workload, split: Split, kv: str) -> list[str]:
    model = work.model
    flags = ["--num-layers", str(model.layers), "--hidden-size", str(model.hidden)]
    flags += ["--num-attention-heads", str(model.heads), *kv.format(model.kv_heads).split()]
    flags += ["--ffn-hidden-size", str(model.ffn), "--seq-length", str(work.seq_len)]
    flags += ["--max-position-embeddings", str(work.seq_len)]
    flags += ["--micro-batch-size", str(split.micro_batch)]
    return [*flags, "--global-batch-size", str(work.global_batch), "--bf16"]


def _architecture_flags(work: Workload, rotary: str) -> list[str]:
    model, flags = work.model, []
    flags += [] if model.learned_positions else rotary.split()
    flags += ["--swiglu"] if model.gated else []
    flags += [] if model.biases else ["--disable-bias-linear", "--normalization"]
    return flags


def megatron_deepspeed(work: Workload, split: Split) -> str:
    """Flags of ``python -m megatron_patches.run pretrain_gpt.py`` and of the trainer here."""
    if split.virtual_stages(work.model) > 1 or split.recompute == "attention-only":
        raise ConfigError(
            "Megatron-DeepSpeed has neither virtual stages nor recomputation of attention alone; "
            "search with --engine megatron-deepspeed"
        )
    more = _memory_flags(work, split)
    flags = ["--tensor-model-parallel-size", str(split.tp)]
    flags += ["--ds-sequence-parallel-size", str(split.sp), "--ulysses-degree", str(split.ulysses)]
    flags += ["--usp-layout", "zigzag", "--pipeline-model-parallel-size", str(split.pp)]
    flags += [] if split.pp > 1 else ["--no-pipeline-parallel"]
    flags += ["--zero-stage", str(split.zero)]
    flags += _shape_flags(work, split, "--num-key-value-heads {}")
    flags += _architecture_flags(work, "--use-rotary-position-embeddings")
    flags += [] if work.model.biases else ["rmsnorm"]
    flags += [] if work.model.tied else ["--untie-embeddings-and-output-weights"]
    if split.recompute == "full":
        flags += ["--checkpoint-activations", "--deepspeed-activation-checkpointing"]
    elif split.recompute != "none":
        flags += ["--usp-recompute", split.recompute]
    return _joined([*flags, *more, "--deepspeed", "--deepspeed_config", "ds_config.json"])


def _memory_flags(work: Workload, split: Split) -> list[str]:
    """What else the plan was priced with: a loss in chunks, packed documents."""
    if split.fused_activation:
        raise ConfigError(
            "neither Megatron-DeepSpeed nor the trainer fuses SwiGLU: leave --fused-activation out"
        )
    for flag, given in (("--fused-loss", split.fused_loss), ("--documents", work.documents)):
        if given and split.pp > 1:
            raise ConfigError(
                f"Megatron-DeepSpeed has no {flag} in a pipeline, and the plan has pp {split.pp}: "
                "search with --pp 1"
            )
    tokens = split.micro_batch * work.seq_len // split.sp
    flags = ["--usp-loss-chunks", str(-(-tokens // _CHUNK_TOKENS))] if split.fused_loss else []
    return flags + (["--reset-attention-mask", "--reset-position-ids"] if work.documents else [])


def megatron_core(work: Workload, split: Split) -> str:
    """Flags of Megatron-LM; ``megatron_patches.apply("megatron_core", ...)`` takes the split of
    context parallelism, which its own flags say too. It fuses SwiGLU unless it is told not to."""
    model = work.model
    if split.zero > 1 or split.recompute in ("gemm-last", "attention"):
        raise ConfigError(
            "Megatron-LM's flags have neither ZeRO-2 and 3 nor recomputation of all but the "
            "products, or but attention; search with --engine megatron-core"
        )
    for flag, given in (("--fused-loss", split.fused_loss), ("--documents", work.documents)):
        if given:
            raise ConfigError(f"Megatron-LM's flags have no {flag[2:]}: leave {flag} out")
    flags = ["--tensor-model-parallel-size", str(split.tp)]
    flags += ["--sequence-parallel"] if split.tp > 1 and split.tp_sequence else []
    flags += ["--context-parallel-size", str(split.sp)]
    if split.ulysses > 1 and split.ring > 1:
        flags += ["--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes"]
        flags += [str(split.ulysses), str(split.ring)]
    elif split.sp > 1:
        flags += ["--cp-comm-type", "a2a" if split.ulysses > 1 else "p2p"]
    flags += ["--pipeline-model-parallel-size", str(split.pp)]
    if split.virtual_stages(model) > 1:
        layers = str(split.chunk_layers(model))
        flags += ["--num-layers-per-virtual-pipeline-stage", layers]
    flags += ["--use-distributed-optimizer"] if split.zero == 1 else []
    flags += ["--overlap-grad-reduce"] if split.overlap_gradients else []
    grouped = "--group-query-attention --num-query-groups {}"
    flags += _shape_flags(work, split, grouped if model.kv_heads < model.heads else "")
    flags += _architecture_flags(work, "--position-embedding-type rope")
    flags += [] if model.biases else ["RMSNorm"]
    flags += [] if model.tied else ["--untie-embeddings-and-output-weights"]
    if split.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        flags += ["--recompute-num-layers", "1"]
    elif split.recompute == "attention-only":
        flags += ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"]
    return _joined([*flags, "--use-flash-attn"])


def ds_config(work: Workload, split: Split) -> str:
    """DeepSpeed's configuration file."""
    zero: dict[str, object] = {"stage": split.zero}
    if split.zero in (1, 2):
        zero |= {"contiguous_gradients": True, "overlap_comm": split.overlap_gradients}
    config = {
        "train_batch_size": work.global_batch,
        "train_micro_batch_size_per_gpu": split.micro_batch,
        "gradient_accumulation_steps": split.micro_batches(work.global_batch),
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if split.grad_bytes == 4 else "bf16"},
    }
    return json.dumps(config, indent=2)


_SCRIPT = """#!/usr/bin/env bash
# {name} on sequences of {seq_length} tokens, {num_gpus} GPUs: planned by python -m ds_usp.planner.
# Belongs into examples_deepspeed/sequence_parallel, beside launch.sh.
# shellcheck disable=SC2034  # launch.sh reads the settings
seq_length={seq_length}
model_size={model_size}
num_layers={num_layers}
hidden_size={hidden_size}
num_attn_heads={num_attn_heads}
num_kv_heads={num_kv_heads}
vocab_size={vocab_size}
rotary="{rotary}"
global_batch_size={global_batch_size}
batch_size={batch_size}

mp_size={mp_size}
sp_size={sp_size}
ulysses_degree={ulysses_degree}
pp_size={pp_size}
zero_stage={zero_stage}
activation_checkpoint="{activation_checkpoint}"

lr=3.0e-4
min_lr=3.0e-5
train_tokens_in_billion=300
lr_warmup_tokens_in_million=3000
lr_decay_tokens_in_billion=300

set -- {more} "$@"
# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${{BASH_SOURCE[0]}}")/launch.sh"
"""


def script(work: Workload, split: Split) -> str:
    """A script beside those of ``examples_deepspeed/sequence_parallel``."""
    megatron_deepspeed(work, split)  # refuses what that cannot run
    model = work.model
    more = ["--ffn-hidden-size", str(model.ffn), *_architecture_flags(work, "")]
    more += [] if model.biases else ["rmsnorm"]
    more += [] if model.tied else ["--untie-embeddings-and-output-weights"]
    if split.recompute in ("gemm-last", "attention"):
        more += ["--usp-recompute", split.recompute]
    more += _memory_flags(work, split)
    return _SCRIPT.format(
        name=model.name,
        seq_length=work.seq_len,
        num_gpus=split.gpus,
        model_size=round(model.parameters() / 1e9, 1),
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attn_heads=model.heads,
        num_kv_heads=model.kv_heads,
        vocab_size=model.vocab,
        rotary="false" if model.learned_positions else "true",
        global_batch_size=work.global_batch,
        batch_size=split.micro_batch,
        mp_size=split.tp,
        sp_size=split.sp,
        ulysses_degree=split.ulysses,
        pp_size=split.pp,
        zero_stage=split.zero,
        activation_checkpoint="true" if split.recompute == "full" else "false",
        more=" ".join(more),
    ).rstrip()


KINDS: Mapping[str, Callable[[Workload, Split], str]] = MappingProxyType(
    {
        "megatron-deepspeed": megatron_deepspeed,
        "megatron-core": megatron_core,
        "ds-config": ds_config,
        "script": script,
    }
)
ENGINE_OF: Mapping[str, str] = MappingProxyType(
    {
        "megatron-deepspeed": "megatron-deepspeed",
        "megatron-core": "megatron-core",
        "ds-config": "megatron-deepspeed",
        "script": "megatron-deepspeed",
    }
)
