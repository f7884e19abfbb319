# shellcheck shell=bash disable=SC2154  # settings get their names in a loop
# What the ds_pretrain_gpt_*_usp_*.sh scripts have in common; they set their variables and source
# this. It takes overrides from the environment, checks, and starts the training:
#
#   SEQ_LENGTH=65536 ULYSSES_DEGREE=2 bash ds_pretrain_gpt_1.3B_usp_32k.sh
#
# Every setting of a script has its name in capitals there. Arguments of the script go to the
# training program as they are. DRY_RUN=1 prints what would run, and runs nothing.
#
# MEGATRON_DEEPSPEED_PATH set: pretrain_gpt.py of that checkout of Megatron-DeepSpeed, patched.
# Not set: the trainer of this folder, with the same flags.
#
# LAUNCHER=deepspeed (HOSTFILE names the nodes), torchrun (started on every node, with NNODES,
# NODE_RANK, MASTER_ADDR, MASTER_PORT) or srun (inside a SLURM job, see slurm.sbatch).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# Settings, with what they are where neither script nor environment say it.
defaults=(
  seq_length= model_size= num_layers= hidden_size= num_attn_heads= num_kv_heads= global_batch_size=
  lr= min_lr=0 init_std=0.02 rotary=false rope_theta=10000 train_tokens_in_billion= train_iters=
  lr_warmup_tokens_in_million= lr_warmup_iters= lr_decay_tokens_in_billion= lr_decay_iters=
  lr_decay_style=cosine mp_size=1 sp_size=1 ulysses_degree= usp_layout=zigzag usp_kernel=auto
  usp_cluster= pp_size=1 zero_stage=1 num_gpus= launcher=deepspeed hostfile= nnodes= node_rank=
  master_addr= master_port=29500 batch_size=1 precision=bf16
  device=auto log_interval=10 eval_iters=10 eval_interval=100 save_interval=100 clip_grad=1.0
  weight_decay=0.1 activation_checkpoint=false seed=1234 num_workers=0 data_path= "split=949,50,1"
  tokenizer_type=GPT2BPETokenizer vocab_path= merge_path= vocab_size= output_home=usp_output
  exit_interval= exit_duration_in_mins= tensorboard_dir= wandb_project= wandb_exp_name=
  wandb_save_dir=
)

# A variable of the environment that is nearly a setting is a slip: SEQ_LENGHT would be ignored.
check_names() {
  local slip known="${defaults[*]} dry_run megatron_deepspeed_path"
  slip="$(compgen -e | awk -v settings="$known" -f "$here/settings.awk")"
  [[ -z "$slip" ]] ||
    fail "$slip The settings are at the head of launch.sh; unset ${slip%% *} if it is meant for" \
      "another program"
}
check_names

for setting in "${defaults[@]}"; do
  name="${setting%%=*}" from_environment="${setting%%=*}"
  from_environment="${from_environment^^}"
  value="${!name-${setting#*=}}"
  printf -v "$name" '%s' "${!from_environment-$value}"
done
host="${MEGATRON_DEEPSPEED_PATH:-}" dry_run="${DRY_RUN:-0}"

# must PATTERN WORDS NAME...: every one of these settings has this form.
must() {
  local name pattern="$1" words="$2"
  shift 2
  for name; do
    [[ "${!name}" =~ ^($pattern)$ ]] || fail "${name^^}='${!name}' must be $words"
  done
}

