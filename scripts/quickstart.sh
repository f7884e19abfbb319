#!/usr/bin/env bash
# Trains a small GPT on real text, on four ranks (Ulysses 2 x Ring 2), and proves that one rank
# gives the same loss. No GPU needed. Further arguments go to the trainer, see its --help.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/env.sh
. "$root/scripts/env.sh"
exec python "$root/examples_deepspeed/sequence_parallel/pretrain_gpt_usp.py" --quickstart "$@"
