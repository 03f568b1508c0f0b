"""Whether XLA compiled the training step of runs, which changes their times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.words import listed
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from candle_p1.reports.runs import RecordedRun


def compiled_apart(runs: Iterable[RecordedRun]) -> str | None:
    """Returns which runs XLA compiled and which it did not, in words; None if all are alike."""
    known = [run for run in runs if run.jit_compile is not None]
    compiled = [run for run in known if run.jit_compile]
    others = [run for run in known if not run.jit_compile]
    if not compiled or not others:
        return None
    ranks = [sorted({run.num_ranks for run in each}) for each in (compiled, others)]
    if set(ranks[0]) & set(ranks[1]):
        which, rest = count(len(compiled), "run"), count(len(others), "other")
    else:
        which, rest = (f"the runs on {listed(each)} rank{'s' * (each != [1])}" for each in ranks)
    return f"XLA compiled the training step (jit_compile) of {which}, and not of {rest}"
