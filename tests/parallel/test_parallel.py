"""Runs the scripts of this folder under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
AVERAGING = "averaged_gradients_equal_numpy replicas_stay_identical_and_differences_are_detected"
"""The checks without which no training on several ranks is right."""


def extended(*values):
    """Returns the parameters of a test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.extended)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("command", "num_ranks", "num_checks"),
    [
        (f"check_averaging.py {AVERAGING}", 2, 2),
        extended("check_averaging.py", 2, 13),
        extended("check_averaging.py", 3, 13),
        extended("check_comm.py", 3, 6),
        extended("check_evaluation.py", 2, 6),
        extended("check_losses.py", 2, 4),
        extended("check_measuring.py", 2, 3),
        extended("check_own_step.py", 2, 6),
        extended("check_preflight.py", 2, 5),
    ],
)
def test_checks_hold_on_all_ranks(mpirun, execute, command, num_ranks, num_checks):
    code, output = execute(mpirun(num_ranks, *command.split()), cwd=HERE)
    print(output)
    assert code == 0, output
    assert output.count("ok ") == num_checks


@pytest.mark.parallel
@pytest.mark.parametrize(
    "nodes", ["a,a,b", *map(extended, ["a,a,a,a", "a,a,b,b", "a,b,a,b", "a,b,c,d"])]
)
def test_loading_on_any_layout_of_ranks(mpirun, execute, monkeypatch, nodes):
    monkeypatch.setenv("NODES", nodes)
    code, output = execute(mpirun(nodes.count(",") + 1, HERE / "check_loading.py"))
    print(output)
    assert code == 0, output
    assert output.count("ok ") == 8
