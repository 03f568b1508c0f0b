"""Signs of life from a thread that does not need Python's lock; see heartbeat/heartbeat.h."""

class Heartbeat:
    """A thread that sends a beat on a socket at once, and then again and again.

    If the process ends by `exit` or `abort` meanwhile, it sends a last word, the byte 0x7F.

    Args:
        socket: The file descriptor of a connected socket, which stays open until `stop`.
        stamp: What a beat says: numbers that are not negative; int64, shape (n,). They are read
            from this memory each time.
        period_s: The time between two beats, in s.
        patience_s: How long this process may ignore that it was told to end, by a line with a
            brace that nobody reads, or that the connection is broken, before it is ended.
        code: The exit code with which it is then ended.
    """

    def __init__(
        self,
        socket: int,
        stamp: memoryview,
        *,
        period_s: float,
        patience_s: float,
        code: int,
    ) -> None: ...
    def stop(self) -> None:
        """Ends the thread; there will be no last word."""

    def spare(self) -> None:
        """Makes sure that the thread does not end this process: it is ending by itself."""

    def end_soon(self) -> None:
        """Ends this process unless it ends by itself before its patience is over."""

    @property
    def error(self) -> int:
        """The errno of the error that has ended the connection; 0 while there is none."""
