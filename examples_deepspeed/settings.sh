# shellcheck shell=bash
# What the launch.sh of the folders have in common: settings, and the start of their launcher.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[1]}")" && pwd)" # the folder of the launch.sh that sources this
root="$(cd "$here/../.." && pwd)"
[[ ! -x "$root/.venv/bin/torchrun" ]] || PATH="$PATH:$root/.venv/bin"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" # launchers pass it on to other nodes

die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

[[ "${DRY_RUN:-0}" =~ ^[01]$ ]] || die "DRY_RUN='$DRY_RUN' must be 0 or 1"

# setting NAME [DEFAULT]: the value of the environment, else of the script, else the default; without
# a default the setting is required.
names=()
setting() {
  local capitals="${1^^}"
  names+=("$capitals")
  printf -v "$1" '%s' "${!capitals-${!1-${2-}}}"
  [[ $# -gt 1 || -n "${!1}" ]] || die "$capitals is not set"
}

# whole_numbers NAME...: these settings are.
whole_numbers() {
  local name
  for name in "$@"; do
    [[ "${!name}" =~ ^[0-9]+$ ]] || die "${name^^}='${!name}' must be a whole number"
  done
}

# counts NAME...: these settings are whole numbers above 0.
counts() {
  local name
  for name in "$@"; do
    [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || die "${name^^}='${!name}' must be a whole number above 0"
  done
}

# one_of NAME VALUE...: the setting is one of the values.
one_of() {
  local name="$1"
  shift
  [[ " $* " == *" ${!name} "* ]] || die "${name^^}='${!name}' must be one of: $*"
}

# No variable of the environment is nearly the name of a setting, or Megatron's name of one.
refuse_misspelt() {
  local near
  command -v python >/dev/null || die "there is no python on PATH. Run: . $root/scripts/env.sh"
  near="$(
    python - "${names[@]}" <<'CODE'
import difflib, os, sys

settings = sys.argv[1:]
megatrons = {"SEQ_LEN": "SEQ_LENGTH", "TP_SIZE": "MP_SIZE", "CP_SIZE": "SP_SIZE"}
megatrons |= {"MICRO_BATCH_SIZE": "BATCH_SIZE", "NUM_ATTENTION_HEADS": "NUM_ATTN_HEADS"}
for name in sorted(os.environ.keys() - {*settings, "NUM_CPUS"}):
    close = [s for s in settings if min(len(s), len(name)) > 5 and abs(len(s) - len(name)) < 3]
    near = difflib.get_close_matches(name, close, 1, 0.85)
    meant = megatrons.get(name, *near[:1] or [""])
    if meant in settings:
        sys.exit(print(name, meant))
CODE
  )"
  [[ -z "$near" ]] || die "${near% *} is no setting; did you mean ${near#* }? The settings are in" \
    "$here/launch.sh; unset ${near% *} if it is meant for another program"
}

# check_settings NAME...: what fine-tuning and diffusion check; these are whole numbers too.
check_settings() {
  refuse_misspelt
  counts num_gpus sp_size
  whole_numbers ulysses_degree "$@"
  [[ -n "$model" ]] || die "MODEL is not set: a folder, an id of the hub, or $tiny_models"
  ((num_gpus % sp_size == 0)) || die "SP_SIZE=$sp_size must divide NUM_GPUS=$num_gpus"
  ((sp_size % (ulysses_degree ? ulysses_degree : 1) == 0)) ||
    die "ULYSSES_DEGREE=$ulysses_degree must divide SP_SIZE=$sp_size"
  [[ "${zero_stage-}" =~ ^[0-3]?$ ]] || die "ZERO_STAGE='$zero_stage' must be 0, 1, 2, 3 or empty"
}

# use_pinned_memory [expandable_segments=True]: torch is to pin host memory in larger pieces.
use_pinned_memory() {
  local options
  options="$(python -c "import os, ds_usp
print(*map('='.join, ds_usp.allocator_variables(os.environ, ${1-}).items()))")"
  [[ -z "$options" ]] || export "${options?}"
}

# Print `command` with further arguments, one flag a line.
print_command() {
  local word end=" \\
   "
  printf '%q' "${command[0]}"
  for word in "${command[@]:1}" "$@"; do
    [[ "$word" != --* ]] || printf '%s' "$end"
    [[ "$word" =~ ^[a-zA-Z0-9_./,:=@+-]+$ ]] && printf ' %s' "$word" || printf ' %q' "$word"
  done
  printf '\n'
}

# runs GROUP: a process of it is alive. `kill -0` counts the dead ones too, which stay until their parent
# asks for them: where a launcher has ended that is PID 1, and that of a container may never ask.
runs() {
  local stat line state group
  kill -0 -- "-$1" 2>/dev/null || return 1
  [[ -r /proc/self/stat ]] || return 0
  for stat in /proc/[0-9]*/stat; do
    { read -r line <"$stat"; } 2>/dev/null || continue # it has ended
    read -r state _ group _ <<<"${line##*) }"          # behind its name
    [[ "$group" != "$1" || "$state" == [ZX] ]] || return 0
  done
  return 1
}

# Run `command` with further arguments, or print it; the exit code is the launcher's. Its processes are
# a group, which gets the signals of the script: DeepSpeed's launcher hands none on. The script ends
# after the last of them, as ranks may save first.
start() {
  if [[ "${DRY_RUN:-0}" == 1 ]]; then
    print_command "$@"
    return
  fi
  command -v "${command[0]}" >/dev/null ||
    die "there is no ${command[0]} on PATH. Run: . $root/scripts/env.sh"
  local status
  set -m
  "${command[@]}" "$@" &
  set +m
  trap 'kill -TERM -- -$! 2>/dev/null' TERM INT HUP USR1
  while
    status=0
    wait $! || status=$? # also where a signal has ended wait
    runs $!
  do sleep 0.1; done
  trap - TERM INT HUP USR1
  return "$status"
}