check_values() {
  must '[1-9][0-9]*' 'a whole number of 1 or more' seq_length num_layers hidden_size \
    num_attn_heads global_batch_size batch_size mp_size sp_size pp_size log_interval eval_iters \
    eval_interval save_interval
  must '[0-9]+' 'a whole number' seed num_workers master_port
  must '[0-9]*' 'a whole number, or empty' num_kv_heads num_gpus train_iters lr_warmup_iters \
    lr_decay_iters nnodes node_rank exit_interval exit_duration_in_mins vocab_size
  must '([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?' 'a number of 0 or more' lr min_lr init_std \
    rope_theta clip_grad weight_decay
  must '[0-9]*|auto' 'a whole number, auto, or empty' ulysses_degree
  must '[0-3]' '0, 1, 2 or 3' zero_stage
  must 'bf16|fp32' 'bf16 or fp32' precision
  must 'auto|cpu|cuda' 'auto, cpu or cuda' device
  must 'true|false' 'true or false' rotary activation_checkpoint
  must 'deepspeed|torchrun|srun' 'deepspeed, torchrun or srun' launcher
  must '[01]' '0 or 1' dry_run # or a run would start that was not to
}

# A step sees seq_length x global_batch_size tokens; both programs count steps.
count_steps() {
  local name tokens_per_step=$((seq_length * global_batch_size))
  if [[ -n "$train_iters" ]]; then
    : "${lr_decay_iters:=$train_iters}" "${lr_warmup_iters:=$((train_iters / 100))}"
  fi
  for name in train_tokens_in_billion lr_decay_tokens_in_billion lr_warmup_tokens_in_million; do
    [[ -n "$train_iters" || "${!name}" =~ ^[0-9]+$ ]] ||
      fail "${name^^}='${!name}' must be a whole number; or give TRAIN_ITERS"
  done
  : "${train_iters:=$((train_tokens_in_billion * 1000000000 / tokens_per_step))}"
  : "${lr_decay_iters:=$((lr_decay_tokens_in_billion * 1000000000 / tokens_per_step))}"
  : "${lr_warmup_iters:=$((lr_warmup_tokens_in_million * 1000000 / tokens_per_step))}"
  [[ -z "$host" ]] || ((lr_warmup_iters < lr_decay_iters)) ||
    fail "LR_WARMUP_ITERS=$lr_warmup_iters must be below LR_DECAY_ITERS=$lr_decay_iters" \
      "(Megatron-DeepSpeed). Use LR_WARMUP_ITERS=$((lr_decay_iters / 100))"
}

# Ranks of a node, and of all: the GPUs of the nodes in a file, this machine's CPUs, or its GPUs,
# all or those that CUDA_VISIBLE_DEVICES names.
count_gpus() {
  visible=false
  check_nodes
  if [[ -n "$hostfile" ]]; then
    [[ -z "$num_gpus" ]] || fail "HOSTFILE counts the GPUs of every node: leave NUM_GPUS out"
    [[ -f "$hostfile" ]] || fail "HOSTFILE=$hostfile does not exist; a line is: worker-0 slots=8"
    num_gpus="$(awk -F 'slots=' 'NF > 1 { sum += $2 } END { print sum + 0 }' "$hostfile")"
    ((num_gpus)) || fail "HOSTFILE=$hostfile names no slots; a line is: worker-0 slots=8"
    return
  elif [[ "$device" == cpu ]]; then
    : "${num_gpus:=$(((replica + nnodes - 1) / nnodes))}"
  elif [[ -n "${CUDA_VISIBLE_DEVICES:-}" ]]; then
    [[ -z "$num_gpus" ]] || fail "CUDA_VISIBLE_DEVICES names the GPUs: leave NUM_GPUS out"
    num_gpus="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | wc -l)"
    visible=true
  elif [[ -z "$num_gpus" ]]; then
    num_gpus="$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)"
    if ((!num_gpus)); then
      [[ "$dry_run" == 1 ]] || fail "no GPU here. Set NUM_GPUS, or DEVICE=cpu"
      num_gpus="$(((replica + nnodes - 1) / nnodes))"
    fi
  fi
  gpus_per_node="$num_gpus"
  num_gpus="$((nnodes * gpus_per_node))"
}

