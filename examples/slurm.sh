#!/bin/bash
# Train on a cluster with SLURM, one process for each GPU, started by srun instead of torchrun:
#
#     sbatch examples/slurm.sh [options of distributed.py]
#
# Before the time of the job is over, SLURM sends SIGTERM to the processes. The handler Preemption of distributed.py saves the state
# then and ends with the status 143; the job is queued again, and `Checkpoint(resume=True)` continues from there.
# The folder has to be one that all machines see.
#
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# With --gpus-per-task=1 each process sees one GPU, whose number is 0. Where each sees all GPUs: LOCAL_RANK=$SLURM_LOCALID.
status=0
srun bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0
    exec python "$@"
' bash examples/distributed.py "$@" || status=$?
if [ "$status" -eq 143 ]; then  # 128 + SIGTERM
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
