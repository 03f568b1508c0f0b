"""Jobs on a machine without a scheduler: they run immediately."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

from candle_p1.cluster.chain import CONTINUE, Chain
from candle_p1.distributed.launch_environment import without_allocation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_here(command: Sequence[str], directory: Path, num_jobs: int = 1) -> int:
    """Runs a job; if it is one of a chain, up to so many times, until its run is complete.

    Ctrl-C reaches the job that is running. Its end is awaited, and no other job follows.

    Args:
        command: The command that starts it.
        directory: The directory of its record.
        num_jobs: The number of jobs in the chain.

    Returns:
        The exit code of the last job.
    """
    interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        interrupted = True

    previous = signal.signal(signal.SIGINT, interrupt)  # not SIG_IGN, which the job would inherit
    try:
        for _ in range(num_jobs):
            code = subprocess.call(command, env=without_allocation(os.environ, here=True))
            if code == 0 or interrupted or Chain.read(directory).decide()[0] != CONTINUE:
                break
    finally:
        signal.signal(signal.SIGINT, previous)
    return code if code >= 0 else 128 - code
