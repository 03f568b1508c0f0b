"""Failing jobs end soon and with a code other than 0, leave no process, and say what happened."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.conftest import CANDLE_P1, NT3_SCRIPT, await_end, wait_until
from tests.records import read_record

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).parent / "faulty_nt3.py"
LIMIT_S = 30
"""A job must be gone this long after a rank fails."""
START_S = 120
FLAGS = ["--epochs", "2000", "--epochs_scaling", "weak", "--output_dir", "out"]
SMALL = ["--conv", "4", "20", "1", "--pool", "10", "--dense", "8"]


@pytest.fixture
def job(mpirun, start, monkeypatch):
    """Starts the script with a fault."""

    def job(fault, *flags, num_ranks=2):
        monkeypatch.setenv("NT3_FOLDER", str(NT3_SCRIPT.parent))
        monkeypatch.setenv("FAULT", fault)
        command = [SCRIPT, *FLAGS, *SMALL, *flags]
        line = mpirun(num_ranks, *command) if num_ranks > 1 else [sys.executable, *command]
        return start(line)

    return job


def pid_in_phase(process, directory, rank, phase):
    """Waits until a rank enters a phase; returns its process id."""

    def entered():
        try:
            pid, now = (directory / f"rank{rank}.phase").read_text().split()
        except FileNotFoundError:
            return None
        return int(pid) if now == phase else None

    return wait_until(entered, START_S, process)


def end_of(process, directory):
    """Waits until no process of a job is left; returns (exit code, output, record)."""
    family = []
    with suppress(psutil.NoSuchProcess):  # it may have ended already
        family = psutil.Process(process.pid).children(recursive=True)
    start = time.monotonic()
    code, output = await_end(process, LIMIT_S)
    print(output)
    wait_until(
        lambda: not any(each.is_running() for each in [*family, *watchdogs(directory)]),
        LIMIT_S - (time.monotonic() - start),
    )
    return code, output, read_record(directory / "out/EXP000/RUN000/run.json")


def watchdogs(directory):
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "candle_p1.failure.server" in (line := process.info["cmdline"] or [])
        and any(str(directory) in word for word in line)
    ]


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("num_ranks", "rank", "phase", "fault", "epochs"),
    [
        pytest.param(2, 0, "train", "-1::", 2000, marks=pytest.mark.jax_engine),
        (2, 1, "broadcast/wait", "0:build:sleep", 2),
        (2, 1, "report", "1:report:sleep", 2),
        (1, 0, "train", "-1::", 2000),
    ],
)
def test_a_killed_rank_is_named(job, tmp_path, num_ranks, rank, phase, fault, epochs):
    """With Horovod, test_installation.py kills rank 1 of two while it trains."""
    process = job(fault, "--epochs", epochs, num_ranks=num_ranks)
    victim = pid_in_phase(process, tmp_path, rank, phase)
    history = tmp_path / "out/EXP000/RUN000/history.csv"
    if phase == "train":
        wait_until(
            lambda: history.exists() and history.read_text().count("\n") > 2, START_S, process
        )
    os.kill(victim, signal.SIGKILL)
    code, output, record = end_of(process, tmp_path)
    assert code != 0
    if num_ranks > 1:  # otherwise nobody is left to print it
        assert f"rank {rank} (host {record['failure']['host']}, pid {victim})" in output
    assert (record["status"], record["failure"]["rank"]) == ("failed", rank)
    assert record["failure"]["phase"].startswith(phase)
    assert ("accuracy" in record.get("quality", {})) == (phase == "report")
    if phase == "train":  # what was measured until then is kept
        epochs = record["training"]["epochs"]
        losses = np.loadtxt(history, delimiter=",", skiprows=1, usecols=3, ndmin=1)
        assert [each["metrics"]["loss"] for each in epochs] == list(losses[: len(epochs)])
        assert epochs[-1]["train"]["max_s"] < record["known_until_s"]
        assert "load" in record["phases"]
        assert "total_s" not in record


@pytest.mark.parallel
def test_an_exception_on_one_rank(job, tmp_path):
    process = job("1:train:raise")
    pid_in_phase(process, tmp_path, 1, "train")
    code, output, record = end_of(process, tmp_path)
    assert code != 0
    assert (record["status"], record["failure"]["rank"]) == ("failed", 1)
    assert "rank 1" in output
    assert "ValueError: planted" in output
    assert "ValueError: planted" in record["failure"]["reason"]
    assert "Traceback" in record["failure"]["traceback"]


@pytest.mark.parallel
@pytest.mark.horovod
@pytest.mark.jax_engine
def test_a_stalled_collective_ends_by_itself(job, tmp_path, monkeypatch):
    """By Horovod's own limit, or, with the other engine, by the watchdog's."""
    if not find_spec("horovod"):
        monkeypatch.setenv("CANDLE_P1_HUNG_S", "4")
    process = job("1:train:sleep", "--stall_shutdown_s", "4")
    pid_in_phase(process, tmp_path, 0, "train")
    code, output, record = end_of(process, tmp_path)
    assert code != 0
    assert "rank 1" in output
    assert (record["status"], record["failure"]["rank"]) == ("failed", 1)
    assert record["failure"]["phase"] == "train"


def test_ctrl_c_that_a_library_turned_into_an_error_is_an_interruption(job, tmp_path):
    process = job("0:train:turn Ctrl-C into an error", num_ranks=1)
    code, _, record = end_of(process, tmp_path)
    assert code != 0
    assert record["status"] == "interrupted"
    assert "SIGINT" in record["failure"]["reason"]


@pytest.mark.parallel
def test_bad_data_gives_one_message_with_file_and_line(mpirun, execute, tmp_path):
    (tmp_path / "train.csv").write_text("1,2,3\n0,1,1\n1,x,2\n")
    (tmp_path / "test.csv").write_text("1,2,3\n0,1,1\n")
    flags = ["--train_data", "train.csv", "--test_data", "test.csv", "--output_dir", "out"]
    code, output = execute(mpirun(2, NT3_SCRIPT, *flags, "--epochs", "2"))
    assert code == 2, output
    assert output.count("error: ") == 1
    assert f"{tmp_path}/train.csv, line 3, column 2: " in output
    record = read_record(tmp_path / "out/EXP000/RUN000/run.json")
    assert record["status"] == "failed"
    assert "line 3" in record["failure"]["reason"]


FULL_DISK = """
mount -t tmpfs -o size=300k tmpfs small || exit 77
(until [ -e small/run.json ] && [ -e small/history.csv ]; do sleep 0.1; done
 dd if=/dev/zero of=small/fill bs=1k) > /dev/null 2>&1 &
