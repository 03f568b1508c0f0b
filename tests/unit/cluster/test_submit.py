import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from candle_p1.cli.submit import submit_command
from candle_p1.errors import CandleError, ParameterError, SetupError
from tests.conftest import ROOT

ON_SLURM = ["nt3", "--machine", "slurm"]
STUDY = """\
title = "Two\\nbatch sizes"
benchmark = "nt3"
repeats = 1
minutes = 20
flags.epochs_scaling = "weak"
vary.batch_size = [5, 10]
environment.HOROVOD_CYCLE_TIME = "2"
sizes.paper = {ranks = [1, 4], flags = {size = "small"}}
sizes.odd = {ranks = [3]}
"""


@pytest.fixture(autouse=True)
def without_a_project(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CANDLE_P1_PROJECT", raising=False)


@pytest.fixture
def study(tmp_path):
    """The command line that submits a study of four runs to Slurm."""
    (tmp_path / "two.toml").write_text(STUDY)
    return [*ON_SLURM, "--study", "two.toml"]


def submit(*arguments):
    result = CliRunner().invoke(submit_command, [*map(str, arguments)], standalone_mode=False)
    if isinstance(result.exception, CandleError):
        raise result.exception
    assert result.exception is None, result.output
    return result


def said(*arguments):
    """Returns what submitting prints, in one line."""
    return " ".join(submit(*arguments).output.split())


def run_argv(script):
    """Returns the last command of a script: job_run with its arguments."""
    return script.replace("\\\n", " ").strip().splitlines()[-1].split()


def dependencies(argv):
    return [word.partition(":")[2] for word in argv if word.startswith("--dependency")]


def test_the_script_is_written_where_the_record_will_be(scheduler, tmp_path):
    argv = scheduler("bsub", "Job <4711> is submitted to default queue <batch>.")
    output = submit("nt3", "--machine", "summit", "--nodes", 64, "--project", "ABC123").output
    script = tmp_path / "output/nt3/EXP000/JOB000/job.lsf"
    assert (argv(), "job 4711" in output) == ([str(script)], True)
    assert f"export CANDLE_P1_ROOT={ROOT}" in (text := script.read_text())
    assert run_argv(text)[-4:] == ["--output_dir", f"{tmp_path}/output/nt3", "--run_id", "JOB000"]
    assert script.stat().st_mode & 0o100  # as Cobalt requires


def test_a_job_does_not_get_the_allocation_it_is_submitted_from(scheduler, monkeypatch, tmp_path):
    scheduler("sbatch", f"$(env >{tmp_path}/env)12")
    for name in ("SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "x")
    submit(*ON_SLURM)
    given = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {name for name in given if name[0] == "S"} >= {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert not given & {"SLURM_CPU_BIND", "SLURM_MEM_PER_CPU"}


def test_jobs_are_numbered_apart_from_runs_and_do_not_share_directories(scheduler, tmp_path):
    scheduler("sbatch")
    for _ in range(2):
        submit(*ON_SLURM, "--", "--experiment_id", "mine")
    assert {path.name for path in (tmp_path / "output/nt3/mine").iterdir()} == {"JOB000", "JOB001"}
    named = [*ON_SLURM, "--", "--output_dir", "o", "--run_id", "R7"]
    submit(*named)
    argv = run_argv((tmp_path / "o/EXP000/R7/job.sh").read_text())
    assert argv[-4:] == ["--output_dir", f"{tmp_path}/o", "--run_id", "R7"]
    with pytest.raises(ParameterError, match="EXP000/R7"):
        submit(*named)
    submit(*ON_SLURM, "--", "--output_dir", ".")
    assert run_argv((tmp_path / "job.sh").read_text())[-2:] == ["--output_dir", "."]


@pytest.mark.parametrize(
    ("machine", "command", "prints", "options"),
    [
        ("slurm", "sbatch", "$number;cluster", "--parsable --dependency=afterany:{}"),
        ("pbs", "qsub", "$number", "-W depend=afterany:{} -o {place}/job-{number}.out"),
        ("theta", "qsub", "routed to 'x'\n$number", "--dependencies {} -O {place}/job-{number}"),
        ("summit", "bsub", "Job <$number> is submitted", "-w ended({})"),
    ],
)
def test_a_chain_of_jobs(machine, command, prints, options, scheduler, tmp_path):
    argv = scheduler(command, prints)
    line = ["nt3", "--machine", machine, "--nodes", 128, "--project", "P", "--mode", "weak"]
    assert "submitted jobs 11, 12, 13" in said(*line, "--chain", 3)
    place = tmp_path / "output/nt3/EXP000/JOB000"
    script = str(place / ("job.lsf" if machine == "summit" else "job.sh"))
    assert " ".join(argv()).count(script) == 3
    for number, before in ((2, 11), (3, 12)):
        expected = options.format(before, place=place, number=number)
        assert f"{expected} {script}" in " ".join(argv())
    assert (place / "job.id").read_text() == "11\n12\n13\n"
    assert (place / "job.chain").read_text() == "jobs 3\n"


def test_a_chain_whose_later_jobs_are_refused(scheduler, tmp_path):
    scheduler("sbatch", refuses_after=2)
    with pytest.raises(SetupError, match=r"2 jobs of 4 submitted \(11, 12\).*too many"):
        submit(*ON_SLURM, "--chain", 4)
    place = tmp_path / "output/nt3/EXP000/JOB000"
    assert (place / "job.chain").read_text() == "jobs 4\njobs 2\n"
    with pytest.raises(SetupError, match="code 1: too many"):
        submit(*ON_SLURM, "--chain", 4)
    assert list((tmp_path / "output/nt3/EXP000/JOB001").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--machine summit", "--project"),
        ("--machine slurm --nodes 5", "384 epochs .* 10 ranks"),
        *((f"--machine slurm --time={text}", "--time ") for text in ("1h", "1:2:3:4")),
        ("--machine slurm --chain 2 -- --ckpt_restart_mode off", "--chain .*--ckpt_restart_mode"),
        ("--machine slurm --chain 2 -- --ckpt_every_s 0", "--chain .*ckpt_every_s"),
        ("--machine slurm --array", "--array requires --study"),
        ("--machine theta --project P --study study.toml --array", "--array: .*theta, cobalt"),
        ("--machine theta --exclude n1", "--exclude n1: jobs on theta"),
        ("--machine slurm --exclude n1;reboot", "--exclude n1;reboot"),
        ("--machine pbs --exclude n[1-3]", r"--exclude n\[1-3\]"),
        ("--machine two.toml --nodes 2 --exclude n1", r"3 nodes, including 1 .* at most 2"),
        ("--machine slurm --container absent.sif", "--container absent.sif"),
        ("--machine slurm --container a:b --stage_env", "cannot be combined"),
        ("--machine slurm --study study.toml --nodes 2", "--nodes .*--study"),
        ("--machine local --study study.toml", "local .*candle-p1 study run"),
        ("--machine slurm --study study.toml --study_size odd", "3 ranks .* 2\\b.*--ranks_per"),
        ("--machine slurm --study none.toml --chain 2", "--chain "),
        ("--machine slurm --study p1b1.toml", r"study .*p1b1.* nt3"),
    ],
)
def test_errors_come_before_anything_is_written(options, problem, tmp_path):
    (tmp_path / "two.toml").write_text('base = "pbs"\nnum_nodes = 2\n')
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "none.toml").write_text(STUDY.replace("flags.epochs", "flags.ckpt_every_s = 0\n#"))
    with pytest.raises(ParameterError, match=problem):
        submit("p1b1" if "p1b1" in options else "nt3", *options.replace("p1b1", "study").split())
    assert not (tmp_path / "output").exists()


def test_a_script_that_cannot_be_written_or_submitted(study, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ParameterError, match="file/below"):
        submit(*ON_SLURM, "--", "--output_dir", "file/below")
    with pytest.raises(SetupError, match="file/below/two-paper"):
        submit(*study, "--study_output", "file/below")
    with pytest.raises(SetupError, match=r"sbatch.* slurm.*--dry_run"):
        submit(*ON_SLURM)


def test_a_local_job_runs_immediately_and_its_exit_code_is_the_commands(
    scheduler, monkeypatch, tmp_path
):
    scheduler("mpirun", "", code=5)
    (tmp_path / "bin/python").symlink_to(sys.executable)
    # The first keeps the real mpirun out of the $PATH of the script.
    of_script = {"VENV": str(tmp_path), "PYTHON": sys.executable, "PREFLIGHT": "0"}
    for name, value in of_script.items():
        monkeypatch.setenv(f"CANDLE_P1_{name}", value)
    result = CliRunner().invoke(submit_command, ["p1b3", "--machine", "local"])
    assert result.exit_code == 5
    assert "p1b3_baseline_keras2.py" in (tmp_path / "argv").read_text()
    assert (tmp_path / "output/p1b3/EXP000/JOB000/job.sh").exists()


def test_ctrl_c_waits_for_the_end_of_a_local_job_and_starts_no_other(start):
    job = "trap 'sleep 1; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    program = (
        "import sys, pathlib; from candle_p1.cluster.submission import run_here\n"
        f"sys.exit(run_here({['sh', '-c', job]!r}, pathlib.Path(), 3))"
    )
    process = start([sys.executable, "-c", program])
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120)[0] == ""
    assert process.returncode == 9


