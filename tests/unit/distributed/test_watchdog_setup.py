"""Where the watchdog listens, how ranks find it, and what the user is told if they do not."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from candle_p1.distributed import job_guard, rank_log
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.watchdog import client, listening, settings
from candle_p1.distributed.watchdog.connections import SPARE_FILES
from candle_p1.distributed.watchdog.protocol import WELCOME, expect_answers
from candle_p1.distributed.watchdog.start import MIN_STRANGERS, Station, group_size
from candle_p1.errors import DistributedError, SetupError
from candle_p1.records.record import make_record, write_record
from tests.conftest import wait_until
from tests.records import RUNNING, read_record
from tools.simulated import WHOLE_RUN, SimulatedJob

TAKEN = SPARE_FILES + MIN_STRANGERS
HELLO = {"rank": 0, "host": "x", "pid": 1}
OF_ONE_RANK = RUNNING | {"num_ranks": 1}


@pytest.mark.parametrize(
    ("num_ranks", "wanted", "max_files", "local_size", "group", "warned"),
    [
        (1, 512, 1024, 1, 512, False),
        (512, 512, 1024, 6, 512, False),
        (4096, 512, 4096, 6, 510, False),
        (4096, 512, 4096, 64, 512, False),
        (4096, 512, 4096, 600, 512, False),
        (10, 3, 1024, 10, 3, False),
        (512, 512, TAKEN + 100, 4, 92, True),
        (512, 4096, -1, 4, 512, False),
    ],
)
def test_ranks_are_watched_in_groups_that_open_files_suffice_for(
    num_ranks, wanted, max_files, local_size, group, warned
):
    found, warnings = group_size(num_ranks, wanted, max_files, local_size)
    assert (found, bool(warnings)) == (group, warned)
    if max_files > 0 and num_ranks > found:
        assert found + (num_ranks - 1) // found <= max_files - TAKEN


def test_too_few_open_files_for_any_group_are_refused():
    with pytest.raises(SetupError, match=r"ulimit -Hn.*4096 ranks.*CANDLE_P1_WATCHDOG=off"):
        group_size(4096, 512, TAKEN + 100, 1)


@pytest.mark.parametrize(
    ("variable", "text", "read"),
    [
        (settings.OFF_VARIABLE, "of", settings.is_off),
        (settings.INTERFACE_VARIABLE, "ib7", lambda: settings.addresses(settings.interface())),
        (settings.INTERFACE_VARIABLE, "::1", lambda: settings.addresses(settings.interface())),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch, variable, text, read):
    monkeypatch.setenv(variable, text)
    with pytest.raises(SetupError, match=f"{variable}='{text}': "):
        read()


def test_the_interface_can_be_chosen_by_name_or_address():
    assert settings.addresses("lo") == settings.addresses("127.0.0.1") == ["127.0.0.1"]
    assert "127.0.0.1" not in settings.addresses("")


@pytest.fixture
def listener():
    """A socket that listens, and a port on which nobody does."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield listener, unused.getsockname()[1]


def test_an_address_that_answers_is_found_among_others(listener, monkeypatch):
    """Others refuse, are unknown, or do not answer at all, as behind a firewall."""
    monkeypatch.setattr(listening, "CONNECT_S", 600)
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
    with listening.connect(addresses, port, "token", HELLO, 20) as connection:
        assert connection.getpeername() == ("127.0.0.1", port)
        options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        found = [connection.getsockopt(socket.IPPROTO_TCP, each) for each in options]
        assert found == [20_000, 5, 5]
    thread.join()


def test_names_are_not_looked_up_if_a_number_can_be_reached(monkeypatch):
    tried = []

    def reach(addresses, port, errors):
        tried.extend(addresses)
        if "127.0.0.1" in addresses:
            yield "127.0.0.1", socket.socket()

    monkeypatch.setattr(listening, "_reach", reach)
    monkeypatch.setattr(listening, "_greet", lambda *arguments: None)
    listening.connect(["a.name", "127.0.0.1"], 1, "token", HELLO, 20).close()
    assert tried == ["127.0.0.1"]


def test_the_error_names_every_address_and_why_it_failed(listener, monkeypatch):
    monkeypatch.setattr(listening, "CONNECT_S", 0.2)
    monkeypatch.setattr(listening, "ANSWER_S", 0.2)
    monkeypatch.setattr(listening, "LIMIT_S", 0.5)
    listener, port = listener
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Connection refused"):
        listening.connect(["127.0.0.1"], port, "token", HELLO, 20)
    silent = listener.getsockname()[1]
    with pytest.raises(OSError, match=rf"127\.0\.0\.1:{silent}: timed out"):
        listening.connect(["127.0.0.1"], silent, "token", HELLO, 20)


