"""Compares the start of a run, up to the end of its first step, with the least there is to do.

In every round ``candle-p1 run`` is started as users start it, limited to a few steps, and as many
processes as it has ranks that only import the framework and read the files' bytes
(candle_p1.bench.startup_baseline). The files are in the kernel's file cache.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from candle_p1.bench import harness, startup_baseline
from candle_p1.bench.harness import Job, Measured, Result
from candle_p1.bench.node_state import prepare_files
from candle_p1.bench.task import BenchmarkTask, Outcome, execute
from candle_p1.distributed.backend import choose_backend
from candle_p1.distributed.launch_environment import module_command
from candle_p1.errors import ParameterError
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.reports.statistics import summarize
from candle_p1.text import count

RUN, BASELINE = "candle-p1 run", "baseline"
LIMITS = {
    "epochs": "1",
    "epochs_scaling": "none",
    "train_steps": "2",  # the first one, in which the framework traces, and one to compare it with
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


@dataclass(frozen=True, kw_only=True)
class StartupTask(BenchmarkTask):
    """A run that trains its first steps."""

    own_flags: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(LIMITS, "the run ends after its first steps"),
        "output_dir": "the run's files are temporary",
    }

    @property
    def settings(self) -> dict[str, Any]:
        return {}  # the run gets its limits as flags


def start_run(task: StartupTask, num_ranks: int) -> Outcome:
    """Starts a run, and waits for its end; see `outcome_of`."""
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        limits = [word for flag, value in LIMITS.items() for word in (f"--{flag}", value)]
        command = [*module_command("candle_p1.cli"), "run", task.benchmark, "--np", str(num_ranks)]
        command += ["--", *task.flags, *limits, "--output_dir", f"{name}/output"]
        began_s, ended_s = _run_timed(TIMED, command, Path(name), RUN)
        (path,) = Path(name, "output").rglob(RECORD_NAME)
        return outcome_of(read_record(path), began_s, ended_s)


def start_baseline(framework: str, paths: Sequence[Path], num_processes: int) -> Outcome:
    """Starts processes that import a framework and read files; returns the times of the slowest."""
    num = str(num_processes)
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        program = [sys.executable, startup_baseline.__file__, framework, f"{name}/outcome"]
        command = [num, *program, num, *map(str, paths)]
        (began_s,) = _run_timed(TIMED_TOGETHER, command, Path(name), BASELINE)
        ends = [path.read_text().split() for path in Path(name).glob("outcome.*")]
        if len(ends) < num_processes:
            output = Path(name, "output.log").read_text()
            raise RuntimeError(f"a process of the baseline failed:\n{output}")
    python_s, imported_s, read_s = max(([*map(float, each)] for each in ends), key=max)
    parts_s = {
        "Python": python_s - began_s,
        f"import {framework}": imported_s - python_s,
        "reading the files' bytes": read_s - imported_s,
    }
    return {"elapsed_s": sum(parts_s.values()), "parts_s": parts_s}


def _run_timed(script: str, command: list[str], directory: Path, name: str) -> list[float]:
    times = directory / "times"
    execute(["sh", "-c", script, str(times), *command], directory, name)
    try:
        return [float(word) for word in times.read_text().split()]
    except ValueError as error:
        raise ParameterError("`date` prints no fractions of seconds here") from error


def outcome_of(record: Any, began_s: float, ended_s: float) -> Outcome:
    """Returns what the record of a run and the times of day, in s since 1970, say about a start.

    ``elapsed_s`` is from the command to the end of the first step on the slowest rank, ``parts_s``
    where it went, mean over ranks, then the remainder; ``step_s`` is a later step on the slowest
    rank, if any; and ``end_s`` is from the run's last measurement to the end of the command.
    """
    first, phases = record.training.epochs[0], record.phases
    before_s = _moment_s(record.started) - began_s
    if record.launch is None:
        parts_s = {"launch, Python, MPI": before_s}
    else:
        process_s, mpi_s = record.launch.process.mean_s, record.launch.mpi.mean_s
        parts_s = {
            "launch": max(before_s - process_s, 0.0),  # the kernel's clock ticks 100 times a second
            "Python, candle_p1, parameters": process_s - mpi_s,
            "MPI": mpi_s,
        }
    startup, train_begin = phases["startup"].regions or {}, phases["train"].begin or first.begin
    imported_s = (startup["devices"].regions or {})["import"].mean_s
    parts_s |= {
        "import of Keras and framework": imported_s,
        "devices": startup["devices"].mean_s - imported_s,
        **{name: startup[part].mean_s for part, name in STARTUP.items()},
        **{name: phases[name].mean_s for name in PHASES},
        "preparing to train": first.begin.mean_s - train_begin.mean_s,
        "tracing and first step": first.steps.first.mean_s,
    }
    total_s = before_s + first.begin.max_s + first.steps.first.max_s
    parts_s["other, and waiting for the slowest rank"] = total_s - sum(parts_s.values())
    return {
        "elapsed_s": total_s,
        "parts_s": parts_s,
        "step_s": first.steps.median and first.steps.median.max_s,
        "end_s": ended_s - _moment_s(record.ended),
    }


def _moment_s(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()


@dataclass(kw_only=True)
class Startup(harness.BenchmarkComparison):
    """Measure the start of BENCHMARK: from the command to the end of the first step.

    Starts `candle-p1 run`, limited to two steps, and shows where the time goes: launching, imports,
    devices, self-test, loading, building, tracing. In turn with it, as many processes as ranks only
    import the framework (TensorFlow, or JAX with --engine jax) and read the bytes of the files.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench startup nt3 --size full",
        "candle-p1 bench startup p1b2 --np 2 --rounds 3 --json startup.json",
    )

    num_rounds: int = harness.rounds_option(6, "Starts of each kind")

    def jobs(self) -> list[Job]:
        kinds = [self.job(variant, StartupTask) for variant in (RUN, BASELINE)]
        return harness.rounds(kinds, self.num_rounds)

    def run(self, job: Job) -> list[Outcome]:
        prepare_files("warm", self.paths())
        if job.variant == RUN:
            return [start_run(job.task, self.num_ranks)]
        return [start_baseline(self._framework(), self.paths(), self.num_ranks)]

    def _framework(self) -> str:
        self.jobs()[0].task.choose_backend()
        return choose_backend()

    def report(self, measured: Measured) -> dict[str, Any]:
        results = super().report(measured)["results"]
        runs_s, baselines_s = (result["repeats_s"] for result in results)
        ratios = [one / other for one, other in zip(runs_s, baselines_s, strict=True)]
        return {
            "num_ranks": self.num_ranks,
            "num_rounds": self.num_rounds,
            "framework": self._framework(),
            "file_bytes": sum(self.file_bytes().values()),
            "results": results,
            "median_ratio": statistics.median(ratios),
            **harness.spread_of(ratios, "ratio"),
        }

    def result(self, variant: str, measured: Measured) -> Result:
        starts = [ranks[0] for ranks in measured.of(variant)]
        more: Result = {}
        for name, key in (("later_step", "step_s"), ("end", "end_s")):
            values = [start[key] for start in starts if start.get(key) is not None]
            more[name] = summarize(values) if values else None
        more["parts"] = [
            {"part": part, **summarize([start["parts_s"][part] for start in starts])}
            for part in starts[0]["parts_s"]
        ]
        return super().result(variant, measured) | more

    def render(self, report: harness.Report) -> harness.Parts:
        run, baseline = report["results"]
        yield (
            f"{report['benchmark']}: from the command to the end of the first step, on"
            f" {count(report['num_ranks'], 'rank')}, {count(report['num_rounds'], 'round')}, files"
            f" of {harness.megabytes(report['file_bytes'])} MB in the file cache"
        )
        rows = [
            {**each, "name": f"  {each['part']}" if "part" in each else each["variant"]}
            for result in (run, baseline)
            for each in (*result["parts"], result)
        ]
        rest = {
            "a later step": run["later_step"],
            "from the last measurement to the command's end": run["end"],
        }
        rows += [{**times, "name": name} for name, times in rest.items() if times]
        columns: harness.Columns = {
            "": "name",
            "median (s)": lambda row: f"{row['median_s']:.3f}",
            "{spread} (s)": lambda row: "{:.3f} to {:.3f}".format(*row["ci95_s"] or row["range_s"]),
        }
        yield harness.table(rows, columns)
        yield (
            f"the start takes {harness.number(report['median_ratio'])} times as long as"
            f" the baseline ({harness.spread(run)} {harness.interval(report, 'ratio')}), which"
            f" imports {report['framework']} and reads the files' bytes; parts are means over ranks"
        )
        yield from harness.remarks(report, "round")


VERB = Startup
