"""Compares the start of a run, up to the end of its first step, with the least there is to do.

In every round two commands are started, in every second round in reverse order: ``candle-p1 run``
as users start it, limited to a few steps; and as many processes as it has ranks, each of which
imports the framework and reads its share of the files' bytes (candle_p1.bench.bare_start). The
files are in the kernel's file cache. Where the time of a run goes follows from its record and from
the time of day at which the command began and ended.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench import bare_start
from candle_p1.bench.file_cache import warm
from candle_p1.bench.job import GRACE_S, Job, Measurement, OnStart, failure
from candle_p1.cluster.launchers import on_this_machine
from candle_p1.cluster.process import run_to_end
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.launch_environment import module_command, without_terminal
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import files_at
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.reports.statistics import median_interval, summarize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.data.reader import FileSet
    from candle_p1.records.types import PhaseTimes, RunRecord

RUN, BARE = "candle-p1 run", "bare minimum"
NUM_STEPS = 2
"""The steps of a run: the first one, in which the framework traces, and one to compare it with."""
LIMITS = {
    "epochs": "1",
    "epochs_scaling": "none",
    "train_steps": str(NUM_STEPS),
    "val_steps": "1",
    "train_bool": "True",
    "eval_bool": "False",
}
"""What limits a run to its first steps."""
TIMED = 'date +%s.%N > "$0"; "$@"; code=$?; date +%s.%N >> "$0"; exit $code'
"""A shell's script that executes a command, and writes when it began and ended."""
TIMED_TOGETHER = """date +%s.%N > "$0"
num="$1"; shift; i=0
while [ "$i" -lt "$num" ]; do "$@" "$i" & i=$((i + 1)); done; wait"""
"""One that executes a command several times at once, with a number from 0 at its end."""
STARTUP = {"engine": "engine", "self_test": "self-test", "files": "locating files"}
"""The parts of the phase `startup`, with the names of the same parts here."""
PHASES = ("load", "digest", "preprocess", "build", "broadcast")


@dataclass(frozen=True)
class StartJob(Job):
    """A run that trains its first steps."""

    worker: ClassVar[str] = "candle_p1.cli"
    own_flags: ClassVar[Mapping[str, str]] = dict.fromkeys(
        LIMITS, "the run ends after its first steps"
    ) | {"output_dir": "the run's files are temporary"}

    @property
    def name(self) -> str:
        """The variant."""
        return RUN

    @property
    def settings(self) -> dict[str, Any]:
        """None: the run gets its limits as flags."""
        return {}


@dataclass(frozen=True)
class RunStart:
    """One start of a run.

    Attributes:
        total_s: The time from the command to the end of the first step on the slowest rank.
        parts_s: Where it went, mean over ranks, in s by name; the last one is the remainder.
        step_s: The time of a later step, on the slowest rank; None if an epoch has only one.
        end_s: The time from the last measurement of the run to the end of the command.
    """

    total_s: float
    parts_s: dict[str, float]
    step_s: float | None
    end_s: float

    @classmethod
    def of(cls, record: RunRecord, began_s: float, ended_s: float) -> RunStart:
        """Returns what a record and the times of day of a command say about a start.

        Args:
            record: That of a run that is complete, and has trained.
            began_s: When the command began, in s since 1970.
            ended_s: When it ended, likewise.
        """
        assert record.phases
        assert record.training
        assert record.ended
        first = record.training.epochs[0]
        assert first.begin
        assert first.steps
        assert first.steps.first
        run_began_s = _seconds_of(record.started)
        before_s = run_began_s - began_s
        parts_s = _before_run(record, before_s) | _startup(record.phases["startup"])
        parts_s |= {name: record.phases[name].mean_s for name in PHASES}
        train = record.phases["train"]
        parts_s["preparing to train"] = first.begin.mean_s - (train.begin or first.begin).mean_s
        parts_s["tracing and first step"] = first.steps.first.mean_s
        total_s = before_s + first.begin.max_s + first.steps.first.max_s
        parts_s["other, and waiting for the slowest rank"] = total_s - sum(parts_s.values())
        step = first.steps.median
        return cls(
            total_s,
            parts_s,
            step.max_s if step else None,
            ended_s - _seconds_of(record.ended),
        )


def _before_run(record: RunRecord, before_s: float) -> dict[str, float]:
    """Returns the parts of the time from the command to the start of the run."""
    if record.launch is None:
        return {"launch, Python, MPI": before_s}
    process_s, mpi_s = record.launch.process.mean_s, record.launch.mpi.mean_s
    return {
        "launch": max(before_s - process_s, 0.0),  # the kernel's clock ticks 100 times a second
        "Python, candle_p1, parameters": process_s - mpi_s,
        "MPI": mpi_s,
    }


def _startup(phase: PhaseTimes) -> dict[str, float]:
    """Returns the parts of the phase `startup`."""
    parts = phase.parts or {}
    imported_s = (parts["devices"].parts or {})["import"].mean_s
    known = {
        "import of Keras and framework": imported_s,
        "devices": parts["devices"].mean_s - imported_s,
    }
    return known | {name: parts[part].mean_s for part, name in STARTUP.items()}