def test_a_port_that_is_taken_is_named(listener, monkeypatch, tmp_path):
    port = listener[0].getsockname()[1]
    monkeypatch.setenv(settings.PORT_VARIABLE, str(port))
    with pytest.raises(SetupError, match=rf"port {port} at 127\.0\.0\.1: Address already in use"):
        client.watch(SerialCommunicator(), tmp_path / "run.json")


def test_a_rank_that_cannot_connect_is_named_with_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(listening, "LIMIT_S", 0.1)
    monkeypatch.setattr(listening, "WELCOME", b"hello")
    expected = rf"rank 0 \(host {socket.gethostname()}\) cannot connect .*127\.0\.0\.1:[0-9]+: "
    with pytest.raises(DistributedError, match=expected) as caught:
        client.watch(SerialCommunicator(), tmp_path / "run.json")
    assert settings.PORT_VARIABLE in str(caught.value)
    assert settings.OFF_VARIABLE in str(caught.value)


RUN = """
import ctypes, os, pathlib, sys, time
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.job_guard import Trouble
from candle_p1.distributed.rank_log import output_to_file
from candle_p1.distributed.watchdog.client import watch

record = pathlib.Path(sys.argv[1])
watchdog = watch(SerialCommunicator(), record)
watchdog.report_record(record)
watchdog.report_phase(("train",))
for _ in range(3):
    watchdog.count_step()
print("ready", *watchdog.warnings, flush=True)
if sys.argv[2] == "error":
    print(watchdog.report_error("ValueError: no", "Traceback"))
    watchdog.close()
    sys.exit(5)
if sys.argv[2] == "trouble":
    with output_to_file(record.parent / "rank.log"):
        print("last words", flush=True)
        watchdog._report_trouble(Trouble("died", 7, is_launcher=True))
if sys.argv[2] == "aborts":  # as a library does that has lost a peer
    ctypes.CDLL(None).abort()
if sys.argv[2] == "stuck":  # in a call that signals do not interrupt, like a collective
    mutex = ctypes.create_string_buffer(64)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
time.sleep(600)
"""
ENDS = {
    "on killed": ("failed", "rank 0 .* died during train", -9),
    "on aborts": ("failed", "rank 0 .* ended during train by itself", -6),
    "on terminated": ("interrupted", "SIGTERM", 143),
    "on error": ("failed", "ValueError: no", 5),
    "off terminated": ("interrupted", "SIGTERM", 143),
    "off stuck": ("interrupted", "SIGTERM", 143),
    "off trouble": ("failed", "the launcher .*pid 7. died", 3),
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
        command = [sys.executable, "-c", RUN, str(record), what]
        environment = os.environ | {settings.OFF_VARIABLE: on}
        with (record.parent / "errors").open("wb") as errors:
            processes[name] = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )
    for name, process in processes.items():
        line = process.stdout.readline()
        assert line.startswith("ready")
        assert ("nobody watches" in line) == name.startswith("off"), line
        if not any(what in name for what in ("error", "trouble", "aborts")):
            process.send_signal(signal.SIGKILL if "killed" in name else signal.SIGTERM)
    for name, process in processes.items():
        status, reason, code = ENDS[name]
        process.communicate(timeout=30)
        errors = (tmp_path / name / "errors").read_text()
        assert process.returncode == code, errors
        record = wait_for_end(tmp_path / name / "run.json")
        assert record["status"] == status, name
        assert record["failure"]["steps"] == 3
        rank = None if "trouble" in name else 0
        assert (record["failure"].get("rank"), record["failure"]["phase"]) == (rank, "train")
        assert re.search(reason, record["failure"]["reason"])
        if "trouble" in name:  # told on the screen, and nothing of the log is lost
            assert "the job ends: " in errors
            assert (tmp_path / name / "rank.log").read_text() == "last words\n"


def test_an_unwatched_rank_completes_no_record_before_it_knows_which(tmp_path, monkeypatch):
    """The one that was expected may be another job's."""
    monkeypatch.setenv(settings.OFF_VARIABLE, "off")
    record = tmp_path / "run.json"
    write_record(record, make_record(OF_ONE_RANK))
    unwatched = client.watch(SerialCommunicator(), record)
    unwatched.report_error("no")
    assert read_record(record)["status"] == "running"
    unwatched.report_record(record)
    unwatched.report_error("no")
    unwatched.close()
    assert read_record(record)["status"] == "failed"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_tells_the_watchdog_the_record(rank, tmp_path):
    watched, sent = object.__new__(client.WatchdogClient), []
    watched._rank, watched._send = rank, lambda **message: sent.append(message)
    watched.report_record(tmp_path)
    assert sent == [{"record": str(tmp_path)}][rank:]


