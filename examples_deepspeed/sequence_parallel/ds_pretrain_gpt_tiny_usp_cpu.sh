#!/usr/bin/env bash
# A tiny GPT on the CPU, to see it all run: sequence parallel 4 = Ulysses 2 x Ring 2, 4 processes.
# launch.sh lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings

### Model
seq_length=512
model_size=0.001
num_layers=2
hidden_size=128
num_attn_heads=8
num_kv_heads=4
global_batch_size=2
rotary="true"

### Training
lr=2.0e-3
min_lr=1.0e-6
train_iters=20
lr_warmup_iters=2
log_interval=5
eval_iters=1
eval_interval=20
save_interval=20

### Parallelism: 4 processes
device="cpu"
precision="fp32"
num_gpus=4
sp_size=4
ulysses_degree=2
batch_size=2

### Data: empty for the documentation that every CPython carries
data_path=""
# of encoded data, which Megatron-DeepSpeed needs: token ids before the end of a document
tokenizer_type="NullTokenizer"
vocab_size=256

# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
