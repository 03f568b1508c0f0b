"""What all measurements of `candle-p1 bench` have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from candle_p1.bench.job import launch
from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.errors import ParameterError
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.bench.job import Job
    from candle_p1.benchmark import Benchmark
    from candle_p1.data.reader import FileSet
    from candle_p1.parameters.parameter_set import ParameterSet


class Starting(Protocol):
    """Is called before each job."""

    def __call__(self, done: int, total: int, what: str, /) -> None:
        """Tells the jobs done, all jobs, and what comes."""


def unheard(done: int, total: int, what: str, /) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Measurement:
    """What is measured, and under which conditions.

    Attributes:
        job: What its jobs are.
        benchmark: The benchmark's name, path or module.
        flags: Of the benchmark.
        num_ranks: Of a job, on this machine.
    """

    job: ClassVar[type[Job]]

    benchmark: str
    flags: Sequence[str]
    num_ranks: int = 1

    @property
    def notes(self) -> list[str]:
        """What a user should know beforehand, as of how ranks are started.

        Raises:
            SetupError: Several cannot be.
        """
        return launch(self.job.worker, self.num_ranks, "").notes

    def bind(self, benchmark: Benchmark) -> ParameterSet:
        """Returns the parameters that the benchmark's flags make.

        Raises:
            CandleError: A flag is wrong.
        """
        return benchmark.read_parameters(self.flags)

    def locate_files(self, progress: Callable[[str, int, int], None] | None = None) -> FileSet:
        """Returns the benchmark's files, made first where they are synthetic.

        Args:
            progress: Called while they are made; see `candle_p1.training.setup.locate_files`.

        Raises:
            CandleError: The benchmark, a flag or a file is wrong.
        """
        if launcher_variable():
            raise ParameterError("this command starts its ranks itself: call it without a launcher")
        benchmark = find_benchmark(self.benchmark)
        return locate_files(benchmark, self.bind(benchmark), progress)

    def measure(self, files: FileSet, starting: Starting = unheard) -> dict[str, Any]:
        """Runs all jobs; returns what ``--json`` writes.

        Args:
            files: As `locate_files` returned them.
            starting: Is told what comes.

        Raises:
            CandleError: A job cannot do its work, or what it found must not be compared.
            RuntimeError: A job has failed otherwise.
        """
        raise NotImplementedError
