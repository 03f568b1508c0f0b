#!/bin/bash
# NT3, weak scaling, Polaris (HPE Apollo 6500, Argonne): 12 nodes, 48 ranks.
# 4 ranks per node, each with 8 cores, 1 GPU, 8 threads; 8 epochs on each rank.
# Submit: qsub -A PROJECT jobs/polaris/nt3_weak.sh
#PBS -q prod
#PBS -N nt3_weak
#PBS -l select=12:mpiprocs=4:ompthreads=8
#PBS -l walltime=01:00:00
#PBS -j oe
#PBS -o nt3_weak.out
#PBS -l place=scatter
#PBS -l filesystems=home:eagle
set -euo pipefail
cd "${PBS_O_WORKDIR:-$PWD}"

export CANDLE_P1_ROOT="${CANDLE_P1_ROOT:-$PWD}"
export CANDLE_P1_MACHINE=polaris
export RANKS_PER_NODE=4
export LOCAL_STORAGE="/local/scratch"
# shellcheck source=common/job_env.sh
source "$CANDLE_P1_ROOT/common/job_env.sh"
job_default OMP_NUM_THREADS 8
job_default CANDLE_P1_GPUS_PER_NODE 4
job_default CUDA_VISIBLE_DEVICES 3,2,1,0
job_default NCCL_DEBUG WARN
job_default NCCL_NET 'AWS Libfabric'
job_default NCCL_NET_GDR_LEVEL PHB
job_default NCCL_CROSS_NIC 1
job_default NCCL_COLLNET_ENABLE 1
job_default FI_CXI_DISABLE_HOST_REGISTER 1
job_default FI_MR_CACHE_MONITOR userfaultfd
job_default FI_CXI_DEFAULT_CQ_SIZE 131072
job_network_plugin /soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib:/soft/libraries/hwloc/lib
job_limit 60 90
job_prepare

job_launcher mpiexec -n "$RANKS" --ppn 4 --depth 8 --env "OMP_NUM_THREADS=$OMP_NUM_THREADS" \
  --cpu-bind depth
job_run benchmarks/nt3/nt3_baseline_keras2.py --size full --epochs 8 --epochs_scaling weak \
  --deterministic False
