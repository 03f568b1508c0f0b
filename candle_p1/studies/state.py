"""The state of each run of a study, derived from records alone.

A run is done when it has a record with status ok. A run that was interrupted, or whose record says
"running" although none of its processes is alive, is repeated; if it writes checkpoints, it is
continued in the same directory instead. A run that failed is repeated only on request. Records with
other parameters do not count; if such a record is ok, it is an error, because the run may not
overwrite it. A run that was submitted as a job is left to its scheduler until its record says how
it ended, because its processes are on other machines.

When a study is killed, its current run dies with it, and that run's record may say no more than
that a rank died. Therefore a failed run counts as interrupted if the study was no longer
running when it ended: its log then lacks the line that the study appends.

The jobs of a chain continue a run without the study. As long as jobs of it are left, the run counts
as submitted, whatever its record says about the ones before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import psutil

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.chain import Chain
from candle_p1.cluster.submission import continues, was_submitted
from candle_p1.errors import RecordError
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.records.types import RunRecord
from candle_p1.studies.plan import PlannedRun, settings_of

RunStatus = Literal["ok", "failed", "interrupted", "running", "submitted", "waiting"]
"""The statuses of records, and those of runs without one: submitted as a job, or waiting."""
LOG_NAME = "study.log"
"""The output of a run, in the directory of its record."""
END_MARK = "candle-p1 study: the run has ended with code"
"""What a study appends to the log, with the exit code, if it is still running when the run ends."""
CONTINUE_MARK = "candle-p1 study: the run is continued"
"""What a study appends to the log of an interrupted run before it continues it."""


@dataclass(frozen=True)
class RunState:
    """How far a run is, with the directory of the attempt that has this status and its record.

    They are None if there is no attempt, or the record is empty.
    """

    run: PlannedRun
    status: RunStatus
    directory: Path | None = None
    record: RunRecord | None = None

    def is_due(self, retry_failed: bool = False) -> bool:
        """Tells whether the run still has to be executed."""
        return self.status in ("waiting", "interrupted", *["failed"] * retry_failed)

    @property
    def is_continued(self) -> bool:
        """Whether the run goes on in its directory, where it left checkpoints, if it is due."""
        has_begun = self.status == "interrupted" and self.record is not None
        return has_begun and continues(self.run.settings)

    @property
    def next_directory(self) -> Path:
        """The directory in which the run is executed next."""
        if self.is_continued and self.directory is not None:
            return self.directory
        return self.run.next_directory()

    @property
    def total_s(self) -> float:
        """The time of a run that is ok, in s, with all its segments if it was continued."""
        assert self.record is not None
        totals = self.record.totals
        return totals.total_s if totals else self.record.total_s or 0.0


def finished(states: Iterable[RunState]) -> list[RunState]:
    """Returns the states of the runs that are done."""
    return [state for state in states if state.status == "ok"]


def pids_of(directory: Path) -> list[int]:
    """Returns the processes on this machine whose command line says that they write this record."""
    record = str(directory / RECORD_NAME)

    def writes(argv: list[str]) -> bool:
        place = ("--run_id", directory.name) in pairwise(argv)
        return record in argv or (place and str(directory.parent) in argv)

    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if writes(process.info["cmdline"] or [])]


def states_of(runs: Iterable[PlannedRun]) -> list[RunState]:
    """Returns the state of each run; see `state_of`."""
    return [state_of(run) for run in runs]


def state_of(run: PlannedRun) -> RunState:
    """Returns the state of a run.

    Raises:
        RecordError: A record cannot be read, or a record in the run's place is ok and belongs to
            another run.
    """
    state = RunState(run, "waiting")
    for directory in run.attempts():
        path = directory / RECORD_NAME
        if not path.exists():
            continue
        # An empty record was created by a process that was killed before it wrote.
        record = read_record(path) if path.stat().st_size else None
        status: RunStatus = record.status if record else "running"
        different = differences(run, record) if record else []
        if different and status == "ok":
            raise RecordError(
                f"{path} belongs to another run than the study's: {'; '.join(different)}. It is not"
                " overwritten: choose another directory with -o, or move this one"
            )
        is_gone = not was_submitted(directory) and not pids_of(directory)
        if (status == "running" and is_gone) or (status == "failed" and _lost_its_study(directory)):
            status = "interrupted"
        if status in ("interrupted", "failed") and Chain.read(directory).has_jobs_left:
            status = "submitted"
        if different and status != "running":
            continue
        state = RunState(run, status, directory, record)
        if status in ("ok", "running", "submitted"):
            return state
    directory = run.next_directory()
    return RunState(run, "submitted", directory) if was_submitted(directory) else state


def differences(run: PlannedRun, record: RunRecord) -> list[str]:
    """Describes how the run of a record differs from this one; [] if it does not.

    Where results go does not matter, and neither does how checkpoints are saved, because a chain of
    jobs adds flags for that. A parameter that the record lacks was added later, and had its
    default value. Only the environment variables that the study sets count, and only records that
    are ok hold them.
    """
    benchmark = find_benchmark(run.benchmark)
    declared = benchmark.declaration.parameters
    own = {"benchmark": benchmark.name, "num_ranks": run.num_ranks}
    expected: dict[str, Any] = own | {
        name: value
        for name, value in run.settings.items()
        if name not in declared or declared[name].group != "checkpoints"
    }
    found = settings_of(benchmark.declaration.parse([], benchmark.model_file))
    found |= {name: entry.value for name, entry in record.parameters.items()}
    found |= {"benchmark": record.benchmark, "num_ranks": record.num_ranks}
    if record.environment:
        expected |= run.variables
        found |= record.environment.settings
    return [
        f"{name} is {json.dumps(found[name]) if name in found else 'absent'} there and"
        f" {json.dumps(value)} here"
        for name, value in expected.items()
        if name not in found or found[name] != value
    ]


def _lost_its_study(directory: Path) -> bool:
    """Tells whether a study started this run, and was no longer running when it ended."""
    path = directory / LOG_NAME
    if not path.exists():
        return False
    _, _, of_last_segment = path.read_bytes().rpartition(CONTINUE_MARK.encode())
    return END_MARK.encode() not in of_last_segment
