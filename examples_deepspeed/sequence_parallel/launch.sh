# shellcheck shell=bash
# Starts a training with the settings of the script that sources this, of this folder or ../megatron_lm:
#
#   SEQ_LENGTH=65536 ULYSSES_DEGREE=2 bash ds_pretrain_gpt_1.3B_usp_32k.sh --eod-mask-loss
#
# Every setting is overridden by its name in capitals. Arguments of the script go to the program: the
# trainer of this folder; with MEGATRON_DEEPSPEED_PATH, a checkout, its pretrain_gpt.py, patched; with
# usp_framework=megatron_lm that of MEGATRON_LM_PATH. DRY_RUN=1 prints the command and starts nothing.
# shellcheck source=examples_deepspeed/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/../settings.sh"

### Model
setting seq_length
setting model_size                   # in billions of parameters, for the names of folders
setting num_layers
setting hidden_size
setting num_attn_heads
setting num_kv_heads "$num_attn_heads"
setting init_std 0.02
setting rotary false                 # true: rotary positions, of base ROPE_THETA; else learned ones
setting rope_theta 10000

### Training, in steps or in tokens
setting global_batch_size
setting lr
setting min_lr 0
setting train_iters ""               # steps; warm-up and decay are then in steps too
setting lr_decay_iters ""
setting lr_warmup_iters ""           # of TRAIN_ITERS 1 %
setting train_tokens_in_billion ""
setting lr_warmup_tokens_in_million ""
setting lr_decay_tokens_in_billion "$train_tokens_in_billion"
setting clip_grad 1.0
setting precision bf16               # or fp32
setting seed 1234

### Parallelism
setting mp_size 1                    # tensor parallel
setting pp_size 1                    # pipeline stages
setting sp_size 1                    # ranks that share each sequence
setting ulysses_degree ""            # of these, ranks that exchange heads; empty: as the heads allow
setting zero_stage 1
setting batch_size 1                 # sequences of a replica at a time
setting activation_checkpoint false  # true: backward recomputes the layers

### Ranks
setting device auto                  # cpu: processes with gloo
setting num_gpus ""                  # ranks of a node; empty: CUDA_VISIBLE_DEVICES, or all GPUs
setting launcher deepspeed           # or torchrun
setting hostfile ""                  # DeepSpeed's, for several nodes; a line of it: worker-0 slots=8
setting nnodes 1                     # torchrun's: the script is started on each of so many nodes,
setting node_rank ""                 # with the number of the node,
setting master_addr ""               # and a name of the first one
setting master_port 29500

### Data and output
setting data_path ""                 # see README.md
setting num_workers 0
setting tokenizer_type GPT2BPETokenizer
setting vocab_path gpt2-vocab.json
setting merge_path gpt2-merges.txt
setting tokenizer_model ""           # of Megatron-LM's other tokenizers
setting vocab_size ""                # token ids of encoded data
setting log_interval 10
setting eval_iters 10
setting eval_interval 100
setting save_interval 100
setting output_home usp_output
# Left out where they are empty: the program's --help says what they are.
more=(usp_cluster usp_layout usp_kernel exit_interval exit_duration_in_mins tensorboard_dir)
for name in "${more[@]}"; do setting "$name" ""; done

### Program
setting usp_framework ""             # megatron_lm
setting megatron_deepspeed_path ""
setting megatron_lm_path ""
setting transformer_impl transformer_engine # of Megatron-LM; local: its own, as on CPUs
setting dry_run 0

refuse_misspelt
counts seq_length global_batch_size batch_size mp_size sp_size pp_size nnodes
one_of zero_stage 0 1 2 3
one_of precision bf16 fp32
one_of launcher deepspeed torchrun
for name in rotary activation_checkpoint; do one_of "$name" true false; done

[[ -z "$train_iters" ]] || counts train_iters
: "${lr_decay_iters:=$train_iters}" "${lr_warmup_iters:=${train_iters:+$((train_iters / 100))}}"
# steps NAME TOKENS UNIT: NAME, or else the steps of so many UNITs of tokens.
steps() {
  [[ -z "${!1}" ]] || return 0
  whole_numbers "$2"
  printf -v "$1" '%s' "$((${!2} * $3 / (seq_length * global_batch_size)))"
}
steps train_iters train_tokens_in_billion 1000000000
steps lr_decay_iters lr_decay_tokens_in_billion 1000000000
steps lr_warmup_iters lr_warmup_tokens_in_million 1000000

### The program
checkout="" suffix="" latest=latest
case "$usp_framework" in
  megatron_lm)
    checkout="$megatron_lm_path" suffix=_mlm latest=latest_checkpointed_iteration.txt
    one_of launcher torchrun
    one_of zero_stage 0 1 # without, and with its distributed optimizer
    ;;
  "") [[ -z "$megatron_deepspeed_path" ]] || checkout="$megatron_deepspeed_path" suffix=_mds ;;
  *) die "USP_FRAMEWORK='$usp_framework' must be megatron_lm, or empty" ;;
