#!/bin/bash
# NT3, strong scaling, this machine: 1 nodes, 2 ranks.
# 2 ranks per node; 384 epochs, 192 epochs on each rank.
# Submit: bash jobs/local/nt3_strong.sh
set -euo pipefail

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=local
export RANKS_PER_NODE=2
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_limit 60 90
job_prepare

job_launcher mpirun -np 2 --host localhost:2 --bind-to none --map-by :OVERSUBSCRIBE \
  --mca mpi_yield_when_idle 1
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 384 --epochs_scaling strong
