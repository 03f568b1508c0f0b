"""Executes another command, which gets SIGTERM when the process that started it dies.

This works even after kill -9, because the kernel sends the signal; a launcher then ends its ranks.
Only Linux offers this (prctl(2), PR_SET_PDEATHSIG, which survives execve). On other systems the
command runs without it.

This is a program of its own because Python code cannot safely run between fork and exec in a
process that has threads.

Usage: python -m candle_p1.cluster.process_group_guard PID COMMAND [ARGUMENT ...]
where PID is the process that starts it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""linux/prctl.h."""


def main(argv: list[str]) -> None:
    """Asks the kernel for the signal, then replaces this process by the command."""
    parent, *command = argv
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):  # the parent died before prctl took effect
            sys.exit(128 + signal.SIGTERM)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
