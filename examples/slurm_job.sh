#!/bin/sh
# One job on several machines: torchrun trains a network on all of them, then Ray certifies it on
# the same machines. Both go on where they were, so the job may be killed and started again.
# Arguments of this script are further options of `tightrope train`.
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --requeue
set -eu

out=${OUT:-runs/slurm}
per_node=${SLURM_GPUS_ON_NODE:-1}   # processes of a machine: one for each of its GPUs
samples=${SAMPLES:-1000}
share=${GPUS_PER_TASK:-0}           # of a GPU, for each process that certifies; 0: on the CPUs
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$per_node" \
  --rdzv-backend c10d --rdzv-endpoint "$first:29400" --rdzv-id "$SLURM_JOB_ID" --max-restarts 3 \
  -m tightrope train --net cnn7 --method taps --out "$out" --resume "$@"

# Ray 2.49 or later starts itself on all machines, runs the command on the first, and ends.
export RAY_USAGE_STATS_ENABLED=0
srun ray symmetric-run --address "$first:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
  tightrope certify "$out" --samples "$samples" \
  --engine ray --address "$first:6379" --gpus-per-task "$share"