cd small && "$@"
code=$?
cp run.json ..; ls -A > ../files
exit $code
"""


@pytest.mark.parallel
def test_a_full_disk_is_one_message_and_is_recorded(mpirun, execute, tmp_path):
    (tmp_path / "small").mkdir()
    argv = [NT3_SCRIPT, *SMALL, "--epochs", "100000", "--epochs_scaling", "weak"]
    line = mpirun(2, *argv, "--output_dir", ".")
    namespace = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "mount", "-t", "tmpfs", "x", tmp_path], check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    code, output = execute([*namespace, "bash", "-c", FULL_DISK, "bash", *line])
    print(output)
    assert code not in (0, 77)
    assert output.count("No space left on device") == 1
    assert "Traceback" not in output
    record = read_record(tmp_path / "run.json")
    assert (record["status"], record["failure"]["rank"]) == ("failed", 0)
    assert "No space left on device" in record["failure"]["reason"]
    assert ".run.json.reserved" not in (tmp_path / "files").read_text().split()


def shown_until(terminal, text=None):
    """Returns what a terminal shows until some text, or until nobody writes to it any more."""
    deadline = time.monotonic() + START_S
    shown = b""
    with suppress(OSError):
        while (text is None or text not in shown) and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1.0)[0]:
                shown = shown[-10_000:] + os.read(terminal, 65536)
    return shown


@pytest.mark.parallel
def test_ctrl_c_in_a_terminal_is_one_message_and_shows_the_cursor(mpirun, environment, tmp_path):
    flags = [*SMALL, "--epochs", "100000", "--epochs_scaling", "weak", "--output_dir", "."]
    command = [*CANDLE_P1, "run", "nt3", "--np", "2", "--", *flags]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(command[0], command)
    shown_until(terminal, b"/100000")
    os.write(terminal, b"\x03")
    shown = shown_until(terminal)
    os.close(terminal)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, LIMIT_S)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGINT
    assert shown.count(b"interrupted") == 1
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
    wait_until(lambda: not watchdogs(tmp_path), LIMIT_S)
    record = read_record(tmp_path / "run.json")
    assert record["status"] == "interrupted"
    assert "SIG" in record["failure"]["reason"]
