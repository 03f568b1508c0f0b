"""Becomes another command, which is told to end when the process that started it dies.

Also after a kill -9, when that process can tell nobody: the kernel sends SIGTERM, by which a
launcher ends its ranks. Linux has this (prctl(2), PR_SET_PDEATHSIG); it outlasts execve. Elsewhere
the command simply runs.

A program of its own, not a function called between fork and exec: Python cannot safely run there in
a process that has threads.

Usage: python -m candle_p1.studies.process_group_guard PID COMMAND [ARGUMENT ...]
where PID is the process that starts it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""


def main(words: list[str]) -> None:
    """Asks the kernel for the signal, then executes the command in place of this process."""
    parent, *command = words
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # it died before that
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
