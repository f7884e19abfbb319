"""A plan as the flags, the configuration or the script that runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ds_usp.errors import ConfigError
from ds_usp.geometry.layout import DEFAULT_SP_ORDER
from ds_usp.planner.formulas import LEAST_BUCKET_ELEMENTS, bucket_elements
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload, framework_caps

_CHUNK_TOKENS = 1024  # of a loss in chunks: 0.8 GB of logits of a vocabulary of 128K
_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")  # the programs' defaults are 0.1


def emit(kind: str, work: Workload, config: ParallelConfig) -> str:
    """A plan as flags, a configuration or a script.

    Args:
        kind: one of :data:`KINDS`.

    Raises:
        ConfigError: a kind that is unknown, or a plan or a model that the program cannot run.
    """
    if kind not in KINDS:
        raise ConfigError(f"--emit {kind} is none of {', '.join(KINDS)}")
    if min(config.ulysses, config.ring) > 1 and config.order != DEFAULT_SP_ORDER:
        raise ConfigError(
            f"{kind} lays ulysses and ring out as {DEFAULT_SP_ORDER} and has no switch for "
            f"{config.order}: leave --order out"
        )
    return KINDS[kind](work, config)


def _joined(flags: list[str]) -> str:
    """Flags as one shell command: a line for each flag and its values, joined by backslashes."""
    lines: list[str] = []
    for flag in flags:
        if flag.startswith("--") or not lines:
            lines.append(flag)
        else:
            lines[-1] += f" {flag}"
    return " \\\n".join(lines)


def _refuse_facts(model: ModelShape, program: str, *, missing: tuple[str, ...] = ()) -> None:
    """Refuse a model that the program's flags cannot state: it would train another one.

    Args:
        missing: fields of the model for which the program has no flag.

    Raises:
        ConfigError: it names every such fact of the model.
    """
    facts = list(model.other_facts)
    for field in missing:
        value = getattr(model, field)
        if field == "head_dim":
            value = 0 if model.q_width == model.hidden else value
        facts += [f"{field}={value}"] if value else []
    if not model.learned_positions and model.rope_theta != int(model.rope_theta):
        facts.append(f"rope_theta={model.rope_theta} (a whole number is taken)")
    if facts:
        raise ConfigError(
            f"{program} has no flag for {', '.join(facts)} of {model.name}: it would train another "
            "model. Plan without --emit, or write the flags by hand"
        )


def _shape_flags(work: Workload, config: ParallelConfig) -> list[str]:
    """Model and batch flags that Megatron-DeepSpeed and Megatron-LM have by the same names."""
    model = work.model
    flags = ["--num-layers", str(model.layers), "--hidden-size", str(model.hidden)]
    flags += ["--num-attention-heads", str(model.heads), "--ffn-hidden-size", str(model.ffn)]
    if model.q_width != model.hidden:
        flags += ["--kv-channels", str(model.head_dim)]
    flags += ["--seq-length", str(work.seq_len), "--max-position-embeddings", str(work.seq_len)]
    flags += ["--swiglu"] if model.gated else []
    flags += [] if model.biases else ["--disable-bias-linear"]
    flags += [] if model.tied else ["--untie-embeddings-and-output-weights"]
    # Both count the end of a document in addition.
    flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(model.vocab - 1)]
    flags += ["--micro-batch-size", str(config.micro_batch)]
    return [*flags, "--global-batch-size", str(work.global_batch), *_DROPOUT, "--bf16"]


def megatron_deepspeed(work: Workload, config: ParallelConfig) -> str:
    """Flags of ``python -m megatron_patches.run pretrain_gpt.py``."""
    model = work.model
    _refuse_facts(model, "Megatron-DeepSpeed", missing=("qkv_bias", "qk_norm"))
    memory = _memory_flags(work, config)
    framework_caps("megatron-deepspeed").with_settings_of(config)
    flags = ["--tensor-model-parallel-size", str(config.tp)]
    flags += [
        "--ds-sequence-parallel-size",
        str(config.sp),
        "--ulysses-degree",
        str(config.ulysses),
    ]
    flags += ["--usp-layout", "zigzag", "--pipeline-model-parallel-size", str(config.pp)]
    flags += [] if config.pp > 1 else ["--no-pipeline-parallel"]
    flags += ["--zero-stage", str(config.zero), "--num-key-value-heads", str(model.kv_heads)]
    flags += _shape_flags(work, config)
    flags += ["--normalization", "layernorm" if model.biases else "rmsnorm"]
    flags += ["--layernorm-epsilon", f"{model.norm_epsilon:g}"]
    if not model.learned_positions:
        flags += ["--use-rotary-position-embeddings"]
        flags += ["--rotary-position-embeddings-theta", str(int(model.rope_theta))]
    # Neither goes with --usp-recompute gemm-last, nor with DeepSpeed.
    flags += ["--no-gradient-accumulation-fusion", "--no-async-tensor-model-parallel-allreduce"]
    return _joined([*flags, *memory, "--deepspeed", "--deepspeed_config", "ds_config.json"])


def _memory_flags(work: Workload, config: ParallelConfig) -> list[str]:
    """The plan's memory settings, as flags that Megatron-DeepSpeed and the trainer share."""
    if config.virtual_stages(work.model) > 1 or config.recompute == "attention-only":
        raise ConfigError(
            "Megatron-DeepSpeed has neither virtual stages nor recomputation of attention alone; "
            "search with --engine megatron-deepspeed"
        )
    _refuse_zero(config)
    if config.fused_activation:
        raise ConfigError(
            "neither Megatron-DeepSpeed nor the trainer fuses SwiGLU: leave --fused-activation out"
        )
    for flag, used in (("--fused-loss", config.fused_loss), ("--documents", work.documents)):
        if used and config.pp > 1:
            raise ConfigError(
                f"Megatron-DeepSpeed has no {flag} in a pipeline, and the plan has pp {config.pp}: "
                "search with --pp 1"
            )
    flags = [] if config.recompute == "none" else ["--usp-recompute", config.recompute]
    flags += ["--usp-offload-ratio", f"{config.offload_ratio:g}"] if config.offload_ratio else []
    tokens = config.micro_batch * work.seq_len // config.sp
    flags += ["--usp-loss-chunks", str(-(-tokens // _CHUNK_TOKENS))] if config.fused_loss else []
    flags += _mlp_flags(config)
    several = config.checkpoint_layers > 1
    flags += ["--usp-checkpoint-layers", str(config.checkpoint_layers)] if several else []
    flags += ["--usp-states-on-host"] if config.states_on_host else []
    flags += ["--usp-projection-overlap", "recompute"] if config.heads_in_chunks else []
    return flags + (["--reset-attention-mask", "--reset-position-ids"] if work.documents else [])


def _mlp_flags(config: ParallelConfig) -> list[str]:
    chunks = config.mlp_chunks
    return ["--usp-mlp-chunks", str(chunks)] if chunks > 1 else []


def _refuse_zero(config: ParallelConfig) -> None:
    """The check of ``ds_usp.training`` for bf16, which is what plans count with."""
    if config.zero == 0:
        raise ConfigError(
            "DeepSpeed's ZeRO-0 sums gradients of bf16 weights in bf16, and the plan counts fp32: "
            "take --zero 1"
        )


def megatron_lm(work: Workload, config: ParallelConfig) -> str:
    """Flags of ``python -m megatron_patches.run`` for ``pretrain_gpt.py`` of Megatron-LM."""
    degree = ["--ulysses-degree", str(config.ulysses)]
    flags = _megatron_lm("megatron-lm", work, config, degree)
    # A dense mask of 128K tokens is 16 GiB a sequence; the causal rule needs none.
    return f"{flags} \\\n--no-create-attention-mask-in-dataloader"


def megatron_core(work: Workload, config: ParallelConfig) -> str:
    """Flags of Megatron-LM, whose program calls ``megatron_patches.apply("megatron_core")``.

    The patches take ulysses x ring from ``--hierarchical-context-parallel-sizes``, and the layers
    whose ``--cp-comm-type`` is ``usp``; Megatron-LM's own default is ``p2p``.
    """
    flags = ["--cp-comm-type", "usp", "--hierarchical-context-parallel-sizes"]
    flags += [str(config.ulysses), str(config.ring)]
    return _megatron_lm("megatron-core", work, config, flags)


def _megatron_lm(
    framework: str, work: Workload, config: ParallelConfig, degree_flags: list[str]
) -> str:
    """Megatron-LM's own flags, with ``degree_flags`` where a sequence has several ranks.

    Megatron-LM fuses SwiGLU by default.

    Raises:
        ConfigError: a plan or a model for which it has no flag.
    """
    model = work.model
    _refuse_facts(model, "Megatron-LM")
    if config.zero > 1 or config.recompute not in framework_caps(framework).recompute:
        raise ConfigError(
            f"{framework}'s flags have neither ZeRO-2 and 3 nor every recomputation, and the plan "
            f"has ZeRO-{config.zero} and recompute {config.recompute}; search with --engine "
            f"{framework}"
        )
    if config.offload_ratio:
        raise ConfigError(
            f"Megatron-LM's flags offload nothing, the plan has {config.offload_ratio:g}"
        )
    framework_caps(framework).with_settings_of(config)
    if work.documents:
        raise ConfigError("Megatron-LM's flags have no documents: leave --documents out")
    flags = ["--tensor-model-parallel-size", str(config.tp)]
    flags += ["--sequence-parallel"] if config.tp > 1 and config.tp_sequence else []
    flags += ["--context-parallel-size", str(config.sp)]
    flags += degree_flags if config.sp > 1 else []
    flags += ["--pipeline-model-parallel-size", str(config.pp)]
    if config.virtual_stages(model) > 1:
        layers = str(config.chunk_layers(model))
        flags += ["--num-layers-per-virtual-pipeline-stage", layers]
    flags += ["--use-distributed-optimizer"] if config.zero == 1 else []
    flags += ["--overlap-grad-reduce"] if config.overlap_gradients else []
    flags += _shape_flags(work, config)
    if model.kv_heads < model.heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.kv_heads)]
    flags += ["--add-qkv-bias"] if model.qkv_bias else []
    flags += ["--qk-layernorm"] if model.qk_norm else []
    flags += ["--normalization", "LayerNorm" if model.biases else "RMSNorm"]
    flags += ["--norm-epsilon", f"{model.norm_epsilon:g}"]
    if not model.learned_positions:
        flags += ["--position-embedding-type", "rope", "--rotary-base", str(int(model.rope_theta))]
    return _joined([*flags, *_recompute_flags(config)])


def _recompute_flags(config: ParallelConfig) -> list[str]:
    """Recomputation, chunks of the MLP and of the heads; Megatron-LM's own checkpoints of layers
    take no chunks of the MLP."""
    flags: list[str] = []
    if config.mlp_chunks > 1:
        flags += _mlp_flags(config)
    if config.heads_in_chunks:
        flags += ["--usp-projection-overlap", "recompute", "--transformer-impl", "local"]
    flags += ["--no-gradient-accumulation-fusion"] if flags else []
    if config.recompute == "attention" or (config.recompute == "full" and flags):
        flags += ["--usp-recompute", config.recompute]
    elif config.recompute == "full":
        flags += ["--recompute-granularity", "full", "--recompute-method", "uniform"]
        flags += ["--recompute-num-layers", "1"]
    elif config.recompute == "attention-only":
        flags += ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"]
    return flags


def ds_config(work: Workload, config: ParallelConfig) -> str:
    """DeepSpeed's configuration file, for ``initialize_deepspeed`` and for Megatron-DeepSpeed."""
    _refuse_zero(config)
    zero: dict[str, object] = {"stage": config.zero}
    zero["reduce_bucket_size"] = bucket_elements(work.model, config.tp, config.zero)
    if config.zero in (1, 2):
        zero |= {"contiguous_gradients": True, "overlap_comm": config.overlap_gradients}
        zero["allgather_bucket_size"] = LEAST_BUCKET_ELEMENTS
    content = {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.micro_batches(work.global_batch),
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if config.grad_bytes == 4 else "bf16"},
    }
    return json.dumps(content, indent=2)


