"""How far a study is: what became of each run, from records alone.

A run is done when a record of it is ok. One that was interrupted, or that says "running" though no
process of it lives, is to be repeated; one that failed is left, unless it is asked for again.
Records of other parameters do not count, and where one of them is ok nothing is done in its place.
What was submitted as a job is left to its scheduler until its record says how it ended: its
processes are on other machines.

A study that is killed takes the run under way with it, whose ranks may have no time to say more
than that one of them died. So it is interrupted too, where the study was not there at its end: the
log lacks the line that the study adds then.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.submission import was_submitted
from candle_p1.errors import RecordError
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.studies.places import END_MARK, LOG_NAME
from candle_p1.studies.plan import settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from candle_p1.studies.planned import PlannedRun

OK, FAILED, INTERRUPTED, RUNNING = "ok", "failed", "interrupted", "running"
SUBMITTED, WAITING = "submitted", "waiting"
STATUSES = (OK, FAILED, INTERRUPTED, RUNNING, SUBMITTED, WAITING)
"""Those of records; without one a run is "submitted" as a job, or "waiting"."""


@dataclass(frozen=True)
class RunState:
    """What became of a run.

    Attributes:
        run: The run.
        status: One of STATUSES.
        directory: Of the attempt that this is the status of; None of a run without any.
        record: Of that attempt; None where there is none, or none could be written.
    """

    run: PlannedRun
    status: str
    directory: Path | None = None
    record: Mapping[str, Any] | None = None

    def is_due(self, retry_failed: bool = False) -> bool:
        """Tells whether the run is still to be performed."""
        return self.status in (WAITING, INTERRUPTED) or (retry_failed and self.status == FAILED)


def pids_of(directory: Path) -> list[int]:
    """Returns the processes of this machine whose command line says that they make this record."""
    record, place = str(directory / RECORD_NAME), ["--run_id", directory.name]
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if (words := process.info["cmdline"] or [])
        and (record in words or (_holds(words, place) and str(directory.parent) in words))
    ]


def states_of(
    runs: Iterable[PlannedRun], pids: Callable[[Path], list[int]] = pids_of
) -> list[RunState]:
    """Returns what became of each run; see `state_of`."""
    return [state_of(run, pids) for run in runs]


def state_of(run: PlannedRun, pids: Callable[[Path], list[int]] = pids_of) -> RunState:
    """Returns what became of a run.

    Args:
        run: The run.
        pids: Finds the processes that make the record of a directory.

    Raises:
        RecordError: A record cannot be read, or one in the run's place is ok and of another run.
    """
    state = RunState(run, WAITING)
    for directory in run.attempts():
        path = directory / RECORD_NAME
        # An empty one was claimed by a process that was killed before it wrote.
        record = read_record(path) if path.stat().st_size else None
        status = record["status"] if record else RUNNING
        different = differences(run, record) if record else []
        if different and status == OK:
            raise RecordError(
                f"{path} is of another run than the study's: {'; '.join(different)}. Nothing is"
                " written over: name another directory by -o, or move this one away"
            )
        is_gone = not was_submitted(directory) and not pids(directory)
        if (status == RUNNING and is_gone) or (status == FAILED and _was_left_alone(directory)):
            status = INTERRUPTED
        if different and status != RUNNING:
            continue
        state = RunState(run, status, directory, record)
        if status in (OK, RUNNING):
            return state
    place = run.next_directory()
    return RunState(run, SUBMITTED, place) if was_submitted(place) else state


def differences(run: PlannedRun, record: Mapping[str, Any]) -> list[str]:
    """Returns in what a record is of another run than this one, in words; [] of the same.

    Where results go does not matter. A parameter that a record lacks is newer than it, and had its
    default. Of environment variables those count that the study sets; only records that are ok have
    them.
    """
    benchmark = find_benchmark(run.benchmark)
    expected: dict[str, Any] = {
        "benchmark": benchmark.name,
        "num_ranks": run.num_ranks,
        **run.settings,
    }
    defaults = settings_of(benchmark.declaration.parse([], benchmark.model_file))
    found = defaults | {"benchmark": record["benchmark"], "num_ranks": record["num_ranks"]}
    found |= {
        name: entry["value"] for name, entry in record["parameters"].items() if name in run.settings
    }
    if "environment" in record:
        expected |= run.variables
        settings = record["environment"]["settings"]
        found |= {name: settings[name] for name in run.variables if name in settings}
    return [
        f"{name} is {_shown(found, name)} there and {_shown(expected, name)} here"
        for name in expected
        if name not in found or found[name] != expected[name]
    ]


def _was_left_alone(directory: Path) -> bool:
    """Tells whether a study performed this run, and was not there at its end."""
    path = directory / LOG_NAME
    return path.exists() and END_MARK.encode() not in path.read_bytes()


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "absent"


def _holds(words: list[str], pair: list[str]) -> bool:
    return any(words[i : i + 2] == pair for i in range(len(words) - 1))
