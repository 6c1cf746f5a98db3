#!/bin/sh
# One shard of a certification per task of an array job, without Ray; every task may be killed and
# started again. `tightrope merge RUN` joins the shards when all have ended.
# The lines for Slurm are comments elsewhere: `TASK=3 sh examples/slurm_shards.sh RUN` does one by hand.
#SBATCH --array=1-16
#SBATCH --cpus-per-task=8
#SBATCH --requeue
set -eu

run=$1
shift  # the rest are further options of `tightrope certify`
task=${SLURM_ARRAY_TASK_ID:-${TASK:-1}}
count=${SLURM_ARRAY_TASK_COUNT:-${COUNT:-16}}

tightrope certify "$run" --shard "$task/$count" --jobs "${SLURM_CPUS_PER_TASK:-1}" "$@"
