"""Settings of the scripts that source ``launch.sh``: defaults, types, flags, and overrides."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from usp_trainer.arguments import build_parser

from ds_usp import ConfigError
from ds_usp.settings import Integer

REQUIRED = (
    "seq_length",
    "model_size",
    "num_layers",
    "hidden_size",
    "num_attn_heads",
    "global_batch_size",
    "lr",
)
# All settings with their defaults.
DEFAULTS: Mapping[str, str] = MappingProxyType(
    dict(
        re.findall(
            r"(\w+)=(\S*)",
            """
        seq_length= model_size= num_layers= hidden_size= num_attn_heads= num_kv_heads=
        global_batch_size= batch_size=1 lr= min_lr=0 lr_decay_style=cosine init_std=0.02
        rotary=false rope_theta=10000 clip_grad=1.0 weight_decay=0.1 precision=bf16
        train_tokens_in_billion= lr_warmup_tokens_in_million= lr_decay_tokens_in_billion=
        train_iters= lr_warmup_iters= lr_decay_iters= exit_interval= exit_duration_in_mins=
        mp_size=1 sp_size=1 ulysses_degree= usp_layout=zigzag usp_kernel=auto usp_cluster=
        pp_size=1 zero_stage=1 activation_checkpoint=false device=auto num_gpus=
        launcher=deepspeed hostfile= nnodes= node_rank= master_addr= master_port=29500
        log_interval=10 eval_iters=10 eval_interval=100 save_interval=100 seed=1234
        data_path= split=949,50,1 num_workers=0 tokenizer_type=GPT2BPETokenizer
        vocab_path=gpt2-vocab.json merge_path=gpt2-merges.txt tokenizer_model= vocab_size=
        output_home=usp_output tensorboard_dir= wandb_project= wandb_exp_name= wandb_save_dir=
        usp_framework= transformer_impl= megatron_deepspeed_path= megatron_lm_path= dry_run=0
        """,
        )
    )
)
# Flags that all programs have, and the settings that are their values.
COMMON_FLAGS = """
    --seq-length {seq_length} --max-position-embeddings {seq_length} --init-method-std {init_std}
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size {batch_size}
    --global-batch-size {global_batch_size} --train-iters {train_iters} --lr {lr} --min-lr {min_lr}
    --lr-decay-style {lr_decay_style} --lr-decay-iters {lr_decay_iters}
    --lr-warmup-iters {lr_warmup_iters} --weight-decay {weight_decay} --clip-grad {clip_grad}
    --adam-beta1 0.9 --adam-beta2 0.95 --log-interval {log_interval}
    --eval-interval {eval_interval} --eval-iters {eval_iters} --save-interval {save_interval}
    --seed {seed} --split {split}
"""
# Of the trainer and Megatron-DeepSpeed.
FLAGS = f"""
    --tensor-model-parallel-size {{mp_size}} --ds-sequence-parallel-size {{sp_size}}
    --ulysses-degree {{ulysses_degree}} --usp-layout {{usp_layout}} --usp-kernel {{usp_kernel}}
    --pipeline-model-parallel-size {{pp_size}} --zero-stage {{zero_stage}}
    --num-layers {{num_layers}} --hidden-size {{hidden_size}}
    --num-attention-heads {{num_attn_heads}} --num-key-value-heads {{num_kv_heads}} {COMMON_FLAGS}
"""
OPTIONAL_FLAGS = """
    --exit-interval {exit_interval} --exit-duration-in-mins {exit_duration_in_mins}
    --tensorboard-dir {tensorboard_dir} --wandb-project {wandb_project}
    --wandb-exp-name {wandb_exp_name} --wandb-save-dir {wandb_save_dir}
"""
OTHER_FLAGS = """
    --usp-cluster {usp_cluster} --vocab-size {vocab_size} --device {device}
    --rotary-base {rope_theta} --data-path {data_path}
"""
MEGATRON_FLAGS = """
    --deepspeed --deepspeed_config {config} --data-impl mmap --num-workers {num_workers}
    --tokenizer-type {tokenizer_type} --rotary-position-embeddings-theta {rope_theta}
    --no-async-tensor-model-parallel-allreduce --no-gradient-accumulation-fusion
    --override-opt_param-scheduler
"""  # the last one: TRAIN_ITERS may differ from the checkpoint's
TOKENIZER_FLAGS = "--vocab-file {vocab_path} --merge-file {merge_path}"
TENSORBOARD_FLAGS = """
    --tensorboard-queue-size 1 --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
"""
CPU_FLAGS = """
    --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion
"""
RECOMPUTE_FLAGS = "--checkpoint-activations --deepspeed-activation-checkpointing"
MOCK_DATA = "mock"  # DATA_PATH that stands for Megatron-LM's --mock-data
# A dense mask of 32K tokens is 1 GiB a sequence; the causal rule needs none.
MEGATRON_LM_FLAGS = f"""
    --tensor-model-parallel-size {{mp_size}} --pipeline-model-parallel-size {{pp_size}}
    --context-parallel-size {{sp_size}} --ulysses-degree {{ulysses_degree}}
    --usp-kernel {{usp_kernel}} --transformer-impl {{transformer_impl}} --overlap-grad-reduce
    --num-layers {{num_layers}} --hidden-size {{hidden_size}}
    --num-attention-heads {{num_attn_heads}} {COMMON_FLAGS} --num-workers {{num_workers}}
    --override-opt_param-scheduler --no-create-attention-mask-in-dataloader