@pytest.mark.parametrize(
    ("prefix", "is_named"), [("/opt/venv", True), (str(ROOT / ".venv"), False)]
)
def test_what_a_script_takes_from_the_environment(prefix, is_named, monkeypatch):
    monkeypatch.setenv("CANDLE_P1_PROJECT", "ABC123")
    monkeypatch.setattr(sys, "prefix", prefix)
    folder = ROOT / "benchmarks/nt3"
    output = submit(folder, "--machine", "theta", "--nodes", 128, "--dry_run").output
    assert (f"job_default CANDLE_P1_VENV {prefix}\n" in output) == is_named
    assert "#COBALT -A ABC123\n" in output
    assert str(folder / "nt3_baseline_keras2.py") in output


def test_the_jobs_of_a_study_wait_for_each_other(scheduler, study, tmp_path):
    argv = scheduler("sbatch")
    line = [*study, "--", "--epochs", 2]
    assert "2 jobs of two" in said(*study, "--study_ranks", "1", "--", "--epochs", 2)
    output = said(*line)
    assert all(each in output for each in ("2 jobs of two, 1 at a time", "1.3 node hours"))
    submitted = argv()
    names = [Path(word).parent.name for word in submitted if word.endswith("job.sh")]
    expected = [f"batch_size-{size}-np{num}-r0" for size in (10, 5) for num in (1, 4)]
    assert (sorted(names), dependencies(submitted)) == (expected, ["11", "12", "13"])
    flags = " ".join(run_argv((tmp_path / f"output/two-paper/{expected[3]}/job.sh").read_text()))
    assert "--size small --epochs 2 --batch_size 5 --rng_seed" in flags
    assert f"--run_id {expected[3]}" in flags
    output = submit(*line).output
    assert all(each in output for each in ("0 jobs", "batch_size-5-np4-r0"))
    assert argv() == submitted


