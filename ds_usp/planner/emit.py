"""A plan as the lines of the program that runs it: ``answer.py`` asks, for the recommended plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeAlias

from ds_usp.errors import ConfigError
from ds_usp.geometry.degrees import zero_refusal
from ds_usp.planner.arguments import counted
from ds_usp.planner.formulas import LEAST_BUCKET_ELEMENTS, bucket_elements
from ds_usp.planner.models import ModelShape
from ds_usp.planner.parallel_config import ParallelConfig, Workload

_CHUNK_TOKENS = 1024  # of a loss in chunks: 0.8 GB of logits of a vocabulary of 128K


def emit(engine: str, work: Workload, config: ParallelConfig) -> str:
    """The lines by which a program runs a plan.

    Raises:
        ConfigError: a plan or a model that the program's settings cannot state.
    """
    return _EMITTERS[engine](work, config)


Flags: TypeAlias = Mapping[str, object]


def _words(flags: Flags) -> list[str]:
    """Flags of the command line: without a value where it is True, left out where it is False."""
    return [
        f"--{name}" if value is True else f"--{name} {value}"
        for name, value in flags.items()
        if value is not False
    ]


def _shell(flags: Flags) -> str:
    """Flags as one shell command, a line for each."""
    return " \\\n".join(_words(flags))


def _refuse_facts(model: ModelShape, program: str, *, missing: tuple[str, ...] = ()) -> None:
    """Refuse a model that the program's flags cannot state: it would train another one.

    Args:
        missing: fields of the model for which the program has no flag.

    Raises:
        ConfigError: it names every such fact of the model.
    """
    facts = list(model.other_facts)  # that have no field, such as a scaling of rotary angles
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
            "model"
        )


def _shape_flags(work: Workload, config: ParallelConfig) -> Flags:
    model = work.model
    return {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "num-attention-heads": model.heads,
        "ffn-hidden-size": model.ffn,
        "kv-channels": model.q_width != model.hidden and model.head_dim,
        "seq-length": work.seq_len,
        "max-position-embeddings": work.seq_len,
        **_layer_flags(model),
        # Both count the end of a document in addition.
        "tokenizer-type": "NullTokenizer",
        "vocab-size": model.vocab - 1,
        "micro-batch-size": config.micro_batch,
        "global-batch-size": work.global_batch,
        "attention-dropout": 0,  # the programs' defaults are 0.1
        "hidden-dropout": 0,
        "bf16": True,
    }


def _layer_flags(model: ModelShape) -> Flags:
    return {
        "swiglu": model.gated,
        "disable-bias-linear": not model.biases,
        "untie-embeddings-and-output-weights": not model.tied,
    }


def _norm_flags(model: ModelShape) -> Flags:
    return {
        "normalization": "layernorm" if model.biases else "rmsnorm",
        "layernorm-epsilon": f"{model.norm_epsilon:g}",
    }


def megatron_deepspeed(work: Workload, config: ParallelConfig) -> str:
    """Flags of ``python -m megatron_patches.run pretrain_gpt.py``, with :func:`ds_config`."""
    model = work.model
    _refuse_facts(model, "Megatron-DeepSpeed", missing=("qkv_bias", "qk_norm"))
    rotary = not model.learned_positions
    return _shell(
        {
            "tensor-model-parallel-size": config.tp,
            "ds-sequence-parallel-size": config.sp,
            "ulysses-degree": config.ulysses,
            "usp-layout": "zigzag",
            "pipeline-model-parallel-size": config.pp,
            "no-pipeline-parallel": config.pp == 1,
            "zero-stage": config.zero,
            "num-key-value-heads": model.kv_heads,
            **_shape_flags(work, config),
            **_norm_flags(model),
            "use-rotary-position-embeddings": rotary,
            "rotary-position-embeddings-theta": rotary and int(model.rope_theta),
            # Neither goes with --usp-recompute gemm-last, nor with DeepSpeed.
            "no-gradient-accumulation-fusion": True,
            "no-async-tensor-model-parallel-allreduce": True,
            **_memory_flags(work, config),
            "deepspeed": True,
            "deepspeed_config": "ds_config.json",
        }
    )


def _memory_flags(work: Workload, config: ParallelConfig) -> Flags:
    """The plan's memory settings, as flags that Megatron-DeepSpeed and the trainer share."""
    return {
        "usp-recompute": config.recompute != "none" and config.recompute,
        "usp-offload-ratio": config.offload_ratio > 0 and f"{config.offload_ratio:g}",
        "usp-loss-chunks": config.fused_loss and loss_chunks(work, config),
        **{row.flag[2:]: value for row, value in config.length_settings()},
        "reset-attention-mask": bool(work.document_lengths),
        "reset-position-ids": bool(work.document_lengths),
    }


