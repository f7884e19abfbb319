#!/usr/bin/env bash
# GPT 1.3B on sequences of 32K tokens: sequence parallel 4 = Ulysses 2 x Ring 2, one node of 4 GPUs.
# shellcheck disable=SC2034  # launch.sh reads the settings
###############################################################################
### Main configs
seq_length=32768

model_size=1.3
num_layers=24
hidden_size=2048
num_attn_heads=16
global_batch_size=2
lr=2.0e-4
min_lr=1.0e-6
init_std=0.013
###############################################################################
### Training duration configs
train_tokens_in_billion=300
# Steps instead of tokens: TRAIN_ITERS=1000, which also shortens warm-up and decay.
###############################################################################
### lr configs
lr_warmup_tokens_in_million=3000
lr_decay_tokens_in_billion=300
lr_decay_style="cosine"
###############################################################################
### Parallelism configs
## Tensor parallelism
mp_size=1

## Sequence parallelism: ranks that share each sequence
sp_size=4
## Of these, ranks that exchange heads; the rest is the ring
ulysses_degree=2
## Which rank holds which token: zigzag balances causal work, contiguous does not
usp_layout="zigzag"
usp_kernel="auto"

## Pipeline parallelism
pp_size=1

zero_stage=1

## GPUs of this machine are counted; with several nodes those of HOSTFILE
num_gpus=""
hostfile=""

## Sequences of a replica at a time
batch_size=1
###############################################################################
### Misc configs
log_interval=10
eval_iters=10
eval_interval=100
save_interval=100

## Less memory, more time: layers are computed again in the backward pass
activation_checkpoint="true"
###############################################################################
### Output and data configs
seed=1234
num_workers=0

## The files of GPT-2's tokenizer, for Megatron-DeepSpeed
vocab_path="gpt2-vocab.json"
merge_path="gpt2-merges.txt"
vocab_size=50257

## A text file, or what Megatron's tools/preprocess_data.py makes; see README.md
data_path=""

output_home="usp_output"
###############################################################################
# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
