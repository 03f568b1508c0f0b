#!/bin/bash
# NT3, strong scaling, a cluster with PBS: 8 nodes, 16 ranks.
# 2 ranks per node; 384 epochs, 24 epochs on each rank.
# Submit: qsub jobs/pbs/nt3_strong.sh
#PBS -N nt3_strong
#PBS -l select=8:mpiprocs=2:ompthreads=1:ncpus=2
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -o nt3_strong.out
#PBS -l place=scatter
set -euo pipefail
cd "${PBS_O_WORKDIR:-$PWD}"

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=pbs
export RANKS_PER_NODE=2
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default NCCL_DEBUG WARN
job_limit 60 90
job_prepare

job_launcher mpiexec -n "$RANKS" -ppn 2
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 384 --epochs_scaling strong \
  --deterministic False
