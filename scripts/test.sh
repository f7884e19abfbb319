#!/usr/bin/env bash
# Runs the tests:  scripts/test.sh [unit|dist|megatron|gpu|all] [pytest arguments]
#   unit      no process groups, no GPU           dist  gloo ranks on the CPU
#   megatron  megatron-core and DeepSpeed, gloo   gpu   needs an NVIDIA GPU
#   all       everything, in one pytest run (the default)
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

group=all
case "${1:-}" in
  unit | dist | megatron | gpu | all)
    group="$1"
    shift
    ;;
  */* | *.py*) group=given ;; # paths stand for themselves
  "" | -*) ;;
  *)
    sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac

# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
cd "$root"

gpu=0
if [[ "$group" == gpu || "$group" == all ]]; then
  if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    gpu=1
  else
    printf '%s\n' '************************************************************' \
      '** NO NVIDIA GPU HERE: the tests in tests/gpu do NOT run.   **' \
      '************************************************************' >&2
    [[ "$group" == gpu ]] && exit 0
  fi
fi
# Files of tests run beside each other, but not where they would share a GPU; -n 0: they do not.
[[ "$group" != given && "$gpu" == 0 ]] && python -c 'import xdist' 2>/dev/null &&
  set -- -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
case "$group" in
  unit) set -- tests/unit tests/examples "$@" ;;
  dist) set -- tests/distributed "$@" ;;
  megatron) set -- tests/megatron "$@" ;;
  gpu) set -- tests/gpu "$@" ;;
  all) set -- tests "$@" ;;
esac
if [[ "$group" == all && -z "${MEGATRON_DEEPSPEED_PATH:-}" ]]; then
  printf '%s\n' '** MEGATRON_DEEPSPEED_PATH IS NOT SET: tests/megatron_deepspeed do NOT run. **' >&2
fi

exec python -m pytest "$@"
