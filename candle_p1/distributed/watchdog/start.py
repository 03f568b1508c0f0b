"""Starting the watchdog server and the hubs, and telling every rank where it reports."""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import subprocess
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from candle_p1.distributed.comm import on_first_rank
from candle_p1.distributed.launch_environment import module_command, without_allocation
from candle_p1.distributed.watchdog import settings
from candle_p1.distributed.watchdog.connections import SPARE_FILES
from candle_p1.distributed.watchdog.protocol import TOKEN_VARIABLE
from candle_p1.distributed.watchdog.settings import Limits
from candle_p1.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from candle_p1.distributed.comm import Communicator

MIN_STRANGERS = 16
LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"


@dataclass(frozen=True)
class Station:
    """Where a rank reports.

    Attributes:
        addresses: Those to try.
        port: The port.
        chosen_port: The port that the user has chosen for the server; 0: none.
        interface: The network interface that the user has chosen; "": none.
        token: The secret with which a connection begins.
        host: The host on which somebody listens there.
        silent_s: How long the connection may be without an answer, in s.
        group: How many ranks report to one process.
        is_off: Nobody watches.
        warnings: What the user should know.
        error: Why nobody listens.
    """

    addresses: list[str] = field(default_factory=list)
    port: int = 0
    chosen_port: int = 0
    interface: str = ""
    token: str = ""
    host: str = ""
    silent_s: float = settings.SILENT_S
    group: int = settings.GROUP
    is_off: bool = False
    warnings: list[str] = field(default_factory=list)
    error: str | None = None


def start_server(
    comm: Communicator, record: Path, memory_fd: int, kept_open: Sequence[int]
) -> tuple[subprocess.Popen[bytes] | None, Station]:
    """Starts the server, on rank 0; collective.

    Args:
        comm: The ranks.
        record: Where the record is expected.
        memory_fd: The memory in which rank 0 counts its progress.
        kept_open: File descriptors that the server keeps open as long as it lives.

    Returns:
        Its process, on rank 0, and where it listens.

    Raises:
        SetupError: It cannot listen, or a variable is wrong; the same on all ranks.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> Station:
        if settings.is_off():
            return Station(is_off=True)
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        group, warnings = group_size(comm.size, settings.group(), hard_limit, comm.local_size)
        interface, port = settings.interface(), settings.port()
        station = Station(
            [LOOPBACK] if comm.num_nodes == 1 else settings.addresses(interface),
            port,
            port,
            interface,
            secrets.token_hex(16),
            socket.gethostname(),
            Limits.from_environment().silent_s,
            group,
            warnings=warnings,
        )
        num_peers = min(group, comm.size) + (comm.size - 1) // group
        arguments = ["--num-ranks", comm.size, "--num-peers", num_peers]
        arguments += ["--record", record.resolve(), "--starter", os.getpid()]
        arguments += ["--counter", memory_fd]
        process, port = _start("server", station, arguments, [memory_fd, *kept_open])
        processes.append(process)
        return replace(station, port=port)

    station = on_first_rank(start, comm)
    return processes[0] if processes else None, station


def start_hub(comm: Communicator, server: Station) -> Station:
    """Starts the hubs of all groups but the first, whose ranks report to the server; collective.

    Returns:
        Where this rank reports.
    """
    first = comm.rank // server.group * server.group
    if first == 0:
        return server
    if comm.rank != first:
        station: Station = comm.receive(first)
        return station
    others = range(first + 1, min(first + server.group, comm.size))
    one_node = server.addresses == [LOOPBACK]
    try:
        station = replace(
            server,
            addresses=server.addresses if one_node else settings.addresses(server.interface),
            port=server.chosen_port and server.chosen_port + first // server.group,
            host=socket.gethostname(),
        )
        arguments = ["--server", *server.addresses, "--server-port", server.port]
        arguments += ["--first-rank", first, "--num-ranks", 1 + len(others)]
        arguments += ["--silent-s", server.silent_s]
        _, port = _start("hub", station, arguments, [])
        station = replace(station, port=port)
    except SetupError as error:
        station = replace(server, error=str(error), host=socket.gethostname())
    for rank in others:
        comm.send(station, rank)
    return station


def group_size(
    num_ranks: int, wanted: int, max_files: int, local_size: int
) -> tuple[int, list[str]]:
    """Returns how many ranks report to one process, and what the user should know about that.

    Groups begin at the first rank of a node if all nodes have the same number of ranks, in order.

    Args:
        num_ranks: The number of ranks.
        wanted: How many it should be.
        max_files: How many files a process may have open; negative: any number.
        local_size: The number of ranks on a node.

    Raises:
        SetupError: A process may not have enough files open for any group.
    """
    capacity = num_ranks if max_files < 0 else max_files - SPARE_FILES - MIN_STRANGERS
    largest = min(wanted, capacity)
    if num_ranks <= largest:
        return largest, []
    for group in range(largest, 0, -1):
        if group > local_size:
            group -= group % local_size
        if group + (num_ranks - 1) // group <= capacity:
            break
    else:
        raise SetupError(
            f"the limit of open files, {max_files} (ulimit -Hn), is too low for watching"
            f" {num_ranks} ranks: raise it, or run without the watchdog by"
            f" {settings.OFF_VARIABLE}=off"
        )
    if largest == wanted:
        return group, []
    return group, [
        f"the limit of open files, {max_files} (ulimit -Hn), is too low for one process to watch"
        f" {min(num_ranks, wanted)} ranks: they are watched in groups of {group}"
    ]


def _start(
    module: str, station: Station, arguments: Sequence[object], kept_open: Sequence[int]
) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a process that listens at a station; returns it and its port.

    Raises:
        SetupError: It cannot.
    """
    command = module_command(f"candle_p1.distributed.watchdog.{module}")
    bind = station.addresses[0] if len(station.addresses) == 1 else ANY
    command += ["--bind", bind, "--port", str(station.port), *map(str, arguments)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            # Until there is a record, beside which its log is.
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=kept_open,
            env=without_allocation(os.environ) | {TOKEN_VARIABLE: station.token},
        )
    except OSError as error:
        raise SetupError(f"the watchdog {module} does not start: {error}") from error
    assert process.stdout is not None
    with process.stdout:
        answer = json.loads(process.stdout.readline() or b"{}")
    if "port" in answer:
        return process, answer["port"]
    process.wait()
    why = answer.get("error") or f"it ended with code {process.returncode}"
    advice = f"; choose another one by {settings.PORT_VARIABLE}" if station.port else ""
    raise SetupError(f"the watchdog {module} cannot listen on {station.host}: {why}{advice}")