esac
if [[ -z "$suffix" ]]; then
  ((mp_size == 1 && pp_size == 1)) || die "MP_SIZE=$mp_size, PP_SIZE=$pp_size: the trainer of this" \
    "folder has neither tensor nor pipeline parallelism. MEGATRON_DEEPSPEED_PATH, a checkout, has both"
  program=("$here/pretrain_gpt_usp.py")
else
  [[ -f "$checkout/pretrain_gpt.py" ]] || die "there is no pretrain_gpt.py in '$checkout': let" \
    "MEGATRON_$([[ $suffix == _mds ]] && echo DEEPSPEED || echo LM)_PATH name a checkout"
  [[ -n "$data_path" || "$dry_run" == 1 ]] || die "Megatron reads encoded data: set DATA_PATH to" \
    "what the checkout's tools/preprocess_data.py makes, or for Megatron-LM to mock"
  program=(--module megatron_patches.run "$checkout/pretrain_gpt.py")
fi

### The launcher
if [[ -z "$num_gpus" && "$device" != cpu ]]; then
  num_gpus="$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)"
  [[ -z "${CUDA_VISIBLE_DEVICES:-}" ]] || num_gpus="$(awk -F, '{ print NF }' <<<"$CUDA_VISIBLE_DEVICES")"
fi
if [[ -z "$num_gpus" || "$num_gpus" == 0 && "$dry_run" == 1 ]]; then
  num_gpus=$((mp_size * sp_size * pp_size / nnodes)) # of one replica
fi
whole_numbers num_gpus master_port
world_size=$((num_gpus * nnodes))
if [[ "$launcher" == torchrun ]]; then
  [[ -z "$hostfile" ]] || die "HOSTFILE is for LAUNCHER=deepspeed, not torchrun"
  ((nnodes == 1)) || [[ -n "$master_addr" && -n "$node_rank" ]] || die "NNODES=$nnodes needs" \
    "MASTER_ADDR, a name of the first node, and NODE_RANK, from 0 to $((nnodes - 1))"
  command=(torchrun --nnodes "$nnodes" --node-rank "${node_rank:-0}" --nproc-per-node "$num_gpus"
    --master-addr "${master_addr:-127.0.0.1}" --master-port "$master_port")
else
  ((nnodes == 1)) || die "NNODES=$nnodes is for LAUNCHER=torchrun; DeepSpeed's launcher needs HOSTFILE"
  command=(deepspeed --log_level error --master_port "$master_port")
  if [[ -n "$hostfile" ]]; then
    [[ -f "$hostfile" ]] || die "HOSTFILE=$hostfile does not exist"
    world_size="$(awk -F 'slots=' '{ n += $2 } END { print n + 0 }' "$hostfile")"
    command+=(--hostfile "$hostfile")
  elif [[ "$device" == cpu || -z "${CUDA_VISIBLE_DEVICES:-}" ]]; then # which it reads itself
    command+=(--num_gpus "$num_gpus")
  fi
fi
((world_size > 0)) || die "no GPU here: set NUM_GPUS, HOSTFILE or DEVICE=cpu"
command+=("${program[@]}")

name="gpt_${model_size}B_s${seq_length}_gbs${global_batch_size}_mbs${batch_size}_g${world_size}"
name+="_z${zero_stage}_sp${sp_size}_u${ulysses_degree:-max}_mp${mp_size}_pp${pp_size}_seed${seed}$suffix"
checkpoint="$output_home/checkpoint/$name" config="$output_home/config/$name.json"

### Flags: those of all programs, then those of one
# flags NAME...: of settings that are not empty. given NAME VALUE FLAG...: where the setting has it.
flags() {
  local name
  for name in "$@"; do [[ -z "${!name}" ]] || command+=("--${name//_/-}" "${!name}"); done
}
given() { [[ "${!1}" != "$2" ]] || command+=("${@:3}"); }

flags num_layers hidden_size seq_length global_batch_size train_iters lr min_lr lr_decay_iters \
  lr_warmup_iters clip_grad seed log_interval eval_interval eval_iters save_interval \
  ulysses_degree "${more[@]}"
command+=(--num-attention-heads "$num_attn_heads" --max-position-embeddings "$seq_length"
  --init-method-std "$init_std" --attention-dropout 0 --hidden-dropout 0 --lr-decay-style cosine
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --split "949,50,1"
  --tensor-model-parallel-size "$mp_size" --pipeline-model-parallel-size "$pp_size"
  --micro-batch-size "$batch_size" --save "$checkpoint")
