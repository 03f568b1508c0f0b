"""Executes one run of a study on this machine, with the command that `candle-p1 run` uses."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import Launch, on_this_machine
from candle_p1.cluster.process import Interrupted, run_to_end
from candle_p1.distributed.launch_environment import TERMINAL_VARIABLE
from candle_p1.errors import SetupError
from candle_p1.studies.completion import complete_record
from candle_p1.studies.cost import LAUNCH_S
from candle_p1.studies.run_state import END_MARK, LOG_NAME, RunState, state_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from candle_p1.studies.planned_run import PlannedRun


def launch(run: PlannedRun, directory: Path | None = None) -> Launch:
    """Returns the command that starts a run here.

    Args:
        run: The run.
        directory: Where its record goes; None selects the run's next directory.

    Raises:
        SetupError: The run has several ranks, and there is no mpirun.
    """
    script = [sys.executable, str(find_benchmark(run.benchmark).script)]
    return on_this_machine(run.num_ranks, [*script, *run.command_flags(directory)])


def execute_run(run: PlannedRun, tick: Callable[[float], None]) -> RunState:
    """Executes a run; returns its state afterwards.

    Args:
        run: The run.
        tick: Called several times a second with the seconds so far.

    Raises:
        Interrupted: A signal asked to end. The run has been ended, and its record says so.
        SetupError: The run has several ranks, and there is no mpirun; or its directory cannot be
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
        raise SetupError(f"cannot write {log}: {error.strerror}") from error
    # The output goes to the log, not to the terminal.
    variables = {name: value for name, value in os.environ.items() if name != TERMINAL_VARIABLE}
    try:
        with output:
            code, is_late = run_to_end(command, variables | run.variables, output, limit_s, tick)
    except Interrupted:
        complete_record(run, directory, command, code=0, is_late=False, interrupted=True)
        raise
    complete_record(run, directory, command, code=code, is_late=is_late)
    with log.open("a", encoding="utf-8") as output_text:
        output_text.write(f"{END_MARK} {code}\n")
    return state_of(run)
