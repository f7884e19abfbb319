#!/usr/bin/env bash
# Llama 3 8B on sequences of 128K tokens in Megatron-LM: tensor 2, context parallel 4 = Ulysses 2 x
# Ring 2, one node of 8 GPUs. MEGATRON_LM_PATH names the checkout. ../sequence_parallel/launch.sh
# lists all settings with their defaults; set others here, or in capitals in the environment.
# shellcheck disable=SC2034  # launch.sh reads the settings
usp_framework="megatron_lm"
launcher="torchrun"

### Model
seq_length=131072
model_size=8
num_layers=32
hidden_size=4096
num_attn_heads=32
num_kv_heads=8
global_batch_size=1
init_std=0.009
rotary="true"
rope_theta=500000

### Training; steps instead of tokens: TRAIN_ITERS=1000, which also shortens warm-up and decay
lr=1.2e-4
min_lr=1.0e-6
train_tokens_in_billion=300
lr_warmup_tokens_in_million=3000
lr_decay_tokens_in_billion=300

### Parallelism
# ranks that share each sequence (--context-parallel-size)
sp_size=4
# of these, ranks that exchange heads; the rest is the ring
ulysses_degree=2
# tensor and pipeline parallelism
mp_size=2
pp_size=1
# 1: the distributed optimizer
zero_stage=1
# sequences of a replica at a time
batch_size=1
# less memory, more time: backward recomputes the layers
activation_checkpoint="true"

### Data: what the checkout's tools/preprocess_data.py makes, or mock; see README.md
data_path=""
num_workers=2
# the folder of Llama 3's tokenizer is TOKENIZER_MODEL; or TOKENIZER_TYPE=NullTokenizer
tokenizer_type="HuggingFaceTokenizer"
# token ids before the end of a document, for NullTokenizer and mock data
vocab_size=128255

# flags that are no settings
set -- --ffn-hidden-size 14336 --swiglu --disable-bias-linear --normalization RMSNorm \
  --norm-epsilon 1e-5 --untie-embeddings-and-output-weights --cross-entropy-loss-fusion "$@"

# shellcheck source=examples_deepspeed/sequence_parallel/launch.sh
. "$(dirname "${BASH_SOURCE[0]}")/../sequence_parallel/launch.sh"
