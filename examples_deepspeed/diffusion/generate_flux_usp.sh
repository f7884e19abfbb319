#!/usr/bin/env bash
# An image of Flux.1-dev, 1024 x 1024 pixels, on 2 GPUs; NUM_GPUS=4 or 8 for more.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

### Model: a folder, or an id of the hub
model="black-forest-labs/FLUX.1-dev"
height=1024
width=1024
steps=28

num_gpus=2
# ranks that exchange heads, of which Flux has 24, the rest is the ring; 0: as many as divide them
ulysses_degree=0

set -- --prompt "a red fox in the snow" "$@"

# shellcheck source=examples_deepspeed/diffusion/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
