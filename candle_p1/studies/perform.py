"""Performs one run on this machine, by the command that `candle-p1 run` starts."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import Launch, on_this_machine
from candle_p1.distributed.launch_environment import TERMINAL_VARIABLE
from candle_p1.errors import SetupError
from candle_p1.studies.cost import LAUNCH_S
from candle_p1.studies.ending import complete_record
from candle_p1.studies.places import END_MARK, LOG_NAME
from candle_p1.studies.process import Interrupted, run_to_end
from candle_p1.studies.state import RunState, state_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from candle_p1.studies.planned import PlannedRun


def launch(run: PlannedRun, directory: Path | None = None) -> Launch:
    """Returns the command that makes a run here.

    Args:
        run: The run.
        directory: Where its record goes; None is the next place that is free.

    Raises:
        SetupError: It has several ranks, and there is no mpirun.
    """
    script = [sys.executable, str(find_benchmark(run.benchmark).script)]
    return on_this_machine(run.num_ranks, [*script, *run.command_flags(directory)])


def perform(run: PlannedRun, tick: Callable[[float], None]) -> RunState:
    """Performs a run; returns what became of it.

    Args:
        run: The run.
        tick: Is called several times a second, with the seconds so far.

    Raises:
        Interrupted: A signal asked to end. The run has been ended and is on record.
        SetupError: It has several ranks, and there is no mpirun; or its directory cannot be
            written.
    """
    directory = run.next_directory()
    command = launch(run, directory).command
    limit_s = LAUNCH_S + 60.0 * run.minutes
    log = directory / LOG_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        output = log.open("wb")
    except OSError as error:
        raise SetupError(f"{log} cannot be written: {error.strerror}") from error
    try:
        with output:
            code, is_late = run_to_end(command, _variables(run), output, limit_s, tick)
    except Interrupted:
        complete_record(run, directory, command, code=0, is_late=False, interrupted=True)
        raise
    complete_record(run, directory, command, code=code, is_late=is_late)
    with log.open("a", encoding="utf-8") as output_text:
        output_text.write(f"{END_MARK} {code}\n")
    return state_of(run)


def _variables(run: PlannedRun) -> dict[str, str]:
    """Returns the environment of a run, whose output goes to a file and not to the terminal."""
    inherited = {name: value for name, value in os.environ.items() if name != TERMINAL_VARIABLE}
    return inherited | run.variables
