# shellcheck shell=bash
# What all job scripts share: modules, the Python environment, settings, checks, and the launch.
# Sourced by the scripts in jobs/ and by those that "candle-p1 submit" writes.
#
# A job reads these environment variables:
#   CANDLE_P1_ROOT       the checkout; default: where the job was submitted
#   CANDLE_P1_NODES      the number of nodes; default: those of the job
#   CANDLE_P1_MODULES    modules to load instead of the machine's; empty for none
#   CANDLE_P1_SETUP      a bash file to source after that, for anything else that a site needs
#   CANDLE_P1_VENV       the virtual environment; default: .venv of the checkout
#   CANDLE_P1_PYTHON     the Python to start; default: python of the environment, or in $PATH
#   CANDLE_P1_STAGE      1: cache the data on the nodes' own storage; or a directory for the caches
#   CANDLE_P1_FLAGS      further flags of the benchmark, which take precedence over the script's;
#                        "--data_dir DIR" names its files, without which the data are synthetic
#   CANDLE_P1_PREFLIGHT  0: start without examining the nodes; or options of the preflight (-m
#                        candle_p1.cluster.preflight --help), such as "--memory-gib 2 --shm-gib 0"
#   CANDLE_P1_MINUTES    the time limit, if it was changed at submission and the script enforces it
#   CANDLE_P1_WARNING_S  how many seconds before that the ranks are told to end
# Variables that job_default sets can be set in advance, too.

job_note() { echo "job: $*" >&2; }

# A job of a study that fails before its ranks start leaves no record. It renames its script, so that
# it counts as not submitted, and can be submitted again once the cause is fixed.
job_fail() {
  job_note "$*"
  if [[ -n ${JOB_SCRIPT:-} ]]; then
    mv -f "$JOB_SCRIPT" "$JOB_SCRIPT.failed" || true
  fi
  exit 2
}

# job_default NAME VALUE: exports a variable, with this value if it has none.
job_default() {
  if [[ -z ${!1+set} ]]; then
    export "$1=$2"
  else
    export "${1?}"
  fi
}

# job_modules NAME...: loads modules.
job_modules() {
  local names=("$@") status=0
  if [[ -n ${CANDLE_P1_MODULES+set} ]]; then
    read -ra names <<<"$CANDLE_P1_MODULES"
  fi
  ((${#names[@]})) || return 0
  if ! type module >/dev/null 2>&1; then
    job_note "not loaded, as there is no command module: ${names[*]}"
    return 0
  fi
  set +eu # the command module does not work under these
  module load "${names[@]}"
  status=$?
  set -eu
  ((status == 0)) ||
    job_fail "module load ${names[*]} failed: name modules of this site in CANDLE_P1_MODULES"
}

# job_limit MINUTES WARNING_S: ends the ranks this long before the time limit, because the scheduler
# gives no warning.
job_limit() {
  local minutes=${CANDLE_P1_MINUTES:-$1} warning_s=${CANDLE_P1_WARNING_S:-$2}
  JOB_END_S=$((minutes * 60 - warning_s))
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

# job_prepare: sets PYTHON, NODES and RANKS, and the settings that all machines share.
job_prepare() {
  if [[ -n ${CANDLE_P1_SETUP:-} ]]; then
    # shellcheck source=/dev/null
    source "$CANDLE_P1_SETUP"
  fi
  local venv=${CANDLE_P1_VENV:-$CANDLE_P1_ROOT/.venv}
  if [[ -x $venv/bin/python ]]; then
    export PATH="$venv/bin:$PATH"
  elif [[ -n ${CANDLE_P1_VENV:-} ]]; then
    job_fail "CANDLE_P1_VENV=$venv has no bin/python"
  fi
  PYTHON=${CANDLE_P1_PYTHON:-$(command -v python || command -v python3)} ||
    job_fail "there is no python in \$PATH: set CANDLE_P1_VENV, or load one in CANDLE_P1_SETUP"
  NODES=$(job_count_nodes) || job_fail "cannot count the nodes of the job: set CANDLE_P1_NODES"
  RANKS=$((NODES * RANKS_PER_NODE))
  export NODES RANKS
  job_default KMP_BLOCKTIME 0
  job_default KMP_AFFINITY granularity=fine,compact,1,0
  job_default NCCL_DEBUG WARN
  job_default HOROVOD_LOG_LEVEL warning
  job_default PYTHONUNBUFFERED 1
  job_default TF_CPP_MIN_LOG_LEVEL 2
}

# job_launcher ARGUMENT...: stores the command line that precedes what the ranks run.
job_launcher() { JOB_LAUNCH=("$@"); }

# job_has MODULE: whether Python finds a module. The module is not imported, because this script may
# run where libraries of the nodes are missing.
job_has() {
  "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' \
    "$1" 2>/dev/null
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
  job_has candle_p1 ||
    job_fail "$PYTHON has no candle_p1: run \"make setup\" in $CANDLE_P1_ROOT, or set CANDLE_P1_VENV"
  ((RANKS == 1)) || job_has mpi4py ||
    job_fail "$PYTHON has no mpi4py, which is needed for more than one rank"
  if [[ ${CANDLE_P1_PREFLIGHT:-1} != 0 ]] && job_has candle_p1.cluster.preflight; then
    local options=()
    [[ ${CANDLE_P1_PREFLIGHT:-} != -* ]] || read -ra options <<<"$CANDLE_P1_PREFLIGHT"
    "${JOB_LAUNCH[@]}" "$PYTHON" -m candle_p1.cluster.preflight --output "$(job_output "$@")" \
      ${options[@]+"${options[@]}"} ||
      job_fail "the nodes failed the preflight (see above); CANDLE_P1_PREFLIGHT=0 skips it"
  fi
}

# Passes the scheduler's signal on to the ranks, which then record the run as interrupted.
job_forward() {
  job_note "received a signal, which is passed on to the ranks"
  case ${JOB_LAUNCH[0]} in
    srun) scancel --signal=TERM "$SLURM_JOB_ID" ;; # srun would kill them
    *) kill -TERM "$JOB_PID" ;;
  esac || true
}

# job_run PROGRAM FLAG...: runs this program on all ranks; returns their exit code.
job_run() {
  local program=$1 limit=() flags=() stage=${CANDLE_P1_STAGE:-0} status=0
  shift
  [[ $program == /* ]] || program=$CANDLE_P1_ROOT/$program
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
    limit=(timeout --foreground --signal=TERM "$((JOB_END_S - SECONDS))")
  fi
  # An empty array counts as unset before bash 4.4.
  local line=(${limit[@]+"${limit[@]}"} "${JOB_LAUNCH[@]}" "$PYTHON" "$program" "$@"
    ${flags[@]+"${flags[@]}"})
  job_note "$NODES nodes, $RANKS ranks: ${line[*]}"
  "${line[@]}" &
  JOB_PID=$!
  trap job_forward TERM USR1 USR2
  wait "$JOB_PID" || status=$?
  while kill -0 "$JOB_PID" 2>/dev/null; do # a signal ended the wait, but not the ranks
    status=0
    wait "$JOB_PID" || status=$?
  done
  trap - TERM USR1 USR2
  return "$status"
}
