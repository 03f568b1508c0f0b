from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from candle_p1.cli.submit import command
from candle_p1.errors import CandleError, ParameterError, SetupError
from tests.conftest import ROOT

CHAIN_FLAGS = "--ckpt_every_s 600 --ckpt_save_best False --ckpt_keep_limit 2"


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CANDLE_P1_PROJECT", raising=False)


def submit(*arguments):
    argv = [str(argument) for argument in arguments]
    result = CliRunner().invoke(command, argv, standalone_mode=False)
    if isinstance(result.exception, CandleError):
        raise result.exception
    assert result.exception is None, result.output
    return result


@pytest.fixture
def scheduler(monkeypatch, tmp_path):
    """Puts a command into $PATH that prints a text, and adds its arguments to the file argv."""

    def scheduler(name, prints, code=0):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/bash\necho "$@" >>"{tmp_path}/argv"\necho "{prints}"\nexit {code}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        return lambda: (tmp_path / "argv").read_text().split()

    return scheduler


def run_argv(script):
    """Returns the last command of a script: job_run with its arguments."""
    return script.replace("\\\n", " ").strip().splitlines()[-1].split()


def test_the_script_is_written_where_the_record_will_be(scheduler, tmp_path):
    argv = scheduler("bsub", "Job <4711> is submitted to default queue <batch>.")
    result = submit("nt3", "--machine", "summit", "--nodes", 64, "--project", "ABC123")
    script = tmp_path / "output/nt3/EXP000/JOB000/job.lsf"
    assert argv() == [str(script)]
    assert "job 4711" in result.output
    text = script.read_text()
    assert {"#BSUB -P ABC123", "#BSUB -nnodes 64", f"export CANDLE_P1_ROOT={ROOT}"} <= set(
        text.splitlines()
    )
    assert run_argv(text)[-4:] == ["--output_dir", f"{tmp_path}/output/nt3", "--run_id", "JOB000"]
    assert script.stat().st_mode & 0o100


def test_a_job_does_not_get_the_allocation_it_is_submitted_from(scheduler, monkeypatch, tmp_path):
    scheduler("sbatch", f"$(env >{tmp_path}/env)12")
    for name in ("SLURM_CPU_BIND", "SLURM_MEM_PER_CPU", "SLURM_CONF", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "x")
    submit("nt3", "--machine", "slurm")
    given = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {name for name in given if name[0] == "S"} >= {"SLURM_CONF", "SBATCH_ACCOUNT"}
    assert not given & {"SLURM_CPU_BIND", "SLURM_MEM_PER_CPU"}


@pytest.mark.parametrize(("indices", "warned"), [([2], True), ([0, 1], False)])
def test_an_index_of_a_gpu_that_looks_like_their_number_is_warned_of(indices, warned):
    output = submit("nt3", "--machine", "slurm", "--dry-run", "--gpus", *indices).output
    assert ("warning: --gpus 2 is the index of the only GPU" in output) == warned


def test_jobs_are_numbered_apart_from_runs(scheduler, tmp_path):
    scheduler("sbatch", "12")
    for _ in range(2):
        submit("nt3", "--machine", "slurm", "--", "--experiment_id", "mine")
    assert {path.name for path in (tmp_path / "output/nt3/mine").iterdir()} == {"JOB000", "JOB001"}


def test_a_named_run_is_not_overwritten(scheduler, tmp_path):
    scheduler("sbatch", "12")
    line = ["nt3", "--machine", "slurm", "--", "--output_dir", "o", "--run_id", "R7"]
    submit(*line)
    argv = run_argv((tmp_path / "o/EXP000/R7/job.sh").read_text())
    assert argv[-4:] == ["--output_dir", f"{tmp_path}/o", "--run_id", "R7"]
    with pytest.raises(ParameterError, match="EXP000/R7"):
        submit(*line)