check_nodes() {
  if [[ "$launcher" == deepspeed ]]; then
    ((${nnodes:-1} == 1)) ||
      fail "NNODES=$nnodes is for LAUNCHER=torchrun or srun; DeepSpeed's launcher needs HOSTFILE"
    nnodes=1 node_rank=0
    return
  fi
  [[ -z "$hostfile" ]] || fail "HOSTFILE is for LAUNCHER=deepspeed, not $launcher"
  if [[ "$launcher" == srun ]]; then
    [[ -n "${SLURM_JOB_ID:-}" || "$dry_run" == 1 ]] ||
      fail "LAUNCHER=srun needs a SLURM job (SLURM_JOB_ID is not set): sbatch slurm.sbatch"
    : "${nnodes:=${SLURM_NNODES:-1}}"
    [[ -n "$master_addr" || -z "${SLURM_JOB_NODELIST:-}" ]] ||
      master_addr="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
    : "${master_addr:=$(hostname)}"
    node_rank=0 # srun starts the tasks of all nodes from here
  fi
  : "${nnodes:=1}"
  ((nnodes >= 1)) || fail "NNODES=$nnodes must be 1 or more"
  [[ "$launcher" == torchrun ]] || return 0
  if ((nnodes > 1)); then
    [[ -n "$master_addr" && -n "$node_rank" ]] ||
      fail "NNODES=$nnodes needs MASTER_ADDR, a name of the first node, and NODE_RANK, from 0 to" \
        "$((nnodes - 1)); start the script on every node"
  fi
  ((${node_rank:=0} < nnodes)) || fail "NODE_RANK=$node_rank must be from 0 to $((nnodes - 1))"
  : "${master_addr:=127.0.0.1}"
}

# The words before the program: what makes a process for each rank.
launch_words() {
  case "$launcher" in
    deepspeed) # it reads CUDA_VISIBLE_DEVICES only if it is told nothing else
      words=(deepspeed --log_level error --master_port "$master_port")
      if [[ -n "$hostfile" ]]; then
        words+=(--hostfile "$hostfile")
      elif [[ "$visible" == false ]]; then
        words+=(--num_gpus "$gpus_per_node")
      fi
      as_module=(--module)
      ;;
    torchrun)
      words=(torchrun --nnodes "$nnodes" --node-rank "$node_rank" --nproc-per-node "$gpus_per_node"
        --master-addr "$master_addr" --master-port "$master_port")
      as_module=(--module)
      ;;
    srun)
      words=(env "MASTER_ADDR=$master_addr" "MASTER_PORT=$master_port"
        "LOCAL_WORLD_SIZE=$gpus_per_node" "LOCAL_SIZE=$gpus_per_node"
        srun --nodes "$nnodes" --ntasks-per-node "$gpus_per_node" --kill-on-bad-exit=1
        bash "$here/srun_rank.sh" python)
      as_module=(-m)
      ;;
  esac
}

check_degrees() {
  local u possible=()
  ((num_attn_heads % mp_size == 0)) ||
    fail "NUM_ATTN_HEADS=$num_attn_heads is not a multiple of MP_SIZE=$mp_size"
  heads_per_rank=$((num_attn_heads / mp_size))
  for ((u = sp_size; u >= 1; u--)); do
    ((sp_size % u == 0 && u <= heads_per_rank)) && possible+=("$u (ring $((sp_size / u)))")
  done
  : "${ulysses_degree:=${possible[0]%% *}}"
  [[ "$ulysses_degree" == auto ]] ||
    ((ulysses_degree >= 1 && sp_size % ulysses_degree == 0 && ulysses_degree <= heads_per_rank)) ||
    fail "ULYSSES_DEGREE=$ulysses_degree must divide SP_SIZE=$sp_size and not exceed the" \
      "$heads_per_rank heads of a rank ($num_attn_heads heads, MP_SIZE=$mp_size)." \
      "Possible: $(printf '%s, ' "${possible[@]}" | sed 's/, $//')"
  ((num_gpus % replica == 0)) ||
    fail "$num_gpus GPUs cannot hold MP_SIZE $mp_size x SP_SIZE $sp_size x PP_SIZE $pp_size =" \
      "$replica ranks. Use a multiple of $replica GPUs, or lower one of the three"
  dp_size=$((num_gpus / replica))
  ((global_batch_size % (batch_size * dp_size) == 0)) ||
    fail "GLOBAL_BATCH_SIZE=$global_batch_size is not a multiple of BATCH_SIZE $batch_size x" \
      "$dp_size replicas. Use GLOBAL_BATCH_SIZE=$((batch_size * dp_size))"
  ((pp_size == 1 || zero_stage < 2)) ||
    fail "ZERO_STAGE=$zero_stage does not work with a pipeline. Use ZERO_STAGE=1 or PP_SIZE=1"
}

