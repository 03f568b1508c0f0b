"""The life cycle of a run: its directory, its record from "running" to the end, its failures.

A run ends in one of four ways, and the record says which: it finishes (ok); all ranks raise the
same error (failed, written by rank 0); one rank fails, dies or is stopped by itself, or the
launcher does (failed, written by the watchdog server, which names the rank and ends the others); a
signal arrives (interrupted, also written by the watchdog server). The watchdog server is there
before the record is. A run that a signal has asked to save a checkpoint writes its record itself.

A run that did not finish is continued in its own directory and record; see
candle_p1.training.run_directory.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.checkpoints.checkpoint import Checkpoint
from candle_p1.checkpoints.policy import are_saved
from candle_p1.checkpoints.writer import CheckpointStatistics
from candle_p1.distributed.comm import Communicator, agree, on_first_rank
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.distributed.watchdog import watch
from candle_p1.errors import CandleError, ParameterError, RecordError, RunInterrupted, SetupError
from candle_p1.failure.agent import RankAgent
from candle_p1.failure.rank_log import output_to_file
from candle_p1.files import FULL
from candle_p1.instrument import collectives, phases
from candle_p1.instrument.collectives import CommunicationLog, summarize_communication
from candle_p1.instrument.logs import CallProfile
from candle_p1.instrument.phases import PhaseTimer, summarize_phases
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import RECORD_NAME, end_record, extend_record, write_so_far
from candle_p1.records.segments import with_positions
from candle_p1.records.types import ClockWaitsFor, Failure, JobEnergy, Position, Rank, RunRecord
from candle_p1.training.measured import (
    Measured,
    PowerMeter,
    describe_ranks,
    first_record,
    write_profiles,
)
from candle_p1.training.restart import SavedRun
from candle_p1.training.run_directory import RunDirectory, checkpoint_root
from candle_p1.training.screen import Screen

if TYPE_CHECKING:
    from candle_p1.training.epochs import GatheredEpochs


@dataclass
class Run:
    """A run in progress."""

    directory: Path  # of its files
    record: RunRecord  # so far; complete on rank 0 only
    phases: PhaseTimer  # of this rank
    communication: CommunicationLog  # of this rank
    power: PowerMeter  # of this node
    profile: CallProfile  # of this rank's Python calls
    screen: Screen  # silent on all ranks but rank 0
    comm: Communicator
    watchdog: RankAgent
    start: float  # by time.perf_counter, in s
    segment: int = 1  # its number, from 1
    checkpoint_root: Path | None = None  # None: it saves none
    restart: Checkpoint | None = None  # that it continues from, on rank 0, if there is one
    _so_far: RunRecord | None = None
    _energy: JobEnergy | None = None
    _next_note_s: float = 0.0

    @property
    def record_path(self) -> Path:
        """The path of the record."""
        return self.directory / RECORD_NAME

    def saved_run(self) -> SavedRun:
        """Returns, on rank 0, what a checkpoint says about the run; collective."""
        energy = self.power.so_far(self.start)
        if energy is not None:
            self._energy = energy
            total = {"kind", "total_j", "mean_w", "total_s"}
            energy = JobEnergy(**energy.model_dump(include=total))
        directory, steps = str(self.directory), self.watchdog.steps
        return SavedRun(directory=directory, segment=self.segment, steps=steps, energy=energy)

    def note(self, **sections: Any) -> None:
        """Keeps what rank 0 has measured so far, for the record of a run that ends early.

        They are sections of the record, to which phases are added, and the energy of a single node,
        or else of all nodes when the last checkpoint was saved. If the record cannot be written, as
        on a full disk, a warning says so, and the run goes on.
        """
        if self.comm.rank != 0:
            return
        if self.comm.num_nodes == 1:
            self._energy = self.power.so_far(self.start)
        if self._energy:
            sections["energy"] = self._energy
        phases = self.phases.phases.items()
        completed = {path: phase for path, phase in phases if self.phases.phases[path[:1]].usage}
        self._so_far = extend_record(
            self._so_far or self.record,
            known_until_s=time.perf_counter() - self.start,
            phases=summarize_phases([completed], [self.start]),
            **sections,
        )
        try:
            write_so_far(self.record_path, self._so_far)
        except OSError as error:
            self._next_note_s = inf
            self.screen.warn(f"if this run ends early, what it has measured is lost: {error}")

    def note_epochs(self, epochs: GatheredEpochs) -> None:
        """Keeps the epochs so far, for at most a hundredth of the time; for rank 0."""
        begin_s = time.perf_counter()
        if begin_s >= self._next_note_s:
            self.note(training={"epochs": epochs.so_far()})
            end_s = time.perf_counter()
            next_s = end_s + max(1.0, 100 * (end_s - begin_s))
            self._next_note_s = max(next_s, self._next_note_s)  # infinite after an error

    def result_directory(self, named: str | None) -> Path:
        """Returns where results go: the named directory, which rank 0 creates, or the run's own.

        Raises ParameterError on every rank if it cannot be created or written to; collective.
        """
        if named is None:
            return self.directory
        directory = Path(named).expanduser().absolute()

        def make() -> None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=directory) as file:
                    file.write(b"x")
            except OSError as error:
                raise ParameterError(f"save_path {named}: {error.strerror}") from error

        on_first_rank(self.comm, make)
        return directory

    def finish(
        self,
        rank_facts: Rank,
        *,
        clock_waits_for: ClockWaitsFor | None = None,
        begin: Position | None = None,
        end: Position | None = None,
        checkpoints: CheckpointStatistics | None = None,
        interrupted: bool = False,
        **sections: Any,
    ) -> None:
        """Gathers what every rank measured and writes the record; collective.

        It is ok unless there is a failure among the sections, or a signal has ended training. A
        record file that has been lost or damaged is written anew. Training began and ended at two
        positions; without the first, where the checkpoint was saved, or at the beginning. The other
        sections have an "efficiency" only if it is absent.

        Raises:
            RecordError: The file already says that the run has ended in another way, as the
                watchdog server may have found; the same on every rank.
            RunInterrupted: It was interrupted; on every rank, after the record has been written.
        """
        intervals = self.phases.intervals()
        ended = time.perf_counter()
        energy = self.power.measure(intervals, self.directory, self.start)
        own = Measured(
            rank_facts,
            self.phases.peak_rss_bytes,
            self.phases.phases,
            self.communication,
            self.start,
            ended,
            None if checkpoints is None else sum(save.wait_s for save in checkpoints.saves),
            phases.process_age_s(self.start),
            self.comm.start_s,
        )
        gathered = self.comm.gather(own)
        write_profiles(self.profile, self.directory, self.comm, self.screen.warn)
        failure, error = sections.pop("failure", None), None
        if interrupted:
            error, failure = self._interruption(checkpoints)
        status = "interrupted" if error else "failed" if failure else "ok"
        if gathered is not None:
            logs = [each.communication for each in gathered]
            measured: dict[str, Any] = {
                **describe_ranks(gathered, checkpoints),
                "total_s": ended - self.start,
                "energy": energy,
                "communication": summarize_communication(logs, clock_waits_for=clock_waits_for),
            }
            if self.record.segments:
                measured["segments"] = with_positions(
                    self.record.segments, begin, end, self.watchdog.steps
                )
            self.record = end_record(
                self.record_path, status, failure, self.record, **measured | sections
            )
        written = self.comm.broadcast(self.record.status)
        if written != status:
            raise RecordError(
                f'{self.record_path}: the run has ended with the status "{status}", but its record'
                f' already says "{written}"'
            ).on_all_ranks()
        if error:
            self.screen.say(str(error))
            error.printed = True
            raise error.on_all_ranks()

    def fail(self, error: CandleError) -> None:
        """Writes the record of a run that ends by an error of all ranks; for rank 0."""
        phase = "/".join(self.phases.failed_in) or None
        failure = Failure(reason=str(error), rank=None, phase=phase, steps=self.watchdog.steps)
        try:
            end_record(self.record_path, "failed", failure)
        except (OSError, RecordError) as lost:
            error.args = (f"{error}; the record cannot be written: {lost}",)

    def _interruption(
        self, checkpoints: CheckpointStatistics | None
    ) -> tuple[RunInterrupted, Failure]:
        """Returns how a signal has ended the run, the same on every rank; collective."""
        signalled = self.comm.first(self.watchdog.save_signal)
        rank, number = signalled or (0, int(signal.SIGUSR1))
        name = signal.Signals(number).name
        saved = "no checkpoint was saved; the same command begins where this segment began"
        if checkpoints and checkpoints.written:
            last = checkpoints.written[-1]
            where = checkpoints.directory / str(last.name)
            goes_on = "the same command goes on from there"
            saved = f"the checkpoint of {last.position} is in {where}; {goes_on}"
        reason = f"interrupted by {name}, which rank {rank} received; {saved}"
        failure = Failure(reason=reason, rank=rank, phase="train", steps=self.watchdog.steps)
        error = RunInterrupted(f"interrupted by {name}: {saved}", number)
        return self.comm.broadcast((error, failure))


@contextmanager
def recorded_run(name: str, params: ParameterSet, comm: Communicator) -> Iterator[Run]:
    """Opens the run's directory and record, watches over it, and records how it ends; collective.

    Raises:
        ParameterError: The directory already holds the record of another run, or a requested power
            source is not available; the same on all ranks.
    """
    with (
        _environment_put_back(),
        PowerMeter(comm, params["power"], params["power_hz"], params["gpus"]) as power,
        closing(agree(comm, Screen, comm.rank, params["logfile"])) as screen,
        closing(RunDirectory(name, params)) as opening,
    ):
        start = time.perf_counter()
        record = first_record(name, params, comm, agree(comm, launched_rank).launcher)
        # Only rank 0 accesses the file system; the others are told the outcome.
        expected = on_first_rank(comm, opening.find)
        watchdog = watch(comm, expected / RECORD_NAME, opening.lock_descriptors)
        if watchdog.warnings:
            record = extend_record(record, warnings=watchdog.warnings)
        with _reported(watchdog, expected) as opened:
            timer = PhaseTimer(on_enter=watchdog.report_phase, begin=start)
            directory, segment = on_first_rank(comm, opening.open, record, watchdog)
            watchdog.report_record(directory / RECORD_NAME)  # unwatched, each rank completes it
            communication, profile = CommunicationLog(), CallProfile(params["profiling"])
            log = directory / f"rank-{comm.rank:04d}.log" if comm.rank else None
            with (
                output_to_file(log),
                phases.active(timer),
                collectives.active(communication if params["communication_log"] else None),
                profile.running(),
            ):
                root = checkpoint_root(params, directory) if are_saved(params) else None
                logs = (timer, communication, power, profile, screen, comm, watchdog)
                saved = (segment, root, opening.checkpoint)
                run = Run(directory, opening.record or record, *logs, start, *saved)
                opened.append(run)
                for note in opening.notes:
                    screen.say(note)
                for warning in watchdog.warnings:
                    screen.warn(warning)
                yield run


@contextmanager
def _environment_put_back() -> Iterator[None]:
    """Undoes in the end what the body changes in the environment, which is meant for one run."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _reported(watchdog: RankAgent, expected: Path) -> Iterator[list[Run]]:
    """Reports to the watchdog, or in the record, how the body fails; it adds the run to the list.

    Before that, the run is expected in a directory.
    """
    opened: list[Run] = []
    try:
        yield opened
    except RunInterrupted:
        raise
    except CandleError as error:
        if not error.agreed:
            error.printed = watchdog.report_error(str(error))
        elif opened and opened[0].comm.rank == 0:
            opened[0].fail(error)
        raise
    except OSError as error:
        if error.errno not in FULL:
            watchdog.report_error(f"{type(error).__name__}: {error}", traceback.format_exc())
            raise
        where = error.filename or (opened[0].directory if opened else expected)
        full = SetupError(f"{where}: {error.strerror}")
        full.printed = watchdog.report_error(str(full))
        raise full from error
    except KeyboardInterrupt:
        watchdog.report_interrupt()
        raise
    except BaseException as error:
        watchdog.report_error(f"{type(error).__name__}: {error}", traceback.format_exc())
        raise
    finally:
        watchdog.close()