@pytest.fixture
def counting_scheduler(scheduler, tmp_path):
    """As `scheduler`; the ids of jobs count from 11, and after some jobs it refuses more."""

    def counting(name, refuses_after=100):
        argv = scheduler(name, "")
        path = tmp_path / "bin" / name
        path.write_text(
            f'#!/bin/bash\nnumber=$((11 + $(cat "{tmp_path}/number" 2>/dev/null || echo 0)))\n'
            f"((number - 11 < {refuses_after})) || {{ echo too many >&2; exit 1; }}\n"
            f'echo "$@" >>"{tmp_path}/argv"\n'
            f'echo $((number - 10)) >"{tmp_path}/number"\necho "$number"\n'
        )
        return argv

    return counting


@pytest.mark.parametrize(
    ("machine", "command", "options"),
    [
        ("slurm", "sbatch", ["--parsable --dependency=afterany:{}"]),
        ("pbs", "qsub", ["-W depend=afterany:{} -o {place}/job-{number}.out"]),
        ("theta", "qsub", ["--dependencies {} -O {place}/job-{number}"]),
    ],
)
def test_a_chain_of_jobs(machine, command, options, counting_scheduler, tmp_path):
    argv = counting_scheduler(command)
    line = ["nt3", "--machine", machine, "--nodes", 128, "--project", "P", "--mode", "weak"]
    result = submit(*line, "--chain", 3)
    place = tmp_path / "output/nt3/EXP000/JOB000"
    script = str(place / "job.sh")
    assert " ".join(argv()).count(script) == 3
    for number, before in ((2, 11), (3, 12)):
        expected = options[0].format(before, place=place, number=number)
        assert f"{expected} {script}" in " ".join(argv())
    assert "submitted jobs 11, 12, 13" in result.output
    assert (place / "job.id").read_text() == "11\n12\n13\n"
    assert (place / "job.chain").read_text() == "jobs 3\n"
    text = Path(script).read_text()
    assert f"job_chain {place}{' 0 #' if machine == 'theta' else chr(10)}" in text
    assert CHAIN_FLAGS in " ".join(run_argv(text))


def test_a_chain_of_lsf(scheduler, tmp_path):
    argv = scheduler("bsub", "Job <4711> is submitted to default queue <batch>.")
    submit("nt3", "--machine", "summit", "--nodes", 64, "--project", "P", "--chain", 2)
    script = str(tmp_path / "output/nt3/EXP000/JOB000/job.lsf")
    assert argv() == [script, "-w", "ended(4711)", script]


@pytest.mark.parametrize(
    ("flags", "added"),
    [
        ([], True),
        (["--ckpt_save_interval", "2"], False),
        (["--ckpt_every_s", "60"], False),
        (["--ckpt_every_steps", "100"], False),
        (["--ckpt_keep_limit", "3"], True),
    ],
)
def test_a_chain_has_checkpoints(flags, added):
    output = submit("nt3", "--machine", "slurm", "--chain", 2, "--dry-run", "--", *flags).output
    assert ("--ckpt_every_s 600" in " ".join(run_argv(output))) == added


@pytest.mark.parametrize(
    "flags", [["--ckpt_restart_mode", "off"], ["--ckpt_every_s", "0"], ["--ckpt_save_interval", 0]]
)
def test_a_chain_that_would_begin_anew_is_refused(flags, tmp_path):
    with pytest.raises(ParameterError, match=r"--chain .*--ckpt_restart_mode.*ckpt_every_s"):
        submit("nt3", "--machine", "slurm", "--chain", 2, "--", *flags)
    assert not (tmp_path / "output").exists()


def test_a_dry_run_of_a_chain(tmp_path):
    output = submit("nt3", "--machine", "slurm", "--chain", 3, "--dry-run").output
    assert "3 times" in output
    assert "--dependency=afterany:JOB" in output
    assert "job_chain " in output
    assert not (tmp_path / "output").exists()
    assert "up to 3 times" in submit("nt3", "--machine", "local", "--chain", 3, "--dry-run").output


