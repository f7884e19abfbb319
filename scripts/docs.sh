#!/usr/bin/env bash
# Writes the reference of the API and of the command line into docs/reference/generated, from
# docstrings and from --help. See docs/reference/README.md.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
exec python "$root/scripts/reference_pages.py" "$@"
