#!/bin/bash
# NT3, weak scaling, Aurora (HPE Cray EX, Argonne): 8 nodes, 96 ranks.
# 12 ranks per node, each with 8 cores, 8 threads; 8 epochs on each rank.
# Submit: qsub -A PROJECT jobs/aurora/nt3_weak.sh
#PBS -q debug-scaling
#PBS -N nt3_weak
#PBS -l select=8:mpiprocs=12:ompthreads=8
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -o nt3_weak.out
#PBS -l place=scatter
#PBS -l filesystems=home:flare
set -euo pipefail
cd "${PBS_O_WORKDIR:-$PWD}"

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=aurora
export RANKS_PER_NODE=12
export LOCAL_STORAGE="/tmp"
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default OMP_NUM_THREADS 8
job_default MPIR_CVAR_ENABLE_GPU 0
job_default MPIR_CVAR_GATHERV_INTER_SSEND_MIN_PROCS -1
job_default FI_CXI_DEFAULT_CQ_SIZE 1048576
job_default FI_CXI_OFLOW_BUF_SIZE 8388608
job_default FI_CXI_CQ_FILL_PERCENT 30
job_default FI_CXI_RX_MATCH_MODE hybrid
job_default FI_MR_CACHE_MONITOR disabled
job_default PALS_PING_PERIOD 240
job_default PALS_RPC_TIMEOUT 240
job_limit 60 90
job_prepare

job_launcher mpiexec -n "$RANKS" --ppn 12 --depth 8 \
  --cpu-bind list:1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100 \
  --env "OMP_NUM_THREADS=$OMP_NUM_THREADS"
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 8 --epochs_scaling weak \
  --deterministic False
