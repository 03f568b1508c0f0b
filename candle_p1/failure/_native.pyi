"""What must go on while a library holds Python's lock; see native/agent.h and native/rank_log.h."""

from collections.abc import Sequence

FAILED: int
INTERRUPTED: int
"""The exit codes of ranks that are told to end, as are those of an interrupted run."""
BEAT_S: float
"""How often a rank says how far it has come."""
LAUNCHER_S: int
"""How long a launcher that is stopped, or has lost a node, may take to end after its ranks."""

class Agent:
    """A thread that ends this process when its job has failed.

    Messages go to what is the standard error when it is made.

    Args:
        terminal: The device whose cursor is to be shown after a message; "" for none.
    """

    def __init__(self, terminal: str) -> None: ...
    def guard(self, parent: int, session: bytes, stopped_s: float) -> None:
        """From now on, looks at the launcher once a second.

        Args:
            parent: The parent of this process.
            session: The directory of Open MPI's launcher on this node, or nothing.
            stopped_s: How long it, or until `watch` another rank, may be stopped, in s.
        """

    @property
    def launcher(self) -> tuple[int, bytes]:
        """The process id of the launcher, and its directory; 0 and nothing if there is none."""

    def watch(
        self,
        socket: int,
        numbers: memoryview,
        *,
        host: str,
        name: str,
        server: str,
        server_pid: int,
        stopped_s: float,
        unwind_s: float,
    ) -> None:
        """From now on, is connected to the watchdog server.

        Args:
            socket: A connected socket, which stays open until `unwatch`.
            numbers: How far this rank has come; int64, shape (n,); read again and again.
            host: This host.
            name: What this rank is called in messages.
            server: What the server is called.
            server_pid: Its process id if it is a child of this process, else 0.
            stopped_s: How long the launcher and the server may be stopped, in s.
            unwind_s: How long the server may take to end this process after a signal, in s.
        """

    def set_recorder(
        self, command: Sequence[bytes], inherited: Sequence[int], *, speaks: bool
    ) -> None:
        """Says what is executed if the server dies, to complete the record; no words: nothing.

        Args:
            command: The command, to which the number of steps begun is added.
            inherited: File descriptors that it keeps open.
            speaks: Whether this rank prints that the server has died, and waits for the command.
        """

    def send(self, message: bytes) -> None:
        """Sends a message, before it returns as far as possible."""

    def disarm(self) -> None:
        """From now on, this process ends by itself."""

    def await_order(self, seconds: float) -> bool:
        """Waits until the server tells this rank to end; returns whether it has."""

    def await_end(self) -> bool:
        """Waits until this process is about to end; returns whether it is, or else not watched."""

    def set_flushed(self) -> None:
        """Says that the output of Python has been flushed, so that the process may end."""

    def unwatch(self, goodbye: bytes) -> None:
        """Sends what is left; the caller then closes the socket. The launcher is still guarded."""

    def clean(self) -> None:
        """Removes what a launcher that has died, and MPI, leave on this node."""

    def stop(self) -> None:
        """Ends the thread."""

    @property
    def signal_fd(self) -> int:
        """A file descriptor to which the numbers of signals are to be written."""

def was_stopped(seconds: float) -> str:
    """Returns what has happened to a process, for a message."""

def process_state(pid: int) -> str:
    """Returns the letter of a process's state on this host; "" if there is no such process."""

def is_gone(pid: int) -> bool:
    """Whether a process of this host has ended."""

def is_segment(name: str) -> bool:
    """Whether a file is one through which Open MPI's ranks of a node exchange messages."""

def remove_shared_memory() -> None:
    """Removes the files of the shared memory of MPI that this process has mapped."""

def rank_log_begin(file: bytes, screen: int) -> int:
    """Sends the output of this process to memory and later to a file; returns an error number."""

def rank_log_write() -> int:
    """Moves the output to the file.

    Returns 0 if there was none, 1 if it is there, and a negative error number if it went to the
    screen.
    """

def rank_log_end() -> None:
    """Lets go of the memory; the outputs have been put back before."""