_SCRIPT = """#!/usr/bin/env bash
# {name} on sequences of {seq_length} tokens, {num_gpus} GPUs: planned by ds-usp plan.
# Belongs into examples_deepspeed/sequence_parallel, beside launch.sh.
# shellcheck disable=SC2034  # launch.sh reads the settings
seq_length={seq_length}
model_size={model_size}
num_layers={num_layers}
hidden_size={hidden_size}
num_attn_heads={num_attn_heads}
num_kv_heads={num_kv_heads}
rotary="{rotary}"
rope_theta={rope_theta}
# Token ids of the data as they are: the trainer is told how many there are, Megatron-DeepSpeed's
# NullTokenizer how many before the end of a document.
tokenizer_type=NullTokenizer
vocab_size={vocab_size}
[[ -z "${{MEGATRON_DEEPSPEED_PATH:-}}" ]] || vocab_size=$((vocab_size - 1))
global_batch_size={global_batch_size}
batch_size={batch_size}

mp_size={mp_size}
sp_size={sp_size}
ulysses_degree={ulysses_degree}
usp_layout=zigzag
pp_size={pp_size}
zero_stage={zero_stage}

lr=3.0e-4
min_lr=3.0e-5
train_tokens_in_billion=300
lr_warmup_tokens_in_million=3000
lr_decay_tokens_in_billion=300

set -- {more} "$@"
# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${{BASH_SOURCE[0]}}")/launch.sh"
"""