# Text files, or prefixes of Megatron's .bin and .idx; each may follow its weight (0.3 a 0.7 b).
read_data_path() {
  local index
  data_words=() data_files=()
  if [[ -z "$data_path" || -f "$data_path" || -f "$data_path.bin" ]]; then
    [[ -z "$data_path" ]] || data_words=("$data_path") data_files=("$data_path")
    return 0
  fi
  read -ra data_words <<<"$data_path"
  if [[ ! "${data_words[0]}" =~ ^[0-9.]+([eE][-+]?[0-9]+)?$ ]]; then
    data_files=("${data_words[@]}")
    return
  fi
  ((${#data_words[@]} % 2 == 0)) ||
    fail "DATA_PATH='$data_path' begins with a weight: every path needs one before it"
  for ((index = 1; index < ${#data_words[@]}; index += 2)); do
    data_files+=("${data_words[index]}")
  done
}

check_data() {
  local file encode='python tools/preprocess_data.py (in Megatron-DeepSpeed) with --input text.jsonl
  --output-prefix my --vocab-file VOCAB --merge-file MERGES --tokenizer-type GPT2BPETokenizer
  --append-eod --workers 8, then DATA_PATH=my_text_document'
  read_data_path
  if [[ -z "$host" ]]; then
    [[ "$device" == cpu || -n "$data_path" || "$dry_run" == 1 ]] ||
      fail "set DATA_PATH to a UTF-8 text file, or to data that Megatron encoded: $encode"
  elif [[ -z "$data_path" ]]; then
    [[ "$dry_run" == 1 ]] ||
      fail "Megatron-DeepSpeed reads encoded data: set DATA_PATH. Make it: $encode"
    data_words=(my_text_document) # a dry run shows where it goes
  fi
  for file in "${data_files[@]}"; do
    [[ -z "$host" || ! -f "$file" ]] ||
      fail "Megatron-DeepSpeed reads encoded data, not '$file'. Make it: $encode"
    [[ -f "$file" || -f "$file.bin" ]] ||
      fail "DATA_PATH=$file is no file, and there is no $file.bin. Make it: $encode"
  done
  [[ -z "$host" || "$tokenizer_type" != GPT2BPETokenizer || "$dry_run" == 1 ||
    (-f "$vocab_path" && -f "$merge_path") ]] ||
    fail "set VOCAB_PATH and MERGE_PATH to the two files of GPT-2's tokenizer," \
      "or TOKENIZER_TYPE=NullTokenizer and VOCAB_SIZE"
}

check_program() {
  [[ -z "$host" || -f "$host/pretrain_gpt.py" ]] ||
    fail "MEGATRON_DEEPSPEED_PATH=$host has no pretrain_gpt.py: give the folder of a checkout," \
      "or unset it to use the trainer of this folder"
  [[ "$dry_run" == 1 ]] && return
  [[ ! -x "$root/.venv/bin/deepspeed" ]] || PATH="$PATH:$root/.venv/bin"
  command -v "$launcher" >/dev/null ||
    fail "there is no $launcher on PATH. Run: . $root/scripts/env.sh"
  [[ -z "$host" ]] || check_trackers # Megatron-DeepSpeed trains on without them
}

check_trackers() {
  local setting package
  for setting in tensorboard_dir:tensorboard wandb_project:wandb; do
    package="${setting#*:}" setting="${setting%:*}"
    [[ -z "${!setting}" ]] ||
      python -c "import importlib.util as u; exit(u.find_spec('$package') is None)" ||
      fail "${setting^^}=${!setting} needs the package $package, which is not installed:" \
        "pip install $package"
  done
}

# Flags that both programs know, in the order of the settings.
common_flags() {
  local name
  flags=(
    --tensor-model-parallel-size "$mp_size"
    --ds-sequence-parallel-size "$sp_size"
    --ulysses-degree "$ulysses_degree"
    --usp-layout "$usp_layout"
    --usp-kernel "$usp_kernel"
    --pipeline-model-parallel-size "$pp_size"
    --zero-stage "$zero_stage"
    --num-layers "$num_layers"
    --hidden-size "$hidden_size"
    --num-attention-heads "$num_attn_heads"
    --num-key-value-heads "${num_kv_heads:-$num_attn_heads}"
    --seq-length "$seq_length"
    --max-position-embeddings "$seq_length"
    --init-method-std "$init_std"
    --attention-dropout 0
    --hidden-dropout 0
    --micro-batch-size "$batch_size"
    --global-batch-size "$global_batch_size"
    --train-iters "$train_iters"
    --lr "$lr"
    --min-lr "$min_lr"
    --lr-decay-style "$lr_decay_style"
    --lr-decay-iters "$lr_decay_iters"
    --lr-warmup-iters "$lr_warmup_iters"
    --weight-decay "$weight_decay"
    --clip-grad "$clip_grad"
    --adam-beta1 0.9
    --adam-beta2 0.95
    --log-interval "$log_interval"
    --eval-interval "$eval_interval"
    --eval-iters "$eval_iters"
    --save-interval "$save_interval"
    --seed "$seed"
    --split "$split"
    --save "$checkpoint_path"
  )
  [[ -z "$usp_cluster" ]] || flags+=(--usp-cluster "$usp_cluster")
  [[ "$rotary" != true ]] || flags+=(--use-rotary-position-embeddings)
  [[ "$precision" != bf16 ]] || flags+=(--bf16)
  [[ ! -f "$checkpoint_path/latest" ]] || flags+=(--load "$checkpoint_path")
  ((!${#data_words[@]})) || flags+=(--data-path "${data_words[@]}")
  for name in exit_interval exit_duration_in_mins tensorboard_dir wandb_project wandb_exp_name \
    wandb_save_dir; do
    [[ -z "${!name}" ]] || flags+=("--${name//_/-}" "${!name}")
  done
  # A text file has a vocabulary of its own, and some tokenizers have.
  if [[ -n "$vocab_size" && ${#data_words[@]} -gt 0 && ! -f "${data_files[0]:-}" ]]; then
    flags+=(--vocab-size "$vocab_size")
  fi
}

host_flags() {
  flags+=(
    --deepspeed
    --deepspeed_config "$config"
    --data-impl mmap
    --num-workers "$num_workers"
    --tokenizer-type "$tokenizer_type"
    --rotary-position-embeddings-theta "$rope_theta"
    --no-async-tensor-model-parallel-allreduce
    --no-gradient-accumulation-fusion
    --override-opt_param-scheduler # TRAIN_ITERS may be another than the checkpoint's
  )
  [[ -z "$vocab_path" ]] || flags+=(--vocab-file "$vocab_path" --merge-file "$merge_path")
  [[ -z "$tensorboard_dir" ]] || flags+=(--tensorboard-queue-size 1 --log-timers-to-tensorboard
    --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard)
  ((pp_size > 1)) || flags+=(--no-pipeline-parallel)
  [[ "$device" != cpu ]] || flags+=(--distributed-backend gloo --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion)
  [[ "$activation_checkpoint" != true ]] ||
    flags+=(--checkpoint-activations --deepspeed-activation-checkpointing)
}

trainer_flags() {
  flags+=(--rotary-base "$rope_theta" --device "$device" --output-dir "$output_home/$jobname")
  [[ "$activation_checkpoint" != true ]] || flags+=(--usp-recompute full)
}

deepspeed_config() {
  local bf16=false
  [[ "$precision" != bf16 ]] || bf16=true
  sed -e "s/@GLOBAL_BATCH_SIZE@/$global_batch_size/" -e "s/@BATCH_SIZE@/$batch_size/" \
    -e "s/@LOG_INTERVAL@/$log_interval/" -e "s/@ZERO_STAGE@/$zero_stage/" \
    -e "s/@CLIP_GRAD@/$clip_grad/" -e "s/@BF16@/$bf16/" "$here/ds_config_gpt_TEMPLATE.json"
}

# The command with one flag and its values a line, to be read and to be pasted.
print_command() {
  local word line=""
  for word in "$@"; do
    if [[ ("$word" == --* || "$word" == *.py) && -n "$line" ]]; then
      printf '%s \\\n' "$line"
      line="   "
    fi
    line+="${line:+ }$(printf '%q' "$word")"
  done
  printf '%s\n' "$line"
}

check_values
replica=$((mp_size * sp_size * pp_size))
count_steps
count_gpus
check_degrees
check_data
check_program

jobname="gpt_${model_size}B_s${seq_length}_gbs${global_batch_size}_mbs${batch_size}_g${num_gpus}"
jobname+="_z${zero_stage}_sp${sp_size}_u${ulysses_degree}_mp${mp_size}_pp${pp_size}_seed${seed}"
[[ -z "$host" ]] || jobname+="_mds" # the two programs write other checkpoints
checkpoint_path="$output_home/checkpoint/$jobname"
config="$output_home/config/$jobname.json"
log="$output_home/log/$jobname.log"

common_flags
launch_words
command=("${words[@]}")
if [[ -n "$host" ]]; then
  host_flags
  command+=("${as_module[@]}" megatron_patches.run "$host/pretrain_gpt.py" "${flags[@]}" "$@")
else
  trainer_flags
  command+=("$here/pretrain_gpt_usp.py" "${flags[@]}" "$@")
fi

if [[ "$dry_run" == 1 ]]; then
  print_command "${command[@]}"
  if [[ -n "$host" ]]; then
    printf '\n# %s\n' "$config"
    deepspeed_config
  fi
  exit 0
fi

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # the launcher hands PYTHON* on to other nodes
if [[ -z "$host" ]]; then # refused before a folder is made and a rank is started
  env -u RANK -u WORLD_SIZE python "$here/pretrain_gpt_usp.py" "${flags[@]}" "$@" \
    --check-only --num-processes "$num_gpus"
fi
mkdir -p "$output_home/log" "$output_home/config" "$checkpoint_path"
if [[ -n "$host" ]]; then deepspeed_config >"$config"; fi
# One queue for all streams: megatron-core's all-reduce of tensor parallelism then starts before the
# product that hides it, and copies beside attention and to the host wait in line behind kernels.
# Megatron-DeepSpeed has no such all-reduce under DeepSpeed; its --sequence-parallel insists on it.
if [[ (-z "$host" && "$mp_size" -gt 1) || " $* " == *" --sequence-parallel "* ]]; then
  export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
fi
# FlashAttention-4 compiles its kernels at the first step; kept on disk, the next start is seconds
# faster.
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="${FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED:-1}"
if [[ "$device" == cpu ]]; then
  export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
((!node_rank)) || log="${log%.log}_node$node_rank.log"
printf '=== %s %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "$(hostname)" >>"$log" # earlier starts stay
"${command[@]}" 2>&1 | tee -a "$log"
