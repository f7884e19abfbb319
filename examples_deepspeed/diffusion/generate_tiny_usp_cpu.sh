#!/usr/bin/env bash
# A tiny random Flux on the CPU, to see it all run: Ulysses 2 x Ring 2, 4 processes, no download. It
# compares the latents after 4 steps with those of one process. MODEL=tiny-wan: a tiny Wan 2.2.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

model="tiny-flux"
height=48
width=80
num_frames=9
steps=6
check=4

device="cpu"
num_gpus=4
ulysses_degree=2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1

# shellcheck source=examples_deepspeed/diffusion/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
