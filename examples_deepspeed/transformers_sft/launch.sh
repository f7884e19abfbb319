# shellcheck shell=bash
# Starts sft.py with the settings of the script that sources this:
#
#   SEQ_LENGTH=65536 ULYSSES_DEGREE=1 bash sft_llama3_8B_usp_64k_4gpu.sh --learning_rate 1e-5
#
# Every setting can be overridden by its name in capitals. Arguments of the script go to sft.py
# unchanged, after its own. DRY_RUN=1 prints the command only.
tiny_models="tiny"
# shellcheck source=examples_deepspeed/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/../settings.sh"

setting model ""                   # a folder, an id of the hub, or tiny
setting trainer trl                # or transformers
setting data_path ""               # JSON lines or an id of the hub; empty: Python's documentation
setting seq_length 4096            # tokens of a sequence
setting packing true               # documents packed into each sequence
setting num_gpus 1                 # ranks of this node; CPU processes if device=cpu
setting sp_size "$num_gpus"        # ranks that share each sequence
setting ulysses_degree 0           # of these, ranks that exchange heads; 0: as the heads allow
setting zero_stage 3               # DeepSpeed's, 0 to 3; empty: DistributedDataParallel
setting fsdp false                 # true: FSDP2 instead
setting batch_size 1               # sequences of a replica at a time
setting global_batch_size 1        # sequences of a step
setting train_iters 1000           # steps
setting lr 2.0e-5
setting device cuda                # or cpu
setting output_home usp_output     # folder of checkpoints
setting compare false              # true: train on one rank too, and compare the losses
setting activation_checkpoint true # less memory, more time: backward recomputes the layers
kept="$([[ "$activation_checkpoint" == true ]] && echo attention || echo none)"
setting usp_recompute "$kept"      # attention: it recomputes all but attention; full; none
setting usp_offload_ratio 0        # of saved activations, in host memory
setting usp_loss_chunks 0          # chunks of tokens of head and loss; 0: not in chunks
setting usp_mlp_chunks 0           # chunks of tokens of each MLP; 0: not in chunks

check_settings seq_length batch_size global_batch_size train_iters

# Set `command` to what trains on RANKS ranks with sequences over SP of them.
build_command() {
  local ranks="$1" sp="$2" ulysses="$3" folder="$4" replicas=$(($1 / $2)) sizes
  ((global_batch_size % (batch_size * replicas) == 0)) ||
    die "GLOBAL_BATCH_SIZE=$global_batch_size must be a multiple of BATCH_SIZE=$batch_size x" \
      "$replicas replicas"
  command=(torchrun --standalone --nproc-per-node "$ranks" "$here/sft.py"
    --model "$model" --trainer "$trainer" --data "$data_path"
    --sequence_parallel_size "$sp" --ulysses_degree "$ulysses" --output_dir "$folder"
    --max_length "$seq_length" --packing "$packing" --per_device_train_batch_size "$batch_size"
    --gradient_accumulation_steps "$((global_batch_size / (batch_size * replicas)))"
    --max_steps "$train_iters" --learning_rate "$lr" --lr_scheduler_type cosine
    --gradient_checkpointing "$activation_checkpoint" --usp_recompute "$usp_recompute"
    --usp_offload_ratio "$usp_offload_ratio" --usp_loss_chunks "$usp_loss_chunks"
    --usp_mlp_chunks "$usp_mlp_chunks" --logging_steps 1 --report_to none)
  if [[ "$device" == cpu ]]; then
    command+=(--use_cpu --bf16 false)
  fi
  if [[ "$fsdp" == true ]]; then
    command+=(--fsdp --fsdp_config '{"version": 2}')
  elif [[ -n "$zero_stage" ]]; then
    sizes='"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"'
    sizes+=', "gradient_clipping": "auto", "bf16": {"enabled": "auto"}'
    command+=(--deepspeed "{\"zero_optimization\": {\"stage\": $zero_stage}, $sizes}")
  fi
}

if [[ "$usp_offload_ratio" != 0 && "$device" == cuda && "${DRY_RUN:-0}" != 1 ]]; then
  use_pinned_memory
fi
name="$(basename "$model")_s${seq_length}"
folder="$output_home/${name}_g${num_gpus}_sp${sp_size}_u${ulysses_degree}"
if [[ "$compare" == true ]]; then # first the same steps on one rank, by transformers alone
  build_command 1 1 1 "$output_home/${name}_one_rank"
  start "$@"
  set -- "$@" --compare_with "$output_home/${name}_one_rank"
fi
build_command "$num_gpus" "$sp_size" "$ulysses_degree" "$folder"
start "$@"
