# shellcheck shell=bash
# What all job scripts share: modules, the Python environment, settings, checks, and the launch.
# Sourced by the scripts in jobs/ and by those that "candle-p1 submit" writes.
#
# A job reads these environment variables:
#   CANDLE_P1_ROOT       the checkout; default: where the job was submitted
#   CANDLE_P1_NODES      the number of nodes; default: those of the job
#   CANDLE_P1_MODULES    modules to load instead of the machine's; empty for none
#   CANDLE_P1_NET_PLUGIN the directories, separated by ":", of the network's plug-in for NCCL or RCCL
#                        and of its libraries, on machines that need one; empty for none
#   CANDLE_P1_SETUP      a bash file to source after that, for anything else that a site needs
#   CANDLE_P1_VENV       the virtual environment; default: .venv of the checkout
#   CANDLE_P1_PYTHON     the Python to start; default: python of the environment, or in $PATH
#   CANDLE_P1_STAGE      1: cache the data on the nodes' own storage; or a directory for the caches
#   CANDLE_P1_FLAGS      further flags of the benchmark, which take precedence over the script's;
#                        "--data_dir DIR" names its files, without which the data are synthetic
#   CANDLE_P1_PREFLIGHT  0: start without examining the nodes; or options of the preflight (-m
#                        candle_p1.cluster.preflight --help), such as "--memory_gib 2 --shm_gib 0"
#   CANDLE_P1_GPUS_PER_NODE  the GPUs that the job asks for on each node; ranks that find none end the
#                        job. Default: those of the machine's file; 0: none are needed
#   CANDLE_P1_MINUTES    the time limit, if it was changed at submission and the script enforces it
#   CANDLE_P1_WARNING_S  how many seconds before that the ranks are told to save and end
#   CANDLE_P1_SAVE_S     how many of these seconds saving may take; default: half of them
# Variables that job_default sets can be set in advance, too.

job_note() { echo "job: $*" >&2; }

# A job of a study that fails before its ranks start leaves no record. It renames its script, so that
# it counts as not submitted, and can be submitted again once the cause is fixed. In a chain, where
# later jobs may need the script, the file job.chain says so.
job_fail() {
  job_note "$*"
  if [[ -n ${JOB_SCRIPT:-} && -z ${JOB_CHAIN:-} ]]; then
    mv -f "$JOB_SCRIPT" "$JOB_SCRIPT.failed" || true
  fi
  [[ -z ${JOB_STAGED:-} ]] || job_unstage
  exit 2
}

for JOB_NAME in CANDLE_P1_NODES CANDLE_P1_MINUTES CANDLE_P1_WARNING_S; do
  [[ ${!JOB_NAME:-1} =~ ^[1-9][0-9]*$ ]] ||
    job_fail "$JOB_NAME=${!JOB_NAME}: give a whole number from 1 on"
done

# job_default NAME VALUE: exports a variable, with this value if it has none.
job_default() {
  if [[ -z ${!1+set} ]]; then
    export "$1=$2"
  else
    export "${1?}"
  fi
}

# job_module ARGUMENT...: the command module, if there is one.
job_module() {
  local status=0
  if ! type module >/dev/null 2>&1; then
    job_note "there is no command module: not done: module $*"
    return 0
  fi
  set +eu # the command module does not work under these
  module "$@"
  status=$?
  set -eu
  ((status == 0)) ||
    job_fail "module $* failed: name modules of this site in CANDLE_P1_MODULES, or in a machine file"
}

