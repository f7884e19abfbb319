#!/usr/bin/env bash
# GPT 6.7B on sequences of 128K tokens: sequence parallel 8 = Ulysses 4 x Ring 2, one node of 8 GPUs.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

### Model
seq_length=131072
model_size=6.7
num_layers=32
hidden_size=4096
num_attn_heads=32
global_batch_size=1
init_std=0.009
# learned positions of 128K tokens would be 537M weights more
rotary="true"
rope_theta=500000

### Training; steps instead of tokens: TRAIN_ITERS=1000, which also shortens warm-up and decay
lr=1.2e-4
min_lr=1.0e-6
train_tokens_in_billion=300
lr_warmup_tokens_in_million=3000
lr_decay_tokens_in_billion=300

### Parallelism
# ranks that share each sequence
sp_size=8
# of these, ranks that exchange heads; the rest is the ring
ulysses_degree=4
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
