#!/bin/sh
# One method and one seed per task of an array job; every task may be killed and started again.
# The lines for Slurm are comments elsewhere: `TASK=3 sh examples/array_job.sh` runs a task by hand.
#SBATCH --array=0-11
#SBATCH --cpus-per-task=4
#SBATCH --requeue
set -eu

out=${OUT:-runs/array}
methods=${METHODS:-ibp sabr taps staps}
seeds=${SEEDS:-3}
task=${SLURM_ARRAY_TASK_ID:-${TASK:-0}}
samples=${SAMPLES:-1000}
jobs=${SLURM_CPUS_PER_TASK:-1}

set -- "$@" --eps 0.1  # arguments of this script are further options of `tightrope train`
number=$((task / seeds))
seed=$((task % seeds))
method=$(echo "$methods" | cut -d ' ' -f $((number + 1)))
run=$out/$method-$seed

tightrope train --method "$method" --seed "$seed" --out "$run" --resume "$@"
tightrope certify "$run" --samples "$samples" --jobs "$jobs"
