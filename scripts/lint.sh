#!/usr/bin/env bash
# Style, format, docstrings, types and import layers; every check runs, the exit code is that of the first that failed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
cd "$root"

status=0
check() {
  local code=0
  printf '== %s\n' "$*"
  python -m "$@" || code=$?
  ((status)) || status=$code
}

check ruff check .
check ruff format --check .
printf '== scripts/docstrings.py\n'
python scripts/docstrings.py || { ((status)) || status=1; }
check mypy
printf '== lint-imports\n'
lint-imports --no-logo 2>/dev/null || { lint-imports; ((status)) || status=1; }
exit "$status"
