#!/bin/bash
# NT3, weak scaling, Perlmutter, GPU nodes (HPE Cray EX, NERSC): 8 nodes, 32 ranks.
# 4 ranks per node, each with 16 cores, 1 GPU, 16 threads; 8 epochs on each rank.
# Submit: sbatch --account PROJECT jobs/perlmutter/nt3_weak.sh
#SBATCH --qos=regular
#SBATCH --job-name=nt3_weak
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
#SBATCH --output=nt3_weak.%j.out
#SBATCH --signal=B:USR1@90
#SBATCH --constraint=gpu
set -euo pipefail

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=perlmutter
export RANKS_PER_NODE=4
export LOCAL_STORAGE="/tmp"
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default OMP_NUM_THREADS 16
job_default CANDLE_P1_GPUS_PER_NODE 4
job_default NCCL_DEBUG WARN
job_default NCCL_SOCKET_IFNAME hsn
job_default NCCL_NET 'AWS Libfabric'
job_default NCCL_CROSS_NIC 1
job_default FI_MR_CACHE_MONITOR userfaultfd
job_modules nccl
export MPICH_GPU_SUPPORT_ENABLED=0
job_warning 90
job_prepare

job_launcher srun "--nodes=$NODES" "--ntasks=$RANKS" --ntasks-per-node=4 --cpus-per-task=32 \
  --gpus-per-task=1 --gpu-bind=none "--export=ALL,OMP_NUM_THREADS=$OMP_NUM_THREADS" \
  --cpu-bind=map_ldom:3,2,1,0
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 8 --epochs_scaling weak \
  --deterministic False
