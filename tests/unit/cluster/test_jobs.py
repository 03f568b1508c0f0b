"""Job scripts: their text, and what they do with a launcher that only says what it was given."""

from __future__ import annotations

import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from candle_p1.benchmark import SCALING_MODES, find_benchmark, list_benchmarks
from candle_p1.cluster import launchers
from candle_p1.cluster.job_script import job_script
from candle_p1.cluster.jobs import paper_job, ready_scripts, write_all
from candle_p1.cluster.machine import load_machine
from candle_p1.errors import ParameterError
from tests.conftest import ROOT

EXPECTED = ROOT / "tests/files/jobs"
NODES = {"local": 1}
BENCHMARKS = list_benchmarks()
MACHINES = sorted(path.stem for path in EXPECTED.glob("*.txt"))


@pytest.fixture(autouse=True)
def neither_root_nor_files_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr(launchers.os, "geteuid", lambda: 1000)
    monkeypatch.delenv("CANDLE_P1_MACHINES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def script_of(machine_name, benchmark, mode):
    machine = load_machine(machine_name)
    return job_script(
        paper_job(find_benchmark(benchmark), machine, mode, NODES.get(machine_name, 8), 60)
    )


def test_a_text_is_expected_of_every_machine():
    own = {path.stem for path in (ROOT / "candle_p1/cluster/machines").glob("*.toml")}
    assert set(MACHINES) == own


@pytest.mark.parametrize("machine_name", MACHINES)
@pytest.mark.parametrize("benchmark", BENCHMARKS)
@pytest.mark.parametrize("mode", SCALING_MODES)
def test_the_script(machine_name, benchmark, mode):
    """files/jobs/MACHINE.txt holds them one after the other, each from its first line."""
    scripts = (EXPECTED / f"{machine_name}.txt").read_text().split("#!/bin/bash\n")[1:]
    place = [(b, m) for m in SCALING_MODES for b in BENCHMARKS].index((benchmark, mode))
    assert script_of(machine_name, benchmark, mode) == "#!/bin/bash\n" + scripts[place]


def test_the_ready_scripts_are_up_to_date(tmp_path):
    """After a change: candle_p1.cluster.jobs.write_all(Path("."))."""
    written = ready_scripts()
    kept = {str(p.relative_to(ROOT)) for p in (ROOT / "jobs").rglob("*") if p.is_file()}
    assert kept - {"jobs/README.md"} == set(written)
    for name, text in written.items():
        assert (ROOT / name).read_text() == text, name
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, name
    assert sorted(path.relative_to(tmp_path) for path in write_all(tmp_path)) == sorted(
        map(Path, written)
    )


def test_the_ready_scripts_are_the_runs_of_the_paper():
    texts = ready_scripts()
    assert "64 nodes, 384 ranks" in texts["jobs/summit/nt3_strong.lsf"]
    assert "16 nodes, 96 ranks" in texts["jobs/summit/p1b1_strong.lsf"]  # 4 epochs each
    assert "8 nodes, 48 ranks" in texts["jobs/summit/p1b3_strong.lsf"]
    assert "512 nodes, 3072 ranks" in texts["jobs/summit/nt3_weak.lsf"]
    assert "384 nodes, 384 ranks" in texts["jobs/theta/nt3_strong.sh"]
    assert "--epochs 8 --epochs_scaling weak" in texts["jobs/summit/p1b2_weak.lsf"]
    assert "--batch_scaling cbrt" in texts["jobs/summit/p1b3_strong.lsf"]


def test_epochs_that_do_not_divide_are_refused():
    with pytest.raises(ParameterError, match="384 epochs do not divide among 30 ranks"):
        paper_job(find_benchmark("nt3"), load_machine("summit"), "strong", 5, 60)


def test_shellcheck(tmp_path):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    for name in MACHINES:
        (tmp_path / f"{name}.sh").write_text(script_of(name, "nt3", "strong"))
    ready = sorted(str(path) for path in (ROOT / "jobs").rglob("*_*.*"))
    files = [str(ROOT / "common/job_env.sh"), *ready, *map(str, sorted(tmp_path.glob("*.sh")))]
    checked = subprocess.run(
        ["shellcheck", "-x", *files], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


class Job:
    """A script around common/job_env.sh, and a launcher that says what it was given."""

    def __init__(self, directory):
        self.directory = directory
        self.launcher = directory / "bin/launch"
        self.launcher.parent.mkdir()
        self.says('printf "%s\\n" "$@"')
        self.environment = {
            "PATH": f"{self.launcher.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "CANDLE_P1_ROOT": str(ROOT),
            "CANDLE_P1_MACHINE": "ours",
            "CANDLE_P1_PREFLIGHT": "0",
            "CANDLE_P1_PYTHON": sys.executable,
            "RANKS_PER_NODE": "2",
        }

    def says(self, body, name="launch"):
        path = self.launcher.with_name(name)
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
        process = self.start(*lines, **variables)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output.splitlines(), errors


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


RUN = ("job_prepare", 'job_launcher launch -n "$RANKS"', "job_run nt3.py --epochs 8")


def test_what_the_launcher_is_given(job):
    code, words, errors = job.run(*RUN)
    assert code == 0
    assert words == ["-n", "2", sys.executable, f"{ROOT}/nt3.py", "--epochs", "8"]
    assert errors.startswith(f"job: 1 nodes, 2 ranks: launch -n 2 {sys.executable}")


def test_the_launcher_ends_the_job_with_its_code(job):
    job.says("exit 7")
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
    _, words, _ = job.run(*RUN, **variables)
    assert " ".join(words[6:]) == flags


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
def test_the_nodes_are_those_of_the_job(job, variables, tmp_path):
    for name, value in variables.items():
        if name.endswith("FILE"):
            (tmp_path / "hosts").write_text("\n".join(value.split()) + "\n")
            variables = {name: str(tmp_path / "hosts")}
    _, words, _ = job.run(*RUN, **variables)
    assert words[:2] == ["-n", "6"]


def test_defaults_give_way(job):
    lines = ["job_default A one", "job_default B two", "env"]
    _, words, _ = job.run(*lines, B="mine")
    assert {"A=one", "B=mine"} <= set(words)
    _, words, _ = job.run(*RUN[:2], "env", KMP_BLOCKTIME="200")
    assert {"KMP_BLOCKTIME=200", "KMP_AFFINITY=granularity=fine,compact,1,0"} <= set(words)


def test_modules(job):
    define = 'module() { echo "module $*"; }'
    assert job.run(define, "job_modules gcc cuda")[1] == ["module load gcc cuda"]
    assert job.run(define, "job_modules gcc", CANDLE_P1_MODULES="a b")[1] == ["module load a b"]
    assert job.run(define, "job_modules gcc", CANDLE_P1_MODULES="")[:2] == (0, [])
    code, _, errors = job.run("job_modules gcc")
    assert code == 0
    assert "no command module: not loaded: gcc" in errors
    code, _, errors = job.run("module() { return 1; }", "job_modules gcc")
    assert code == 2
    assert "module load gcc failed" in errors


def test_the_file_of_a_site_is_read(job, tmp_path):
    (tmp_path / "site.sh").write_text("export FROM_SITE=yes\n")
    _, words, _ = job.run("job_prepare", "env", CANDLE_P1_SETUP=str(tmp_path / "site.sh"))
    assert "FROM_SITE=yes" in words


@pytest.mark.parametrize(
    ("lines", "variables", "problem"),
    [
        (
            ("job_prepare", "job_launcher jsrun", "job_run x"),
            {},
            "jsrun, which starts ranks on ours, is not in",
        ),
        (RUN, {"CANDLE_P1_VENV": "/absent"}, "CANDLE_P1_VENV=/absent holds no bin/python"),
        (RUN, {"CANDLE_P1_PYTHON": "/bin/false"}, "/bin/false has no candle_p1"),
        (("job_limit 1 60", *RUN), {}, "the time limit is over"),
    ],
)
def test_jobs_that_cannot_start_say_why(job, lines, variables, problem):
    code, words, errors = job.run(*lines, **variables)
    assert (code, words) == (2, [])
    assert problem in errors


TELLS = "trap 'echo told; exit 3' TERM; echo ready; while :; do sleep 0.05; done"


def test_a_signal_reaches_the_ranks_and_their_code_is_the_jobs(job):
    job.says(TELLS)
    process = job.start(*RUN)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (3, "told\n")
    assert "told to end" in errors


def test_srun_is_told_through_slurm(job):
    """srun kills its ranks when it is told to end."""
    job.says(
        'echo ready; while [[ ! -e $HOME/told ]]; do sleep 0.05; done; cat "$HOME/told"', "srun"
    )
    job.says('echo "$*" >"$HOME/told"', "scancel")
    lines = ["job_prepare", "job_launcher srun", "job_run nt3.py"]
    process = job.start(*lines, HOME=str(job.directory), SLURM_JOB_ID="12")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "--signal=TERM 12\n")


def test_the_end_of_the_time_limit_is_announced(job):
    job.says(TELLS)
    start = time.monotonic()
    code, words, _ = job.run(
        "job_limit 60 60", *RUN, CANDLE_P1_MINUTES="1", CANDLE_P1_WARNING_S="58"
    )
    assert (code, words) == (124, ["ready", "told"])  # timeout's code
    assert time.monotonic() - start < 30


def test_the_preflight_runs_on_the_nodes_before_the_ranks(job, tmp_path):
    package = tmp_path / "lib/candle_p1"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "preflight.py").touch()
    (tmp_path / "lib/mpi4py.py").touch()
    job.says('echo "launch $*"; [[ "$*" != *preflight* || -z ${UNFIT-} ]]')
    variables = {"PYTHONPATH": str(tmp_path / "lib"), "CANDLE_P1_PREFLIGHT": "1"}
    code, words, _ = job.run(*RUN, **variables)
    assert code == 0
    preflight = f"launch -n 2 {sys.executable} -m candle_p1.cluster.preflight"
    assert words[0] == f"{preflight} --output output"
    assert words[1].endswith("nt3.py --epochs 8")
    variables["CANDLE_P1_PREFLIGHT"] = "--memory-gib 2 --shm-gib 0"
    _, words, _ = job.run(*RUN[:2], "job_run nt3.py --output_dir out --epochs 8", **variables)
    assert words[0] == f"{preflight} --output out --memory-gib 2 --shm-gib 0"
    code, words, errors = job.run(*RUN, **variables, UNFIT="1")
    assert (code, len(words)) == (2, 1)
    assert "CANDLE_P1_PREFLIGHT=0" in errors
