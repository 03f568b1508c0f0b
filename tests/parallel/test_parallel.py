"""Runs the scripts of this folder under mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.extended
@pytest.mark.parallel
@pytest.mark.parametrize(
    ("command", "num_ranks", "num_checks"),
    [
        ("harness.py check_averaging check_comm", 3, 13 + 6),
        # The runs of check_losses come last, because they choose kernels for the process.
        (
            "harness.py check_measuring check_evaluation check_own_step check_losses",
            2,
            3 + 6 + 6 + 4,
        ),
        ("check_preflight.py", 2, 5),
    ],
)
def test_checks_hold_on_all_ranks(mpirun, execute, command, num_ranks, num_checks):
    script, *argv = command.split()
    code, output = execute(mpirun(num_ranks, HERE / script, *argv), limit_s=1800)
    print(output)
    assert code == 0, output
    assert output.count("ok ") == num_checks


@pytest.mark.parallel
@pytest.mark.parametrize(
    "layouts",
    [
        ["a,b"],
        pytest.param(["a,a"], marks=pytest.mark.extended),
        pytest.param(["a,a,a,a", "a,a,b,b", "a,b,a,b", "a,a,a,b"], marks=pytest.mark.extended),
    ],
)
def test_checkpoints_on_any_layout_of_ranks(mpirun, execute, layouts):
    """A job has as many ranks as each of its layouts."""
    script = HERE / "check_checkpoints.py"
    code, output = execute(mpirun(layouts[0].count(",") + 1, script, *layouts))
    print(output)
    assert code == 0, output
    assert output.count("ok ") == 7 * len(layouts)


@pytest.mark.parallel
@pytest.mark.parametrize(
    "layouts",
    [
        ["a,a,b"],
        pytest.param(["a,a,a,a", "a,a,b,b", "a,b,a,b", "a,b,c,d"], marks=pytest.mark.extended),
    ],
)
def test_loading_on_any_layout_of_ranks(mpirun, execute, layouts):
    """A job has as many ranks as each of its layouts."""
    code, output = execute(mpirun(layouts[0].count(",") + 1, HERE / "check_loading.py", *layouts))
    print(output)
    assert code == 0, output
    assert output.count("ok ") == 12 * len(layouts)
