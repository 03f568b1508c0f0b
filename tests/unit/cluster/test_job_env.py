"""common/job_env.sh, with launchers that only print their arguments."""

import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT

RUN = ("job_prepare", 'job_launcher launch -n "$RANKS"', "job_run nt3.py --epochs 8")
WAIT = "echo ready; while :; do sleep 0.05; done"
PRINT_SIGNAL = f"trap 'echo got USR1; exit 3' USR1; trap 'echo got TERM; exit 4' TERM; {WAIT}"
DEAF = f"trap '' USR1; trap 'echo got TERM; exit 4' TERM; {WAIT}"


class JobEnv:
    """Runs scripts that source common/job_env.sh, with commands of its own in $PATH."""

    def __init__(self, directory):
        self.directory = directory
        (directory / "bin").mkdir()
        self.command("launch", 'printf "%s\\n" "$*"')
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
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", script], env=self.environment | variables, **streams)

    def run(self, *lines, **variables):
        """Returns the exit code, the lines of the output, and the errors."""
        process = self.start(*lines, **variables)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output.splitlines(), errors

    def interrupt(self, *lines, number=signal.SIGUSR1, **variables):
        """Sends a signal to the script once its ranks are ready; returns code and output."""
        process = self.start(*lines, **variables)
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output


@pytest.fixture
def job(tmp_path):
    return JobEnv(tmp_path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ["A=one", "CANDLE_P1_SAVE_S=7", "KMP_AFFINITY=granularity=fine,compact,1,0"]),
        ({"A": "mine", "KMP_BLOCKTIME": "200"}, ["A=mine", "KMP_BLOCKTIME=200"]),
        ({"SLURM_CPUS_PER_TASK": "7"}, ["SRUN_CPUS_PER_TASK=7"]),
        ({"CANDLE_P1_SETUP": "{}/site.sh"}, ["FROM_SITE=yes"]),
        ({"CANDLE_P1_STAGE": "0", "CANDLE_P1_FLAGS": "--size small"}, ["8 --size small"]),
        ({"CANDLE_P1_STAGE": "1", "LOCAL_STORAGE": "/bb"}, ["--loader cached --stage_dir /bb"]),
        ({"CANDLE_P1_STAGE": "/ssd"}, ["--loader cached --stage_dir /ssd"]),
        ({"CANDLE_P1_NODES": "3", "SLURM_JOB_NUM_NODES": "9"}, ["ranks -n 6"]),
        ({"SLURM_JOB_NUM_NODES": "3"}, ["ranks -n 6"]),
        ({"COBALT_JOBSIZE": "3"}, ["ranks -n 6"]),
        ({"PBS_NODEFILE": "{}/pbs"}, ["ranks -n 6"]),
        ({"LSB_DJOB_HOSTFILE": "{}/lsf"}, ["ranks -n 6"]),
    ],
)
def test_what_starts_the_ranks_and_what_is_in_their_environment(job, tmp_path, variables, expected):
    job.command("launch", 'echo "ranks $*"; env; exit 7')
    (tmp_path / "site.sh").write_text("export FROM_SITE=yes\n")
    (tmp_path / "pbs").write_text("a\na\nb\nb\nc\nc\n")
    (tmp_path / "lsf").write_text("batch1\na\na\na\nb\nb\nc\n")
    variables = {name: value.format(tmp_path) for name, value in variables.items()}
    code, output, errors = job.run("job_default A one", "job_warning 15", *RUN, **variables)
    found = "\n".join(output)
    assert all(each in found for each in expected)
    assert (code, output[0][:9]) == (7, "ranks -n ")
    assert f" {sys.executable} {ROOT}/nt3.py --epochs 8" in output[0]
    assert f" ranks: launch {output[0].removeprefix('ranks ')}\n" in errors
    assert ("SRUN_CPUS" in found) == ("SRUN_CPUS" in expected[0])