# job_modules NAME...: loads modules.
job_modules() {
  local names=("$@")
  if [[ -n ${CANDLE_P1_MODULES+set} ]]; then
    read -ra names <<<"$CANDLE_P1_MODULES"
  fi
  ((${#names[@]} == 0)) || job_module load "${names[@]}"
}

# job_exclude NUMBER NAME...: keeps this many nodes of the job, without those with these names. The
# job has spare ones, because its scheduler cannot exclude nodes.
job_exclude() {
  local number=$1
  shift
  JOB_HOSTFILE=$(mktemp "${TMPDIR:-/tmp}/candle_p1-nodes-XXXXXX")
  awk -v number="$number" -v names="$*" '
    BEGIN { split(names, list, " "); for (i in list) excluded[list[i]] }
    { split($1, part, "."); if ($1 in excluded || part[1] in excluded) next }
    !($1 in kept) && num < number { kept[$1]; num++ }
    $1 in kept
    END { exit num < number }' "$PBS_NODEFILE" >"$JOB_HOSTFILE" ||
    job_fail "fewer than $number nodes are left without $*: these names may stand for several nodes"
  export PBS_NODEFILE=$JOB_HOSTFILE
}

# job_container ARGUMENT...: stores the command line that runs a command in a container, whose Python
# is started then.
job_container() {
  JOB_CONTAINER=("$@")
  unset PYTHONPATH PYTHONHOME # they are for the Python outside
}

# job_network_plugin DIRECTORY:...: lets NCCL or RCCL find its plug-in for the network, in these
# directories or in those of CANDLE_P1_NET_PLUGIN.
job_network_plugin() {
  local path=${CANDLE_P1_NET_PLUGIN-$1} directories directory
  if [[ -z $path ]]; then
    job_note "no plug-in for the network (libnccl-net.so): NCCL or RCCL will use TCP between nodes," \
      "which is slow; name its directory in CANDLE_P1_NET_PLUGIN"
    return 0
  fi
  IFS=: read -ra directories <<<"$path"
  for directory in "${directories[@]}"; do
    [[ -d $directory ]] ||
      job_fail "no directory $directory, for the plug-in of NCCL or RCCL: name another one in" \
        "CANDLE_P1_NET_PLUGIN (empty: no plug-in; then also set NCCL_NET=Socket)"
  done
  export LD_LIBRARY_PATH="$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# job_warning SECONDS: how long before the time limit the ranks are told to save and end. Half of it
# is for saving. Ranks that have not ended after 5/9 of it (50 of 90 s) are told to end at once, which
# may take them 30 s.
job_warning() {
  JOB_WARNING_S=${CANDLE_P1_WARNING_S:-$1}
  job_default CANDLE_P1_SAVE_S "$((JOB_WARNING_S / 2))"
}

# job_limit MINUTES WARNING_S: the same for a scheduler that gives no warning, in whose place this
# script does.
job_limit() {
  job_warning "$2"
  JOB_END_S=$((${CANDLE_P1_MINUTES:-$1} * 60 - JOB_WARNING_S))
}

# job_chain DIRECTORY [CODE]: this job is one of several that continue the run in a directory, where
# the file job.chain lists which have begun and how they ended. CODE is their exit code if the next
# one waits for success.
job_chain() {
  JOB_CHAIN=$1
  local changed # when the record was, which candle_p1/cluster/chain.py compares
  changed=$(stat --format=" %Y" "$JOB_CHAIN/run.json" 2>/dev/null) || changed=""
  echo "begun$changed" >>"$JOB_CHAIN/job.chain"
  # shellcheck disable=SC2064 # the code is known now
  trap "job_leave \$? ${2:-}" EXIT
}

job_leave() {
  echo "ended $1" >>"$JOB_CHAIN/job.chain" || job_note "cannot write to $JOB_CHAIN"
  exit "${2:-$1}"
}

# Ends this job if it is one of a chain and its run needs no more jobs, or if another one would fail
# like the one before.
job_check_previous() {
  [[ -n ${JOB_CHAIN:-} && -z ${JOB_CHECKED_PREVIOUS:-} ]] || return 0
  local status=0
  JOB_CHECKED_PREVIOUS=1
  "${PYTHON[@]}" -m candle_p1.cluster.chain "$JOB_CHAIN" || status=$?
  case $status in
    0) ;;
    3) exit 0 ;; # the run is complete
    *) exit 2 ;;
  esac
}

job_count_nodes() {
  if [[ -n ${CANDLE_P1_NODES:-} ]]; then
    echo "$CANDLE_P1_NODES"
  elif [[ -n ${SLURM_JOB_NUM_NODES:-} ]]; then
    echo "$SLURM_JOB_NUM_NODES"
  elif [[ -n ${COBALT_JOBSIZE:-} ]]; then
    echo "$COBALT_JOBSIZE"
  elif [[ -n ${PBS_NODEFILE:-} ]]; then
    sort -u "$PBS_NODEFILE" | wc -l
  elif [[ -n ${LSB_DJOB_HOSTFILE:-} ]]; then # also names the node of this script
    sort -u "$LSB_DJOB_HOSTFILE" | grep -cv -e batch -e login
  else
    echo 1
  fi
}

# job_prepare: sets PYTHON and RANK_PYTHON (command lines), NODES and RANKS, and the settings that all machines share.
job_prepare() {
  if [[ -n ${CANDLE_P1_SETUP:-} ]]; then
    # shellcheck source=/dev/null
    source "$CANDLE_P1_SETUP"
  fi
  local venv=${CANDLE_P1_VENV:-$CANDLE_P1_ROOT/.venv}
  if [[ -n ${JOB_CONTAINER+set} ]]; then
    PYTHON=("${JOB_CONTAINER[@]}" python)
  else
    if [[ -x $venv/bin/python ]]; then
      export PATH="$venv/bin:$PATH"
    elif [[ -n ${CANDLE_P1_VENV:-} ]]; then
      job_fail "CANDLE_P1_VENV=$venv has no bin/python"
    fi
    PYTHON=("${CANDLE_P1_PYTHON:-$(command -v python || command -v python3)}") ||
      job_fail "there is no python in \$PATH: set CANDLE_P1_VENV, or load one in CANDLE_P1_SETUP"
  fi
  RANK_PYTHON=("${PYTHON[@]}")
  NODES=$(job_count_nodes) || job_fail "cannot count the nodes of the job: set CANDLE_P1_NODES"
  RANKS=$((NODES * RANKS_PER_NODE))
  export NODES RANKS
  # What sbatch was told, srun does not take from the job's SLURM_CPUS_PER_TASK (since Slurm 22.05).
  [[ -z ${SLURM_CPUS_PER_TASK:-} ]] || job_default SRUN_CPUS_PER_TASK "$SLURM_CPUS_PER_TASK"
  job_default KMP_BLOCKTIME 0
  job_default KMP_AFFINITY granularity=fine,compact,1,0
  job_default NCCL_DEBUG WARN
  job_default HOROVOD_LOG_LEVEL warning
  job_default PYTHONUNBUFFERED 1
  job_default TF_CPP_MIN_LOG_LEVEL 2
}

# job_launcher ARGUMENT...: stores the command line that precedes what the ranks run.
job_launcher() {
  JOB_LAUNCH=("$@")
  if [[ -n ${JOB_HOSTFILE:-} ]]; then
    JOB_LAUNCH=("$1" --hostfile "$JOB_HOSTFILE" "${@:2}")
  fi
}

# job_stage_env ARCHIVE: copies an environment to each node's own storage; the ranks start its Python.
job_stage_env() {
  local archive=$1 id
  ! job_has candle_p1 || job_check_previous # before the nodes get copies
  [[ -r $archive ]] || job_fail "the environment $archive is gone: submit again with --stage_env"
  # A job that Slurm repeats keeps its id, and its nodes may have the copy of the first time.
  id=${SLURM_JOB_ID:+$SLURM_JOB_ID${SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}}
  id=${id:-${PBS_JOBID:-${LSB_JOBID:+$LSB_JOBID-${LSB_JOBINDEX:-0}}}}
  id=${id:-${COBALT_JOBID:-$$}}
  JOB_STAGED=${LOCAL_STORAGE:-${TMPDIR:-/tmp}}/candle_p1-env-$id
  if [[ ${JOB_LAUNCH[0]} == srun ]]; then
    sbcast --force "$archive" "$JOB_STAGED.tar" ||
      job_fail "sbcast cannot copy $archive to $JOB_STAGED.tar on all nodes (see above)"
    archive=$JOB_STAGED.tar
  fi
  "${JOB_LAUNCH[@]}" bash "$CANDLE_P1_ROOT/common/unpack_env.sh" "$archive" "$JOB_STAGED" ||
    job_fail "the environment was not unpacked in $JOB_STAGED on all nodes (see above)"
  RANK_PYTHON=("$JOB_STAGED/venv/bin/python")
  export PATH="$JOB_STAGED/venv/bin:$PATH"
  export PYTHONPATH="$JOB_STAGED/root${PYTHONPATH:+:$PYTHONPATH}"
  export LD_LIBRARY_PATH="$JOB_STAGED/venv/lib:$JOB_STAGED/base/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
}

# Removes it. Storage of a job alone is emptied after the job in any case.
job_unstage() {
  timeout 60 "${JOB_LAUNCH[@]}" rm -rf -- "$JOB_STAGED" "$JOB_STAGED".{lock,part,tar} ||
    job_note "$JOB_STAGED is left on the nodes"
}

# job_has MODULE: whether Python finds a module. The module is not imported, because this script may
# run where libraries of the nodes are missing. Why a container does not start is shown.
job_has() {
  local find="import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
  if [[ -n ${JOB_CONTAINER+set} ]]; then
    "${PYTHON[@]}" -c "$find" "$1"
  else
    "${PYTHON[@]}" -c "$find" "$1" 2>/dev/null
  fi
}

# job_output FLAG...: the output directory that the flags name.
job_output() {
  local word previous="" directory=output
  for word in "$@"; do
    [[ $previous != --output_dir ]] || directory=$word
    previous=$word
  done
  echo "$directory"
}

# job_check FLAG...: checks that the job has what it needs.
job_check() {
  command -v "${JOB_LAUNCH[0]}" >/dev/null ||
    job_fail "${JOB_LAUNCH[0]}, which starts ranks on $CANDLE_P1_MACHINE, is not in \$PATH"
  [[ -z ${JOB_CONTAINER+set} ]] || command -v "${JOB_CONTAINER[0]}" >/dev/null ||
    job_fail "${JOB_CONTAINER[0]}, which runs containers on $CANDLE_P1_MACHINE, is not in \$PATH"
  job_has candle_p1 ||
    job_fail "${PYTHON[*]} has no candle_p1: run \"make setup\" in $CANDLE_P1_ROOT, or set CANDLE_P1_VENV"
  job_check_previous
  ((RANKS == 1)) || job_has mpi4py ||
    job_fail "${PYTHON[*]} has no mpi4py, which is needed for more than one rank"
  if [[ ${CANDLE_P1_PREFLIGHT:-1} != 0 ]] && job_has candle_p1.cluster.preflight; then
    local options=()
    [[ ${CANDLE_P1_PREFLIGHT:-} != -* ]] || read -ra options <<<"$CANDLE_P1_PREFLIGHT"
    "${JOB_LAUNCH[@]}" "${RANK_PYTHON[@]}" -m candle_p1.cluster.preflight --output "$(job_output "$@")" \
      ${options[@]+"${options[@]}"} ||
      job_fail "the nodes failed the preflight (see above); CANDLE_P1_PREFLIGHT=0 skips it"
  fi
}

# job_sleep SECONDS: waits without another process, which would outlive this one if it were killed.
job_sleep() { read -rt "$1" <> <(:) || true; }

# job_left_s: prints the remaining seconds of a job of Slurm; fails elsewhere.
job_left_s() {
  local left
  [[ -n ${SLURM_JOB_ID:-} ]] || return 1
  left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%L 2>/dev/null) || return 1
  [[ $left =~ ^\ *((([0-9]+)-)?([0-9]+):)?([0-9]+):([0-9]+)\ *$ ]] || return 1
  local days=${BASH_REMATCH[3]:-0} hours=${BASH_REMATCH[4]:-0}
  echo $((((10#$days * 24 + 10#$hours) * 60 + 10#${BASH_REMATCH[5]}) * 60 + 10#${BASH_REMATCH[6]}))
}

# job_signal NAME: sends the ranks a signal through their launcher.
#   srun    would kill the ranks itself, so the step is signalled; without --full, scancel leaves
#           this script alone (Slurm's manual, scancel: --full)
#   jsrun   jskill signals the ranks of job steps (IBM's JSM reference, jskill: -s)
#   mpirun  passes on SIGUSR1, and ends its ranks at SIGTERM (Open MPI, pull request 2726)
#   aprun   passes on SIGUSR1 and SIGTERM (HPE, Additional aprun Information: aprun Signal Processing)
#   mpiexec of MPICH passes on both (src/pm/hydra/mpiexec/mpiexec.c: signal_cb); for that of PALS we
#           found no public documentation: if it keeps SIGUSR1 to itself, SIGTERM ends the run
job_signal() {
  case ${JOB_LAUNCH[0]}:$1 in
    srun:*) scancel --signal="$1" "$SLURM_JOB_ID" ;;
    jsrun:USR1) jskill -s "$(kill -l "$1")" all ;;
    *) kill -s "$1" "$JOB_PID" ;;
  esac || job_note "cannot pass SIG$1 on to the ranks"
}

# Tells the ranks to save and end, and later those that have not ended to do so at once.
job_warn() {
  local left_s warning_s=${JOB_WARNING_S:-90}
  # Slurm warns up to a minute early (sbatch: --signal). A warning that comes earlier is not Slurm's.
  if left_s=$(job_left_s) && ((left_s > warning_s && left_s <= warning_s + 60)); then
    job_sleep "$((left_s - warning_s))"
  fi
  job_note "the ranks are told to save and end (SIGUSR1)"
  job_signal USR1
  job_sleep "$((warning_s * 5 / 9))"
  job_note "the ranks have not ended, and are told to end at once (SIGTERM)"
  job_signal TERM
}

# In the background, because a trap keeps this script from seeing the ranks end.
job_warned() {
  [[ -z $JOB_WARNER ]] || return 0
  job_warn &
  JOB_WARNER=$!
}

# job_run PROGRAM FLAG...: runs this program on all ranks; returns their exit code.
job_run() {
  local program=$1 flags=() stage=${CANDLE_P1_STAGE:-0} status=0 timer="" helper
  shift
  [[ $program == /* ]] || program=$CANDLE_P1_ROOT/$program
  if [[ -n ${JOB_STAGED:-} && $program == "$CANDLE_P1_ROOT"/benchmarks/* ]]; then
    program=$JOB_STAGED/root/${program#"$CANDLE_P1_ROOT"/}
  fi
  job_check "$@"
  if [[ $stage == 1 ]]; then
    stage=${LOCAL_STORAGE:-${TMPDIR:-/tmp}}
  fi
  if [[ $stage != 0 ]]; then
    flags+=(--loader cached --stage_dir "$stage")
  fi
  if [[ -n ${CANDLE_P1_FLAGS:-} ]]; then
    local further
    read -ra further <<<"$CANDLE_P1_FLAGS"
    flags+=("${further[@]}")
  fi
  if [[ -n ${JOB_END_S:-} ]]; then
    ((JOB_END_S > SECONDS)) || job_fail "the time limit ends before the ranks can start"
  fi
  # An empty array counts as unset before bash 4.4.
  local line=("${JOB_LAUNCH[@]}" "${RANK_PYTHON[@]}" "$program" "$@" ${flags[@]+"${flags[@]}"})
  job_note "$NODES nodes, $RANKS ranks: ${line[*]}"
  "${line[@]}" &
  JOB_PID=$!
  JOB_WARNER=""
  trap job_warned USR1 USR2 URG
  trap 'job_signal TERM' TERM # the job is cancelled
  if [[ -n ${JOB_END_S:-} ]]; then
    { job_sleep "$((JOB_END_S - SECONDS))" && kill -USR1 $$; } &
    timer=$!
  fi
  wait "$JOB_PID" || status=$?
  while kill -0 "$JOB_PID" 2>/dev/null; do # a signal ended the wait, but not the ranks
    status=0
    wait "$JOB_PID" || status=$?
  done
  trap - TERM USR1 USR2 URG
  for helper in $timer $JOB_WARNER; do
    kill "$helper" 2>/dev/null || true
    wait "$helper" 2>/dev/null || true
  done
  [[ -z ${JOB_STAGED:-} ]] || job_unstage
  return "$status"
}
