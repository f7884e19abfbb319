#!/usr/bin/env bash
# Llama 3.1 8B on packed sequences of 64K tokens: sequence parallel 4 = Ulysses 2 x Ring 2, 4 GPUs.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

### Model: a folder, or an id of the hub
model="meta-llama/Llama-3.1-8B"

### Data: JSON lines with a column "text" (or an id of the hub); empty: Python's documentation
data_path=""
# tokens of a sequence, into which documents are packed
seq_length=65536
packing="true"

### Training
global_batch_size=4
train_iters=1000
lr=2.0e-5
# less memory, more time: backward recomputes the layers
activation_checkpoint="true"

### Parallelism
num_gpus=4
# ranks that share each sequence
sp_size=4
# of these, ranks that exchange heads; the rest is the ring
ulysses_degree=2
# 3: weights, gradients and optimizer states are partitioned over all ranks
zero_stage=3

# shellcheck source=examples_deepspeed/transformers_sft/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
