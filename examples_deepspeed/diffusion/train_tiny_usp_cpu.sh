#!/usr/bin/env bash
# A tiny random Wan on the CPU, to see it all run: Ulysses 2 x Ring 2, 4 processes, ZeRO-2, no
# download. It does the same steps on one process too, and compares the losses.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

program="train_flow_matching.py"
model="tiny-wan"
size="3 6 10"
text_tokens=7

### Training; SGD shows a wrong scale of gradients, which Adam hides
batch_size=4
steps=10
lr=0.2
set -- --optimizer sgd --samples 2 --check "$@"

device="cpu"
num_gpus=4
ulysses_degree=2

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1

# shellcheck source=examples_deepspeed/diffusion/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
