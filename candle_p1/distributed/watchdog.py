"""Starting the watchdog of a run, and connecting all ranks to it (candle_p1.failure).

The variables of rank 0's environment decide for all ranks.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import resource
import secrets
import socket
import subprocess
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import psutil

from candle_p1.distributed.comm import on_first_rank
from candle_p1.distributed.launch_environment import (
    limits_from_environment,
    module_command,
    read_number,
    terminal,
    without_allocation,
)
from candle_p1.errors import DistributedError, SetupError
from candle_p1.failure import progress, protocol
from candle_p1.failure._native import process_state
from candle_p1.failure.agent import RankAgent, connect_to_own_server, launcher
from candle_p1.failure.connections import num_files
from candle_p1.failure.protocol import Endpoint, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from candle_p1.distributed.comm import Communicator

OFF_VARIABLE = "CANDLE_P1_WATCHDOG"
"""If it is "off" or 0, there is no watchdog."""
INTERFACE_VARIABLE = "CANDLE_P1_WATCHDOG_INTERFACE"
PORT_VARIABLE = "CANDLE_P1_WATCHDOG_PORT"
LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"
SERVER = "candle_p1.failure.server"


def is_off() -> bool:
    """Whether there is to be no watchdog; SetupError if the variable says something else."""
    text = os.environ.get(OFF_VARIABLE, "on").lower()
    if text not in ("", "on", "1", "off", "0"):
        raise SetupError(f"{OFF_VARIABLE}={text!r}: give on or off")
    return text in ("off", "0")


def addresses(interface: str) -> list[str]:
    """Returns the addresses by which other nodes may reach this one: IPv4, and its name at the end.

    They are restricted to an interface, if one is given by its name or address. Raises SetupError
    if the interface has no address here.
    """
    found = {
        name: [each.address for each in of_one if each.family == socket.AF_INET]
        for name, of_one in psutil.net_if_addrs().items()
    }
    every = [each for of_one in found.values() for each in of_one]
    if not interface:
        return [*(each for each in every if not each.startswith("127.")), platform.node()]
    wanted = found.get(interface) or [each for each in every if each == interface]
    if not wanted:
        there = ", ".join(f"{name} ({', '.join(each)})" for name, each in found.items() if each)
        raise SetupError(
            f"{INTERFACE_VARIABLE}={interface!r}: {platform.node()} has no network interface"
            f" with this name or IPv4 address; there are {there or 'none'}"
        )
    return wanted


def check_file_limit(num_ranks: int, max_files: int) -> None:
    """Raises SetupError if `max_files` are too few for the server; if negative, any number is."""
    wanted = num_files(num_ranks)
    if 0 <= max_files < wanted:
        raise SetupError(
            f"the limit of open files, {max_files} (ulimit -Hn), is too low for watching"
            f" {num_ranks} ranks: raise it to {wanted}, or run without the watchdog by"
            f" {OFF_VARIABLE}=off"
        )


def watch(comm: Communicator, record: Path, kept_open: Sequence[int] = ()) -> RankAgent:
    """Starts the watchdog of a run, and connects all ranks to it; collective.

    Args:
        comm: The ranks of the run.
        record: Where rank 0 expects to write the run record; see `RankAgent.report_record`.
        kept_open: File descriptors of rank 0 that the server keeps open as long as it lives.

    Raises:
        DistributedError: Some rank cannot connect; the same on every rank.
        SetupError: The server cannot listen, or a variable is wrong; the same on every rank.
    """
    descriptor = os.memfd_create("candle-p1-progress")
    os.ftruncate(descriptor, progress.NUM_BYTES)
    memory = memoryview(mmap.mmap(descriptor, progress.NUM_BYTES)).cast("q")
    servers: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[Endpoint | None, Limits]:
        limits = limits_from_environment()
        if is_off():
            return None, limits
        server, endpoint = _start_server(comm, limits, record, descriptor, kept_open)
        servers.append(server)
        return endpoint, limits

    try:
        endpoint, limits = on_first_rank(comm, start)
    finally:
        os.close(descriptor)
    own_server, warnings, recorder = None, [], None
    if endpoint is None:
        endpoint = Endpoint(token=secrets.token_hex(16), host=platform.node(), pid=os.getpid())
        near, own_server = connect_to_own_server(limits, endpoint.token, memory)
        protocol.greet(near, endpoint.token, _hello(comm))
        warnings.append(
            f"the watchdog is off ({OFF_VARIABLE}=off): if a rank is killed or stopped, or a node"
            ' is lost, the record keeps saying "running", and the other ranks may wait for ever'
        )
    else:
        near = _connect(comm, endpoint, servers)
        if comm.node == 0 and comm.local_rank < 2:
            recorder = module_command(SERVER), [] if comm.rank else kept_open
    return RankAgent(
        comm.rank,
        near,
        endpoint,
        memory,
        server=servers[0] if servers else None,
        stopped_s=limits.stopped_s,
        own_server=own_server,
        recorder=recorder,
        terminal=terminal(),
        warnings=warnings,
    )


def _start_server(
    comm: Communicator,
    limits: Limits,
    record: Path,
    memory_fd: int,
    kept_open: Sequence[int],
) -> tuple[subprocess.Popen[bytes], Endpoint]:
    """Starts the server on this node, or raises SetupError; returns it and where it listens."""
    check_file_limit(comm.size, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    endpoint = Endpoint(
        [LOOPBACK] if comm.num_nodes == 1 else addresses(os.environ.get(INTERFACE_VARIABLE, "")),
        read_number(PORT_VARIABLE, 0, "a port, from 1 to 65535", most=65_535),
        secrets.token_hex(16),
        platform.node(),
        silent_s=limits.silent_s,
    )
    bind = endpoint.addresses[0] if len(endpoint.addresses) == 1 else ANY
    command: list[object] = [*module_command(SERVER), "--bind", bind, "--port", endpoint.port]
    command += ["--num-ranks", comm.size, "--record", record.resolve()]
    command += ["--limits", json.dumps(asdict(limits))]
    command += ["--starter", os.getpid(), "--counter", memory_fd]
    try:
        process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Until there is a record, beside which its log is.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[memory_fd, *kept_open],
            env=without_allocation(os.environ) | {protocol.TOKEN_VARIABLE: endpoint.token},
        )
    except OSError as error:
        raise SetupError(f"the watchdog server does not start: {error}") from error
    assert process.stdout is not None
    with process.stdout:
        answer = json.loads(process.stdout.readline() or b"{}")
    if "port" in answer:
        return process, replace(endpoint, port=answer["port"], pid=process.pid)
    process.wait()
    why = answer.get("error") or f"it ended with code {process.returncode}"
    advice = f"; choose another one by {PORT_VARIABLE}" if endpoint.port else ""
    raise SetupError(f"the watchdog server cannot listen on {endpoint.host}: {why}{advice}")


def _hello(comm: Communicator) -> protocol.Message:
    hello = {"rank": comm.rank, "host": platform.node(), "pid": os.getpid()}
    pid, session = launcher()
    return hello | ({"launcher": pid, "session": session} if comm.size > 1 else {})


def _connect(
    comm: Communicator, endpoint: Endpoint, servers: Sequence[subprocess.Popen[bytes]]
) -> socket.socket:
    """Returns this rank's connection to the server, as `watch`; collective."""
    connection: socket.socket | None = None
    error: str | None = None
    host = platform.node()
    try:
        connection = protocol.connect(endpoint, _hello(comm))
    except OSError as caught:
        error = f"cannot connect to the watchdog on {endpoint.host} by TCP ({caught})"
    found = comm.first(error and f"{host}: {error}")
    if found is None:
        assert connection is not None
        return connection
    num_failed = int(comm.allreduce_sum(np.array([error is not None], np.int64))[0])
    state = on_first_rank(comm, _kill, servers)
    if connection is not None:
        connection.close()
    rank, text = found
    host, _, why = text.partition(": ")
    others = f", and neither can {num_failed - 1} more of {comm.size} ranks"
    raise DistributedError(
        f"rank {rank} (host {host}) {why}{others * (num_failed > 1)}. {state}. The nodes of a job"
        f" must be able to connect to each other: open the port ({PORT_VARIABLE} chooses which),"
        f" choose another network by {INTERFACE_VARIABLE}, or run without the watchdog by"
        f" {OFF_VARIABLE}=off"
    ).on_all_ranks()


def _kill(servers: Sequence[subprocess.Popen[bytes]]) -> str:
    """Kills the server; returns in words what it did before."""
    (server,) = servers
    code, state = server.poll(), process_state(server.pid)
    server.kill()
    server.wait()
    if code is not None:
        return f"The watchdog (pid {server.pid}) has ended with code {code}"
    return f"The watchdog (pid {server.pid}) runs, in state {state} (/proc/PID/stat)"
