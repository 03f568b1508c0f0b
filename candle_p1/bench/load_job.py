"""What a job of a comparison of loaders measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from candle_p1.bench.job import Job
from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.bench.memory import Samples
    from candle_p1.benchmark import Benchmark
    from candle_p1.parameters.parameter_set import ParameterSet

OPTIONS = {"loader": "--methods", "load_threads": "--threads"}
"""What sets a benchmark's parameter in a comparison."""


@dataclass(frozen=True)
class LoadJob(Job):
    """What a job loads, and how.

    Attributes:
        benchmark: Its name, path or module.
        flags: Of the benchmark.
        method: The loader.
        threads: Of each rank; 0 is its share of the cores.
        samples_memory: Whether to sample the memory meanwhile, which takes time.
    """

    benchmark: str
    flags: Sequence[str]
    method: str
    threads: int
    samples_memory: bool

    worker: ClassVar[str] = "candle_p1.bench.load_worker"

    @property
    def name(self) -> str:
        """The loader."""
        return self.method


@dataclass(frozen=True)
class LoadOutcome:
    """What a rank has measured.

    Attributes:
        elapsed_s: From the barrier to the end of the load.
        file_s: The time of each file, by role.
        threads: That this rank may read with.
        matrix_bytes: Of the matrices this rank has loaded.
        digests: Of the tables as read, by role.
        memory: Samples since before the barrier; none where they were not taken.
        bytes_read: By system calls; None where the kernel does not count.
        storage_bytes_read: From storage; None likewise.
    """

    elapsed_s: float
    file_s: dict[str, float]
    threads: int
    matrix_bytes: int
    digests: dict[str, str]
    memory: Samples
    bytes_read: int | None
    storage_bytes_read: int | None


def bind(benchmark: Benchmark, flags: Sequence[str], method: str, threads: int) -> ParameterSet:
    """Returns the parameters of a benchmark whose files are loaded by a method.

    Args:
        benchmark: What to load.
        flags: Of the benchmark.
        method: The loader.
        threads: Of each rank; 0 is its share of the cores.

    Raises:
        CandleError: A flag is wrong, or names the loader, or a file is missing.
    """
    params = benchmark.read_parameters(flags)
    for name, option in OPTIONS.items():
        if params.origin(name).kind == "flag":
            raise ParameterError(f"--{name} is not for a comparison: use {option}")
    return params.replace({"loader": method, "load_threads": threads})
