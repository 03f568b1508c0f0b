#!/bin/bash
# NT3, weak scaling, Frontier (HPE Cray EX, Oak Ridge): 8 nodes, 64 ranks.
# 8 ranks per node, each with 7 cores, 1 GPU, 7 threads; 8 epochs on each rank.
# Submit: sbatch --account PROJECT jobs/frontier/nt3_weak.sh
#SBATCH --partition=batch
#SBATCH --job-name=nt3_weak
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --output=nt3_weak.%j.out
#SBATCH --signal=B:USR1@90
#SBATCH --constraint=nvme
#SBATCH --network=disable_rdzv_get
set -euo pipefail

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=frontier
export RANKS_PER_NODE=8
export LOCAL_STORAGE="/mnt/bb/$USER"
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default OMP_NUM_THREADS 7
job_default CANDLE_P1_GPUS_PER_NODE 8
job_default MIOPEN_USER_DB_PATH "/tmp/$USER-miopen-$SLURM_JOB_ID"
job_default MIOPEN_CUSTOM_CACHE_DIR "/tmp/$USER-miopen-$SLURM_JOB_ID"
job_default NCCL_DEBUG WARN
job_default NCCL_SOCKET_IFNAME hsn0
job_default NCCL_NET_GDR_LEVEL 3
job_default NCCL_CROSS_NIC 1
job_default FI_MR_CACHE_MONITOR kdreg2
job_default FI_CXI_DEFAULT_CQ_SIZE 131072
job_default FI_CXI_DEFAULT_TX_SIZE 2048
job_default FI_CXI_RX_MATCH_MODE hybrid
job_default FI_CXI_RDZV_PROTO alt_read
job_modules PrgEnv-gnu rocm craype-accel-amd-gfx90a
job_network_plugin ""
job_warning 90
job_prepare

job_launcher srun "--nodes=$NODES" "--ntasks=$RANKS" --ntasks-per-node=8 --cpus-per-task=7 \
  --gpus-per-task=1 --gpu-bind=closest "--export=ALL,OMP_NUM_THREADS=$OMP_NUM_THREADS"
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 8 --epochs_scaling weak \
  --deterministic False
