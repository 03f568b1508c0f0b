import os
import signal
import subprocess
import sys

import psutil
import pytest

from candle_p1.cluster.process import guarded, run_to_end
from tests.conftest import wait_until


def await_end_of(*pids):
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10)


@pytest.mark.extended
def test_a_command_that_ignores_its_end_is_killed_with_its_children(tmp_path):
    loop = "while :; do sleep 0.1; done"
    with (tmp_path / "log").open("wb") as output:
        command = ["bash", "-c", f"trap '' TERM; ({loop}) & echo $$ $!; {loop}"]
        assert run_to_end(command, os.environ, output, 2.0, grace_s=1.0) == (-signal.SIGKILL, True)
    await_end_of(*map(int, (tmp_path / "log").read_text().split()))


def test_what_a_command_leaves_behind_is_ended(tmp_path):
    """As a launcher that was killed: its ranks, in groups of their own, have lost their parent."""
    with (tmp_path / "log").open("wb") as output:
        command = ["bash", "-c", "set -m; sleep 600 & echo $!"]
        assert run_to_end(command, os.environ, output, grace_s=0.5) == (0, False)
    await_end_of(int((tmp_path / "log").read_text()))


def test_the_command_does_not_start_if_its_parent_has_died(tmp_path):
    guard = guarded(["touch", str(tmp_path / "touched")], 1)
    code = subprocess.run(guard, check=False).returncode
    assert code == (128 + signal.SIGTERM if sys.platform == "linux" else 0)
    assert (tmp_path / "touched").exists() == (code == 0)
