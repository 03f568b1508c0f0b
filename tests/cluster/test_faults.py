"""What ends a job on several nodes is named, and the job leaves nothing on any of them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import ROOT, await_end, wait_until
from tests.records import read_record

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
START_S = 120
LIMIT_S = 30
"""A job must be gone from all nodes this long after a rank fails or a node is lost."""
PORT = "20500"
TRAINING = "--conv 4 20 1 --pool 10 --dense 8 --epochs 2000 --epochs_scaling weak --output_dir out"


class Job:
    """A job on several nodes, which nothing ends but a fault.

    Args:
        nodes: The cluster.
        process: The launcher.
        directory: Where it runs.

    Attributes:
        pids: The process ids of the ranks, once `await_training` has returned.
    """

    def __init__(self, nodes, process, directory) -> None:
        self._nodes, self._process, self._directory = nodes, process, directory
        self.pids: list[int] = []

    def await_training(self, num_ranks):
        """Waits until all ranks train; they write a file each."""
        wait_until(lambda: self._find(num_ranks), START_S, self._process)

    def await_epoch(self):
        """Waits until the ranks have trained for an epoch."""
        history = self._directory / "out/EXP000/RUN000/history.csv"
        wait_until(history.exists, START_S, self._process)

    def _find(self, num_ranks):
        self.pids = []
        with suppress(FileNotFoundError):
            for rank in range(num_ranks):
                pid, phase = (self._directory / f"rank{rank}.phase").read_text().split()
                self.pids += [int(pid)] if phase == "train" else []
        return len(self.pids) == num_ranks

    def await_end(self):
        """Waits until nothing is left of the job; returns (exit code, output, record)."""
        deadline = time.monotonic() + LIMIT_S
        code, output = await_end(self._process, LIMIT_S)
        print(output)
        left = self._nodes.await_silence(deadline - time.monotonic())
        assert left == "", f"{left}\n{output}"
        assert [node.shared_memory() for node in self._nodes.nodes] == [[]] * len(self._nodes.nodes)
        return code, output, read_record(self._directory / "out/EXP000/RUN000/run.json")


@pytest.fixture
def soon(monkeypatch):
    """Ranks that are not heard from are given up sooner than by default."""
    monkeypatch.setenv("CANDLE_P1_SILENT_S", "6")


@pytest.fixture
def begin(cluster, start, tables, tmp_path, monkeypatch):
    """Returns a function that starts a job, and returns its nodes and the job."""

    def begin(*num_ranks_of_nodes, command=(HERE / "watched_run.py", *tables)):
        monkeypatch.setenv("STEPS", "1000000")
        nodes = cluster(len(num_ranks_of_nodes))
        job = Job(nodes, start(nodes.mpirun(num_ranks_of_nodes, *command)), tmp_path)
        job.await_training(sum(num_ranks_of_nodes))
        return nodes, job

    return begin


@pytest.fixture
def begin_training(begin, nt3_script, monkeypatch):
    """Returns a function that starts NT3 with its network and default time limits on two nodes."""
    monkeypatch.setenv("NT3_FOLDER", str(nt3_script.parent))
    script = ROOT / "tests/integration/faulty_nt3.py"

    def begin_training():
        nodes, job = begin(1, 1, command=(script, *TRAINING.split()))
        job.await_epoch()
        return nodes, job

    return begin_training


def assert_named(job, ranks, host, *, is_printed=True):
    """Asserts that one of these ranks is named as the one that failed; returns the reason."""
    code, output, record = job.await_end()
    assert code != 0
    failure = record["failure"]
    assert record["status"] == "failed"
    assert failure["rank"] in ranks
    assert (failure["host"], failure["pid"]) == (host, job.pids[failure["rank"]])
    assert failure["phase"].startswith("train")
    assert failure["steps"] > 0
    # A launcher that cannot end is killed, maybe before it has passed the ranks' last words on.
    named = f"rank {failure['rank']} (host {host}, pid {failure['pid']})"
    assert named in output or not is_printed or code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return failure["reason"]


@pytest.mark.parametrize(
    ("number", "how"),
    [(signal.SIGKILL, "died"), (signal.SIGSEGV, "died"), (signal.SIGABRT, "by itself")],
)
def test_a_rank_is_killed_on_another_node(begin, number, how):
    """MPI then ends the rank that communicated with it, on the node of the watchdog."""
    _, job = begin(2, 2)
    os.kill(job.pids[3], number)
    # While the watchdog looks for a cause, the launcher may kill all that could print the reason.
    assert how in assert_named(job, [3], "node2", is_printed=number != signal.SIGABRT)


def test_a_rank_is_stopped_that_has_a_neighbour(begin, monkeypatch):
    monkeypatch.setenv("CANDLE_P1_STOPPED_S", "4")
    _, job = begin(2, 2)
    os.kill(job.pids[3], signal.SIGSTOP)
    assert "SIGSTOP" in assert_named(job, [3], "node2")


def test_a_rank_is_stopped_that_is_alone_on_its_node(begin, soon):
    _, job = begin(2, 1, 1)
    os.kill(job.pids[3], signal.SIGSTOP)
    assert_named(job, [3], "node3")


def test_the_cable_of_a_node_is_pulled(begin, soon):
    nodes, job = begin(2, 2)
    nodes.cut(nodes.nodes[1])
    assert_named(job, [2, 3], "node2")


def test_the_network_drops_the_packets_of_a_node(begin, soon):
    nodes, job = begin(2, 1, 1)
    nodes.nodes[2].drop_all()
    assert_named(job, [3], "node3")


@pytest.mark.horovod
@pytest.mark.jax_engine
def test_a_rank_on_another_node_is_killed_while_gradients_are_averaged(begin_training):
    """The engine of the other rank may notice before the watchdog does, and fail."""
    _, job = begin_training()
    os.kill(job.pids[1], signal.SIGKILL)
    assert "died" in assert_named(job, [1], "node2")


@pytest.mark.horovod
@pytest.mark.jax_engine
def test_the_cable_of_a_node_is_pulled_while_gradients_are_averaged(begin_training):
    nodes, job = begin_training()
    nodes.cut(nodes.nodes[1])
    assert_named(job, [1], "node2")


@pytest.mark.parametrize("silently", [False, True], ids=["refused", "dropped"])
def test_a_firewall_keeps_ranks_from_the_watchdog(
    cluster, start, tables, tmp_path, monkeypatch, silently
):
    """No run begins that nobody could watch; the message says what is closed and what to do."""
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("CANDLE_P1_WATCHDOG_PORT", PORT)
    nodes = cluster(2)
    first = nodes.nodes[0]
    first.reject("--dport", PORT, silently=silently)
    command = nodes.mpirun([2, 2], HERE / "watched_run.py", *tables)
    begin_s = time.monotonic()
    code, output = await_end(start(command), LIMIT_S)
    print(output)
    assert code == 2
    assert output.count("error: ") == 1
    for part in (first.address, PORT, "CANDLE_P1_WATCHDOG_PORT", "CANDLE_P1_WATCHDOG=off"):
        assert part in output
    assert nodes.await_silence(begin_s + LIMIT_S - time.monotonic()) == ""
    assert [node.shared_memory() for node in nodes.nodes] == [[], []]
    assert not list(tmp_path.rglob("run.json"))

    monkeypatch.setenv("CANDLE_P1_WATCHDOG", "off")
    code, output = await_end(start(command), LIMIT_S)
    assert code == 0, output
    (record,) = tmp_path.rglob("run.json")
    assert read_record(record)["status"] == "ok"
