"""The same allreduces by OSU's benchmark, where it is installed (mvapich.cse.ohio-state.edu)."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from candle_p1.cluster.launchers import on_this_machine
from candle_p1.cluster.process import run_to_end
from candle_p1.distributed.launch_environment import without_terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

PROGRAM = "osu_allreduce"
LARGEST_BYTES = 1 << 26
"""OSU's allreduce repeats each size many times, so the largest ones would take minutes."""
LIMIT_S, GRACE_S = 300.0, 5.0
ROW = re.compile(r"^\s*(\d+)\s+([0-9.]+)(?:\s|$)", re.MULTILINE)
US = 1e-6


def hold_against_osu(num_ranks: int, measured: Mapping[int, float]) -> dict[str, Any]:
    """Runs osu_allreduce on ranks of this machine, and compares what MPI takes.

    Args:
        num_ranks: The number of ranks.
        measured: The times in s of MPI's allreduce, by the size in bytes.

    Returns:
        `program`, its path or None; `why_not`, if there is no comparison; `rows`, with `bytes`,
        `osu_s`, `here_s` and `ratio`, of the sizes that both have measured.
    """
    here = {size: time_s for size, time_s in measured.items() if size <= LARGEST_BYTES}
    program = shutil.which(PROGRAM)
    found: dict[str, Any] = {"program": program, "why_not": None, "rows": []}
    if program is None:
        return found | {"why_not": f"{PROGRAM} is not in $PATH"}
    if not here:
        return found | {"why_not": "the allreduce of MPI was not measured"}
    sizes = f"{min(here)}:{max(here)}"
    command = on_this_machine(num_ranks, [program, "-m", sizes]).command
    with tempfile.TemporaryFile() as file:
        variables = without_terminal(os.environ)
        code, is_late = run_to_end(command, variables, file, LIMIT_S, grace_s=GRACE_S)
        file.seek(0)
        printed = file.read().decode(errors="replace")
    if code:
        last = (printed.strip() or "it says nothing").splitlines()[-1]
        why = f"did not end within {LIMIT_S} s" if is_late else f"ended with code {code}: {last}"
        return found | {"why_not": f"{program} {why}"}
    osu = {int(size): float(us) * US for size, us in ROW.findall(printed)}
    found["rows"] = [
        {"bytes": size, "osu_s": osu[size], "here_s": here_s, "ratio": here_s / osu[size]}
        for size, here_s in sorted(here.items())
        if osu.get(size)
    ]
    if not found["rows"]:
        found["why_not"] = f"{program} printed none of these sizes"
    return found
