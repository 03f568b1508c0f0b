"""Measuring jobs: fresh processes, started for one measurement and ended with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

from candle_p1.errors import EXIT_CODE, CandleError, ParameterError, SetupError
from candle_p1.machines.launchers import Launch, mpirun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from candle_p1.bench.memory import Samples
    from candle_p1.benchmark import Benchmark
    from candle_p1.params import ParameterSet

WORKER = "candle_p1.bench.load_worker"
ERROR_MARK = "error: "
OPTIONS = {"loader": "--methods", "load_threads": "--threads"}
"""What sets a benchmark's parameter in a comparison."""
END_S = 5.0
"""How long a job may take to end when it is asked to."""
KILLED = (-9, 128 + 9)
"""Exit codes of a process killed by SIGKILL, and of a launcher that saw one."""


@dataclass(frozen=True)
class LoadJob:
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

    def write(self, directory: Path) -> None:
        """Writes the job into its directory."""
        (directory / "job.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> LoadJob:
        """Reads a job from its directory."""
        return cls(**json.loads((directory / "job.json").read_text(encoding="utf-8")))


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
    params = benchmark.bind(benchmark.initialize_parameters(argv=flags))
    for name, option in OPTIONS.items():
        if params.origin(name).kind == "flag":
            raise ParameterError(f"--{name} is not for a comparison: use {option}")
    return params.replace({"loader": method, "load_threads": threads})


def write_outcomes(directory: Path, outcomes: Sequence[LoadOutcome]) -> None:
    """Writes what the ranks have measured into their job's directory."""
    content = json.dumps([asdict(outcome) for outcome in outcomes])
    (directory / "outcomes.json").write_text(content, encoding="utf-8")


def launch(num_ranks: int, directory: str) -> Launch:
    """Returns the command that starts a job's ranks; its directory holds the job."""
    command = [sys.executable, "-m", WORKER, directory]
    return mpirun(num_ranks, command) if num_ranks > 1 else Launch(command)


def run(job: LoadJob, num_ranks: int) -> list[LoadOutcome]:
    """Runs a job to its end; returns what each rank has measured.

    The job ends with this call, also when an exception, as of Ctrl-C, ends it.

    Raises:
        CandleError: The job has ended with an error that a user can mend: its own message.
        SetupError: It was killed.
        RuntimeError: It has failed otherwise; with all it has printed.
    """
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        directory = Path(name)
        job.write(directory)
        output = directory / "output.log"
        with (
            output.open("wb") as file,
            _process(launch(num_ranks, name).command, file) as process,
        ):
            code = process.wait()
        if code:
            raise _failure(job, code, output.read_text(encoding="utf-8", errors="replace"))
        outcomes = json.loads((directory / "outcomes.json").read_text(encoding="utf-8"))
        return [LoadOutcome(**outcome) for outcome in outcomes]


@contextmanager
def _process(command: Sequence[str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process, out of reach of the terminal's Ctrl-C; ends it and its family at exit."""
    this = psutil.Process()
    others = this.children()
    try:
        yield subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        # Looked up, for a signal may have come when the process was there and its object was not.
        started = [child for child in this.children() if child not in others]
        _end([member for child in started for member in (child, *child.children(recursive=True))])


def _end(family: Sequence[psutil.Process]) -> None:
    left = list(family)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for member in left:
            with suppress(psutil.NoSuchProcess):
                end(member)
        _, left = psutil.wait_procs(left, timeout=END_S)


def _failure(job: LoadJob, code: int, output: str) -> Exception:
    """Returns the error that a job's exit code and output tell of."""
    told = [line for line in output.splitlines() if line.startswith(ERROR_MARK)]
    if code == EXIT_CODE and told:
        return CandleError(f"{job.method}: {told[0].removeprefix(ERROR_MARK)}")
    if code in KILLED:
        return SetupError(
            f"{job.method}: the job was killed, as the system does when its memory runs out: try"
            " fewer ranks, a smaller data set, or leave this method out"
        )
    return RuntimeError(f"the job that measured {job.method} ended with code {code}:\n{output}")
