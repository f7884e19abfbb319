#!/usr/bin/env bash
# A tiny GPT on the CPU, to see it all run: sequence parallel 4 = Ulysses 2 x Ring 2, 4 processes.
# shellcheck disable=SC2034  # launch.sh reads the settings
###############################################################################
### Main configs
seq_length=512

model_size=0.001
num_layers=2
hidden_size=128
num_attn_heads=8
num_kv_heads=4
global_batch_size=2
lr=2.0e-3
min_lr=1.0e-6
init_std=0.02
rotary="true"
###############################################################################
### Training duration configs
train_iters=20
###############################################################################
### lr configs
lr_warmup_iters=2
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

## Processes, not GPUs
num_gpus=4
device="cpu"
precision="fp32"

## Sequences of a replica at a time
batch_size=2
###############################################################################
### Misc configs
log_interval=5
eval_iters=1
eval_interval=20
save_interval=20

## Less memory, more time: layers are computed again in the backward pass
activation_checkpoint="false"
###############################################################################
### Output and data configs
seed=1234
num_workers=0

## Bytes and an end of document; what the trainer encodes text to, and Megatron-DeepSpeed reads
tokenizer_type="NullTokenizer"
vocab_size=256

## Empty: the documentation that every CPython carries
data_path=""

output_home="usp_output"
###############################################################################
# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
