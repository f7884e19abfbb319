#!/usr/bin/env bash
# A video of Wan 2.2 A14B, 81 frames of 1280 x 720 pixels, on 2 GPUs; NUM_GPUS=4 or 8 for more.
# Wan 2.1: MODEL=Wan-AI/Wan2.1-T2V-14B-Diffusers.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

### Model: a folder, or an id of the hub
model="Wan-AI/Wan2.2-T2V-A14B-Diffusers"
height=720
width=1280
num_frames=81
steps=40

num_gpus=2
# ranks that exchange heads, of which Wan 14B has 40, the rest is the ring; 0: as many as divide them
ulysses_degree=0

set -- --prompt "a red fox runs through the snow" "$@"
# each branch of the guidance on half of the ranks, if these are even; --cfg-degree 1: both on all
((${NUM_GPUS:-2} % 2)) || set -- --cfg-degree 2 "$@"

# shellcheck source=examples_deepspeed/diffusion/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
