#!/usr/bin/env bash
# GPT 1.3B on sequences of 32K tokens: sequence parallel 4 = Ulysses 2 x Ring 2, one node of 4 GPUs.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

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
# ranks that share each sequence
sp_size=4
# of these, ranks that exchange heads; the rest is the ring
ulysses_degree=2
# tensor and pipeline parallelism
mp_size=1
pp_size=1
zero_stage=1
# sequences of a replica at a time
batch_size=1
# less memory, more time: backward recomputes the layers
activation_checkpoint="true"

### Data: a text file, or what Megatron's tools/preprocess_data.py makes; see README.md
data_path=""
# token ids of encoded data: GPT-2's
vocab_size=50257

# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