def test_a_chain_whose_later_jobs_are_refused(counting_scheduler, tmp_path):
    counting_scheduler("sbatch", refuses_after=2)
    with pytest.raises(SetupError, match=r"2 jobs of 4 submitted \(11, 12\).*too many"):
        submit("nt3", "--machine", "slurm", "--chain", 4)
    place = tmp_path / "output/nt3/EXP000/JOB000"
    assert (place / "job.chain").read_text() == "jobs 4\njobs 2\n"
    with pytest.raises(SetupError, match="code 1: too many"):
        submit("nt3", "--machine", "slurm", "--chain", 4)
    assert list((tmp_path / "output/nt3/EXP000/JOB001").iterdir()) == []


def test_a_chain_that_ended_before_its_run_began_can_be_submitted_again(
    counting_scheduler, tmp_path
):
    counting_scheduler("sbatch")
    line = ["nt3", "--machine", "slurm", "--chain", 2, "--", "--run_id", "R7"]
    submit(*line)
    with pytest.raises(ParameterError, match="EXP000/R7"):
        submit(*line)
    chain = tmp_path / "output/nt3/EXP000/R7/job.chain"
    chain.write_text("jobs 2\nbegun\nended 2\n")
    submit(*line)
    assert chain.read_text() == "jobs 2\n"


def test_the_working_directory_as_output_directory(scheduler, tmp_path):
    scheduler("sbatch", "12")
    submit("nt3", "--machine", "slurm", "--", "--output_dir", ".")
    assert run_argv((tmp_path / "job.sh").read_text())[-2:] == ["--output_dir", "."]


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ([], "--size full --epochs 384 --epochs_scaling strong --deterministic False"),
        (
            ["--mode", "weak"],
            "--size full --epochs 8 --epochs_scaling weak --deterministic False",
        ),
        (
            ["--", "--epochs", "16", "--size", "small"],
            "--epochs_scaling strong --deterministic False --epochs 16 --size small",
        ),
        (
            ["--mode", "weak", "--", "--epochs_scaling", "strong_ceil"],
            "--size full --epochs 8 --deterministic False --epochs_scaling strong_ceil",
        ),
        (
            ["--", "--data_parallel", "batch_step", "--deterministic", "True"],
            "--size full --epochs 384 --data_parallel batch_step --deterministic True",
        ),
    ],
)
def test_flags_of_the_user_override_those_of_the_mode(options, flags):
    argv = run_argv(submit("nt3", "--machine", "slurm", "--dry-run", *options).output)
    assert " ".join(argv[2:-4]) == flags


def test_a_config_file_of_the_user_overrides_the_mode(tmp_path):
    (tmp_path / "ours.txt").write_text("[Global_Params]\nepochs = 32\n")
    result = submit("nt3", "--machine", "slurm", "--dry-run", "--", "--config_file", "ours.txt")
    assert "--epochs " not in result.output


def test_a_dry_run_writes_and_submits_nothing(tmp_path):
    result = submit("nt3", "--machine", "pbs", "--dry-run")
    assert "#PBS -l select=1:mpiprocs=2" in result.output
    assert f"$ qsub {tmp_path}/output/nt3/EXP000/JOB000/job.sh" in result.output
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--machine", "sumit"], "'sumit' .*'summit'"),
        (["--machine", "summit"], "--project"),
        (["--machine", "summit", "--ranks-per-node", 7], "7 ranks per node on summit"),
        (["--machine", "slurm", "--nodes", 5], "384 epochs .* 10 ranks"),
        (["--machine", "slurm", "--time", "long"], "--time long"),
        (["--machine", "slurm", "--", "--epocs", "3"], "--epocs "),
    ],
)
def test_errors_come_before_anything_is_written(options, problem, tmp_path):
    with pytest.raises(ParameterError, match=problem):
        submit("nt3", *options)
    assert not (tmp_path / "output").exists()


def test_the_project_may_be_named_in_the_environment(monkeypatch):
    monkeypatch.setenv("CANDLE_P1_PROJECT", "ABC123")
    result = submit("nt3", "--machine", "theta", "--nodes", 128, "--dry-run")
    assert "#COBALT -A ABC123\n" in result.output


