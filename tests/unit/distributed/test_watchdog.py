"""Where the watchdog listens, how ranks find it, and what the user is told if they do not."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest

from candle_p1.distributed import watchdog
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DistributedError, SetupError
from candle_p1.failure import protocol
from candle_p1.failure.connections import MIN_STRANGERS, SPARE_FILES
from candle_p1.failure.diagnosis import may_have_lost_peer
from candle_p1.failure.protocol import WELCOME, Endpoint, expect_answers
from candle_p1.records.record import make_record, write_record
from tests.conftest import wait_until
from tests.records import RUNNING, read_record
from tools.simulated import WHOLE_RUN, SimulatedJob

TAKEN = SPARE_FILES + MIN_STRANGERS
HELLO = {"rank": 0, "host": "x", "pid": 1}
OF_ONE_RANK = RUNNING | {"num_ranks": 1}


def test_a_limit_of_open_files_that_is_too_low_for_all_ranks_is_refused():
    watchdog.check_file_limit(4096, -1)
    watchdog.check_file_limit(4096, 4096 + TAKEN)
    with pytest.raises(SetupError, match=r"ulimit -Hn.*4096 ranks.*CANDLE_P1_WATCHDOG=off"):
        watchdog.check_file_limit(4096, 4095 + TAKEN)


@pytest.mark.parametrize(
    ("variable", "text", "read"),
    [
        (watchdog.OFF_VARIABLE, "of", watchdog.is_off),
        (watchdog.INTERFACE_VARIABLE, "ib7", lambda: watchdog.addresses("ib7")),
        (watchdog.INTERFACE_VARIABLE, "::1", lambda: watchdog.addresses("::1")),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch, variable, text, read):
    monkeypatch.setenv(variable, text)
    with pytest.raises(SetupError, match=f"{variable}='{text}': "):
        read()


def test_the_interface_can_be_chosen_by_name_or_address():
    assert watchdog.addresses("lo") == watchdog.addresses("127.0.0.1") == ["127.0.0.1"]
    assert "127.0.0.1" not in watchdog.addresses("")


@pytest.fixture
def listener():
    """A socket that listens, and a port on which nobody does."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield listener, unused.getsockname()[1]


def test_an_address_that_answers_is_found_among_others(listener, monkeypatch):
    """Others refuse, are unknown, or do not answer at all, as behind a firewall."""
    monkeypatch.setattr(protocol, "CONNECT_S", 600)
    listener, _ = listener

    def welcome():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(WELCOME)

    thread = threading.Thread(target=welcome)
    thread.start()
    port = listener.getsockname()[1]
    addresses = ["192.0.2.1", "no.such.name.invalid", "127.0.0.2", "127.0.0.1"]
    with protocol.connect(Endpoint(addresses, port, "token"), HELLO) as connection:
        assert connection.getpeername() == ("127.0.0.1", port)
        options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        found = [connection.getsockopt(socket.IPPROTO_TCP, each) for each in options]
        assert found == [20_000, 5, 5]
    thread.join()


def test_the_error_names_every_address_and_why_it_failed(listener, monkeypatch):
    monkeypatch.setattr(protocol, "CONNECT_S", 0.2)
    monkeypatch.setattr(protocol, "LIMIT_S", 0.5)
    listener, port = listener
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Connection refused"):
        protocol.connect(Endpoint(["127.0.0.1"], port), HELLO)
    silent = listener.getsockname()[1]
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{silent}: timed out"):
        protocol.connect(Endpoint(["127.0.0.1"], silent), HELLO)


def test_a_port_that_is_taken_is_named(listener, monkeypatch, tmp_path):
    port = listener[0].getsockname()[1]
    monkeypatch.setenv(watchdog.PORT_VARIABLE, str(port))
    with pytest.raises(SetupError, match=rf"port {port} at 127\.0\.0\.1: Address already in use"):
        watchdog.watch(SerialCommunicator(), tmp_path / "run.json")


def test_an_error_of_many_ranks_names_the_first_and_reaches_each_of_them_once(monkeypatch):
    def connect(*_):
        raise OSError("no answer")

    def work(comm):
        text = r"^rank 0 \(host .*no answer\), and neither can 63 more of 64 ranks\. .* runs, .*"
        text += f"{watchdog.PORT_VARIABLE}.*{watchdog.OFF_VARIABLE}=off"
        with pytest.raises(DistributedError, match=text):
            watchdog._connect(comm, Endpoint(), [server])

    monkeypatch.setattr(protocol, "connect", connect)
    job = SimulatedJob(64, ranks_per_node=8)
    with subprocess.Popen(["sleep", "60"]) as server:
        job.run(work)
    assert server.returncode == -signal.SIGKILL
    assert job.traffic[WHOLE_RUN][1:, 1].max() < 500


@pytest.mark.parametrize(("limit_s", "limit_ms"), [(1e9, 2**31 - 1), (1e-4, 1)])
def test_limits_that_the_kernel_does_not_take_are_moved_to_those_that_it_does(limit_s, limit_ms):
    with socket.socket() as connection:
        expect_answers(connection, limit_s)
        option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert option == limit_ms


