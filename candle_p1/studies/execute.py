"""Executes the runs of a study on this machine, one after the other."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import filelock

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import check_alone, check_num_ranks
from candle_p1.cluster.process import GRACE_S, signals_interrupt
from candle_p1.errors import CandleError, SetupError
from candle_p1.studies.cost import CostEstimate, estimate, explain, remaining
from candle_p1.studies.display import result_line, study_bar
from candle_p1.studies.local_run import execute_run, launch
from candle_p1.studies.manifest import write_manifest
from candle_p1.studies.planned_run import to_argv
from candle_p1.studies.run_state import (
    FAILED,
    OK,
    RUNNING,
    RunState,
    finished,
    pids_of,
    states_of,
)
from candle_p1.studies.similar import SimilarRuns
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from candle_p1.studies.plan import Plan
    from candle_p1.studies.planned_run import PlannedRun
    from candle_p1.training.screen import Screen


@dataclass
class Execution:
    """The execution of a study.

    Attributes:
        plan: The study's runs.
        screen: Where progress is shown.
        retry_failed: Whether to repeat runs that failed in an earlier session.
        states: The state of each run so far, in the plan's order.
    """

    plan: Plan
    screen: Screen
    retry_failed: bool = False
    states: list[RunState] = field(default_factory=list)

    @property
    def failed(self) -> list[RunState]:
        """The runs that have failed, now or in an earlier session."""
        return [state for state in self.states if state.status == FAILED]

    @property
    def undone(self) -> list[RunState]:
        """The runs that are neither done nor failed: submitted as jobs, or interrupted."""
        return [state for state in self.states if state.status not in (OK, FAILED)]

    @property
    def num_done(self) -> int:
        """The number of runs that are done."""
        return len(finished(self.states))

    def execute(self) -> None:
        """Executes all runs that are due, and continues after a run that fails.

        The study's directory stays locked. However this session ends, the next one resumes
        the study where this one left it.

        Raises:
            Interrupted: A signal asked this process to end. The current run has been ended, and its
                record says so.
            CandleError: The study does not fit this machine, or its directory is in use, cannot be
                written, or holds the record of another run.
        """
        check_alone()
        check_num_ranks(self.plan.most_ranks)
        with _locked(self.plan.directory), signals_interrupt():
            self.states = _states_at_rest(self.plan)
            write_manifest(self.plan)
            due = [i for i, state in enumerate(self.states) if state.is_due(self.retry_failed)]
            self._introduce(self._estimates(due))
            _make_data([self.states[i].run for i in due], self.screen)
            with study_bar(self.screen) as bar:
                task = bar.add_task("", total=len(self.states), left="")
                while due:
                    before, estimates = self.states[due[0]], self._estimates(due)
                    num_past = len(self.states) - len(due)
                    bar.update(task, completed=num_past, description=before.run.name)

                    def tick(elapsed_s: float, estimates: list[CostEstimate] = estimates) -> None:
                        bar.update(task, left=f"{remaining(estimates, elapsed_s)} left")

                    self.states[due[0]] = execute_run(before, tick)
                    self.screen.say(self._result(due.pop(0), due))

    def _estimates(self, due: Sequence[int]) -> list[CostEstimate]:
        """Returns how long each of the runs at these positions will take."""
        done = finished(self.states)
        return [estimate(self.states[i].run, done, self._similar) for i in due]

    @cached_property
    def _similar(self) -> SimilarRuns:
        return SimilarRuns.beside(self.plan.directory)

    def _introduce(self, estimates: list[CostEstimate]) -> None:
        """Says what is done, and what remains to be done."""
        if self.num_done:
            self.screen.say(f"{self.num_done} of {len(self.states)} runs are already done")
        if self.failed and not self.retry_failed:
            self.screen.say(
                f"{len(self.failed)} failed earlier and are skipped; --retry_failed repeats them"
            )
        if not estimates:
            return
        for note in dict.fromkeys(note for run in self.plan.runs for note in launch(run).notes):
            self.screen.say(f"note: {note}")
        self.screen.say(explain(estimates))

    def _result(self, i: int, due: Sequence[int]) -> str:
        """Returns the result of the run at a position, with the remaining time of the study."""
        total = str(len(self.states))
        left = f"  ({remaining(self._estimates(due))} left)" if due else ""
        return f"{i + 1:>{len(total)}}/{total}  {result_line(self.states[i])}{left}"


def _make_data(runs: Iterable[PlannedRun], screen: Screen) -> None:
    """Generates missing synthetic files, so that no run's time includes this."""
    by_data = {
        (run.benchmark, run.settings["size"], run.settings["data_seed"]): run for run in runs
    }
    for run in by_data.values():
        benchmark = find_benchmark(run.benchmark)
        params = benchmark.read_parameters(to_argv(run.flags))
        with screen.making_data() as progress:
            locate_files(benchmark, params, progress)


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
    """Returns the state of each run, after those that an earlier session left running have ended.

    Raises:
        CandleError: They do not end.
    """
    deadline = time.monotonic() + GRACE_S
    while True:
        states = states_of(plan.runs)
        running = [state for state in states if state.status == RUNNING]
        if not running:
            return states
        if time.monotonic() > deadline:
            directory = running[0].directory
            assert directory is not None
            pids = " ".join(map(str, pids_of(directory)))
            remedy = f"end them: kill {pids}" if pids else "move it if its job no longer exists"
            raise CandleError(
                f"{directory}: processes of an earlier session are still working on it; wait until"
                f" they end, or {remedy}"
            )
        time.sleep(1)
