# shellcheck shell=bash
# What launch.sh of transformers_sft and of diffusion have in common: settings, and the start.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)" # the folder of the launch.sh that sources this
root="$(cd "$here/../.." && pwd)"
[[ ! -x "$root/.venv/bin/torchrun" ]] || PATH="$PATH:$root/.venv/bin"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# setting NAME DEFAULT: the value of the environment, else of the script, else the default.
names=()
setting() {
  local capitals="${1^^}"
  names+=("$capitals")
  printf -v "$1" '%s' "${!capitals-${!1-$2}}"
}

# refuse_misspelt: no variable of the environment is nearly the name of a setting.
refuse_misspelt() {
  local near code="import os, sys; from launch_settings import misspelt_setting as near
print(*near(os.environ, sys.argv[1:]) or ())"
  near="$(PYTHONPATH="$here/../sequence_parallel:$PYTHONPATH" python -c "$code" "${names[@]}")"
  [[ -z "$near" ]] || die "${near% *} is no setting; did you mean ${near#* }? The settings are in" \
    "$here/launch.sh; unset ${near% *} if it is meant for another program"
}

# check_settings NAME...: these are whole numbers, and the degrees of parallelism divide the ranks.
check_settings() {
  local name
  refuse_misspelt
  for name in num_gpus sp_size ulysses_degree "$@"; do
    [[ "${!name}" =~ ^[0-9]+$ ]] || die "${name^^}='${!name}' must be a whole number"
  done
  [[ -n "$model" ]] || die "MODEL is not set: a folder, an id of the hub, or $tiny_models"
  ((num_gpus % sp_size == 0)) || die "SP_SIZE=$sp_size must divide NUM_GPUS=$num_gpus"
  ((sp_size % (ulysses_degree ? ulysses_degree : 1) == 0)) ||
    die "ULYSSES_DEGREE=$ulysses_degree must divide SP_SIZE=$sp_size"
  [[ "${zero_stage-}" =~ ^[0-3]?$ ]] || die "ZERO_STAGE='$zero_stage' must be 0, 1, 2, 3 or empty"
}

# Print or run `command`, with further arguments.
start() {
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    printf '%q ' "${command[@]}" "$@" && printf '\n'
    return
  fi
  command -v torchrun >/dev/null || die "there is no torchrun on PATH. Run: . $root/scripts/env.sh"
  if [[ "${usp_offload_ratio:-0}" != 0 && "$device" == cuda ]]; then # let torch pin memory faster
    local options="import os, ds_usp; print(*map('='.join, ds_usp.allocator_variables(os.environ).items()))"
    options="$(python -c "$options")"
    [[ -z "$options" ]] || export "${options?}"
  fi
  # Bash hands no signal on: the ranks would go on without the script.
  local status=0 code="import os, sys; sys.path.insert(0, sys.argv[1])
from usp_trainer.signals import supervise
sys.exit(supervise('torchrun', sys.argv[2:], None, os.environ))"
  python -c "$code" "$here/../sequence_parallel" "${command[@]}" "$@" &
  trap 'kill -TERM $!' TERM INT HUP USR1
  wait $! || status=$?
  while kill -0 $! 2>/dev/null; do # the signal has ended wait
    status=0
    wait $! || status=$?
  done
  trap - TERM INT HUP USR1
  return "$status"
}