given precision bf16 --bf16
[[ ! -f "$checkpoint/$latest" ]] || command+=(--load "$checkpoint")
read -ra data <<<"${data_path:-my_text_document}" # of Megatron, perhaps after their weights
if [[ "$suffix" != _mlm ]]; then
  command+=(--ds-sequence-parallel-size "$sp_size" --zero-stage "$zero_stage"
    --num-key-value-heads "$num_kv_heads")
  given rotary true --use-rotary-position-embeddings
fi
case "$suffix" in
  "")
    command+=(--rotary-base "$rope_theta" --output-dir "$output_home/$name")
    flags device data_path
    given activation_checkpoint true --usp-recompute full
    [[ ! -f "$data_path.bin" ]] || flags vocab_size # text has its own vocabulary
    ;;
  _mds)
    command+=(--data-path "${data[@]}" --data-impl mmap --deepspeed --deepspeed_config "$config"
      --rotary-position-embeddings-theta "$rope_theta" --override-opt_param-scheduler
      --no-async-tensor-model-parallel-allreduce --no-gradient-accumulation-fusion)
    flags num_workers tokenizer_type vocab_size
    given tokenizer_type GPT2BPETokenizer --vocab-file "$vocab_path" --merge-file "$merge_path"
    given pp_size 1 --no-pipeline-parallel
    given device cpu --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion \
      --no-bias-dropout-fusion
    given activation_checkpoint true --checkpoint-activations --deepspeed-activation-checkpointing
    ;;
  _mlm)
    [[ "$data_path" != mock ]] || printf -v tokenizer_type '%s' NullTokenizer
    [[ "$data_path" == mock ]] && command+=(--mock-data) || command+=(--data-path "${data[@]}")
    command+=(--context-parallel-size "$sp_size" --overlap-grad-reduce --override-opt_param-scheduler
      --no-create-attention-mask-in-dataloader) # a mask of 32K tokens would be 1 GiB
    flags num_workers transformer_impl tokenizer_type tokenizer_model
    [[ "$num_kv_heads" == "$num_attn_heads" ]] ||
      command+=(--group-query-attention --num-query-groups "$num_kv_heads")
    if [[ "$mp_size" != 1 ]]; then
      command+=(--sequence-parallel)
      export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # Megatron-LM requires it
    fi
    given rotary true --position-embedding-type rope --rotary-base "$rope_theta"
    given zero_stage 1 --use-distributed-optimizer --overlap-param-gather
    given transformer_impl local --no-persist-layer-norm --no-masked-softmax-fusion --no-rope-fusion
    python -c 'import importlib.util as u; exit(not u.find_spec("fused_weight_gradient_mlp_cuda"))' ||
      command+=(--no-gradient-accumulation-fusion) # which needs apex
    given device cpu --distributed-backend gloo --disable-jit-fuser # else it builds C++ for minutes
    given activation_checkpoint true --recompute-granularity full --recompute-method uniform \
      --recompute-num-layers 1
    given tokenizer_type NullTokenizer --vocab-size "$vocab_size"
    given tokenizer_type GPT2BPETokenizer --vocab-file "$vocab_path" --merge-file "$merge_path"
    ;;
esac

ds_config() { # whose pipeline cannot overlap
  cat <<JSON
{
  "train_batch_size": $global_batch_size, "train_micro_batch_size_per_gpu": $batch_size,
  "zero_optimization": {"stage": $zero_stage, "overlap_comm": $(boolean "$pp_size" 1),
    "reduce_bucket_size": 40000000, "allgather_bucket_size": 40000000},
  "gradient_clipping": $clip_grad, "steps_per_print": $log_interval, "bf16": {"enabled": $(boolean "$precision" bf16)}
}
JSON
}
boolean() { [[ "$1" == "$2" ]] && echo true || echo false; }

### The start
# FlashAttention-4 compiles kernels at the first step; a disk cache saves later starts that.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}"
if [[ "$device" == cpu ]]; then
  export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
elif [[ -n "$checkout" && " $*" =~ \ --usp-(offload-ratio|states-on-host) ]]; then
  use_pinned_memory expandable_segments=True # the trainer does it itself
fi
if [[ "$dry_run" != 1 ]]; then
  if [[ -z "$hostfile" && "${node_rank:-0}" == 0 ]]; then # the ranks meet on this node
    python -c "import socket; socket.create_server(('', $master_port))" 2>/dev/null ||
      die "MASTER_PORT=$master_port is in use on this machine, as by another training: set" \
        "MASTER_PORT to a free port, on every node alike"
  fi
  mkdir -p "$checkpoint" "$output_home/config" "$output_home/log"
  [[ "$suffix" != _mds ]] || ds_config >"$config"
  # A log of all starts; tee outlives a signal, as ranks write until they have saved.
  exec > >(trap '' TERM INT HUP && exec tee -a "$output_home/log/$name${node_rank:+_node$node_rank}.log") 2>&1
fi
start "$@"
[[ "$dry_run$suffix" != 1_mds ]] || { printf '\n# %s\n' "$config" && ds_config; }
