#!/bin/bash
# NT3, strong scaling, a cluster with Slurm: 24 nodes, 48 ranks.
# 2 ranks per node; 384 epochs, 8 epochs on each rank.
# Submit: sbatch jobs/slurm/nt3_strong.sh
#SBATCH --job-name=nt3_strong
#SBATCH --nodes=24
#SBATCH --ntasks-per-node=2
#SBATCH --time=02:00:00
#SBATCH --output=nt3_strong.%j.out
#SBATCH --signal=B:USR1@90
#SBATCH --exclusive
#SBATCH --mem=0
set -euo pipefail

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=slurm
export RANKS_PER_NODE=2
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default NCCL_DEBUG WARN
job_warning 90
job_prepare

job_launcher srun "--nodes=$NODES" "--ntasks=$RANKS" --ntasks-per-node=2 --export=ALL --mpi=pmix
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 384 --epochs_scaling strong \
  --deterministic False
