"""What all measurements of `candle-p1 bench` share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from candle_p1.bench.job import launch
from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.errors import ParameterError
from candle_p1.records import environment
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from candle_p1.bench.job import Job
    from candle_p1.data.reader import FileSet

OnStart = Callable[[int, int, str], None]
"""Called before each job with the number of jobs done, that of all jobs, and the job's name."""


@dataclass(frozen=True)
class Measurement:
    """What is measured, and under which conditions.

    Attributes:
        job: The job that is run, or from which all jobs are derived.
        num_ranks: Ranks of a job, all on this machine.
    """

    job: Job
    num_ranks: int = 1

    @property
    def notes(self) -> list[str]:
        """What the user should know in advance, such as how the ranks are started.

        Raises:
            SetupError: Several ranks cannot be started.
        """
        return launch(self.job.worker, self.num_ranks, "").notes

    def locate_files(self, progress: Callable[[str, int, int], None] | None = None) -> FileSet:
        """Returns the benchmark's files; synthetic ones are generated first if they are missing.

        Args:
            progress: Called while they are generated; see `candle_p1.training.setup.locate_files`.

        Raises:
            CandleError: The benchmark, a flag or a file is wrong.
        """
        if launcher_variable():
            raise ParameterError("this command starts its own ranks: call it without a launcher")
        benchmark = find_benchmark(self.job.benchmark)
        return locate_files(benchmark, self.job.bind(benchmark), progress)

    def measure(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; returns what ``--json`` writes.

        Args:
            files: As `locate_files` returned them.
            on_start: Called before each job.

        Raises:
            CandleError: A job cannot do its work, or its results must not be compared.
            RuntimeError: A job failed in another way.
        """
        raise NotImplementedError

    def conditions(self, files: FileSet, started: str) -> dict[str, Any]:
        """Returns the facts that every result begins with."""
        return {
            "benchmark": find_benchmark(self.job.benchmark).name,
            "command": sys.argv,
            "started": started,
            "synthetic": files.synthetic,
            "machine": environment.capture(),
        }
