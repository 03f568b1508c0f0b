#!/bin/bash
# NT3, strong scaling, Aurora (HPE Cray EX, Argonne): 8 nodes, 96 ranks.
# 12 ranks per node, each with 8 cores, 1 GPU, 8 threads; 384 epochs, 4 epochs on each rank.
# Submit: qsub -A PROJECT jobs/aurora/nt3_strong.sh
#PBS -q prod
#PBS -N nt3_strong
#PBS -l select=8:mpiprocs=12
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -o nt3_strong.out
#PBS -l place=scatter
#PBS -l filesystems=home:flare
set -euo pipefail
cd "${PBS_O_WORKDIR:-$PWD}"

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=aurora
export RANKS_PER_NODE=12
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default OMP_NUM_THREADS 8
job_default FI_MR_CACHE_MONITOR userfaultfd
job_modules frameworks
job_limit 60 90
job_prepare

job_launcher mpiexec -n "$RANKS" --ppn 12 --depth 8 --env "OMP_NUM_THREADS=$OMP_NUM_THREADS" \
  --cpu-bind list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 384 --epochs_scaling strong \
  --deterministic False
