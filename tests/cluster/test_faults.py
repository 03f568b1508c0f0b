"""What ends a job on several nodes is named, and the job leaves nothing on any of them."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import NT3_SCRIPT, ROOT, await_end, wait_until
from tests.records import read_record

pytestmark = pytest.mark.cluster

HERE = Path(__file__).parent
START_S = 120
LIMIT_S = 30
"""A job must be gone from all nodes this long after a rank fails or a node is lost."""
PORT = "20500"
TRAINING = "--conv 4 20 1 --pool 10 --dense 8 --epochs 2000 --epochs_scaling weak --output_dir out"


class Job:
    """A job on several nodes, which nothing ends but a fault; `pids` are those of its ranks."""

    def __init__(self, nodes, process, directory):
        self._nodes, self.process, self._directory = nodes, process, directory

    def await_training(self, num_ranks):
        """Waits until all ranks train; they write a file each."""

        def all_train():
            words = [path.read_text().split() for path in self._directory.glob("rank*.phase")]
            return len(words) == num_ranks and {phase for _, phase in words} == {"train"}

        wait_until(all_train, START_S, self.process)
        files = [self._directory / f"rank{rank}.phase" for rank in range(num_ranks)]
        self.pids = [int(path.read_text().split()[0]) for path in files]

    def await_epoch(self):
        history = self._directory / "out/EXP000/RUN000/history.csv"
        wait_until(
            lambda: history.exists() and history.read_text().count("\n") > 1, START_S, self.process
        )

    def await_end(self):
        """Waits until nothing is left of the job; returns (exit code, output, record)."""
        deadline = time.monotonic() + LIMIT_S
        code, output = await_end(self.process, LIMIT_S)
        print(output)
        left = self._nodes.await_silence(deadline - time.monotonic())
        assert left == "", f"{left}\n{output}"
        for node in self._nodes.nodes:
            assert (node.shared_memory(), node.sessions()) == ([], [])
        return code, output, read_record(self._directory / "out/EXP000/RUN000/run.json")


@pytest.fixture
def soon(monkeypatch):
    """Ranks that are not heard from are given up sooner than by default."""
    monkeypatch.setenv("CANDLE_P1_SILENT_S", "6")


@pytest.fixture
def begin(cluster, start, tables, tmp_path, monkeypatch):
    """Returns a function that starts a job, and returns its nodes and the job."""

    def begin(*num_ranks_of_nodes, command=(HERE / "watched_run.py", *tables), wrap=list):
        monkeypatch.setenv("STEPS", "1000000")
        nodes = cluster(len(num_ranks_of_nodes))
        line = nodes.mpirun(num_ranks_of_nodes, *command, wrap=wrap)
        job = Job(nodes, start(line), tmp_path)
        job.await_training(sum(num_ranks_of_nodes))
        return nodes, job

    return begin


@pytest.fixture
def begin_training(begin, monkeypatch):
    """Returns a function that starts NT3 with its network and default time limits on two nodes."""
    monkeypatch.setenv("NT3_FOLDER", str(NT3_SCRIPT.parent))
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
    ("number", "how"), [(signal.SIGKILL, "died"), (signal.SIGABRT, "by itself")]
)
def test_a_rank_is_killed_on_another_node(begin, number, how):
    """MPI then ends the rank that communicated with it, on the node of the watchdog."""
    _, job = begin(2, 2)
    os.kill(job.pids[3], number)
    # While the watchdog looks for a cause, the launcher may kill all that could print the reason.
    assert how in assert_named(job, [3], "node2", is_printed=number != signal.SIGABRT)


@pytest.mark.parametrize(
    ("rank", "host", "why"), [(1, "node1", "SIGSTOP"), (3, "node3", "it is stopped")]
)
def test_a_rank_is_stopped(begin, soon, monkeypatch, rank, host, why):
    """The server sees the state of a process on its own node only."""
    monkeypatch.setenv("CANDLE_P1_STOPPED_S", "2")
    _, job = begin(2, 1, 1)
    os.kill(job.pids[rank], signal.SIGSTOP)
    assert why in assert_named(job, [rank], host)


def test_the_cable_of_a_node_is_pulled(begin, soon):
    nodes, job = begin(2, 2)
    nodes.cut(nodes.nodes[1])
    assert_named(job, [2, 3], "node2")


@pytest.mark.horovod
@pytest.mark.jax_engine
def test_a_rank_on_another_node_is_killed_while_gradients_are_averaged(begin_training):
    """The engine of the other rank may notice before the watchdog does, and fail."""
    _, job = begin_training()
    os.kill(job.pids[1], signal.SIGKILL)
    assert "died" in assert_named(job, [1], "node2")


@pytest.mark.horovod
def test_the_cable_of_a_node_is_pulled_while_gradients_are_averaged(begin_training):
    nodes, job = begin_training()
    nodes.cut(nodes.nodes[1])
    assert_named(job, [1], "node2")


def assert_ended(job):
    """Asserts that the job has failed, and that no rank is to blame; returns the reason."""
    code, _, record = job.await_end()
    assert code != 0
    assert record["status"] == "failed"
    assert record["failure"]["rank"] is None
    return record["failure"]["reason"]


@pytest.mark.parametrize("aborts", [False, True])
def test_the_watchdog_is_killed(begin, aborts):
    """The run ends, and its record is completed even if a rank ends at the same moment."""
    nodes, job = begin(2, 2)
    processes = nodes.nodes[0].processes()
    next(each for each in processes if "candle_p1.failure.server" in each.cmdline()).kill()
    if aborts:
        os.kill(job.pids[3], signal.SIGABRT)
    assert "nobody watched it any more" in assert_ended(job)


def in_script(command):
    """Returns the command that runs another one within a script, which remains its parent."""
    return ["sh", "-c", '"$@"; true', "sh", *command]


@pytest.mark.parametrize("victim", ["rank", "script"])
def test_the_launcher_is_stopped_and_a_process_dies(begin, victim):
    """Nobody else could end the job."""
    _, job = begin(2, 2, wrap=in_script)
    psutil.Process(job.process.pid).suspend()
    rank = psutil.Process(job.pids[1])
    (rank if victim == "rank" else rank.parent()).send_signal(signal.SIGBUS)
    code, _, record = job.await_end()
    assert code != 0
    assert record["status"] == "failed"
    assert record["failure"]["rank"] == (1 if victim == "rank" else None)


def test_the_node_of_rank_0_is_cut_off_and_rank_0_is_killed(begin):
    nodes, job = begin(2, 2)
    nodes.cut(nodes.nodes[0])
    os.kill(job.pids[0], signal.SIGKILL)
    assert_named(job, [0], "node1", is_printed=False)


def test_a_short_gap_of_the_network_is_survived(begin):
    """TCP repeats what was lost after twice as long each time: 13 s after the begin."""
    nodes, job = begin(2, 1)
    nodes.lose_packets(nodes.nodes[1], is_losing=True)
    time.sleep(6)
    nodes.lose_packets(nodes.nodes[1], is_losing=False)
    time.sleep(LIMIT_S - 6)
    assert job.process.poll() is None
    os.kill(job.pids[0], signal.SIGKILL)
    assert_named(job, [0], "node1")


def test_what_a_job_has_left_that_was_killed_as_a_whole_is_removed_by_the_next_one(
    begin, start, tables, monkeypatch
):
    nodes, _ = begin(2)
    (node,) = nodes.nodes
    for process in node.processes():
        process.suspend()
    for process in node.processes():
        process.kill()
    assert nodes.await_silence(LIMIT_S) == ""
    assert node.shared_memory()
    assert node.sessions()
    inside = Path(f"/proc/{node.pid}/root")
    for name in node.shared_memory():
        os.utime(inside / "dev/shm" / name, (0, 0))
    for name in node.sessions():
        os.utime(inside / node.temporary.relative_to("/") / name, (0, 0))
    monkeypatch.setenv("STEPS", "2")
    code, output = await_end(start(nodes.mpirun([2], HERE / "watched_run.py", *tables)), START_S)
    assert code == 0, output
    assert (node.shared_memory(), node.sessions()) == ([], [])


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