def test_a_study_of_chains(scheduler, study, tmp_path):
    argv = scheduler("sbatch")
    line = [*study, "--chain", 2]
    output = said(*line)
    assert all(each in output for each in ("4 chains of up to 2 jobs of two", "4.0 node hours"))
    assert dependencies(argv()) == [str(job) for job in range(11, 18)]
    place = tmp_path / "output/two-paper/batch_size-5-np4-r0"
    with (place / "job.chain").open("a") as file:
        file.write("begun\nended 2\n")  # as a job that fails before its ranks start
    assert "1 chain of" in said(*line)
    assert (place / "job.chain").read_text() == "jobs 2\n"


def test_a_study_as_job_arrays(scheduler, study, tmp_path):
    """One array for each size: a node with one rank, and two nodes with two ranks each."""
    argv = scheduler("sbatch")
    output = said(*study, "--array")
    assert all(each in output for each in ("4 jobs of two, in 2 job arrays", "array 11 of 2 jobs"))
    place = tmp_path / "output/two-paper"
    submitted = [word for word in argv() if word.endswith("job.sh")]
    assert submitted == [f"{place}/arrays/00{number}/job.sh" for number in range(2)]
    assert dependencies(argv()) == ["11"]
    texts = [Path(script).read_text() for script in submitted]
    assert sorted("#SBATCH --nodes=2\n" in text for text in texts) == [False, True]
    ids = {path: (path.parent / "job.id").read_text() for path in place.glob("*-r0/job.sh")}
    assert sorted(ids.values()) == ["11_0\n", "11_1\n", "12_0\n", "12_1\n"]
    assert all(sum(str(path) in text for text in texts) == 1 for path in ids)
    assert "0 jobs of two, in 0 job arrays" in said(*study, "--array")


def test_a_job_that_the_scheduler_refuses_can_be_submitted_again(scheduler, study):
    argv = scheduler("sbatch", "invalid account", code=1)
    with pytest.raises(SetupError, match="code 1: invalid account"):
        submit(*study)
    scheduler("sbatch", "who knows")
    with pytest.raises(SetupError, match="who knows"):  # submitted, but with what id?
        submit(*study, "--study_ranks", "1")
    scheduler("sbatch", "12")
    assert "3 jobs of two" in said(*study, "--at_once", 2)
    assert dependencies(argv()) == ["12"]


def test_a_script_that_fails_before_its_ranks_lets_the_next_job_start(study, tmp_path):
    (tmp_path / "ours.toml").write_text('base = "theta"\nlauncher = "jsrun"\n')
    line = ["nt3", "--machine", "ours.toml", "--project", "P", *study[3:], "--dry_run"]
    text = submit(*line).stdout
    script = Path(re.search(r"JOB_SCRIPT=(\S+)", text)[1])
    script.parent.mkdir(parents=True)
    script.write_text(text[text.index("#!/bin/bash") :])
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(["bash", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, "jsrun" in done.stderr) == (0, True)
    assert [path.name for path in script.parent.iterdir()] == ["job.sh.failed"]
