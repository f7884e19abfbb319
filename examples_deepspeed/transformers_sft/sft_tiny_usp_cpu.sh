#!/usr/bin/env bash
# A tiny random Llama on the CPU, to see it all run: sequence parallel 4 = Ulysses 2 x Ring 2, 4
# processes, packed documents. It trains on one process too, without ds_usp, and compares the losses.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

### Model and data: nothing is downloaded
model="tiny"
data_path=""
seq_length=512
packing="true"

### Training; SGD without clipping shows a wrong scale of gradients, which Adam hides
global_batch_size=2
train_iters=8
lr=0.1
activation_checkpoint="true"
compare="true"
set -- --optim sgd --max_grad_norm 0 --disable_tqdm true "$@"

### Parallelism: 4 processes
device="cpu"
num_gpus=4
sp_size=4
ulysses_degree=2
zero_stage=""

export HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# shellcheck source=examples_deepspeed/transformers_sft/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
