#!/usr/bin/env bash
# Profiles this machine's GPUs, trains the held-out runs and judges the planner by them:
#   scripts/bench/planner_runs.sh FOLDER [GPUS]       about five minutes on 4 H200
# Leaves cluster.json, trainer.json, fitted.csv, runs.csv and validation.csv in FOLDER; a cluster.json
# that is there already is taken as it is.
# DEVICE=cpu tries the scripts with models that a CPU trains; their figures mean little.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
folder="${1:?usage: planner_runs.sh FOLDER [GPUS]}"
gpus="${2:-4}"
device="${DEVICE:-cuda}"
[[ "$gpus" == 4 ]] || {
  printf 'error: the held-out runs are for 4 GPUs, not %s\n' "$gpus" >&2
  exit 2
}
mkdir -p "$folder"
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
ranks=(torchrun --standalone --nproc-per-node "$gpus")
seconds=(--seconds "${SECONDS_TO_PROFILE:-90}")
tiny=()
if [[ "$device" == cpu ]]; then
  export OMP_NUM_THREADS=1
  tiny=(--tiny --steps 2)
  seconds=(--seconds 3)
fi

# Layers come from the trainer, not from the plain ones: no --model.
[[ -f "$folder/cluster.json" ]] ||
  "${ranks[@]}" -m ds_usp.planner profile --out "$folder/cluster.json" --device "$device" \
    "${seconds[@]}" --model
"${ranks[@]}" "$here/planner_runs.py" --profile "$folder/cluster.json" \
  --out-profile "$folder/trainer.json" --out "$folder/runs.csv" --device "$device" "${tiny[@]}"
python "$here/planner_validation.py" --profile "$folder/trainer.json" \
  --out "$folder/validation.csv" "$folder/runs.csv"
