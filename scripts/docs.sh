#!/usr/bin/env bash
# Builds the site from docs, docstrings and --help into build/site/html:  scripts/docs.sh [serve]
# `serve` shows it on this machine. A broken link or anchor, and a page that mkdocs.yml does not name, fail.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
exec python "$root/scripts/build_site.py" "$@"
