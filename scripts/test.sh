#!/usr/bin/env bash
# Runs the tests:  scripts/test.sh [unit|dist|megatron|gpu|all] [pytest arguments]
#   unit      no process groups, no GPU           dist  gloo ranks on the CPU
#   megatron  megatron-core and DeepSpeed, gloo   gpu   needs an NVIDIA GPU
#   all       everything, in one pytest run (the default)
# Files of tests run beside each other; -n 0 runs one after the other, as -s and --trace need it.
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
    sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2
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
if [[ "$group" != given && "$gpu" == 0 ]]; then # tests/gpu would share the GPU
  cores="$(python -c 'import os
from importlib.metadata import version
if tuple(map(int, version("pytest-xdist").split(".")[:2])) >= (3, 8):
    print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))' \
    2>/dev/null || true)"
  # A file's tests have up to eight ranks at a time, each of 40 MB.
  ((${cores:-1} > 1)) && set -- -n "$((cores < 6 ? cores : 6))" --dist loadfile \
    --no-loadscope-reorder "$@"
fi
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
