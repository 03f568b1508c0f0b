#!/bin/bash
# P1B3, strong scaling, a cluster with PBS: 24 nodes, 48 ranks.
# 2 ranks per node; 1 epoch on each rank.
# Submit: qsub jobs/pbs/p1b3_strong.sh
#PBS -N p1b3_strong
#PBS -l select=24:mpiprocs=2:ompthreads=1:ncpus=2
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -o p1b3_strong.out
#PBS -l place=scatter
set -euo pipefail
cd "${PBS_O_WORKDIR:-$PWD}"

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=pbs
export RANKS_PER_NODE=2
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default NCCL_DEBUG WARN
job_limit 120 90
job_prepare

job_launcher mpiexec -n "$RANKS" -ppn 2
job_run benchmarks/p1b3/p1b3_baseline_keras2.py --size full --epochs 1 --epochs_scaling none \
  --batch_scaling cbrt --deterministic False