"""
# These kernels are of apex or TransformerEngine; that of the output layer is apex's in any layers.
MEGATRON_LM_LOCAL_FLAGS = "--no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion"
NO_GRADIENT_FUSION = "--no-gradient-accumulation-fusion"
# Else torch.compile builds C++ for minutes.
MEGATRON_LM_CPU_FLAGS = "--distributed-backend gloo --disable-jit-fuser"
MEGATRON_LM_RECOMPUTE_FLAGS = """
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
"""
SETTING_OF_FLAG: Mapping[str, str] = MappingProxyType(
    dict(re.findall(r"(--\S+) \{(\w+)\}", FLAGS + OPTIONAL_FLAGS + OTHER_FLAGS))
)


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    choices: Sequence[Any]

    def __call__(self, text: str) -> str:
        if text not in map(str, self.choices):
            raise ValueError
        return text

    def __str__(self) -> str:
        *others, last = map(str, self.choices)
        return f"{', '.join(others)} or {last}" if others else last


# Types of settings that are no value of a flag.
TYPES: Mapping[str, Any] = MappingProxyType(
    {
        "rotary": Choice(("true", "false")),
        "activation_checkpoint": Choice(("true", "false")),
        "precision": Choice(("bf16", "fp32")),
        "launcher": Choice(("deepspeed", "torchrun", "srun")),
        "usp_framework": Choice(("megatron_lm",)),
        "transformer_impl": Choice(("transformer_engine", "local")),
        "dry_run": Choice("01"),
        "num_gpus": Integer(1),
        "nnodes": Integer(1),
        "node_rank": Integer(0),
        "master_port": Integer(0),
        "num_workers": Integer(0),
        "train_tokens_in_billion": Integer(0),
        "lr_decay_tokens_in_billion": Integer(0),
        "lr_warmup_tokens_in_million": Integer(0),
    }
)
# Variables that other programs read, so they are no misspelt settings.
FOREIGN_VARIABLES = re.compile(
    "(CUDA|NCCL|SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|UCX|TORCH|PYTORCH|NVIDIA|DS|OMP|MKL|GLOO|LOCAL|GROUP"
    "|ROLE|WANDB|HF|LC|XDG|SSH|CI|GIT|PIP|CONDA|BASH|PYTHON|LD)_.*|NUM_CPUS"
)
MEGATRON_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "NUM_ATTENTION_HEADS": "NUM_ATTN_HEADS",
        "NUM_KEY_VALUE_HEADS": "NUM_KV_HEADS",
        "NUM_QUERY_GROUPS": "NUM_KV_HEADS",
        "MICRO_BATCH_SIZE": "BATCH_SIZE",
        "TP_SIZE": "MP_SIZE",
        "CP_SIZE": "SP_SIZE",
        "TENSOR_MODEL_PARALLEL_SIZE": "MP_SIZE",
        "PIPELINE_MODEL_PARALLEL_SIZE": "PP_SIZE",
        "DS_SEQUENCE_PARALLEL_SIZE": "SP_SIZE",
    }
)


def misspelt_setting(
    variables: Iterable[str], settings: Sequence[str] = tuple(name.upper() for name in DEFAULTS)
) -> tuple[str, str] | None:
    """An environment variable that is probably meant as one of the settings, and that setting;
    None if there is none. Of several the first in alphabetical order.

    It is Megatron's name of a setting, or no variable that other programs own, and nearly the name
    of a setting or the beginning of one.
    """
    for variable in sorted(variables):
        if not re.fullmatch("[A-Z][A-Z0-9_]+", variable) or variable in settings:
            continue
        meant = [MEGATRON_NAMES[variable]] if variable in MEGATRON_NAMES else []
        if not meant and not FOREIGN_VARIABLES.fullmatch(variable):
            # One letter of 6 may differ, and none of shorter names, which are near to many words.
            lengths = {s: abs(len(s) - len(variable)) for s in settings if len(s) > 5}
            near = [s for s, difference in lengths.items() if difference <= 1 + (len(s) > 11)]
            meant = get_close_matches(variable, near, 1, 5 / 6)
            completions = [setting for setting in settings if setting.startswith(variable)]
            if not meant and "_" in variable and len(variable) > 5 and len(completions) == 1:
                meant = completions
        if meant and meant[0] in settings:
            return variable, meant[0]
    return None


def read_settings(script: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of a script with overrides from the environment, each of its type.

    Raises:
        ConfigError: a value out of range, or a variable that is nearly a setting's name.
    """
    misspelt = misspelt_setting(environment)
    if misspelt:
        raise ConfigError(
            f"{misspelt[0]} is no setting; did you mean {misspelt[1]}? The settings are in "
            f"launch_settings.py; unset {misspelt[0]} if it is meant for another program"
        )
    actions = {name: a for a in build_parser()._actions for name in a.option_strings}
    types = dict(TYPES)
    for flag, name in SETTING_OF_FLAG.items():
        choices = actions[flag].choices
        types.setdefault(name, Choice(tuple(choices)) if choices else actions[flag].type)
    settings = {}
    for name, default in DEFAULTS.items():
        value = settings[name] = environment.get(name.upper(), script.get(name, default))
        is_optional = name not in REQUIRED and not default
        if name in types and (value or not is_optional):
            try:
                types[name](value)
            except (ValueError, ArgumentTypeError) as error:
                raise ConfigError(f"{name.upper()}={value!r} must be {types[name]}") from error
    return settings


def in_settings_names(message: str) -> str:
    """An error of the trainer with the names of settings instead of flags."""

    def name_of(match: re.Match[str]) -> str:
        setting = SETTING_OF_FLAG.get(match[1], "").upper()
        return f"{setting}{'=' if match[2] else ''}" if setting else match[0]

    return re.sub(r"(--[a-z-]+)( (?=[\d/.]))?", name_of, message)