def _seconds_of(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


@dataclass(frozen=True)
class StartComparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        num_rounds: Starts of each kind.
    """

    job: StartJob
    num_rounds: int = 6

    @property
    def notes(self) -> list[str]:
        """How the ranks are started; see Measurement."""
        return on_this_machine(self.num_ranks, []).notes

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Starts everything; see Measurement."""
        paths = [file for path in files.paths.values() for file in files_at(path)]
        self.job.choose_backend()
        framework = choose_backend()
        runs: list[RunStart] = []
        bare: list[dict[str, float]] = []
        for number in range(self.num_rounds):
            for variant in (RUN, BARE) if number % 2 == 0 else (BARE, RUN):
                done = len(runs) + len(bare)
                on_start(done, 2 * self.num_rounds, f"{variant}, round {number + 1}")
                try:
                    warm(paths)
                except OSError as error:
                    raise DataError(
                        f"cannot read the file: {error.strerror}", error.filename
                    ) from error
                if variant == RUN:
                    runs.append(start_run(self.job, self.num_ranks))
                else:
                    bare.append(start_bare(self.job, framework, paths, self.num_ranks))
        totals_s = [sum(each.values()) for each in bare]
        ratios = [one.total_s / other for one, other in zip(runs, totals_s, strict=True)]
        interval = median_interval(ratios)
        steps_s = [one.step_s for one in runs if one.step_s is not None]
        results = [
            {
                "variant": RUN,
                **summarize([one.total_s for one in runs]),
                "parts": _summarize_parts([one.parts_s for one in runs]),
                "later_step": summarize(steps_s) if steps_s else None,
                "end": summarize([one.end_s for one in runs]),
            },
            {"variant": BARE, **summarize(totals_s), "parts": _summarize_parts(bare)},
        ]
        return {
            "num_ranks": self.num_ranks,
            "num_rounds": self.num_rounds,
            "framework": framework,
            "file_bytes": sum(path.stat().st_size for path in paths),
            "results": results,
            "median_ratio": statistics.median(ratios),
            "ci95_ratio": list(interval) if interval else None,
            "range_ratio": [min(ratios), max(ratios)],
        }


def _summarize_parts(starts: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    return [{"part": name, **summarize([start[name] for start in starts])} for name in starts[0]]


def start_run(job: StartJob, num_ranks: int) -> RunStart:
    """Starts a run, and waits for its end; call it from the main thread.

    Raises:
        CandleError: It failed with an error that the user can resolve.
        RuntimeError: It failed in another way; holds everything it printed.
    """
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        limits = [word for flag, value in LIMITS.items() for word in (f"--{flag}", value)]
        command = [*module_command(job.worker), "run", job.benchmark, "--np", str(num_ranks), "--"]
        command += [*job.flags, *limits, "--output_dir", f"{name}/output"]
        began_s, ended_s = _run_timed(job, TIMED, command, Path(name))
        (path,) = Path(name, "output").rglob(RECORD_NAME)
        return RunStart.of(read_record(path), began_s, ended_s)


def start_bare(
    job: StartJob, framework: str, paths: Sequence[Path], num_processes: int
) -> dict[str, float]:
    """Starts processes that import a framework and read files, and waits for their end.

    Returns:
        The times that the slowest process took to begin, to import and to read, in s.

    Raises:
        RuntimeError: A process failed; holds everything that all of them printed.
    """
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        program = [sys.executable, bare_start.__file__, framework, f"{name}/outcome"]
        command = [str(num_processes), *program, str(num_processes), *map(str, paths)]
        (began_s,) = _run_timed(job, TIMED_TOGETHER, command, Path(name))
        outcomes = [
            [float(word) for word in path.read_text().split()]
            for path in Path(name).glob("outcome.*")
        ]
        if len(outcomes) < num_processes:
            raise RuntimeError(
                f"a process of the bare minimum failed:\n{(Path(name) / 'output.log').read_text()}"
            )
        python_s, imported_s, read_s = max(outcomes, key=lambda outcome: outcome[-1])
        return {
            "Python": python_s - began_s,
            f"import {framework}": imported_s - python_s,
            "reading the files' bytes": read_s - imported_s,
        }


def _run_timed(job: StartJob, script: str, command: list[str], directory: Path) -> list[float]:
    """Runs a command through a script, and returns the times of day that the script has written."""
    output, times = directory / "output.log", directory / "times"
    argv = ["sh", "-c", script, str(times), *command]
    with output.open("wb") as file:
        code, _ = run_to_end(argv, without_terminal(os.environ), file, grace_s=GRACE_S)
    if code:
        raise failure(job, code, output.read_text(encoding="utf-8", errors="replace"))
    try:
        return [float(word) for word in times.read_text().split()]
    except ValueError as error:
        raise ParameterError(
            "this command needs a `date` that prints fractions of seconds"
        ) from error
