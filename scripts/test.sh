#!/usr/bin/env bash
# Runs the tests:  scripts/test.sh [fast|unit|dist|megatron|transformers|compat|verl|bridge|versions|gpu|all] [pytest arguments]
#   fast      some cases of every test of ds_usp: five minutes on two cores
#   unit      no process groups, no GPU           dist  gloo ranks on the CPU
#   megatron  megatron-core and DeepSpeed, gloo   gpu   needs an NVIDIA GPU
#   transformers  Hugging Face's models and trainers, diffusion models, gloo
#   compat    the function that trainers replace, with each transformers of constraints.txt
#   versions  the oldest and newest torch, transformers and diffusers that setup.py lets in, but for those
#             of .venv: the tests of each package. versions-torch, ...: of one
#   verl      its own FSDP engines with a ring, in verl's overlay of constraints.txt
#   bridge    Megatron-Bridge's providers, in its overlay of constraints.txt, gloo
#   all       everything (the default)
# Files of tests run beside each other; -n 0 runs one after the other, as -s and --trace need it.
# gpu --record FILE writes the result to FILE too: date, commit, machine, counts, why tests were skipped.
set -euo pipefail
start="$(date +%s)"

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

group=all
case "${1:-}" in
  fast | unit | dist | megatron | transformers | compat | verl | bridge | versions* | gpu | all)
    group="$1"
    shift
    ;;
  */* | *.py*) group=paths ;; # the arguments name the tests
  "" | -*) ;;
  *)
    sed -n '2,13s/^# //p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac

# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
cd "$root"
# Where it is set, each of a thousand ranks and scripts compiles the sources that it imports.
unset PYTHONDONTWRITEBYTECODE
# Workers and their ranks share the cores: threads of each would wait for each other's.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

cores="$(python -c 'import os
print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))')"
# parallel WORKERS: the flags that run files of tests beside each other, none on one core.
parallel() {
  ((cores > 1)) && python -c 'import xdist' 2>/dev/null &&
    printf '%s\n' -n "$((cores < $1 ? cores : $1))" --dist "$2" --no-loadscope-reorder
}

has_gpu=0
if [[ "$group" == gpu || "$group" == all ]]; then
  if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    has_gpu=1
  else
    printf '%s\n' '************************************************************' \
      '** NO NVIDIA GPU HERE: the tests in tests/gpu do NOT run.   **' \
      '************************************************************' >&2
    [[ "$group" == gpu ]] && exit 0
  fi
fi
if [[ "$group" == all ]]; then
  [[ "${MEGATRON_DEEPSPEED_PATH:-}" ]] ||
    printf '%s\n' '** MEGATRON_DEEPSPEED_PATH IS NOT SET: tests/megatron_deepspeed do NOT run. **' >&2
  [[ "${MEGATRON_LM_PATH:-}" ]] ||
    printf '%s\n' '** MEGATRON_LM_PATH IS NOT SET: most of tests/megatron_lm do NOT run. **' >&2
fi
if [[ "$group" == all || "$group" == transformers ]]; then
  python -c 'from importlib.util import find_spec as find
tests = {"transformers": "tests/integrations", "diffusers": "tests/integrations/test_diffus*.py"}
for name in [name for name in tests if not find(name)]:
    print(f"** NO {name.upper()} HERE: {tests[name]} do NOT run. **")' >&2
fi

case "$group" in
  fast) paths=(tests/unit tests/distributed tests/examples -m fast) ;;
  unit) paths=(tests/unit tests/examples) ;;
  dist) paths=(tests/distributed) ;;
  megatron) paths=(tests/megatron) ;;
  transformers) paths=(tests/integrations) ;;
  compat)
    paths=(tests/compat/test_flash_attention_forward.py tests/compat/test_ring_flash_attn_adapter.py
      tests/compat/test_other_trainers.py)
    ;;
  verl) paths=(tests/compat/test_verl.py) ;;
  bridge) paths=(tests/megatron/test_megatron_bridge.py) ;;
  all) paths=(tests) ;;
  *) paths=() ;;
esac
status=0
overlay=()
run() {
  local code=0
  "${overlay[@]}" python -m pytest "$@" || code=$?
  ((code == 5 && has_gpu)) && code=0 # the arguments chose tests of another run
  ((status)) || status=$code
}
if [[ "$group" != gpu ]]; then
  # A file's tests have up to eight ranks at a time, each of 40 MB.
  mapfile -t flags < <([[ "$group" == paths ]] || parallel 4 loadfile)
  ((has_gpu)) && paths+=(--ignore tests/gpu)
  names="$(bash scripts/with_versions.sh | grep "^$group-")" ||
    [[ "$group" != versions* ]] || names="$group" # no row: with_versions.sh says which there are
  for name in $names; do
    overlay=(bash scripts/with_versions.sh "$name")
    case "$name" in # what touches that package; a row of another one is a line of constraints.txt too
      versions-torch-*) paths=(tests/unit tests/distributed -m fast) ;;
      versions-transformers-*) paths=(tests/integrations --ignore-glob='*/test_diffus*') ;;
      versions-diffusers-*) paths=(tests/integrations/test_diffus*.py) ;;
    esac
    run "${flags[@]}" "${paths[@]}" "$@"
  done
  overlay=()
  # Versions of .venv: their tests are part of `all`.
  [[ "$group" == versions* ]] || run "${flags[@]}" "${paths[@]}" "$@"
fi
if ((has_gpu)); then # see tests/gpu/conftest.py
  if [[ "$group" == gpu && "${1:-}" == --record ]]; then
    record="$2"
    shift 2
  else
    record="$(mktemp)"
    trap 'rm "$record"' EXIT
  fi
  printf '{"start": %d}\n' "$start" >"$record" # all runs are one result
  mapfile -t flags < <(parallel 24 worksteal)
  run "${flags[@]}" tests/gpu -m "not several_gpus and not no_other_load" --record "$record" "$@"
  mapfile -t flags < <(parallel 4 worksteal)
  run "${flags[@]}" tests/gpu -m several_gpus --record "$record" "$@"
  run tests/gpu -m no_other_load --record "$record" "$@"
fi
exit "$status"
