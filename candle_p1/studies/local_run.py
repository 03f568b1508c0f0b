"""Executes one run of a study on this machine, with the command that `candle-p1 run` uses.

Afterwards its record is completed if need be. A run that was killed while it loaded its libraries
has no record; one that was killed together with its watchdog server has a record that says
"running"; and one that a study ended at its time limit has a record that says "interrupted", so
that it would be repeated forever.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import Launch, on_this_machine
from candle_p1.cluster.process import Interrupted, run_to_end
from candle_p1.distributed.launch_environment import without_terminal
from candle_p1.errors import SetupError
from candle_p1.records.record import (
    RECORD_NAME,
    extend_record,
    make_record,
    read_so_far,
    utc_now,
    write_record,
)
from candle_p1.records.types import SCHEMA_VERSION, Failure, RunRecord
from candle_p1.studies.cost import LAUNCH_S
from candle_p1.studies.run_state import (
    CONTINUE_MARK,
    END_MARK,
    FAILED,
    INTERRUPTED,
    LOG_NAME,
    OK,
    RUNNING,
    RunState,
    pids_of,
    state_of,
)
from candle_p1.text import ERROR_MARK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from candle_p1.studies.planned_run import PlannedRun

WATCHDOG_S = 15.0
"""How long the watchdog server may take to complete a record after the last rank has gone."""
POLL_S = 0.1


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


def execute_run(before: RunState, tick: Callable[[float], None]) -> RunState:
    """Executes a run, or continues one that was interrupted; returns its state afterwards.

    Args:
        before: The run and its state.
        tick: Called several times a second with the seconds so far.

    Raises:
        Interrupted: A signal asked this process to end. The run has been ended, and its record says
            so.
        SetupError: The run has several ranks, and there is no mpirun; or its directory cannot be
            written.
    """
    run, directory = before.run, before.next_directory
    earlier = before.record if before.is_continued else None
    command = launch(run, directory).command
    limit_s = LAUNCH_S + 60.0 * run.minutes
    log = directory / LOG_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        output = log.open("ab" if earlier else "wb")
        if earlier:
            output.write(f"{CONTINUE_MARK}\n".encode())
            output.flush()
    except OSError as error:
        raise SetupError(f"cannot write {log}: {error.strerror}") from error
    variables = without_terminal(os.environ) | run.variables
    try:
        with output:
            code, is_late = run_to_end(command, variables, output, limit_s, tick)
    except Interrupted:
        complete_record(run, directory, command, code=0, is_late=False, interrupted=True)
        raise
    complete_record(run, directory, command, code=code, is_late=is_late, earlier=earlier)
    with log.open("a", encoding="utf-8") as output_text:
        output_text.write(f"{END_MARK} {code}\n")
    return state_of(run)


def complete_record(
    run: PlannedRun,
    directory: Path,
    command: Sequence[str],
    *,
    code: int,
    is_late: bool,
    interrupted: bool = False,
    earlier: RunRecord | None = None,
) -> None:
    """Makes sure that the record of a run that has ended says how it ended.

    Args:
        run: The run.
        directory: Where its record is, or should be.
        command: The command that was executed.
        code: Its exit code.
        is_late: Whether the study ended the run at its time limit.
        interrupted: Whether the study itself was asked to end. No record is then made for a run
            without one, which is executed again.
        earlier: The record that the run was to continue. If it is still there, the run has failed
            before it began: executed again, it would fail again.
    """
    deadline = time.monotonic() + WATCHDOG_S
    while pids_of(directory) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    path = directory / RECORD_NAME
    if not path.exists() or path.stat().st_size == 0:
        if interrupted:
            path.unlink(missing_ok=True)
            return
        record, status, reason = _unwritten(run, command), RUNNING, ""
    else:
        record = read_so_far(path)
        status, reason = record.status, record.failure.reason if record.failure else ""
    is_unchanged = earlier is not None and record == earlier
    if status == OK or not (status == RUNNING or is_late or interrupted or is_unchanged):
        return
    if is_late:
        reason = f"ended at the study's time limit of {run.minutes} minutes" + (
            f"; {reason}" if reason else ""
        )
    elif interrupted:
        reason = reason or "the study was interrupted"
    else:
        reason = f"ended with code {code}{_printed_error(directory)}"
    phase = record.failure.phase if record.failure else None
    ended = extend_record(
        record,
        status=INTERRUPTED if interrupted else FAILED,
        ended=record.ended or utc_now(),
        failure=Failure(reason=reason, rank=None, phase=phase),
    )
    write_record(path, ended)


def _unwritten(run: PlannedRun, command: Sequence[str]) -> RunRecord:
    """Returns the record of a run that has written none."""
    return make_record(
        {
            "schema_version": SCHEMA_VERSION,
            "status": RUNNING,
            "benchmark": find_benchmark(run.benchmark).name,
            "started": utc_now(),
            "command": list(command),
            "num_ranks": run.num_ranks,
            "parameters": {
                name: {"value": value, "origin": "study"} for name, value in run.settings.items()
            },
        }
    )


def _printed_error(directory: Path) -> str:
    """Returns the error that a run has printed, or else its last line, after a colon."""
    try:
        text = (directory / LOG_NAME).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
    return f": {(errors or lines[-1:])[0]}" if lines else ""
