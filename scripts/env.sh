#!/usr/bin/env bash
# The project's Python environment, `.venv`, with the versions of constraints.txt. For bash.
#
#   . scripts/env.sh        makes it if it is missing or out of date, and puts it first on PATH
#   bash scripts/env.sh     only makes it
#
# Settings, all optional:
#   USP_PYTHON=python3.12   the interpreter to build on (default: the first usable python3)
#   USP_TORCH_INDEX=URL     one more package index for torch. Without a GPU the ordinary index may
#                           give the CUDA build, which is several GB; name a CPU index here then.
#   USP_SYSTEM_TORCH=1      keep the torch that the interpreter already has
#   USP_NO_INSTALL=1        make nothing, use the `python` on PATH as it is

_usp_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [[ "${BASH_SOURCE[0]}" != "$0" ]]; then # sourced: the caller's shell options stay as they are
  if [[ "${USP_NO_INSTALL:-0}" == 1 ]]; then
    command -v python >/dev/null || {
      printf '[env] USP_NO_INSTALL=1, but there is no python on PATH\n' >&2
      return 1
    }
    export PYTHONPATH="$_usp_root${PYTHONPATH:+:$PYTHONPATH}"
  else
    bash "$_usp_root/scripts/env.sh" || return 1
    export VIRTUAL_ENV="$_usp_root/.venv" PATH="$_usp_root/.venv/bin:$PATH"
    unset PYTHONHOME
  fi
  unset _usp_root
  return 0
fi

set -euo pipefail
unset PIP_CONSTRAINT PIP_USER # a container's own pins and targets are not for this environment
root="$_usp_root"
venv="$root/.venv"
log="$venv/install.log"

say() { printf '[env] %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# Print the path of an interpreter that can make a venv: USP_PYTHON, or the first that will do; of
# our own venv's, if that is on PATH, the one it was made by: the venv itself is about to go.
find_python() {
  local name
  for name in ${USP_PYTHON:-python3 python3.12 python3.11 python3.10}; do
    "$name" -c 'import os, sys, ensurepip, venv
if sys.version_info < (3, 10): sys.exit(1)
ours = os.path.realpath(sys.prefix) == os.path.realpath(sys.argv[1])
print(os.path.realpath(sys.executable) if ours else sys.executable)' "$venv" 2>/dev/null && return 0
  done
  die "no usable interpreter among: ${USP_PYTHON:-python3 python3.12 python3.11 python3.10};" \
    "needed: Python >= 3.10 with venv and pip (Debian: apt install python3-venv)"
}

# Everything that decides what the environment holds; a change of any line builds it anew.
fingerprint() (
  cd "$root"
  printf '%s\n' "$root" "${USP_PYTHON:-}" "${USP_TORCH_INDEX:-}" "${USP_SYSTEM_TORCH:-0}"
  printf '%s\n' */__init__.py # the packages that the editable install maps
  cat constraints.txt setup.py scripts/env.sh ds_usp/_version.py
)

up_to_date() {
  [[ -x "$venv/bin/python" && -f "$venv/stamp" ]] && cmp -s "$venv/stamp" <(fingerprint)
}

ticker=""
# stage WHAT COMMAND...: run it with its output in the log and one line of progress on the screen.
stage() {
  local what="$1" start="$SECONDS" status=0
  shift
  if [[ -t 2 ]]; then
    while kill -0 $$ 2>/dev/null; do
      printf '\r[env] %s ... %d s ' "$what" "$((SECONDS - start))" >&2
      sleep 1
    done 9>&- &
    ticker=$!
  fi
  printf '\n==== %s: %s\n' "$what" "$*" >>"$log"
  "$@" >>"$log" 2>&1 9>&- || status=$?
  stop_ticker
  if ((status)); then
    [[ -t 2 ]] && printf '\n' >&2
    tail -n 15 "$log" | sed 's/^/    /' >&2
    die "$what failed (exit code $status); the whole output is in $log"
  fi
  [[ -t 2 ]] && printf '\r' >&2
  say "$what ... $((SECONDS - start)) s "
}

stop_ticker() {
  [[ -z "$ticker" ]] && return 0
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  ticker=""
}

# Compiles just the modules that are used (pip would compile everything), and proves they import.
first_import() {
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -W ignore -c "import $*"
}

# Beside each other; what they share is torch.
first_imports() {
  local frameworks status=0
  first_import torch, deepspeed, megatron.core.models.gpt.gpt_model, matplotlib.pyplot, tqdm, pytest &
  frameworks=$!
  first_import torch, accelerate, datasets, diffusers, peft, transformers.trainer, trl\; \
    'print("torch", torch.__version__, "CUDA", torch.version.cuda)' || status=$?
  wait "$frameworks" || status=$?
  return "$status"
}

# The pip that an older Python brings takes twice the time for what it installs next.
install_pip_and() {
  "${pip[@]}" pip && "${pip[@]}" "$@"
}

build() {
  local python have="" make_venv pip compiling constraints="$root/constraints.txt" torch=(torch)
  python="$(find_python)"
  make_venv=("$python" -m venv)
  if [[ "${USP_SYSTEM_TORCH:-0}" == 1 ]]; then
    have="$("$python" -c 'import torch; print(torch.__version__)')" ||
      die "USP_SYSTEM_TORCH=1, but $python has no torch"
    make_venv+=(--system-site-packages)
  fi
  rm -rf "$venv"
  mkdir "$venv"
  if [[ -n "$have" ]]; then
    # The machine's torch brings CUDA libraries of its own; the pins for ours do not apply.
    constraints="$venv/constraints.txt"
    grep -vE '^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==' "$root/constraints.txt" >"$constraints"
    printf 'torch==%s\n' "$have" >>"$constraints"
  elif [[ -n "${USP_TORCH_INDEX:-}" ]]; then
    torch+=(--extra-index-url "$USP_TORCH_INDEX")
  fi

  say "installing into $venv (once; the log is $log)"
  stage "1/4 empty environment from $python" "${make_venv[@]}" "$venv"
  pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input install
    --constraint "$constraints" --no-compile)
  # DeepSpeed is built from source, and its setup imports what this stage installs.
  torch+=(numpy packaging setuptools wheel ninja py-cpuinfo)
  stage "2/4 torch" install_pip_and "${torch[@]}"
  # pip works on one core: another compiles torch meanwhile.
  first_import torch, torch._dynamo, torch.distributed.fsdp >>"$log" 2>&1 9>&- &
  compiling=$!
  stage "3/4 DeepSpeed, megatron-core, transformers, diffusers and tools" env DS_BUILD_OPS=0 "${pip[@]}" \
    --no-build-isolation --editable "${root}[trainer,megatron,transformers,diffusers,test,docs]"
  wait "$compiling" || true # what does not import, the next stage says
  stage "4/4 first import" first_imports
  if nvidia-smi >/dev/null 2>&1 && ! "$venv/bin/python" -c \
    'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    say "WARNING: there is an NVIDIA GPU here, but the installed torch cannot use it"
  fi
  fingerprint >"$venv/stamp" # last: without it the next call starts over
}

trap stop_ticker EXIT
if ! up_to_date; then
  exec 9<"$root/constraints.txt" # the lock is on a file that is always there
  if command -v flock >/dev/null && ! flock --nonblock 9; then
    say "another process is installing; waiting for it"
    flock 9
  fi
  up_to_date || build
fi
