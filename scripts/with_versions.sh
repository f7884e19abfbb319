#!/usr/bin/env bash
# Runs a command with other versions of some packages before those of .venv:
#
#   scripts/with_versions.sh NAME COMMAND...
#   scripts/with_versions.sh                    the names, one a line
#
# An overlay is a line `#: NAME package==version ...` of constraints.txt: exactly these packages,
# without what they depend on, which is .venv's. Each is installed once, into .venv/overlays. Of torch
# that is the CUDA build with its libraries, several GB; with USP_TORCH_INDEX (scripts/env.sh) the
# CPU build of that index, which needs none of them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if (($# == 0)); then
  sed -n 's/^#: \([^ ]*\) .*/\1/p' "$root/constraints.txt"
  exit 0
fi
name="$1"
shift
read -ra pins < <(sed -n "s/^#: $name //p" "$root/constraints.txt") || {
  printf 'constraints.txt has no overlay %s; there are:\n' "$name" >&2
  bash "$root/scripts/with_versions.sh" >&2
  exit 2
}

index=()
if [[ "${USP_TORCH_INDEX:-}" && " ${pins[*]}" == *" torch=="* ]]; then
  index=(--extra-index-url "$USP_TORCH_INDEX")
  mapfile -t pins < <(printf '%s\n' "${pins[@]}" | grep -vE '^(triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==')
fi

# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
folder="$root/.venv/overlays/$name"
stamp="$(python -c 'import sys; print(sys.prefix, sys.version)') ${pins[*]}"
up_to_date() { [[ -f "$folder/stamp" && "$(<"$folder/stamp")" == "$stamp" ]]; }
if ! up_to_date; then
  exec 9<"$root/constraints.txt"
  if command -v flock >/dev/null; then flock 9; fi
  if ! up_to_date; then
    printf '[overlay] %s: %s\n' "$name" "${pins[*]}" >&2
    rm -rf "$folder"
    # Of flash-attn, the Python files: a build of its kernels takes hours, and a GPU's compiler.
    env -u PIP_CONSTRAINT -u PIP_USER PIP_NO_BUILD_ISOLATION=0 FLASH_ATTENTION_FORCE_BUILD=TRUE \
      FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE python -m pip --disable-pip-version-check --no-input install \
      --quiet --no-deps --no-compile "${index[@]}" --target "$folder" "${pins[@]}" >&2
    printf '%s\n' "$stamp" >"$folder/stamp" # last: without it the next call starts over
  fi
  exec 9<&-
fi
PYTHONPATH="$folder:$root${PYTHONPATH:+:$PYTHONPATH}" exec "$@"
