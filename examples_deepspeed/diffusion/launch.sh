# shellcheck shell=bash
# Starts generate.py or train_flow_matching.py with the settings of the script that sources this:
#
#   MODEL=Wan-AI/Wan2.2-T2V-A14B-Diffusers NUM_GPUS=4 bash generate_wan_usp.sh --prompt "a cat runs"
#
# Every setting can be overridden by its name in capitals. Arguments of the script go to the program
# unchanged, after its own. DRY_RUN=1 prints the command only.
tiny_models="tiny-flux, tiny-wan"
# shellcheck source=examples_deepspeed/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/../settings.sh"

setting program generate.py         # or train_flow_matching.py
setting model ""                    # a folder, an id of the hub, tiny-flux or tiny-wan
setting num_gpus 1                  # ranks of this node; CPU processes if device=cpu
setting sp_size "$num_gpus"         # ranks that share each sample; to generate: all
setting ulysses_degree 0            # of these, ranks that exchange heads; 0: as the heads allow
setting device cuda                 # or cpu
setting output usp_output           # folder of what is written
# To generate
setting height 1024
setting width 1024
setting num_frames 81               # of a video
setting steps 28                    # of sampling, or of training
setting check 0                     # steps after which latents are compared with one rank's; 0: not
# To train
setting latents ""                  # folder of encoded samples; empty: random ones
setting size "128 128"              # of the latents of random samples, [frames] height width
setting text_tokens 512             # of random samples
setting batch_size 1                # samples of a replica and step
setting zero_stage 2                # DeepSpeed's, 0 to 3
setting ds_config ""                # a file of JSON instead
setting lr 1.0e-5
setting lora 0                      # rank of the matrices that are trained; 0: all weights are
setting activation_checkpoint true  # less memory, more time: backward recomputes the blocks

check_settings height width num_frames steps check text_tokens batch_size lora
case "$program" in
  generate.py) ((sp_size == num_gpus)) || die "SP_SIZE=$sp_size: all $num_gpus ranks share a sample" ;;
  train_flow_matching.py) ;;
  *) die "PROGRAM='$program' must be generate.py or train_flow_matching.py" ;;
esac

command=(torchrun --standalone --nproc-per-node "$num_gpus" "$here/$program")
case "$model" in
  tiny-*) command+=(--tiny "${model#tiny-}") ;;
  *) command+=(--model "$model") ;;
esac
command+=(--ulysses-degree "$ulysses_degree" --device "$device" --output "$output" --steps "$steps")
if [[ "$program" == generate.py ]]; then
  command+=(--height "$height" --width "$width" --num-frames "$num_frames" --check "$check")
else
  # shellcheck disable=SC2206  # a list of numbers
  sizes=($size)
  command+=(--sequence-parallel-size "$sp_size" --latents "$latents" --size "${sizes[@]}"
    --text-tokens "$text_tokens" --batch-size "$batch_size" --lr "$lr" --lora "$lora"
    --deepspeed "${ds_config:-{\"zero_optimization\": {\"stage\": ${zero_stage:-0}\}\}}")
  [[ "$activation_checkpoint" != true ]] || command+=(--gradient-checkpointing)
fi
start "$@"
