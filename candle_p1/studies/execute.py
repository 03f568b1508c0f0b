"""Executes the runs of a study on this machine, one after the other.

Each run is started by the command that `candle-p1 run` uses. Afterwards its record is completed if
need be: a run that was killed while it loaded its libraries has no record; one that was killed
together with its watchdog server has a record that says "running"; and one that a study ended at
its time limit has a record that says "interrupted", so that it would be repeated forever.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import filelock
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import Launch, check_alone, check_num_ranks, on_this_machine
from candle_p1.cluster.process import GRACE_S, Interrupted, run_to_end, signals_interrupt
from candle_p1.distributed.launch_environment import without_terminal
from candle_p1.errors import CandleError, SetupError
from candle_p1.records.record import (
    RECORD_NAME,
    extend_record,
    make_record,
    read_so_far,
    utc_now,
    write_record,
)
from candle_p1.records.types import SCHEMA_VERSION, Failure, RunRecord
from candle_p1.studies.display import remaining, result_line
from candle_p1.studies.plan import Plan, PlannedRun, to_argv
from candle_p1.studies.state import (
    CONTINUE_MARK,
    END_MARK,
    LOG_NAME,
    RunState,
    finished,
    pids_of,
    state_of,
    states_of,
)
from candle_p1.text import ERROR_MARK
from candle_p1.training.screen import Screen
from candle_p1.training.setup import locate_files

LAUNCH_S = 3.0
"""The time of every run before its record begins: until its processes have joined through MPI."""
WATCHDOG_S = 15.0
"""How long the watchdog server may take to complete a record after the last rank has gone."""
POLL_S = 0.1


def execute_study(plan: Plan, screen: Screen, retry_failed: bool = False) -> list[RunState]:
    """Executes all runs that are due, and continues after a run that fails.

    The study's directory stays locked. However this session ends, the next one resumes the study
    where this one left it. Returns the state of each run, in the plan's order.

    Raises:
        Interrupted: A signal asked this process to end. The current run has been ended, and its
            record says so.
        CandleError: The study does not fit this machine, or its directory is in use, cannot be
            written, or holds the record of another run.
    """
    check_alone()
    check_num_ranks(max(run.num_ranks for run in plan.runs))
    with _locked(plan.directory), signals_interrupt():
        states = _states_at_rest(plan)
        plan.write_manifest()
        due = [i for i, state in enumerate(states) if state.is_due(retry_failed)]
        _introduce(plan, states, due, retry_failed, screen)
        _make_data([plan.runs[i] for i in due], screen)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("runs"), TimeElapsedColumn())
        with screen.bar(TextColumn("{task.description}"), *columns) as bar:
            task = bar.add_task("", total=len(states))
            for place, i in enumerate(due, start=1):
                num_past = len(states) - len(due) + place - 1
                left = remaining([plan.runs[i] for i in due[place - 1 :]], states)
                bar.update(task, completed=num_past, description=f"{plan.runs[i].name}, {left}")
                states[i] = execute_run(states[i])
                left = remaining([plan.runs[i] for i in due[place:]], states)
                number = f"{i + 1:>{len(str(len(states)))}}/{len(states)}"
                screen.say(f"{number}  {result_line(states[i])}" + f"  ({left} left)" * bool(left))
    return states


def _introduce(
    plan: Plan, states: Sequence[RunState], due: Sequence[int], retry_failed: bool, screen: Screen
) -> None:
    if num_done := len(finished(states)):
        screen.say(f"{num_done} of {len(states)} runs are already done")
    num_failed = sum(state.status == "failed" for state in states)
    if num_failed and not retry_failed:
        screen.say(f"{num_failed} failed earlier and are skipped; --retry_failed repeats them")
    if due:
        launches = [launch(run, run.next_directory()) for run in plan.runs]
        for note in dict.fromkeys(note for each in launches for note in each.notes):
            screen.say(f"note: {note}")
        screen.say(remaining([plan.runs[i] for i in due], states))


def _make_data(runs: Iterable[PlannedRun], screen: Screen) -> None:
    """Generates missing synthetic files, so that no run's time includes this."""
    names = ("size", "data_seed")
    by_data = {(run.benchmark, *map(run.settings.get, names)): run for run in runs}
    for run in by_data.values():
        benchmark = find_benchmark(run.benchmark)
        with screen.making_data() as progress:
            locate_files(benchmark, benchmark.read_parameters(to_argv(run.flags)), progress)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Creates the study's directory, and keeps other processes from working on it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(directory / ".lock", timeout=0)
        lock.acquire()
    except filelock.Timeout as error:
        raise SetupError(
            f"another candle-p1 study is working on {directory}: wait until it ends, or choose"
            " another directory with -o"
        ) from error
    except (OSError, NotImplementedError) as error:  # the latter: the file system has no locks
        raise SetupError(
            f"cannot use {directory} ({getattr(error, 'strerror', None) or error}): choose"
            " another directory with -o"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _states_at_rest(plan: Plan) -> list[RunState]:
    """Returns the state of each run, after those that an earlier session left have ended."""
    deadline = time.monotonic() + GRACE_S
    while True:
        states = states_of(plan.runs)
        running = [state.directory for state in states if state.status == "running"]
        if not running:
            return states
        if time.monotonic() > deadline:
            assert running[0] is not None
            pids = " ".join(map(str, pids_of(running[0])))
            remedy = f"end them: kill {pids}" if pids else "move it if its job no longer exists"
            raise CandleError(
                f"{running[0]}: processes of an earlier session are still working on it; wait until"
                f" they end, or {remedy}"
            )
        time.sleep(1)


def launch(run: PlannedRun, directory: Path) -> Launch:
    """Returns the command that starts a run here, whose record goes to a directory.

    Raises:
        SetupError: The run has several ranks, and there is no mpirun.
    """
    script = [sys.executable, str(find_benchmark(run.benchmark).script)]
    return on_this_machine(run.num_ranks, [*script, *run.command_flags(directory)])


def execute_run(before: RunState) -> RunState:
    """Executes a run, or continues one that was interrupted; returns its state afterwards.

    Raises Interrupted as `execute_study` does, and SetupError if there is no mpirun for several
    ranks, or the run's directory cannot be written.
    """
    run, directory = before.run, before.next_directory
    earlier = before.record if before.is_continued else None
    command = launch(run, directory).command
    log = directory / LOG_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        output = log.open("ab" if earlier else "wb")
        if earlier:
            output.write(f"{CONTINUE_MARK}\n".encode())
            output.flush()
    except OSError as error:
        raise SetupError(f"cannot write {log}: {error.strerror}") from error
    variables = {**without_terminal(os.environ), **run.variables}
    limit_s = LAUNCH_S + 60.0 * run.minutes
    try:
        with output:
            code, is_late = run_to_end(command, variables, output, limit_s)
    except Interrupted:
        complete_record(run, directory, command, None)
        raise
    complete_record(run, directory, command, code, is_late=is_late, earlier=earlier)
    with log.open("a", encoding="utf-8") as output_text:
        output_text.write(f"{END_MARK} {code}\n")
    return state_of(run)


def complete_record(
    run: PlannedRun,
    directory: Path,
    command: Sequence[str],
    code: int | None,
    *,
    is_late: bool = False,
    earlier: RunRecord | None = None,
) -> None:
    """Makes sure that the record of a run that has ended, in a directory, says how it ended.

    The code is that with which the command ended; None if the study itself was asked to end. No
    record is then made for a run without one, which is executed again. `is_late` says that the
    study ended the run at its time limit. `earlier` is the record that the run was to continue: if
    it is still there, the run has failed before it began, and executed again, it would fail again.
    """
    deadline = time.monotonic() + WATCHDOG_S
    while pids_of(directory) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    path = directory / RECORD_NAME
    if path.exists() and path.stat().st_size:
        record = read_so_far(path)
    elif code is None:
        path.unlink(missing_ok=True)
        return
    else:
        origins = {name: {"value": run.settings[name], "origin": "study"} for name in run.settings}
        facts = {"benchmark": find_benchmark(run.benchmark).name, "num_ranks": run.num_ranks}
        facts |= {"started": utc_now(), "command": list(command), "parameters": origins}
        record = make_record(facts | {"schema_version": SCHEMA_VERSION, "status": "running"})
    must_change = is_late or code is None or (earlier is not None and record == earlier)
    if record.status == "ok" or not (record.status == "running" or must_change):
        return
    given = record.failure.reason if record.failure else ""
    if is_late:
        reason = f"ended at the study's time limit of {run.minutes} minutes"
        reason += f"; {given}" * bool(given)
    elif code is None:
        reason = given or "the study was interrupted"
    else:
        reason = f"ended with code {code}{_printed_error(directory)}"
    phase = record.failure.phase if record.failure else None
    ended = extend_record(
        record,
        status="interrupted" if code is None else "failed",
        ended=record.ended or utc_now(),
        failure=Failure(reason=reason, rank=None, phase=phase),
    )
    write_record(path, ended)


def _printed_error(directory: Path) -> str:
    """Returns the error that a run has printed, or else its last line, after a colon."""
    log = directory / LOG_NAME
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = list(filter(None, map(str.strip, text.splitlines())))
    errors = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
    return f": {(errors or lines[-1:])[0]}" if lines else ""
