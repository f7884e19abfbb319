#!/usr/bin/env bash
# One task of srun as one rank: SLURM's numbers under the names that torch reads.
#
#   srun --ntasks-per-node 8 bash srun_rank.sh python pretrain_gpt_usp.py ...
#
# MASTER_ADDR and MASTER_PORT are the caller's: the same on all nodes. Every task has to see all GPUs
# of its node (--gpus-per-node, not --gpus-per-task).
set -euo pipefail
export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
exec "$@"