def script(work: Workload, config: ParallelConfig) -> str:
    """A script beside those of ``examples_deepspeed/sequence_parallel``, for either program."""
    model = work.model
    _refuse_facts(model, "the trainer", missing=("qkv_bias", "qk_norm", "head_dim"))
    more = ["--ffn-hidden-size", str(model.ffn), *(["--swiglu"] if model.gated else [])]
    more += [] if model.biases else ["--disable-bias-linear"]
    more += [] if model.tied else ["--untie-embeddings-and-output-weights"]
    more += ["--normalization", "layernorm" if model.biases else "rmsnorm"]
    more += ["--layernorm-epsilon", f"{model.norm_epsilon:g}", *_memory_flags(work, config)]
    if config.heads_in_chunks:
        more += ["--transformer-impl", "local"]
    return _SCRIPT.format(
        name=model.name,
        seq_length=work.seq_len,
        num_gpus=config.gpus,
        model_size=round(model.parameters() / 1e9, 1),
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attn_heads=model.heads,
        num_kv_heads=model.kv_heads,
        vocab_size=model.vocab,
        rotary="false" if model.learned_positions else "true",
        rope_theta=int(model.rope_theta),
        global_batch_size=work.global_batch,
        batch_size=config.micro_batch,
        mp_size=config.tp,
        sp_size=config.sp,
        ulysses_degree=config.ulysses,
        pp_size=config.pp,
        zero_stage=config.zero,
        more=" ".join(more),
    ).rstrip()


KINDS: Mapping[str, Callable[[Workload, ParallelConfig], str]] = MappingProxyType(
    {
        "megatron-deepspeed": megatron_deepspeed,
        "megatron-lm": megatron_lm,
        "megatron-core": megatron_core,
        "ds-config": ds_config,
        "script": script,
    }
)
FRAMEWORK_OF: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(KINDS, "megatron-deepspeed")
    | {name: name for name in ("megatron-lm", "megatron-core")}
    | {"script": "trainer"}
)