JAX_GLOO = "JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/"
MESSAGES = {
    f"{JAX_GLOO}pair.cc:538] Read error [127.0.0.1]:12678: Connection reset by peer": True,
    f"{JAX_GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:50342": True,
    "JaxRuntimeError: UNAVAILABLE: Failed to send RPC to coordination service. Either the leader"
    " task was preempted/died/restarted unexpectedly or this task is experiencing network"
    " issues.": True,
    "HorovodInternalError: Horovod has been shut down. This was caused by an exception on one of"
    " the ranks or an attempt to allreduce, allgather or broadcast a tensor after one of the ranks"
    " finished execution.": True,
    "UnknownError: {{function_node __inference_one_step}} Horovod has been shut down.": True,
    "Exception: MPI_ERR_PROC_FAILED: Process Failure": True,
    "Exception: MPI_ERR_OTHER: known error not in list": True,
    "XlaRuntimeError: INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or"
    " there was a network error.": True,
    "ValueError: no": False,
    "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 1073741824 bytes.": False,
    "FileNotFoundError: [Errno 2] No such file or directory: 'nt_train2.csv'": False,
    "MemoryError": False,
    "KeyError: 'communication_log'": False,
}
"""Messages of errors, and whether another rank's end may be their cause."""


@pytest.mark.parametrize("message", MESSAGES)
def test_an_error_that_another_ranks_end_may_explain_says_so(message, monkeypatch):
    monkeypatch.setattr(client.time, "sleep", lambda seconds: None)
    watched, sent = object.__new__(client.WatchdogClient), []
    watched._signals = SimpleNamespace(is_interrupted=False)
    watched._ending, watched._thread = threading.Event(), threading.Thread(target=int)
    watched._thread.start()
    watched._heartbeat = SimpleNamespace(spare=lambda: None)
    watched._send = lambda **message: sent.append(message)
    watched.report_error(message)
    assert [each["error"]["lost_peer"] for each in sent] == [MESSAGES[message]]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_rank_that_leaves_writes_its_log_and_leaves_no_launcher_behind(is_lost, monkeypatch):
    calls = []
    for module, name in [
        (rank_log, "write_out"),
        (job_guard, "end_lost"),
        (job_guard, "remove_leftovers"),
        (job_guard, "remove_shared_memory"),
        (os, "_exit"),
    ]:
        monkeypatch.setattr(module, name, lambda *code, name=name: calls.append((name, *code)))
    watched = object.__new__(client.WatchdogClient)
    watched._ending = threading.Event()
    watched._heartbeat = SimpleNamespace(end_soon=lambda: None)
    watched._obey({"end": "", "status": "failed", "speak": False, "lost": is_lost})
    assert (("end_lost",) in calls) == is_lost
    calls = [each for each in calls if each != ("end_lost",)]
    assert calls == [("write_out",), ("remove_leftovers",), ("remove_shared_memory",), ("_exit", 3)]


@pytest.mark.parametrize(("limit_s", "limit_ms"), [(1e9, 2**31 - 1), (1e-4, 1), (20.0, 20_000)])
def test_limits_that_the_kernel_does_not_take_are_moved_to_those_that_it_does(limit_s, limit_ms):
    with socket.socket() as connection:
        expect_answers(connection, limit_s)
        option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert option == limit_ms


def wait_for_end(path):
    return wait_until(lambda: (r := read_record(path))["status"] != "running" and r, 20)


def test_an_error_of_many_ranks_names_the_first_and_reaches_each_of_them_once():
    def work(comm):
        watched = object.__new__(client.WatchdogClient)
        watched._server, watched._stderr = None, os.dup(2)
        station = Station(error="cannot start a process" if comm.rank else "is not allowed to")
        text = r"^rank 0 \(host .*\) is not allowed to, and neither can 63 more of 64 ranks\."
        with pytest.raises(DistributedError, match=text):
            watched._connect(comm, station)

    job = SimulatedJob(64, ranks_per_node=8)
    job.run(work)
    assert job.traffic[WHOLE_RUN][1:, 1].max() < 500
