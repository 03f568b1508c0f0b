"""The life cycle of a run: its directory, its record from "running" to the end, its failures.

A run ends in one of four ways, and the record says which: it finishes (ok); all ranks raise the
same error (failed, written by rank 0); one rank fails, dies or is stopped by itself, or the
launcher does (failed, written by the watchdog server, which names the rank and ends the others); a
signal arrives (interrupted, also written by the watchdog server). The watchdog server is there
before the record is.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.distributed.comm import Attempt, on_first_rank
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.distributed.watchdog_client import WatchdogClient
from candle_p1.errors import CandleError, ParameterError, SetupError
from candle_p1.files import FULL, release, write_atomically
from candle_p1.instrument import collectives, efficiency, phases
from candle_p1.instrument.collectives import CommunicationLog, summarize_communication
from candle_p1.instrument.phases import PhaseTimer, summarize_phases
from candle_p1.instrument.profiles import CallProfile, write_profiles
from candle_p1.records.record import (
    RECORD_NAME,
    begin_record,
    extend_record,
    make_record,
    utc_now,
    write_record,
)
from candle_p1.records.spread import Bytes
from candle_p1.records.types import SCHEMA_VERSION, Efficiency, Failure, RankFacts, RunRecord
from candle_p1.training.power_meter import PowerMeter
from candle_p1.training.run_directory import run_directories
from candle_p1.training.screen import Screen, output_to_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet


@dataclass
class Run:
    """A run in progress.

    Attributes:
        directory: Where its files go.
        record: The record so far; complete on rank 0 only.
        phases: Times the phases of this rank.
        communication: The log of this rank's communication.
        power: Measures the power of this node.
        profile: The profile of this rank's Python calls.
        screen: Prints on rank 0; silent on all other ranks.
        comm: The ranks.
        watchdog: Reports to the watchdog server.
        start: When it began, by time.perf_counter, in s.
    """

    directory: Path
    record: RunRecord
    phases: PhaseTimer
    communication: CommunicationLog
    power: PowerMeter
    profile: CallProfile
    screen: Screen
    comm: Communicator
    watchdog: WatchdogClient
    start: float

    @property
    def record_path(self) -> Path:
        """The path of the record."""
        return self.directory / RECORD_NAME

    def result_directory(self, named: str | None) -> Path:
        """Returns where results go: the named directory, which rank 0 creates, or the run's own.

        Raises:
            ParameterError: It cannot be created or written to; raised on every rank.
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

        Attempt(lambda: make() if self.comm.rank == 0 else None).agree(self.comm)
        return directory

    def finish(self, rank_facts: RankFacts, *, logged: bool, **sections: Any) -> None:
        """Gathers what every rank measured and writes the record; collective.

        It is ok unless there is a failure among the sections.

        Args:
            rank_facts: What the record says about this rank.
            logged: Whether collectives were logged.
            sections: The other sections of the record; "efficiency" only if it is absent.
        """
        intervals = self.phases.intervals()
        end = time.perf_counter()
        energy = self.power.measure(intervals, self.directory, self.start)
        mine = _Measured(
            rank_facts,
            self.phases.peak_rss_bytes,
            self.phases.phases,
            self.communication,
            self.start,
            end,
            self.profile.statistics(),
        )
        gathered = self.comm.gather(mine)
        if gathered is None:
            return
        write_profiles(self.directory, [measured.profile for measured in gathered])
        measured = {
            "status": "failed" if "failure" in sections else "ok",
            "ended": utc_now(),
            "ranks": [each.facts for each in gathered],
            "phases": summarize_phases(
                [each.phases for each in gathered], [each.start for each in gathered]
            ),
            "peak_rss": Bytes.over([each.peak_rss_bytes for each in gathered]),
            "total_s": end - self.start,
            "energy": energy,
            "communication": summarize_communication(
                [each.communication for each in gathered], logged=logged
            ),
            "efficiency": _efficiency(gathered),
        }
        self.record = extend_record(self.record, **measured | sections)
        write_record(self.record_path, self.record)


class _Measured(NamedTuple):
    """What a rank measured, for the record."""

    facts: RankFacts
    peak_rss_bytes: int
    phases: dict[phases.PhasePath, phases.Phase]
    communication: CommunicationLog
    start: float
    end: float
    profile: bytes | None


def _efficiency(of_ranks: Sequence[_Measured]) -> Efficiency:
    """Returns how well the ranks worked together over the whole run."""
    waited_s = [
        sum(phase.communication_s for path, phase in rank.phases.items() if len(path) == 1)
        for rank in of_ranks
    ]
    took_s = [rank.end - rank.start for rank in of_ranks]
    useful_s = [took - waited for took, waited in zip(took_s, waited_s, strict=True)]
    return efficiency.efficiencies(useful_s, max(took_s), definition=efficiency.DEFINITION)


