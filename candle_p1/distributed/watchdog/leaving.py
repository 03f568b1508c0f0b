"""How a thread of a rank ends its process, whose main thread may be stuck in a collective."""

from __future__ import annotations

import os
from typing import NoReturn

from candle_p1.distributed import job_guard, rank_log


def leave(code: int, *, is_lost: bool = False) -> NoReturn:
    """Ends this process at once, but leaves its log behind, and nothing of a killed launcher.

    Args:
        code: The exit code.
        is_lost: Whether this node is cut off, so that the launcher on it has to be ended, too.
    """
    rank_log.write_out()
    if is_lost:
        job_guard.end_lost()
    job_guard.remove_leftovers()
    job_guard.remove_shared_memory()
    os._exit(code)
