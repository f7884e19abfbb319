#!/usr/bin/env bash
# GPT 1.3B on sequences of 32K tokens in Megatron-LM: context parallel 4 = Ulysses 2 x Ring 2, one
# node of 4 GPUs. MEGATRON_LM_PATH names the checkout. ../sequence_parallel/launch.sh lists
# all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings
usp_framework="megatron_lm"
launcher="torchrun"

### Model
seq_length=32768
model_size=1.3
num_layers=24
hidden_size=2048
num_attn_heads=16
global_batch_size=2
init_std=0.013

### Training; steps instead of tokens: TRAIN_ITERS=1000, which also shortens warm-up and decay
lr=2.0e-4
min_lr=1.0e-6
train_tokens_in_billion=300
lr_warmup_tokens_in_million=3000
lr_decay_tokens_in_billion=300

### Parallelism
# ranks that share each sequence (--context-parallel-size)
sp_size=4
# of these, ranks that exchange heads; the rest is the ring
ulysses_degree=2
# tensor and pipeline parallelism
mp_size=1
pp_size=1
# 1: the distributed optimizer
zero_stage=1
# sequences of a replica at a time
batch_size=1
# less memory, more time: backward recomputes the layers
activation_checkpoint="false"

### Data: what the checkout's tools/preprocess_data.py makes, or mock; see README.md
data_path=""
num_workers=2
# token ids of encoded data: GPT-2's
vocab_size=50257

# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/../sequence_parallel/launch.sh"