@pytest.mark.parametrize(
    ("module", "variables", "code", "output"),
    [
        ('echo "module $*"', {}, 0, ["module load gcc cuda"]),
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


def test_nodes_are_left_out(job, tmp_path):
    (tmp_path / "nodes").write_text("".join(f"n{number}.site\n" * 2 for number in (1, 2, 3, 4)))
    variables = {"PBS_NODEFILE": str(tmp_path / "nodes"), "TMPDIR": str(tmp_path)}
    lines = ["job_exclude 2 n2 n9", "job_prepare", 'job_launcher mpiexec -n "$RANKS"']
    show = 'echo "$RANKS" "${JOB_LAUNCH[@]}"; cat "$PBS_NODEFILE"'
    _, output, _ = job.run(*lines, show, **variables)
    assert output[0].startswith(f"4 mpiexec --hostfile {tmp_path}/candle_p1-nodes-")
    assert output[1:] == ["n1.site", "n1.site", "n3.site", "n3.site"]
    code, _, errors = job.run("job_exclude 3 n2.site n3", **variables)
    assert (code, "fewer than 3 nodes" in errors) == (2, True)


def test_the_ranks_python_runs_in_a_container(job, tmp_path):
    variables = dict.fromkeys(("CANDLE_P1_VENV", "CANDLE_P1_PYTHON"), "/absent")
    job.command("runs", f'echo "in $2" >>"{tmp_path}/log"; shift 2; exec "$@"')
    lines = ["job_container runs in image", *RUN]
    code, argv, errors = job.run(*lines, PYTHONPATH=str(ROOT), **variables)
    assert (code, argv) == (0, [f"-n 2 runs in image python {ROOT}/nt3.py --epochs 8"]), errors
    assert "in image" in (tmp_path / "log").read_text()  # the check for candle_p1
    job.command("runs", "echo image is damaged >&2; exit 255")
    for runtime, problem in (("absent-runtime", "absent-runtime, "), ("runs", "image is damaged")):
        code, _, errors = job.run(f"job_container {runtime} in image", *RUN)
        assert (code, problem in errors) == (2, True)


class TestStagedEnvironment:
    """With an archive whose Python only prints its arguments, and launchers that start one rank."""

    @pytest.fixture
    def lines(self, job, tmp_path):
        tree, node = tmp_path / "tree", tmp_path / "node"
        for directory in (tree / "venv/bin", tree / "root/benchmarks", node):
            directory.mkdir(parents=True)
        python = tree / "venv/bin/python"
        python.write_text('#!/bin/bash\n[[ $1 == -c ]] || echo "staged $*" "$PYTHONPATH"\n')
        python.chmod(0o755)
        archive = tmp_path / "env.tar"
        subprocess.run(["tar", "-cf", archive, "-C", tree, "venv", "root"], check=True)
        job.command("python", f'exec {sys.executable} "$@"')
        # Its bin has the launchers below.
        job.environment |= {"CANDLE_P1_VENV": str(tmp_path), "LOCAL_STORAGE": str(node)}
        for name in ("mpiexec", "srun"):
            job.command(name, 'shift 2; exec "$@"')
        job.command("sbcast", f'echo "$@" >"{tmp_path}/sbcast"; cp "$2" "$3"')

        def lines(launcher="mpiexec", program="benchmarks/nt3.py"):
            run = ["job_prepare", f'job_launcher {launcher} -n "$RANKS"']
            return [*run, f"job_stage_env {archive}", f"job_run {program} --epochs 8"]

        return lines

    @pytest.mark.parametrize(
        ("launcher", "program", "variables", "name"),
        [
            # Slurm repeats the job, whose first copy is still there.
            ("srun", "benchmarks/nt3.py", {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}, "7-1"),
            ("mpiexec", "/elsewhere/nt3.py", {"PBS_JOBID": "12[3].server"}, "12[3].server"),
        ],
    )
    def test_ranks_start_the_python_of_their_node(
        self, job, lines, launcher, program, variables, name, tmp_path
    ):
        node = tmp_path / "node"
        if name == "7-1":
            (node / "candle_p1-env-7.lock").mkdir()
        place = f"{node}/candle_p1-env-{name}"
        code, output, errors = job.run(*lines(launcher, program), PYTHONPATH="/mine", **variables)
        started = program if program.startswith("/") else f"{place}/root/{program}"
        assert (code, output) == (0, [f"staged {started} --epochs 8 {place}/root:/mine"]), errors
        copied = tmp_path / "sbcast"
        assert copied.exists() == (launcher == "srun")
        if launcher == "srun":
            assert copied.read_text() == f"--force {tmp_path}/env.tar {place}.tar\n"
        assert not list(node.glob(f"candle_p1-env-{name}*"))  # removed at the end
        assert (tmp_path / "env.tar").exists()

    def test_a_job_that_fails_or_is_not_needed_leaves_nothing(self, job, lines, tmp_path):
        code, _, errors = job.run("job_limit 1 60", *lines())
        assert (code, "time limit" in errors) == (2, True)
        code, _, errors = job.run(*lines(), LOCAL_STORAGE=str(tmp_path / "absent"))
        assert (code, "was not unpacked in" in errors) == (2, True)
        assert list((tmp_path / "node").iterdir()) == []
        (tmp_path / "env.tar").unlink()
        code, _, errors = job.run(*lines())
        assert (code, "env.tar is gone: submit again with --stage_env" in errors) == (2, True)
        (tmp_path / "run.json").write_text('{"status": "ok"}')  # it ends before it would need it
        assert chained(job, *lines())[:2] == (0, [])


@pytest.mark.parametrize(
    ("here", "variables", "path"),
    [
        ("/bin:/lib", {"LD_LIBRARY_PATH": "/opt"}, "/bin:/lib:/opt"),
        ("", {"CANDLE_P1_NET_PLUGIN": "/usr:/bin"}, "/usr:/bin"),
        ("/bin", {"CANDLE_P1_NET_PLUGIN": ""}, "unset"),
    ],
)
def test_the_networks_plug_in_is_found(job, here, variables, path):
    show = 'echo "${LD_LIBRARY_PATH:-unset}"'
    code, output, errors = job.run(f'job_network_plugin "{here}"', show, **variables)
    assert (code, output, "TCP" in errors) == (0, [path], path == "unset")


@pytest.mark.parametrize(
    ("lines", "variables", "problem"),
    [
        (("job_prepare", "job_launcher jsrun", "job_run x"), {}, "jsrun"),
        (RUN, {"CANDLE_P1_VENV": "/absent"}, "CANDLE_P1_VENV=/absent"),
        (RUN, {"CANDLE_P1_PYTHON": "/bin/false"}, "/bin/false has no candle_p1"),
        (("job_limit 1 60", *RUN), {}, "time limit"),
        (("job_network_plugin /absent",), {}, "no directory /absent"),
        *(
            (("job_limit 60 90", *RUN), {f"CANDLE_P1_{name}": text}, f"CANDLE_P1_{name}={text}: ")
            for name, text in (("NODES", "two"), ("MINUTES", "0"), ("WARNING_S", "-1"))
        ),
    ],
)
def test_jobs_that_cannot_start_say_why(job, lines, variables, problem):
    code, output, errors = job.run(*lines, **variables)
    assert (code, output, problem in errors) == (2, [], True)


@pytest.mark.parametrize(
    ("lines", "ranks", "number", "ended"),
    [
        ((), PRINT_SIGNAL, signal.SIGURG, (3, "got USR1\n")),
        ((), PRINT_SIGNAL, signal.SIGTERM, (4, "got TERM\n")),  # the job is cancelled
        (("job_warning 2",), DEAF, signal.SIGUSR1, (4, "got TERM\n")),
    ],
)
def test_a_signal_reaches_the_ranks(job, lines, ranks, number, ended):
    job.command("launch", ranks)
    assert job.interrupt(*lines, *RUN, number=number) == ended


@pytest.mark.parametrize(
    ("launcher", "command", "number", "arguments"),
    [
        ("srun", "scancel", signal.SIGUSR1, "--signal=USR1 12"),  # srun would kill its ranks
        ("srun", "scancel", signal.SIGTERM, "--signal=TERM 12"),
        ("jsrun", "jskill", signal.SIGUSR1, f"-s {int(signal.SIGUSR1)} all"),
    ],
)
def test_a_signal_is_passed_on_by_a_command(job, launcher, command, number, arguments):
    wait = 'while [[ ! -s $HOME/signal ]]; do sleep 0.05; done; cat "$HOME/signal"'
    job.command(launcher, f"echo ready; {wait}")
    job.command(command, 'echo "$*" >"$HOME/signal"')
    job.command("squeue", "exit 1")  # a real one would look for its controller
    lines = ["job_prepare", f"job_launcher {launcher}", "job_run nt3.py"]
    variables = {"HOME": str(job.directory), "SLURM_JOB_ID": "12"}
    assert job.interrupt(*lines, number=number, **variables) == (0, f"{arguments}\n")


@pytest.mark.parametrize(
    ("left", "seconds", "early_s"),
    [("1:32", 92, 2), ("1:00:08", 3608, 0), ("2-01:00:00", 176400, 0), ("INVALID", None, 0)],
)
def test_what_slurm_warns_too_early_waits(job, left, seconds, early_s):
    """At most a minute: a warning that comes earlier was not Slurm's."""
    job.command("squeue", f"echo '{left}'")
    job.command("scancel", "true")
    show = "job_sleep() { echo $1; }; job_signal() { echo $1; }; JOB_LAUNCH=(srun)"
    lines = [show, "job_left_s || true", "job_warning 90", "job_warn"]
    code, output, _ = job.run(*lines, SLURM_JOB_ID="12")
    times = [str(seconds)] * (seconds is not None) + [str(early_s)] * bool(early_s)
    assert (code, output) == (0, [*times, "USR1", "50", "TERM"])


@pytest.mark.extended
def test_the_ranks_get_a_signal_before_the_time_limit(job):
    job.command("launch", PRINT_SIGNAL)
    variables = {"CANDLE_P1_MINUTES": "1", "CANDLE_P1_WARNING_S": "55"}
    code, output, _ = job.run("job_limit 60 60", *RUN, **variables)
    assert (code, output) == (3, ["ready", "got USR1"])


def chained(job, *lines):
    """Runs a job of a chain of three in the directory of the fixture; returns as `run`."""
    chain = job.directory / "job.chain"
    if not chain.exists():
        chain.write_text("jobs 3\n")
    return job.run(f"job_chain {job.directory}", *lines)


def test_a_job_of_a_chain_notes_its_begin_and_its_end(job):
    job.command("launch", "exit 7")
    assert chained(job, *RUN)[0] == 7
    job.command("launch", 'kill -9 "$PPID"')
    assert chained(job, *RUN)[0] == -9
    job.command("launch", "exit 7")  # under Cobalt the next job waits for success
    assert job.run(f"job_chain {job.directory} 0", *RUN)[0] == 0
    (job.directory / "run.json").write_text('{"status": "ok"}')
    assert chained(job, *RUN)[:2] == (0, [])
    changed_s = int((job.directory / "run.json").stat().st_mtime)
    lines = ["jobs 3", "begun", "ended 7", "begun", "begun", "ended 7", f"begun {changed_s}"]
    assert (job.directory / "job.chain").read_text().splitlines() == [*lines, "ended 0"]


def test_a_job_does_not_repeat_what_the_user_has_to_correct(job):
    assert chained(job, "job_prepare", "job_launcher absent", "job_run nt3.py")[0] == 2
    code, output, errors = chained(job, *RUN)
    assert (code, output, str(job.directory) in errors) == (2, [], True)
    assert chained(job, *RUN)[0] == 2
    code, output, _ = chained(job, *RUN)  # the user has submitted the script once more
    assert (code, len(output)) == (0, 1)


@pytest.mark.parametrize(
    ("setting", "flags", "options"),
    [
        ("1", " --epochs 8", "--output output"),
        ("--shm_gib 0", " --output_dir out", "--output out --shm_gib 0"),
    ],
)
def test_the_preflight_runs_before_the_ranks(job, setting, flags, options):
    job.command("launch", 'echo "launch $*"; [[ "$*" != *preflight* || -z ${UNFIT-} ]]')
    run = (*RUN[:2], f"job_run nt3.py{flags}")
    code, lines, _ = job.run(*run, CANDLE_P1_PREFLIGHT=setting)
    python = f"launch -n 2 {sys.executable}"
    started = [f"-m candle_p1.cluster.preflight {options}", f"{ROOT}/nt3.py{flags}"]
    assert (code, lines) == (0, [f"{python} {each}" for each in started])
    code, lines, errors = job.run(*run, CANDLE_P1_PREFLIGHT=setting, UNFIT="1")
    assert (code, len(lines), "CANDLE_P1_PREFLIGHT=0" in errors) == (2, 1, True)
