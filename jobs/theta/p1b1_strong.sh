#!/bin/bash
# P1B1, strong scaling, Theta (Cray XC40, Argonne): 96 nodes, 96 ranks.
# 1 rank per node, each with 64 cores, 64 threads; 384 epochs, 4 epochs on each rank.
# Submit: qsub -A PROJECT jobs/theta/p1b1_strong.sh
#COBALT -q default
#COBALT -n 96
#COBALT -t 180
#COBALT --jobname p1b1_strong
#COBALT -O p1b1_strong
#COBALT --attrs mcdram=cache:numa=quad
set -euo pipefail

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=theta
export RANKS_PER_NODE=1
export LOCAL_STORAGE="/local/scratch"
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default OMP_NUM_THREADS 64
job_default KMP_BLOCKTIME 0
job_default MPICH_MAX_THREAD_SAFETY multiple
job_default PMI_NO_FORK 1
job_limit 180 90
job_prepare

job_launcher aprun -n "$RANKS" -N 1 -d 64 -j 1 -cc depth -e "OMP_NUM_THREADS=$OMP_NUM_THREADS"
job_run benchmarks/p1b1/p1b1_baseline_keras2.py --size full --epochs 384 --epochs_scaling strong \
  --deterministic False