def test_a_script_that_cannot_be_written_or_submitted(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ParameterError, match="file/below"):
        submit("nt3", "--machine", "slurm", "--", "--output_dir", "file/below")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"sbatch.* slurm.*--dry_run"):
        submit("nt3", "--machine", "slurm")


def test_a_local_job_runs_immediately_and_its_exit_code_is_the_commands(
    scheduler, monkeypatch, tmp_path
):
    scheduler("mpirun", "", code=5)
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.setenv(
        "CANDLE_P1_VENV", str(tmp_path)
    )  # keeps the real mpirun out of the $PATH of the script
    monkeypatch.setenv("CANDLE_P1_PYTHON", sys.executable)
    monkeypatch.setenv("CANDLE_P1_PREFLIGHT", "0")
    result = CliRunner().invoke(command, ["p1b3", "--machine", "local"])
    assert result.exit_code == 5
    assert "p1b3_baseline_keras2.py" in (tmp_path / "argv").read_text()
    assert (tmp_path / "output/p1b3/EXP000/JOB000/job.sh").exists()


def test_ctrl_c_waits_for_the_end_of_a_local_job_and_starts_no_other(start, tmp_path):
    job = "trap 'sleep 1; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    program = (
        "import sys, pathlib; from candle_p1.cluster.submission import run_here\n"
        f"sys.exit(run_here({['sh', '-c', job]!r}, pathlib.Path({str(tmp_path)!r}), 3))"
    )
    process = start([sys.executable, "-c", program])
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120)[0] == ""
    assert process.returncode == 9


def test_another_virtual_environment_is_named(monkeypatch):
    monkeypatch.setattr(sys, "prefix", "/opt/venv")
    result = submit("nt3", "--machine", "slurm", "--dry-run")
    assert "job_default CANDLE_P1_VENV /opt/venv\n" in result.output
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    assert "CANDLE_P1_VENV" not in submit("nt3", "--machine", "slurm", "--dry-run").output


def test_a_benchmark_elsewhere_and_a_machine_of_ones_own(tmp_path):
    (tmp_path / "ours.toml").write_text('base = "pbs"\nranks_per_node = 1\n')
    folder = ROOT / "benchmarks/p1b2"
    result = submit(folder, "--machine", tmp_path / "ours.toml", "--dry-run")
    assert "#PBS -l select=1:mpiprocs=1:ompthreads=1:ncpus=1\n" in result.output
    assert str(Path(folder) / "p1b2_baseline_keras2.py") in result.output


@pytest.mark.parametrize(
    ("text", "limit"),
    [("90", "01:30"), ("1:30", "01:30"), ("01:30:00", "01:30"), ("0:00:30", "00:01")],
)
def test_time_limits(text, limit):
    script = submit("nt3", "--machine", "slurm", "--dry-run", "--time", text).output
    assert f"#SBATCH --time={limit}:00\n" in script


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5"])
def test_malformed_time_limits(text):
    with pytest.raises(ParameterError, match="--time "):
        submit("nt3", "--machine", "slurm", f"--time={text}")


