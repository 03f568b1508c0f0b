"""A rank's connection to the sentinel: it reports, and obeys when told to end."""

from __future__ import annotations

import json
import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from candle_p1.distributed.launch_environment import terminal
from candle_p1.distributed.watchdog_server import TOKEN_VARIABLE
from candle_p1.errors import EXIT_CODE, DistributedError

if TYPE_CHECKING:
    from types import FrameType

    from candle_p1.distributed.comm import Communicator

UNWIND_S = 3.0
"""How long the main thread may take to unwind after Ctrl-C, and the sentinel to end this process
after another signal, before it ends itself."""
CONNECT_S = 10.0
HEARTBEAT_S = 1.0
"""How often a rank tells how many steps it has begun, while that changes."""
HOROVOD_SHUTDOWN = "Horovod has been shut down"
"""What the operations of Horovod say after a stall, and after another rank has gone."""


class Link:
    """Connects a rank to the sentinel of its run; rank 0 starts the sentinel. Collective.

    Signals are seen at once, also while the main thread sits in a collective: they arrive through
    the wake-up file descriptor, which the C-level handler writes. After SIGTERM and SIGHUP the
    sentinel ends the process; an exception out of their handler could arise anywhere, and while
    TensorFlow traces a model it crashes there. Ctrl-C raises KeyboardInterrupt as it always does.

    Args:
        comm: The ranks of the run.
        record: The run record, already written by rank 0 with status "running".

    Attributes:
        steps: The training steps this rank has begun; see `count_step`.

    Raises:
        DistributedError: No connection could be made; the same on every rank.
    """

    def __init__(self, comm: Communicator, record: Path) -> None:
        # Kept for the reason a job ended: a rank other than 0 sends its own output to a file.
        self._stderr = os.dup(2)
        self._process, where = _start_sentinel(comm, record) if comm.rank == 0 else (None, None)
        addresses, port, token = comm.broadcast(where) or ([], 0, "")
        error: str | None = None
        try:
            self._socket = _connect_any(addresses, port)
        except OSError as caught:
            error = f"{socket.gethostname()}: {caught}"
        errors = [text for text in comm.allgather(error) if text]
        if errors:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            if error is None:
                self._socket.close()
            os.close(self._stderr)
            raise DistributedError(
                f"{len(errors)} of {comm.size} ranks cannot reach rank 0 by TCP at"
                f" {', '.join(addresses) or 'any address'}"
                f" ({errors[0]}): the nodes of a job must be able to connect to each other"
            ).on_all_ranks()
        self._send_lock = threading.Lock()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._handlers: dict[int, Any] = {}
        self._old_wakeup_fd = -1
        self._interrupted = False
        self._send(
            {
                "hello": {
                    "token": token,
                    "rank": comm.rank,
                    "host": socket.gethostname(),
                    "pid": os.getpid(),
                }
            }
        )
        if threading.current_thread() is threading.main_thread():
            self._catch_signals()
        self.steps = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="sentinel-link", daemon=True)
        self._thread.start()

    def count_step(self) -> None:
        """Notes that a training step begins."""
        self.steps += 1

    def report_phase(self, path: tuple[str, ...]) -> None:
        """Tells the sentinel which phase this rank is in."""
        self._send({"phase": "/".join(path)})

    def report_error(self, message: str, traceback: str | None = None) -> None:
        """Tells the sentinel that this rank failed, and waits until the failure is on record.

        After Ctrl-C the error is taken for its own: libraries through which KeyboardInterrupt
        passes (TensorFlow, while it traces) turn it into one of theirs.

        Returns after the sentinel has told the other ranks to end.
        """
        if self._interrupted:
            self.report_interrupt()
            return
        self._ending.set()  # this rank ends by raising; it need not be ended
        stalled = HOROVOD_SHUTDOWN in message
        if stalled:
            self._send({"steps": self.steps})
            time.sleep(2 * HEARTBEAT_S)  # what the others have begun, and a dead rank, come first
        self._send({"error": {"message": message, "traceback": traceback, "stalled": stalled}})
        self._thread.join(timeout=UNWIND_S)

    def report_interrupt(self) -> None:
        """Tells the sentinel that Ctrl-C unwound this rank, and waits until that is on record."""
        self._ending.set()
        self._send({"signal": signal.SIGINT})
        self._thread.join(timeout=UNWIND_S)

    def close(self) -> None:
        """Says bye. The run is over for this rank, well or by an error all ranks agreed upon."""
        self._ending.set()
        self._send({"bye": True})
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=UNWIND_S)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._handlers:
            signal.set_wakeup_fd(self._old_wakeup_fd)
        for opened in (self._socket, self._wakeup, self._wakeup_writer):
            opened.close()
        os.close(self._stderr)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):  # it waits for the other ranks' byes
                self._process.wait(timeout=UNWIND_S)

    def _send(self, message: dict[str, Any]) -> None:
        with self._send_lock, suppress(OSError):  # the sentinel is gone: nothing more to say
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _catch_signals(self) -> None:
        self._wakeup_writer.setblocking(False)
        self._old_wakeup_fd = signal.set_wakeup_fd(
            self._wakeup_writer.fileno(), warn_on_full_buffer=False
        )
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            handler = signal.getsignal(number)
            if handler in (signal.SIG_IGN, None):
                continue  # nohup, or whoever embeds Python, has decided about it
            self._handlers[number] = handler
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Is the handler of signals, and leaves them to `_listen`, but for Ctrl-C."""
        if number != signal.SIGINT:
            return
        self._interrupted = True
        if self._send_lock.acquire(blocking=False):  # else this very thread may hold it
            self._send_lock.release()
            self._send({"signal": number})  # before anything crashes on the way
        handler = self._handlers[number]
        if callable(handler):
            handler(number, frame)  # Python's own raises KeyboardInterrupt
        else:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        """Runs in a thread: passes signals on to the sentinel and obeys its order to end."""
        buffer = b""
        connected, deadline, steps_told = True, None, 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while connected or (deadline is not None and not self._ending.is_set()):
                ready = selector.select(HEARTBEAT_S if deadline is None else 0.1)
                if self.steps != steps_told:
                    steps_told = self.steps
                    self._send({"steps": steps_told})
                for key, _ in ready:
                    if key.fileobj is self._wakeup:
                        for number in self._wakeup.recv(64):
                            if number in self._handlers:
                                self._send({"signal": number})
                                deadline = time.monotonic() + UNWIND_S
                        continue
                    data = _receive(self._socket)
                    if not data:  # closed by this rank, or the sentinel is done
                        selector.unregister(self._socket)
                        connected = False
                    buffer += data
                    if b"\n" in buffer:
                        self._obey(json.loads(buffer.split(b"\n")[0]))
                        return
                late = deadline is not None and time.monotonic() > deadline
                if late and not self._ending.is_set():
                    os._exit(128 + signal.SIGTERM)

    def _obey(self, order: dict[str, Any]) -> None:
        """Ends this process at once: the main thread may sit in a collective for ever."""
        if order["speak"]:
            with suppress(OSError):
                os.write(self._stderr, f"\ncandle-p1: the job ends: {order['end']}\n".encode())
            with suppress(OSError):
                _show_cursor()
        if self._ending.is_set():
            return
        interrupted = order["status"] == "interrupted"
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(128 + signal.SIGTERM if interrupted else EXIT_CODE + 1)


def _start_sentinel(
    comm: Communicator, record: Path
) -> tuple[subprocess.Popen[bytes] | None, tuple[list[str], int, str] | None]:
    """Starts the sentinel; returns its process, and the addresses to try, its port and the token.

    None where it does not start.
    """
    _raise_file_limit(comm.size + 64)
    token = secrets.token_hex(16)
    one_node = comm.num_nodes == 1
    command = [sys.executable, "-m", "candle_p1.distributed.watchdog_server"]
    command += ["--bind", "127.0.0.1" if one_node else "0.0.0.0"]
    command += ["--num-ranks", str(comm.size), "--record", str(record.resolve())]
    command += ["--starter", str(os.getpid())]
    try:
        with (record.parent / "sentinel.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=_environment_without_launcher() | {TOKEN_VARIABLE: token},
            )
    except OSError:
        return None, None
    assert process.stdout is not None
    port = int(process.stdout.readline() or 0)
    process.stdout.close()
    return process, (["127.0.0.1"] if one_node else _addresses(), port, token)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _show_cursor() -> None:
    """Brings back the terminal's cursor, which a progress bar of a killed rank had hidden."""
    if device := terminal():
        with Path(device).open("wb") as screen:
            screen.write(b"\x1b[?25h")


def _connect_any(addresses: list[str], port: int) -> socket.socket:
    """Connects to the first address that answers.

    Raises:
        OSError: None does; the last one's error.
    """
    last: OSError = OSError("the sentinel did not start; see sentinel.log beside the record")
    for address in addresses if port else ():
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            last = error
        else:
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connection
    raise last


def _addresses() -> list[str]:
    """Returns the names and addresses under which other nodes may reach this one."""
    found = [
        item.address
        for interface in psutil.net_if_addrs().values()
        for item in interface
        if item.family == socket.AF_INET and not item.address.startswith("127.")
    ]
    return [*found, socket.gethostname()]


def _environment_without_launcher() -> dict[str, str]:
    """Returns the environment less what would make the sentinel look like a rank of the job."""
    prefixes = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "PALS_", "ALPS_", "JSM_")
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def _raise_file_limit(wanted: int) -> None:
    """Lets rank 0's sentinel, which inherits the limit, hold a connection from every rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