@contextmanager
def recorded_run(name: str, params: ParameterSet, comm: Communicator) -> Iterator[Run]:
    """Opens the run's directory and record, watches over it, and records how it ends; collective.

    Raises:
        ParameterError: The directory already holds the record of another run, or a requested power
            source is not available; the same on all ranks.
    """
    with (
        PowerMeter(comm, params["power"], params["power_hz"], params["gpus"]) as power,
        _opened_run(name, params, comm, power) as run,
    ):
        yield run


@contextmanager
def _opened_run(
    name: str, params: ParameterSet, comm: Communicator, power: PowerMeter
) -> Iterator[Run]:
    start = time.perf_counter()
    record = make_record(
        {
            "schema_version": SCHEMA_VERSION,
            "status": "running",
            "benchmark": name,
            "started": utc_now(),
            "command": sys.argv,
            "num_ranks": comm.size,
            "num_nodes": comm.num_nodes,
            "launcher": Attempt(launched_rank).agree(comm).launcher,
            "parameters": {
                key: {"value": value, "origin": str(params.origin(key))}
                for key, value in params.items()
            },
        }
    )
    # Only rank 0 accesses the file system; the others are told the outcome.
    screen = Attempt(lambda: Screen(comm.rank, params["logfile"])).agree(comm)
    candidates = run_directories(name, params)
    watchdog = WatchdogClient(comm, _first_free(candidates) if comm.rank == 0 else candidates[0])
    timer = PhaseTimer(on_enter=watchdog.report_phase, begin=start)
    directory: Path | None = None
    try:
        opening = partial(_open_directory, candidates, params, record, watchdog)
        directory = on_first_rank(opening, comm)
        communication = CommunicationLog()
        profile = CallProfile(params["profiling"])
        log = directory / f"rank-{comm.rank:04d}.log" if comm.rank else None
        with (
            output_to_file(log),
            phases.active(timer),
            collectives.active(communication if params["communication_log"] else None),
            profile.running(),
        ):
            yield Run(
                directory,
                record,
                timer,
                communication,
                power,
                profile,
                screen,
                comm,
                watchdog,
                start,
            )
    except CandleError as error:
        if not error.agreed:
            error.printed = watchdog.report_error(str(error))
        elif comm.rank == 0 and directory is not None:
            _record_agreed_failure(directory, record, error, phase="/".join(timer.failed_in))
        raise
    except OSError as error:
        if error.errno not in FULL:
            watchdog.report_error(f"{type(error).__name__}: {error}", traceback.format_exc())
            raise
        full = SetupError(f"{error.filename or directory}: {error.strerror}")
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
        screen.close()


def describe_rank(comm: Communicator, *, threads: int, device: str, num_cores: int) -> RankFacts:
    """Returns what the record says about this rank."""
    return RankFacts(
        rank=comm.rank,
        host=socket.gethostname(),
        node=comm.node,
        local_rank=comm.local_rank,
        num_cores=num_cores,
        threads=threads,
        device=device,
    )


def _first_free(candidates: Sequence[Path]) -> Path:
    """Returns the record of the first directory that has none yet, or else of the last."""
    free = (each for each in candidates if not os.path.lexists(each / RECORD_NAME))
    return next(free, candidates[-1]) / RECORD_NAME


def _open_directory(
    candidates: Sequence[Path], params: ParameterSet, record: RunRecord, watchdog: WatchdogClient
) -> Path:
    """Creates the run's directory, with the parameters and the record, which is still "running"."""
    try:
        for directory in candidates:
            directory.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(directory / RECORD_NAME):
                continue
            try:
                begin_record(directory / RECORD_NAME, record)  # two jobs never share one
            except FileExistsError:
                continue
            watchdog.report_record(directory / RECORD_NAME)
            try:
                write_atomically(directory / "final_params.txt", params.to_text())
            except OSError:
                (directory / RECORD_NAME).unlink()
                release(directory / RECORD_NAME)
                raise
            return directory
    except OSError as error:
        raise ParameterError(
            f"output_dir ({params.origin('output_dir')}): cannot write to"
            f" {error.filename or directory}: {error.strerror}"
        ) from error
    raise ParameterError(
        f"{candidates[-1]} already holds the record of a run: choose another --run_id,"
        " --experiment_id or --output_dir"
    )


def _record_agreed_failure(
    directory: Path, record: RunRecord, error: CandleError, phase: str
) -> None:
    failure = Failure(reason=str(error), rank=None, phase=phase or None)
    ended = extend_record(record, status="failed", ended=utc_now(), failure=failure)
    try:
        write_record(directory / RECORD_NAME, ended)
    except OSError as full:
        error.args = (f"{error}; the record cannot be written: {full}",)
