"""What ends a job on several nodes is named, and the job leaves nothing on any of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import await_end, wait_until
from tests.records import read_record

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
START_S = 60
LIMIT_S = 30
"""A job must be gone from all nodes this long after a rank fails or a node is lost."""
PORT = "20500"


class Job:
    """A job on several nodes, which nothing ends but a fault.

    Args:
        nodes: The cluster.
        start: Starts a command.
        command: The command.
        directory: Where it runs.
        num_ranks: The number of its ranks.
    """

    def __init__(self, nodes, start, command, directory, num_ranks) -> None:
        self._nodes, self._directory = nodes, directory
        self._process = start(command)
        self.pids = wait_until(lambda: self._find(num_ranks), START_S, self._process)

    def _find(self, num_ranks):
        try:
            paths = [self._directory / f"rank{rank}.pid" for rank in range(num_ranks)]
            return [int(path.read_text()) for path in paths]
        except FileNotFoundError:
            return None

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
def begin(cluster, start, tables, tmp_path, monkeypatch):
    """Returns a function that starts a job, and returns its nodes and the job."""

    def begin(*num_ranks_of_nodes):
        monkeypatch.setenv("STEPS", "1000000")
        nodes = cluster(len(num_ranks_of_nodes))
        command = nodes.mpirun(num_ranks_of_nodes, HERE / "watched_run.py", *tables)
        return nodes, Job(nodes, start, command, tmp_path, sum(num_ranks_of_nodes))

    return begin


def assert_named(job, rank, host):
    """Asserts that a rank is named as the one that failed, in the record and on the screen."""
    code, output, record = job.await_end()
    assert code != 0
    failure = record["failure"]
    assert record["status"] == "failed"
    assert (failure["rank"], failure["host"]) == (rank, host), failure
    assert failure["phase"] == "train"
    assert failure["steps"] > 0
    assert f"rank {rank} (host {host}, pid {job.pids[rank]})" in output
    return failure["reason"]


def test_a_rank_is_killed_on_another_node(begin):
    _, job = begin(2, 2)
    os.kill(job.pids[3], signal.SIGKILL)
    assert "died" in assert_named(job, 3, "node2")


def test_a_rank_is_stopped_that_has_a_neighbour(begin):
    _, job = begin(2, 2)
    os.kill(job.pids[3], signal.SIGSTOP)
    assert "SIGSTOP" in assert_named(job, 3, "node2")


def test_a_rank_is_stopped_that_is_alone_on_its_node(begin):
    _, job = begin(2, 1, 1)
    os.kill(job.pids[3], signal.SIGSTOP)
    assert_named(job, 3, "node3")


@pytest.mark.parametrize("num_ranks_of_nodes", [(2, 2), (2, 1, 1)])
def test_the_cable_of_a_node_is_pulled(begin, num_ranks_of_nodes):
    nodes, job = begin(*num_ranks_of_nodes)
    nodes.cut(nodes.nodes[1])
    assert_named(job, 2, "node2")


def test_the_network_drops_the_packets_of_a_node(begin):
    nodes, job = begin(2, 1, 1)
    nodes.nodes[2].drop_all()
    assert_named(job, 3, "node3")


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