RUN = """
import ctypes, os, pathlib, sys, time
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.watchdog import watch
from candle_p1.failure import agent
from candle_p1.failure.rank_log import output_to_file

agent.UNWIND_S = 20.0  # on a busy machine, too, the server is in time to say why
record, what = pathlib.Path(sys.argv[1]), sys.argv[2]
watchdog = watch(SerialCommunicator(), record)
watchdog.report_record(record)
watchdog.report_phase(("train",))
for _ in range(3):
    watchdog.count_steps(1)
with output_to_file(record.parent / "rank.log"):
    print("last words")  # not flushed
    os.write(3, b"%d\\n" % (watchdog._server.pid if watchdog._server else 0))
    if what == "error":
        told = watchdog.report_error("ValueError: no", "Traceback")
        watchdog.close()
        sys.exit(5 if told else 6)
    if what == "aborts":  # as a library does that has lost a peer
        ctypes.CDLL(None).abort()
    if what == "stuck":  # in a call that signals do not interrupt, like a collective
        mutex = ctypes.create_string_buffer(64)
        while True:
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    time.sleep(600)  # until it is killed
"""
ENDS = {
    **{f"on orphan-{n}": ("failed", "nobody watched it any more", 3) for n in (9, 19)},
    "on killed": ("failed", "rank 0 .* died during train", -9),
    "on aborts": ("failed", "rank 0 .* ended during train by itself", -6),
    "on stuck": ("interrupted", "SIGTERM", 143),
    "on error": ("failed", "ValueError: no", 5),
    "off stuck": ("interrupted", "SIGTERM", 143),
    "off error": ("failed", "ValueError: no", 5),
}


def test_the_record_says_how_a_process_ended(tmp_path):
    """With the watchdog and, as far as possible, without it; all at the same time."""
    processes = {}
    for name in ENDS:
        record = tmp_path / name / "run.json"
        record.parent.mkdir()
        write_record(record, make_record(OF_ONE_RANK))
        on, what = name.split()
        settings = {"CANDLE_P1_STOPPED_S": "1"} if "orphan" in name else {}
        command = [sys.executable, "-c", RUN, str(record), what]
        with (record.parent / "errors").open("wb") as errors:
            processes[name] = subprocess.Popen(
                ["bash", "-c", 'exec "$@" 3>&1', "bash", *command],
                env=os.environ | settings | {watchdog.OFF_VARIABLE: on},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
    for name, process in processes.items():
        server = int(process.stdout.readline())
        if "orphan" in name:  # the watchdog dies or is stopped
            os.kill(server, int(name.partition("-")[2]))
        elif not any(what in name for what in ("error", "aborts")):
            process.send_signal(signal.SIGKILL if "killed" in name else signal.SIGTERM)
    for name, process in processes.items():
        status, reason, code = ENDS[name]
        process.communicate(timeout=30)
        errors = (tmp_path / name / "errors").read_text()
        assert process.returncode == code, errors
        path = tmp_path / name / "run.json"
        wait_until(lambda path=path: read_record(path)["status"] != "running", 20)
        record = read_record(path)
        assert record["status"] == status, name
        failure = record["failure"]
        rank, phase = (None, None) if "orphan" in name else (0, "train")
        assert (failure["rank"], failure.get("phase"), failure["steps"]) == (rank, phase, 3)
        assert re.search(reason, failure["reason"])
        if "orphan" in name:
            assert f"the watchdog (host {socket.gethostname()}, pid " in errors, name
        if code in (5, 143):  # told on the screen, and nothing of the log is lost
            assert errors.count("the job ends: ") == 1, name
            assert (tmp_path / name / "rank.log").read_text() == "last words\n", name


def test_a_run_without_the_watchdog_says_so_and_completes_no_record_before_it_knows_which(
    tmp_path, monkeypatch
):
    """The one that was expected may be another job's."""
    monkeypatch.setenv(watchdog.OFF_VARIABLE, "off")
    record = tmp_path / "run.json"
    write_record(record, make_record(OF_ONE_RANK))
    agent = watchdog.watch(SerialCommunicator(), record)
    assert [watchdog.OFF_VARIABLE in each for each in agent.warnings] == [True]
    agent.report_error("no")
    assert read_record(record)["status"] == "running"
    agent.report_record(record)
    wait_until(lambda: read_record(record)["status"] == "failed", 20)
    agent.close()


@pytest.mark.parametrize(
    ("message", "may_have"),
    [
        ("JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport", True),
        ("Read error [127.0.0.1]:12678: Connection reset by peer", True),
        ("JaxRuntimeError: UNAVAILABLE: Failed to send RPC to coordination service.", True),
        ("UnknownError: {{function_node __inference}} Horovod has been shut down.", True),
        ("Exception: MPI_ERR_PROC_FAILED: Process Failure", True),
        ("Exception: MPI_ERR_OTHER: known error not in list", True),
        ("XlaRuntimeError: INTERNAL: NCCL operation ncclGroupEnd() failed", True),
        ("JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.", False),
    ],
)
def test_an_error_that_another_ranks_end_may_explain_is_known(message, may_have):
    assert may_have_lost_peer(message) == may_have
