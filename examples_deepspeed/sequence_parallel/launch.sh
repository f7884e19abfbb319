# shellcheck shell=bash
# Starts a training with the settings of the script that sources this: those of this folder, and of
# ../megatron_lm. launch_job.py checks them, builds the command and runs it:
#
#   SEQ_LENGTH=65536 ULYSSES_DEGREE=2 bash ds_pretrain_gpt_1.3B_usp_32k.sh
#
# Every setting can be overridden by its name in capitals; launch_settings.py lists all with defaults.
# Arguments of the script go to the training program unchanged. DRY_RUN=1 prints the command only.
#
# usp_framework=megatron_lm: pretrain_gpt.py of the checkout MEGATRON_LM_PATH, patched. Otherwise
# MEGATRON_DEEPSPEED_PATH set: pretrain_gpt.py of that checkout of Megatron-DeepSpeed, patched.
# Not set: the trainer of this folder, with the same flags.
#
# LAUNCHER=deepspeed (HOSTFILE names the nodes), torchrun (started on every node, with NNODES,
# NODE_RANK, MASTER_ADDR, MASTER_PORT) or srun (inside a SLURM job, see slurm.sbatch).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
[[ ! -x "$root/.venv/bin/deepspeed" ]] || PATH="$PATH:$root/.venv/bin"
command -v python >/dev/null || {
  echo "error: there is no python on PATH. Run: . $root/scripts/env.sh" >&2
  exit 2
}
script_variables=()
for name in $(compgen -v | grep -E '^[a-z][a-z_]*$'); do
  script_variables+=("$name=${!name-}")
done
unset RANK WORLD_SIZE # of an outer launcher; its ranks would not print what is refused
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # the launchers pass PYTHON* on to other nodes
exec python "$here/launch_job.py" "${script_variables[@]}" -- "$@"
