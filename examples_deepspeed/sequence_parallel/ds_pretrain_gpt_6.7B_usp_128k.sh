#!/usr/bin/env bash
# GPT 6.7B on sequences of 128K tokens: sequence parallel 8 = Ulysses 4 x Ring 2, one node of 8 GPUs.
# shellcheck disable=SC2034  # launch.sh reads the settings
###############################################################################
### Main configs
seq_length=131072

model_size=6.7
num_layers=32
hidden_size=4096
num_attn_heads=32
global_batch_size=1
lr=1.2e-4
min_lr=1.0e-6
init_std=0.009

## A learned position for each of 128K tokens would be 537M weights more
rotary="true"
rope_theta=500000
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
sp_size=8
## Of these, ranks that exchange heads; the rest is the ring
ulysses_degree=4
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
