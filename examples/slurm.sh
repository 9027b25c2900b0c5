#!/bin/bash
# Trains on a SLURM cluster, one process per GPU, started by srun instead of torchrun:
#
#     sbatch examples/slurm.sh [options of distributed.py]
#
# Before the time limit of the job, SLURM sends SIGTERM to the processes. The Preemption handler in distributed.py then saves the
# state and exits with status 143, the job is requeued, and `Checkpoint(resume=True)` resumes the run.
# The folder must be visible to all machines.
#
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

# With --gpus-per-task=1, each process sees one GPU, with index 0.
# If each process sees all GPUs, use LOCAL_RANK=$SLURM_LOCALID.
status=0
srun bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0
    exec python "$@"
' bash examples/distributed.py "$@" || status=$?
if [ "$status" -eq 143 ]; then  # 128 + SIGTERM
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
