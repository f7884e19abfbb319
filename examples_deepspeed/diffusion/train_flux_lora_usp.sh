#!/usr/bin/env bash
# Low-rank matrices (LoRA) of Flux.1-dev on images of 2048 x 2048 pixels, 4 GPUs.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

program="train_flow_matching.py"
### Model: a folder, or an id of the hub
model="black-forest-labs/FLUX.1-dev"

### Data: a folder of encoded samples (README.md says how they are written); empty: random ones
latents=""
size="256 256"

### Training
batch_size=1
steps=1000
lr=1.0e-4
lora=16
zero_stage=2

num_gpus=4
# ranks that exchange heads, of which Flux has 24, the rest is the ring; 0: as many as divide them
ulysses_degree=0

# shellcheck source=examples_deepspeed/diffusion/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