STUDY = """\
title = "Two\\nbatch sizes"
benchmark = "nt3"
flags.epochs_scaling = "weak"
vary.batch_size = [5, 10]
environment.HOROVOD_CYCLE_TIME = "2"

[sizes.paper]
ranks = [1, 4]
repeats = 1
minutes = 20
flags.size = "small"

[sizes.odd]
ranks = [3]
repeats = 1
minutes = 20
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(STUDY)
    return path


def test_the_jobs_of_a_study_form_a_chain(scheduler, study, tmp_path):
    argv = scheduler("sbatch", "12")
    line = ["nt3", "--machine", "slurm", "--study", study, "--", "--epochs", 2]
    output = " ".join(submit(*line).output.split())
    assert "4 jobs of two, 1 at a time" in output
    assert "2.0 node hours" in output
    submitted = argv()
    scripts = [Path(word) for word in submitted if word.endswith("job.sh")]
    assert {path.parent.name for path in scripts} == {
        f"batch_size-{size}-np{num}-r0" for size in (5, 10) for num in (1, 4)
    }
    assert len(scripts) == 4
    assert submitted.count("--dependency=afterany:12") == 3
    assert submitted.index("--dependency=afterany:12") > submitted.index(str(scripts[0]))
    text = (tmp_path / "output/two-paper/batch_size-5-np4-r0/job.sh").read_text()
    assert {
        *("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", "#SBATCH --time=00:20:00"),
        "export HOROVOD_CYCLE_TIME=2",
    } <= set(text.splitlines())
    flags = " ".join(run_argv(text))
    assert "--size small --epochs 2 --batch_size 5 --rng_seed" in flags
    assert "--run_id batch_size-5-np4-r0" in flags

    output = submit(*line).output
    assert argv() == submitted
    assert "0 jobs" in output
    assert "batch_size-5-np4-r0" in output


def test_a_study_of_chains(counting_scheduler, study, tmp_path):
    argv = counting_scheduler("sbatch")
    line = ["nt3", "--machine", "slurm", "--study", study, "--chain", 2]
    output = " ".join(submit(*line).output.split())
    assert "4 chains of up to 2 jobs of two, 1 at a time" in output
    assert "4.0 node hours" in output
    waits = [word for word in argv() if word.startswith("--dependency")]
    assert waits == [f"--dependency=afterany:{job}" for job in range(11, 18)]
    place = tmp_path / "output/two-paper/batch_size-5-np4-r0"
    text = (place / "job.sh").read_text()
    assert f"job_chain {place}\n" in text
    assert {"--ckpt_every_s", "--ckpt_save_best", "--ckpt_keep_limit"} <= set(run_argv(text))
    assert "0 chains" in submit(*line).output
    with (place / "job.chain").open("a") as file:
        file.write("begun\nended 2\n")  # as a job that fails before its ranks start
    assert "1 chain of" in submit(*line).output
    assert (place / "job.chain").read_text() == "jobs 2\n"


def test_a_study_of_chains_that_turns_checkpoints_off(study):
    study.write_text(
        study.read_text().replace("[sizes.odd]", "flags.ckpt_every_s = 0\n[sizes.odd]")
    )
    with pytest.raises(ParameterError, match="--chain "):
        submit("nt3", "--machine", "slurm", "--study", study, "--chain", 2)


def test_a_study_as_job_arrays(counting_scheduler, study, tmp_path):
    """One array for each size: a node with one rank, and two nodes with two ranks each."""
    argv = counting_scheduler("sbatch")
    line = ["nt3", "--machine", "slurm", "--study", study, "--array"]
    output = " ".join(submit(*line).output.split())
    assert "4 jobs of two, in 2 job arrays, with time limits" in output
    assert "submitted array 11 of 2 jobs" in output
    place = tmp_path / "output/two-paper"
    submitted = [word for word in argv() if word.endswith("job.sh")]
    assert submitted == [f"{place}/arrays/00{number}/job.sh" for number in range(2)]
    assert argv().count("--dependency=afterany:11") == 1
    texts = [Path(script).read_text() for script in submitted]
    assert sorted("#SBATCH --nodes=2\n" in text for text in texts) == [False, True]
    runs = [path for path in place.glob("*-r0") if (path / "job.sh").exists()]
    ids = sorted((path / "job.id").read_text().strip() for path in runs)
    assert ids == ["11_0", "11_1", "12_0", "12_1"]
    assert all(sum(f"{path}/job.sh" in text for text in texts) == 1 for path in runs)
    assert "0 jobs" in submit(*line).output

    dry = submit(*line[:4], study, "--array", "--at-once", 1, "--dry-run", "--study-ranks", 4)
    assert "0 jobs of two, in 0 job arrays, 1 at a time" in " ".join(dry.output.split())


def test_a_dry_run_of_an_array_prints_its_script(study):
    line = ["nt3", "--machine", "summit", "--project", "P", "--study", study, "--array"]
    output = submit(*line, "--at-once", 1, "--dry-run").output
    assert '#BSUB -J "two[1-2]%1"\n' in output
    assert "script=${scripts[LSB_JOBINDEX - 1]}\n" in output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--machine", "slurm", "--array"], "--array goes with --study"),
        (["--machine", "theta", "--exclude", "n1"], "--exclude n1: jobs on theta"),
        (["--machine", "slurm", "--exclude", "n1;reboot"], "--exclude n1;reboot"),
        (["--machine", "pbs", "--exclude", "n[1-3]"], r"--exclude n\[1-3\]"),
        (["--machine", "slurm", "--container", "absent.sif"], "--container absent.sif"),
        (["--machine", "slurm", "--container", "a:b", "--stage-env"], "exclude each other"),
    ],
)
def test_ways_to_run_that_a_machine_or_command_does_not_have(options, problem):
    with pytest.raises(ParameterError, match=problem):
        submit("nt3", *options, "--dry-run")


@pytest.mark.parametrize(
    ("machine", "line"),
    [
        ("slurm", "#SBATCH --exclude=n[1-3,7],m9\n"),
        ("summit", "#BSUB -R \"select[hname!='n1' && hname!='m9']\"\n"),
        ("pbs", "#PBS -l select=3:mpiprocs=2"),
        ("pbs", "job_exclude 1 n1 m9\n"),
    ],
)
def test_nodes_are_excluded(machine, line):
    names = "n[1-3,7],m9" if machine == "slurm" else "n1,m9"
    argv = ["--machine", machine, "--project", "P", "--exclude", names, "--dry-run"]
    assert line in submit("nt3", *argv).output


def test_excluded_nodes_of_pbs_count_as_nodes(tmp_path):
    (tmp_path / "ours.toml").write_text('base = "pbs"\nnum_nodes = 2\n')
    argv = ["--machine", tmp_path / "ours.toml", "--nodes", 2, "--exclude", "n1"]
    with pytest.raises(ParameterError, match=r"3 nodes, of which 1 .* at most 2"):
        submit("nt3", *argv)


def test_a_container_and_an_environment_in_a_script(tmp_path):
    (tmp_path / "a.sif").write_text("")
    text = submit("nt3", "--machine", "slurm", "--container", "a.sif", "--dry-run").output
    assert "\njob_container apptainer exec --bind" in text
    assert f"{tmp_path}/a.sif" in text
    text = submit("nt3", "--machine", "slurm", "--stage-env", "--dry-run").output
    assert f"\njob_stage_env {ROOT}/.staged/env-" in text


def test_a_dry_run_of_a_study_submits_nothing(study, tmp_path):
    output = submit("nt3", "--machine", "pbs", "--study", study, "--dry-run").output
    assert "batch_size-10-np1-r0: " in output
    assert output.count("#PBS -N ") == 1
    assert "# Two batch sizes.\n" in output
    assert not (tmp_path / "output").exists()


def test_a_ready_study_fits_the_machine_of_the_paper():
    line = ["nt3", "--machine", "summit", "--project", "P", "--study", "strong-nt3", "--dry-run"]
    assert "96 jobs of strong-nt3" in submit(*line).output
    line = [*line[:2], "perlmutter", *line[3:], "--ranks-per-node", 3]
    assert "96 jobs of strong-nt3" in submit(*line).output


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["p1b1", "--machine", "slurm"], "two .*p1b1.* nt3"),
        (["nt3", "--machine", "slurm", "--nodes", 2], "--nodes .*--study"),
        (["nt3", "--machine", "local"], "local .*candle-p1 study run"),
        (["nt3", "--machine", "summit"], "--project"),
        (["nt3", "--machine", "slurm", "--study-size", "huge"], "'huge'"),
        (["nt3", "--machine", "slurm", "--study-size", "odd"], "3 ranks .* 2\\b.*--ranks_per_node"),
    ],
)
def test_studies_that_cannot_be_submitted(options, problem, study, tmp_path):
    with pytest.raises(ParameterError, match=problem):
        submit(*options, "--study", study)
    assert not (tmp_path / "output").exists()


def test_a_job_that_the_scheduler_refuses_can_be_submitted_again(scheduler, study, tmp_path):
    line = ["nt3", "--machine", "slurm", "--study", study]
    scheduler("sbatch", "invalid account", code=1)
    with pytest.raises(SetupError, match="code 1: invalid account"):
        submit(*line)
    argv = scheduler("sbatch", "12")
    submitted = argv()
    assert "4 jobs of two" in submit(*line, "--at-once", 3).output
    assert argv()[len(submitted) :].count("--dependency=afterany:12") == 1


def test_jobs_of_a_study_take_nothing_else_from_the_environment(study, tmp_path):
    line = ["nt3", "--project", "P", "--ranks-per-node", 1, "--study", study, "--dry-run"]
    text = submit(*line, "--machine", "theta").output
    name = text.split("--run_id ")[1].split()[0]
    script = tmp_path / "output/two-paper" / name / "job.sh"
    assert "unset CANDLE_P1_STAGE CANDLE_P1_FLAGS" in text
    assert f"export CANDLE_P1_NODES={name.split('np')[1][0]}\n" in text
    assert f"export JOB_SCRIPT={script}\n" in text
    assert "trap 'exit 0' EXIT" in text  # under Cobalt the next job waits for success
    assert "trap" not in submit(*line, "--machine", "slurm").output
    single = submit("nt3", "--machine", "theta", "--project", "P", "--nodes", 128, "--dry-run")
    assert not {"unset", "trap", "CANDLE_P1_NODES"} & set(single.output.split())


def test_a_script_that_fails_before_its_ranks_lets_the_next_job_start(study, tmp_path):
    (tmp_path / "ours.toml").write_text('base = "theta"\nlauncher = "jsrun"\n')
    line = ["nt3", "--machine", "ours.toml", "--project", "P", "--study", study, "--dry-run"]
    text = submit(*line).stdout
    script = Path(re.search(r"JOB_SCRIPT=(\S+)", text)[1])
    script.parent.mkdir(parents=True)
    script.write_text(text[text.index("#!/bin/bash") :])
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", script], check=False, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0
    assert "jsrun" in done.stderr
    assert [path.name for path in script.parent.iterdir()] == ["job.sh.failed"]


def test_new_jobs_of_a_study_wait_for_earlier_ones(scheduler, study, tmp_path):
    line = ["nt3", "--machine", "slurm", "--study", study]
    scheduler("sbatch", "12")
    submit(*line, "--study-ranks", "1")
    argv = scheduler("sbatch", "13")
    assert "2 jobs of two" in submit(*line).output
    waits = [word for word in argv() if word.startswith("--dependency")]
    assert waits == [f"--dependency=afterany:{job}" for job in (12, 12, 13)]
    assert (tmp_path / "output/two-paper/batch_size-5-np4-r0/job.id").read_text() == "13\n"


def test_a_job_without_an_id_is_not_submitted_twice(scheduler, study):
    line = ["nt3", "--machine", "slurm", "--study", study, "--study-ranks", "1"]
    scheduler("sbatch", "who knows")
    with pytest.raises(SetupError, match="who knows"):
        submit(*line)
    scheduler("sbatch", "12")
    assert "1 job of two" in submit(*line).output


def test_a_study_whose_directory_cannot_be_written_submits_nothing(scheduler, study, tmp_path):
    scheduler("sbatch", "12")
    (tmp_path / "file").touch()
    line = ["nt3", "--machine", "slurm", "--study", study, "--study-output", "file/below"]
    with pytest.raises(SetupError, match="file/below/two-paper"):
        submit(*line)
    assert not (tmp_path / "argv").exists()
