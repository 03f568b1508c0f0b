"""Performs the runs of a study on this machine, one after the other."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import filelock

from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.errors import CandleError, ParameterError, SetupError
from candle_p1.records.environment import available_cores
from candle_p1.studies.cost import Cost, cost, measured
from candle_p1.studies.manifest import keep
from candle_p1.studies.perform import launch, perform
from candle_p1.studies.planned import words_of
from candle_p1.studies.process import GRACE_S, signals_interrupt
from candle_p1.studies.screen import result_line
from candle_p1.studies.state import FAILED, OK, RUNNING, RunState, pids_of, states_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from candle_p1.studies.plan import Plan
    from candle_p1.studies.planned import PlannedRun
    from candle_p1.studies.screen import StudyScreen

MAX_RANKS_PER_CORE = 8
"""More would not train, but exhaust the machine's memory."""


@dataclass
class Execution:
    """The performance of a study.

    Attributes:
        plan: The study's runs.
        screen: Where it shows how far it is.
        retry_failed: Whether to repeat runs that failed at an earlier start.
        states: What became of each run so far, in the plan's order.
    """

    plan: Plan
    screen: StudyScreen
    retry_failed: bool = False
    states: list[RunState] = field(default_factory=list)

    @property
    def failed(self) -> list[RunState]:
        """The runs that have failed, now or at an earlier start."""
        return [state for state in self.states if state.status == FAILED]

    @property
    def undone(self) -> list[RunState]:
        """The runs that are neither done nor failed: submitted as jobs, or ended by a signal."""
        return [state for state in self.states if state.status not in (OK, FAILED)]

    @property
    def num_done(self) -> int:
        """How many runs are done."""
        return sum(state.status == OK for state in self.states)

    def perform(self) -> None:
        """Performs all runs that are due; goes on after one that fails.

        Nothing else may work on the study's directory meanwhile, and a second start goes on where
        this one has ended, however it did.

        Raises:
            Interrupted: A signal asked to end. The run under way has been ended and is on record.
            CandleError: The study does not fit this machine, its directory is in use or cannot be
                written, or holds the record of another run.
        """
        _check_machine(self.plan)
        with _locked(self.plan.directory), signals_interrupt():
            self.states = _states_at_rest(self.plan)
            keep(self.plan)
            due = [i for i, state in enumerate(self.states) if state.is_due(self.retry_failed)]
            self._introduce(self._left(due))
            _make_data([self.states[i].run for i in due], self.screen)
            with self.screen.studying(len(self.states)) as bar:
                while due:
                    run = self.states[due[0]].run
                    bar.begin(len(self.states) - len(due), run.name, self._left(due))
                    self.states[due[0]] = perform(run, bar.tick)
                    self.screen.say(self._result(due.pop(0), due))

    def _left(self, due: Sequence[int]) -> Cost:
        """Returns what the runs at these places will take, by what is known by now."""
        return cost([self.states[i].run for i in due], measured(self.states))

    def _introduce(self, left: Cost) -> None:
        """Says what is done, and what is left to do."""
        if self.num_done:
            self.screen.say(f"{self.num_done} of {len(self.states)} runs are done already")
        if self.failed and not self.retry_failed:
            self.screen.say(
                f"{len(self.failed)} failed before and are left out; --retry-failed repeats them"
            )
        if not left.estimates:
            return
        for note in dict.fromkeys(note for run in self.plan.runs for note in launch(run).notes):
            self.screen.say(f"note: {note}")
        self.screen.say(left.explain())

    def _result(self, i: int, due: Sequence[int]) -> str:
        """Returns what became of the run at a place, with the time of those still due."""
        total = str(len(self.states))
        left = f"  ({self._left(due).words()} left)" if due else ""
        return f"{i + 1:>{len(total)}}/{total}  {result_line(self.states[i])}{left}"


def _make_data(runs: Iterable[PlannedRun], screen: StudyScreen) -> None:
    """Makes synthetic files that are missing, so that no run's time contains it."""
    of_data = {
        (run.benchmark, run.settings["size"], run.settings["data_seed"]): run for run in runs
    }
    for run in of_data.values():
        benchmark = find_benchmark(run.benchmark)
        parsed = benchmark.declaration.parse(words_of(run.flags), benchmark.model_file)
        with screen.making_data() as progress:
            benchmark.locate_files(benchmark.bind(parsed), progress)


def _check_machine(plan: Plan) -> None:
    if launcher_variable():
        raise ParameterError("this command starts its ranks itself: call it without a launcher")
    num_cores = len(available_cores())
    if plan.most_ranks > MAX_RANKS_PER_CORE * num_cores:
        raise ParameterError(
            f"{plan.most_ranks} ranks are too many for the {num_cores} cores of this machine:"
            " choose fewer by --ranks, or another --size"
        )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Makes the study's directory, and keeps other processes from working on it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(directory / ".lock", timeout=0)
        lock.acquire()
    except filelock.Timeout as error:
        raise SetupError(
            f"another candle-p1 study works on {directory}: wait for its end, or name another"
            " directory by -o"
        ) from error
    except (OSError, NotImplementedError) as error:  # the latter: no locks on this file system
        raise SetupError(
            f"{directory} cannot be used ({getattr(error, 'strerror', None) or error}): name"
            " another directory by -o"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _states_at_rest(plan: Plan) -> list[RunState]:
    """Returns what became of each run, once what an earlier start has left running has ended.

    Raises:
        CandleError: It does not end.
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
            remedy = f"end them: kill {pids}" if pids else "if its job is gone, move it away"
            raise CandleError(
                f"{directory}: processes of another start still work on it; wait for their end, or"
                f" {remedy}"
            )
        time.sleep(1)