def loss_chunks(work: Workload, config: ParallelConfig) -> int:
    """Chunks of a loss in chunks."""
    return -(-config.micro_batch * work.seq_len // config.sp // _CHUNK_TOKENS)


def megatron_lm(work: Workload, config: ParallelConfig) -> str:
    """Flags of ``python -m megatron_patches.run pretrain_gpt.py`` of Megatron-LM, which fuses
    SwiGLU: a plan counts more memory than the run takes.

    Raises:
        ConfigError: a plan or a model for which it has no flag.
    """
    model = work.model
    scaling = _rope_scaling_flags(model)
    stated = () if scaling else model.other_facts
    _refuse_facts(replace(model, other_facts=stated), "Megatron-LM")
    if work.document_lengths:
        raise ConfigError("Megatron-LM's flags have no documents: leave --documents out")
    rotary, virtual = not model.learned_positions, config.virtual_stages(model) > 1
    grouped = model.kv_heads < model.heads
    flags: Flags = {
        "tensor-model-parallel-size": config.tp,
        "sequence-parallel": config.tp > 1 and config.tp_sequence,
        "context-parallel-size": config.sp,
        "ulysses-degree": config.sp > 1 and config.ulysses,
        "pipeline-model-parallel-size": config.pp,
        "num-layers-per-virtual-pipeline-stage": virtual and config.chunk_layers(model),
        "use-distributed-optimizer": config.zero == 1,
        "overlap-grad-reduce": config.overlap_gradients,
        **_shape_flags(work, config),
        "group-query-attention": grouped,
        "num-query-groups": grouped and model.kv_heads,
        "add-qkv-bias": model.qkv_bias,
        "qk-layernorm": model.qk_norm,
        "normalization": "LayerNorm" if model.biases else "RMSNorm",
        "norm-epsilon": f"{model.norm_epsilon:g}",
        "position-embedding-type": rotary and "rope",
        "rotary-base": rotary and int(model.rope_theta),
        **scaling,
        **_recompute_flags(config),
        # A dense mask of 128K tokens is 16 GiB a sequence; the causal rule needs none.
        "no-create-attention-mask-in-dataloader": True,
    }
    return _shell(flags)


def _rope_scaling_flags(model: ModelShape) -> Flags:
    """Flags of Llama 3.1's scaling, if that is the one fact of a model that no other flag has:
    Megatron-LM has its other constants."""
    facts = model.other_facts
    if len(facts) != 1 or not facts[0].startswith("rope_scaling {"):
        return {}
    scaling = json.loads(facts[0].partition(" ")[2])
    kind = scaling.pop("rope_type", scaling.pop("type", ""))
    factor, constants = scaling.pop("factor", None), (1, 4, 8192)
    names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind != "llama3" or tuple(scaling.get(name) for name in names) != constants:
        return {}
    return {"use-rope-scaling": True, "rope-scaling-factor": f"{factor:g}"}


def _recompute_flags(config: ParallelConfig) -> Flags:
    """Recomputation, and the settings that trade time for length, with which Megatron-LM's own
    checkpoints of layers do not go."""
    flags = {row.flag[2:]: value for row, value in config.length_settings()}
    mode, patched = config.recompute, bool(flags)
    flags["no-gradient-accumulation-fusion"] = patched
    if mode == "attention" or (mode == "full" and patched):
        flags["usp-recompute"] = mode
    elif mode == "full":
        flags |= {"recompute-granularity": "full", "recompute-method": "uniform"}
        flags["recompute-num-layers"] = 1
    elif mode == "attention-only":
        flags |= {"recompute-granularity": "selective", "recompute-modules": "core_attn"}
    return flags


def ds_config(work: Workload, config: ParallelConfig) -> Mapping[str, object]:
    """DeepSpeed's configuration of a plan."""
    if refusal := zero_refusal(config.zero, config.pp, bf16=True):  # which plans count with
        raise ConfigError(refusal.message)
    zero: dict[str, object] = {"stage": config.zero}
    zero["reduce_bucket_size"] = bucket_elements(work.model, config.tp, config.zero)
    if config.zero in (1, 2):
        zero |= {"contiguous_gradients": True, "overlap_comm": config.overlap_gradients}
        zero["allgather_bucket_size"] = LEAST_BUCKET_ELEMENTS
    return {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.micro_batches(work.global_batch),
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32" if config.grad_bytes == 4 else "bf16"},
    }


_SCRIPT = """#!/usr/bin/env bash
# {name} on sequences of {tokens} tokens, {gpus}: planned by ds-usp plan.
# Belongs into examples_deepspeed/sequence_parallel, beside launch.sh.
# shellcheck disable=SC2034  # launch.sh reads the settings
{shape}
# Token ids of the data as they are: the trainer is told how many there are, Megatron-DeepSpeed's
# NullTokenizer how many before the end of a document.
tokenizer_type=NullTokenizer
{vocabulary}
[[ -z "${{MEGATRON_DEEPSPEED_PATH:-}}" ]] || vocab_size=$((vocab_size - 1))
{batch}

{degrees}

lr=3.0e-4
min_lr=3.0e-5
train_tokens_in_billion=300
lr_warmup_tokens_in_million=3000
lr_decay_tokens_in_billion=300

set -- {more} "$@"
# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${{BASH_SOURCE[0]}}")/launch.sh"
"""


def _assignments(**values: object) -> str:
    return "\n".join(f"{name}={value}" for name, value in values.items())


def trainer(work: Workload, config: ParallelConfig) -> str:
    """A script beside those of ``examples_deepspeed/sequence_parallel``."""
    model = work.model
    _refuse_facts(model, "the trainer", missing=("qkv_bias", "qk_norm", "head_dim"))
    more = {"ffn-hidden-size": model.ffn, **_layer_flags(model), **_norm_flags(model)}
    return _SCRIPT.format(
        name=model.name,
        tokens=work.seq_len,
        gpus=counted(config.gpus, "GPU"),
        shape=_assignments(
            seq_length=work.seq_len,
            model_size=round(model.parameters() / 1e9, 1),
            num_layers=model.layers,
            hidden_size=model.hidden,
            num_attn_heads=model.heads,
            num_kv_heads=model.kv_heads,
            rotary='"false"' if model.learned_positions else '"true"',
            rope_theta=int(model.rope_theta),
        ),
        vocabulary=_assignments(vocab_size=model.vocab),
        batch=_assignments(global_batch_size=work.global_batch, batch_size=config.micro_batch),
        degrees=_assignments(
            mp_size=config.tp,
            sp_size=config.sp,
            ulysses_degree=config.ulysses,
            usp_layout="zigzag",
            pp_size=config.pp,
            zero_stage=config.zero,
        ),
        more=" ".join(_words({**more, **_memory_flags(work, config)})),
    ).rstrip()


def _command(config: ParallelConfig, checkout: str, flags: str) -> str:
    gpus = counted(config.gpus, "GPU")
    return f"""\
# {gpus}. Several nodes: NNODES, and RENDEZVOUS="--node-rank N --master-addr HOST"
torchrun --nnodes ${{NNODES:-1}} --nproc-per-node $(({config.gpus} / ${{NNODES:-1}})) \\
${{RENDEZVOUS:---standalone}} -m megatron_patches.run ${checkout}/pretrain_gpt.py \\
{flags}"""


def _of_megatron_lm(work: Workload, config: ParallelConfig) -> str:
    return _command(config, "MEGATRON_LM_PATH", megatron_lm(work, config))


def _of_megatron_deepspeed(work: Workload, config: ParallelConfig) -> str:
    content = json.dumps(ds_config(work, config), indent=2)
    command = _command(config, "MEGATRON_DEEPSPEED_PATH", megatron_deepspeed(work, config))
    return f"cat > ds_config.json <<'END'\n{content}\nEND\n{command}"


_START = """\
import torch
import torch.distributed as dist

if not dist.is_initialized():
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl")
"""


def transformers(work: Workload, config: ParallelConfig) -> str:
    """Python beside a model of transformers. The model's facts are in its own configuration."""
    options = {
        "recompute": config.recompute != "none" and f'"{config.recompute}"',
        "offload_ratio": config.offload_ratio > 0 and f"{config.offload_ratio:g}",
        "loss_chunks": config.fused_loss and loss_chunks(work, config),
        "mlp_chunks": config.mlp_chunks > 1 and config.mlp_chunks,
    }
    keywords = "".join(f", {name}={value}" for name, value in options.items() if value is not False)
    mesh = f"SequenceMesh.from_group(None, ulysses_degree={config.ulysses})"
    if config.dp > 1:
        axes = f'{{"ulysses": {config.ulysses}, "ring": {config.ring}, "dp": {config.dp}}}'
        mesh = f"SequenceMesh.build(ds_usp.RankGrid({axes}))"
    sizes = f"per_device_train_batch_size={config.micro_batch}"
    accumulated = config.micro_batches(work.global_batch)
    sizes += f", gradient_accumulation_steps={accumulated}" if accumulated > 1 else ""
    if config.fsdp2:
        dtype = "bfloat16" if config.bf16_states else "float32"
        engine = 'fsdp=True, fsdp_config={"version": 2}'
        policy = f"param_dtype=torch.bfloat16, reduce_dtype=torch.{dtype}"
        loop = f"""\
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
policy = MixedPrecisionPolicy({policy})
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)"""
    else:
        dtype = "bfloat16"
        content = json.dumps(ds_config(work, config), indent=4)
        content = content.replace("true", "True").replace("false", "False")
        engine = "deepspeed=ds_config"
        loop = """\
optimizer = torch.optim.AdamW(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)"""
    processes = counted(config.gpus, "process", "es")
    head = f"# {processes} of torchrun; from_pretrained(..., dtype=torch.{dtype})"
    configured = "" if config.fsdp2 else f"ds_config = {content}\n"
    return f"""\
{head}
{_START}
import ds_usp
from ds_usp.integrations.transformers import attach, enable, replicate_batches

mesh = ds_usp.{mesh}
enable(model, mesh{keywords})  # before a Trainer or an engine has it
{configured}
# a Trainer, or one of TRL's; its batch sizes count sequences of a mesh:
args = TrainingArguments(bf16=True, {sizes}, {engine})
attach(trainer, mesh)  # a trainer with these args and yours, before trainer.train()

# or a loop of your own, over replicate_batches(loader, mesh):
{loop}"""


_DIFFUSERS = """\
# {ranks} of torchrun; each calls the pipeline with a generator of the same seed
{start}
import ds_usp
from ds_usp.integrations.diffusers import enable

mesh = ds_usp.SequenceMesh.from_group(None, ulysses_degree={ulysses})
enable(pipe, mesh)  # with guidance, under torch.no_grad(): enable(pipe, mesh, cfg_degree=2)"""


def diffusers(gpus: int, ulysses: int) -> str:
    """Python beside a pipeline of diffusers whose images all ranks share."""
    return _DIFFUSERS.format(ranks=counted(gpus, "process", "es"), ulysses=ulysses, start=_START)


_EMITTERS: Mapping[str, Callable[[Workload, ParallelConfig], str]] = MappingProxyType(
    {
        "transformers": transformers,
        "megatron-lm": _of_megatron_lm,
        "megatron-deepspeed": _of_megatron_deepspeed,
        "trainer": trainer,
    }
)
