"""Runs the scripts of this folder under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("script", "num_ranks", "num_checks"),
    [
        ("check_averaging.py", 2, 13),
        ("check_averaging.py", 3, 13),
        ("check_comm.py", 3, 5),
        ("check_evaluation.py", 2, 6),
        ("check_losses.py", 2, 4),
        ("check_measuring.py", 2, 3),
        ("check_preflight.py", 2, 5),
    ],
)
def test_checks_hold_on_all_ranks(mpirun, execute, script, num_ranks, num_checks):
    code, output = execute(mpirun(num_ranks, HERE / script))
    print(output)
    assert code == 0, output
    assert "FAILED" not in output
    assert output.count("ok ") == num_checks


@pytest.mark.parallel
@pytest.mark.parametrize("nodes", ["a,a,a,a", "a,a,b,b", "a,b,a,b", "a,b,c,d", "a,a,b"])
def test_loading_on_any_layout_of_ranks(mpirun, execute, monkeypatch, nodes):
    monkeypatch.setenv("NODES", nodes)
    code, output = execute(mpirun(nodes.count(",") + 1, HERE / "check_loading.py"))
    print(output)
    assert code == 0, output
    assert "FAILED" not in output
    assert output.count("ok ") == 8
