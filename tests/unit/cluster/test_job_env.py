"""common/job_env.sh, with launchers that only print their arguments."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

RUN = ("job_prepare", 'job_launcher launch -n "$RANKS"', "job_run nt3.py --epochs 8")
PRINT_ARGV = 'printf "%s\\n" "$@"'
PRINT_SIGNAL = "trap 'echo got TERM; exit 3' TERM; echo ready; while :; do sleep 0.05; done"


class JobEnv:
    """Runs scripts that source common/job_env.sh, with commands of its own in $PATH."""

    def __init__(self, directory):
        self.directory = directory
        (directory / "bin").mkdir()
        self.command("launch", PRINT_ARGV)
        self.environment = {
            "PATH": f"{directory}/bin:{sys.prefix}/bin:/usr/bin:/bin",
            "CANDLE_P1_ROOT": str(ROOT),
            "CANDLE_P1_MACHINE": "ours",
            "CANDLE_P1_PREFLIGHT": "0",
            "CANDLE_P1_PYTHON": sys.executable,
            "RANKS_PER_NODE": "2",
        }

    def command(self, name, body):
        path = self.directory / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def start(self, *lines, **variables):
        script = self.directory / "job.sh"
        head = ["set -euo pipefail", 'source "$CANDLE_P1_ROOT/common/job_env.sh"']
        script.write_text("\n".join([*head, *lines]) + "\n")
        return subprocess.Popen(
            ["bash", str(script)],
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *lines, **variables):
        """Returns the exit code, the lines of the output, and the errors."""
        process = self.start(*lines, **variables)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output.splitlines(), errors

    def interrupt(self, *lines, **variables):
        """Sends SIGTERM to the script once its ranks are ready; returns code and output."""
        process = self.start(*lines, **variables)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=20)
        return process.returncode, output


@pytest.fixture
def job(tmp_path):
    return JobEnv(tmp_path)


def test_the_command_line_that_starts_the_ranks(job):
    code, argv, errors = job.run(*RUN)
    assert code == 0
    assert argv == ["-n", "2", sys.executable, f"{ROOT}/nt3.py", "--epochs", "8"]
    assert errors.startswith(f"job: 1 nodes, 2 ranks: launch -n 2 {sys.executable}")


def test_the_exit_code_of_the_launcher_is_the_jobs(job):
    job.command("launch", "exit 7")
    assert job.run(*RUN)[0] == 7


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ({"CANDLE_P1_FLAGS": "--size small --epochs 4"}, "--size small --epochs 4"),
        ({"CANDLE_P1_STAGE": "0"}, ""),
        (
            {"CANDLE_P1_STAGE": "1", "LOCAL_STORAGE": "/mnt/bb/me"},
            "--loader cached --stage_dir /mnt/bb/me",
        ),
        ({"CANDLE_P1_STAGE": "/ssd"}, "--loader cached --stage_dir /ssd"),
        ({"CANDLE_P1_STAGE": "1", "TMPDIR": "/t"}, "--loader cached --stage_dir /t"),
    ],
)
def test_flags_from_the_environment(job, variables, flags):
    _, argv, _ = job.run(*RUN, **variables)
    assert " ".join(argv[6:]) == flags


@pytest.mark.parametrize(
    "variables",
    [
        {"CANDLE_P1_NODES": "3", "SLURM_JOB_NUM_NODES": "9"},
        {"SLURM_JOB_NUM_NODES": "3"},
        {"COBALT_JOBSIZE": "3"},
        {"PBS_NODEFILE": "a a b b c c"},
        {"LSB_DJOB_HOSTFILE": "batch1 a a a b b c"},
    ],
)
def test_the_nodes_of_the_job_are_counted(job, variables, tmp_path):
    for name, value in variables.items():
        if name.endswith("FILE"):
            (tmp_path / "hosts").write_text("\n".join(value.split()) + "\n")
            variables = {name: str(tmp_path / "hosts")}
    _, argv, _ = job.run(*RUN, **variables)
    assert argv[:2] == ["-n", "6"]


def test_variables_of_the_user_override_defaults(job):
    lines = ["job_default A one", "job_default B two", *RUN[:2], "env"]
    _, variables, _ = job.run(*lines, B="mine", KMP_BLOCKTIME="200")
    assert {"A=one", "B=mine", "KMP_BLOCKTIME=200"} <= set(variables)
    assert "KMP_AFFINITY=granularity=fine,compact,1,0" in variables


@pytest.mark.parametrize(
    ("module", "variables", "code", "output"),
    [
        ('echo "module $*"', {}, 0, ["module load gcc cuda"]),
        ('echo "module $*"', {"CANDLE_P1_MODULES": "a b"}, 0, ["module load a b"]),
        ('echo "module $*"', {"CANDLE_P1_MODULES": ""}, 0, []),
        ("return 1", {}, 2, []),
        (None, {}, 0, []),
    ],
)
def test_modules(job, module, variables, code, output):
    define = [] if module is None else [f"module() {{ {module}; }}"]
    found = job.run(*define, "job_modules gcc cuda", **variables)
    assert found[:2] == (code, output)
    assert ("gcc cuda" in found[2]) == (module in ("return 1", None))


def test_the_setup_file_of_a_site_is_sourced(job, tmp_path):
    (tmp_path / "site.sh").write_text("export FROM_SITE=yes\n")
    _, variables, _ = job.run("job_prepare", "env", CANDLE_P1_SETUP=str(tmp_path / "site.sh"))
    assert "FROM_SITE=yes" in variables


@pytest.mark.parametrize(
    ("lines", "variables", "problem"),
    [
        (("job_prepare", "job_launcher jsrun", "job_run x"), {}, "jsrun"),
        (RUN, {"CANDLE_P1_VENV": "/absent"}, "CANDLE_P1_VENV=/absent"),
        (RUN, {"CANDLE_P1_PYTHON": "/bin/false"}, "/bin/false has no candle_p1"),
        (("job_limit 1 60", *RUN), {}, "time limit"),
    ],
)
def test_jobs_that_cannot_start_say_why(job, lines, variables, problem):
    code, output, errors = job.run(*lines, **variables)
    assert (code, output) == (2, [])
    assert problem in errors


def test_a_signal_is_passed_on_to_the_ranks(job):
    job.command("launch", PRINT_SIGNAL)
    assert job.interrupt(*RUN) == (3, "got TERM\n")


def test_a_signal_is_passed_on_by_scancel_under_srun(job):
    """srun kills its ranks when it gets a signal itself."""
    wait = 'while [[ ! -e $HOME/signal ]]; do sleep 0.05; done; cat "$HOME/signal"'
    job.command("srun", f"echo ready; {wait}")
    job.command("scancel", 'echo "$*" >"$HOME/signal"')
    lines = ["job_prepare", "job_launcher srun", "job_run nt3.py"]
    variables = {"HOME": str(job.directory), "SLURM_JOB_ID": "12"}
    assert job.interrupt(*lines, **variables) == (0, "--signal=TERM 12\n")


def test_the_ranks_get_a_signal_before_the_time_limit(job):
    job.command("launch", PRINT_SIGNAL)
    variables = {"CANDLE_P1_MINUTES": "1", "CANDLE_P1_WARNING_S": "58"}
    code, output, _ = job.run("job_limit 60 60", *RUN, **variables)
    assert (code, output) == (124, ["ready", "got TERM"])  # timeout's exit code


@pytest.mark.parametrize(
    ("setting", "run", "options"),
    [
        ("1", RUN[2], "--output output"),
        (
            "--memory-gib 2 --shm-gib 0",
            "job_run nt3.py --output_dir out",
            "--output out --memory-gib 2 --shm-gib 0",
        ),
    ],
)
def test_the_preflight_runs_before_the_ranks(job, setting, run, options):
    job.command("launch", 'echo "launch $*"; [[ "$*" != *preflight* || -z ${UNFIT-} ]]')
    code, lines, _ = job.run(*RUN[:2], run, CANDLE_P1_PREFLIGHT=setting)
    assert code == 0
    python = f"launch -n 2 {sys.executable}"
    assert lines[0] == f"{python} -m candle_p1.cluster.preflight {options}"
    assert lines[1].startswith(f"{python} {ROOT}/nt3.py")
    code, lines, errors = job.run(*RUN[:2], run, CANDLE_P1_PREFLIGHT=setting, UNFIT="1")
    assert (code, len(lines)) == (2, 1)
    assert "CANDLE_P1_PREFLIGHT=0" in errors
