"""Measurements of `candle-p1 bench`, and the jobs they run.

Each job runs in fresh processes, which end with it.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench.task import BenchmarkTask
from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import check_alone, on_this_machine
from candle_p1.cluster.process import run_to_end
from candle_p1.distributed.backend import AUTO, choose_backend
from candle_p1.distributed.launch_environment import module_command, without_terminal
from candle_p1.errors import EXIT_CODE, CandleError, ParameterError, SetupError
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.text import ERROR_MARK
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.benchmark import Benchmark
    from candle_p1.cluster.launchers import Launch
    from candle_p1.data.reader import FileSet
    from candle_p1.parameters.parameter_set import ParameterSet

JOB_FILE, OUTCOMES_FILE = "job.pickle", "outcomes.pickle"
"""The files of a job's directory: the job, and the outcome of each rank."""
GRACE_S = 5.0
"""How long a job may take to end after SIGTERM."""
KILLED = (-9, 128 + 9)
"""Exit codes of a process that was killed by SIGKILL, and of its launcher."""

OnStart = Callable[[int, int, str], None]
"""Called before each job with the number of jobs done, that of all jobs, and the job's name."""


@dataclass(frozen=True)
class BareJob:
    """What the ranks of a job measure, without a benchmark.

    Attributes:
        worker: The module that each rank executes, with the job's directory as its argument; see
            candle_p1.bench.worker.
    """

    worker: ClassVar[str]

    @property
    def name(self) -> str:
        """What is measured, for messages."""
        raise NotImplementedError

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the job sets for its processes."""
        return {}

    def choose_backend(self) -> None:
        """Sets Keras's backend for the job's processes, some of which import Keras at once."""
        choose_backend()


@dataclass(frozen=True)
class Job(BareJob):
    """What the ranks of a job measure, with a benchmark.

    Attributes:
        own_flags: Flags of the benchmark that the job sets itself, with what to do instead.
        benchmark: The benchmark's name, path or module.
        flags: Flags for the benchmark.
    """

    own_flags: ClassVar[Mapping[str, str]] = {}

    benchmark: str
    flags: Sequence[str]

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters that the job sets itself: here one epoch, for any number of ranks."""
        return {"epochs": 1, "epochs_scaling": "none", "train_steps": 0}

    def choose_backend(self) -> None:
        """Sets the backend of the engine that the flags ask for."""
        choose_backend(self.bind(find_benchmark(self.benchmark)).get("engine", AUTO))

    def bind(self, benchmark: Benchmark) -> ParameterSet:
        """Returns the benchmark's parameters for this job.

        Raises:
            CandleError: A flag is wrong, or is set by the job itself; or a file is missing.
        """
        params = benchmark.read_parameters(self.flags)
        for name, instead in self.own_flags.items():
            if params.origin(name).kind == "flag":
                raise ParameterError(f"--{name} cannot be set in a comparison: {instead}")
        return params.replace(self.settings)

    locate = BenchmarkTask.locate


def launch(worker: str, num_ranks: int, directory: str) -> Launch:
    """Returns the command that starts the ranks of the job in a directory."""
    return on_this_machine(num_ranks, [*module_command(worker), directory])


def run(job: BareJob, num_ranks: int) -> list[Any]:
    """Runs a job until it ends; returns the outcome of each rank, as its worker measured it.

    The job ends with this call, even if an exception ends it. Call it from the main thread.

    Raises:
        CandleError: The job ended with an error that the user can resolve, which is its message.
        SetupError: The job was killed.
        RuntimeError: It failed in another way; holds everything it printed.
    """
    job.choose_backend()
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        directory = Path(name)
        (directory / JOB_FILE).write_bytes(pickle.dumps(job))
        output = directory / "output.log"
        command = launch(job.worker, num_ranks, name).command
        with output.open("wb") as file:
            variables = without_terminal(os.environ) | job.environment
            code, _ = run_to_end(command, variables, file, grace_s=GRACE_S)
        if code:
            raise failure(job, code, output.read_text(encoding="utf-8", errors="replace"))
        outcomes: list[Any] = pickle.loads((directory / OUTCOMES_FILE).read_bytes())
        return outcomes


def failure(job: BareJob, code: int, output: str) -> Exception:
    """Returns the error that follows from the exit code and the output of a job."""
    errors = [line for line in output.splitlines() if line.startswith(ERROR_MARK)]
    if code == EXIT_CODE and errors:
        return CandleError(f"{job.name}: {errors[0].removeprefix(ERROR_MARK)}")
    if code in KILLED:
        return SetupError(
            f"{job.name}: the job was killed, probably because the memory ran out: use fewer"
            " ranks or smaller data, or omit this method"
        )
    return RuntimeError(f"the job that measured {job.name} ended with code {code}:\n{output}")


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
        check_alone()
        benchmark = find_benchmark(self.job.benchmark)
        return locate_files(benchmark, self.job.bind(benchmark), progress)

    def measure(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; returns what ``--json`` writes: the conditions, and `results`.

        Args:
            files: As `locate_files` returned them.
            on_start: Called before each job.

        Raises:
            CandleError: A job cannot do its work, or its results must not be compared.
            RuntimeError: A job failed in another way.
        """
        started = utc_now()
        return self.results(files, on_start) | {
            "benchmark": find_benchmark(self.job.benchmark).name,
            "command": sys.argv,
            "started": started,
            "synthetic": files.synthetic,
            "machine": environment.capture(),
        }

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; returns what they have measured. See `measure`."""
        raise NotImplementedError
