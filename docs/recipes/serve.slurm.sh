#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# One model over the devices of two hosts, served by process 0:  sbatch docs/recipes/serve.slurm.sh
#
# JAX finds the job's hosts by Slurm's variables. On GPUs it gives each task one of them, so ask for
# as many tasks as devices; on hosts without, one task per host. All tasks read the same files.
#SBATCH --job-name=utio-serve
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=7-00:00:00
#SBATCH --requeue
#SBATCH --output=utio-serve-%j.log

set -euo pipefail

MODEL=${MODEL:-shared-16}
KEYS=${KEYS:-$HOME/utio-keys.txt} # the key itself, see docs/serving.md

# A task that is gone ends all of them within a minute, by itself; Slurm need not wait for that.
# `scancel` sends SIGTERM to all: process 0 answers what is open, for as long as KillWait allows.
if srun --kill-on-bad-exit=1 --label utio-jax serve --distributed \
    --model "$MODEL" --host 0.0.0.0 --port 8000 --api-key-file "$KEYS" --drain-seconds 25; then
    exit 0
fi
# The group starts again as a whole; give up where it does not hold.
if [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit 1
