"""The jobs of measurements: what their ranks do, and how they are started; also what ranks execute.

Each job runs in fresh processes, which end with it: ``python -m candle_p1.bench.task DIRECTORY``,
alone or under a launcher.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import timeit
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import candle_p1
from candle_p1.benchmark import Benchmark, find_benchmark
from candle_p1.cluster.launchers import on_this_machine
from candle_p1.cluster.process import run_to_end
from candle_p1.data.reader import FileSet
from candle_p1.distributed.backend import AUTO, VARIABLE, choose_backend
from candle_p1.distributed.comm import Communicator, agree, connect, on_first_rank
from candle_p1.distributed.launch_environment import module_command, without_terminal
from candle_p1.errors import EXIT_CODE, CandleError, ParameterError, SetupError
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.text import ERROR_MARK, print_error
from candle_p1.training.setup import locate_files

TASK_FILE, OUTCOMES_FILE = "task.pickle", "outcomes.pickle"  # of a job's directory
GRACE_S = 5.0  # that a job has to end after SIGTERM
KILLED = (-9, 128 + 9)  # exit codes of a process killed by SIGKILL, and of its launcher
DESCRIBE_S = 60  # that an environment may take to describe itself
DESCRIBE = """\
import json, sys
del sys.path[0]  # as module_command does
import candle_p1
from candle_p1.distributed.backend import choose_backend
print(json.dumps({"version": candle_p1.__version__, "backend": choose_backend()}))
"""

Outcome = dict[str, Any]
"""What a rank has measured. Values of ``checked`` must be the same on all ranks of all jobs."""


@dataclass(frozen=True, kw_only=True)
class BenchTask:
    """What the ranks of a job measure."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the job sets for its processes."""
        return {}

    def choose_backend(self) -> None:
        """Sets Keras's backend for the job's processes."""
        choose_backend()

    def measure(self, comm: Communicator) -> Outcome:
        """Returns what this rank has measured; collective.

        Raises:
            CandleError: Some rank cannot do its work; the same on every rank.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BenchmarkTask(BenchTask):
    """What the ranks of a job measure, with a benchmark."""

    own_flags: ClassVar[Mapping[str, str]] = {}
    """Flags of the benchmark that the job sets itself, with what to do instead."""

    benchmark: str
    flags: Sequence[str] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters that the job sets itself: here one epoch, for any number of ranks."""
        return {"epochs": 1, "epochs_scaling": "none", "train_steps": 0}

    def choose_backend(self) -> None:
        choose_backend(self.bind(find_benchmark(self.benchmark)).get("engine", AUTO))

    def bind(self, benchmark: Benchmark) -> ParameterSet:
        """Returns the benchmark's parameters; raises CandleError for flags that are wrong."""
        params = benchmark.read_parameters(self.flags)
        for name, instead in self.own_flags.items():
            if params.origin(name).kind == "flag":
                raise ParameterError(f"--{name} cannot be set in a comparison: {instead}")
        return params.replace(self.settings)

    def locate(self, comm: Communicator) -> tuple[Benchmark, ParameterSet, FileSet]:
        """Returns the benchmark, its parameters and its files; collective, as its errors are."""
        benchmark = agree(comm, find_benchmark, self.benchmark)
        params = agree(comm, self.bind, benchmark)
        return benchmark, params, on_first_rank(comm, locate_files, benchmark, params)


@dataclass(frozen=True)
class OtherEnvironment:
    """Another Python environment: its interpreter, and the backend that Keras has there.

    TensorFlow 2.18 and the JAX of today cannot be installed together, so engines are compared by
    jobs of two environments, in turn.
    """

    python: str
    backend: str

    @classmethod
    def of(cls, python: str) -> OtherEnvironment:
        """Returns the environment of an interpreter.

        Raises:
            ParameterError: It cannot be started, or has not this version of this package.
        """
        command, given = [python, "-c", DESCRIBE], f"--compare_env {python}"
        try:
            done = subprocess.run(
                command, env=_variables(python), capture_output=True, text=True, timeout=DESCRIBE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = getattr(error, "strerror", f"it takes more than {DESCRIBE_S} s")
            raise ParameterError(f"{given} cannot be started: {why}") from error
        if done.returncode:
            why = (done.stderr.strip() or f"it ends with code {done.returncode}").splitlines()[-1]
            raise ParameterError(
                f"{given} cannot import candle_p1: {why}. Install this package there, too"
            )
        found, here = json.loads(done.stdout), candle_p1.__version__
        if found["version"] != here:
            raise ParameterError(
                f"{given} has candle_p1 {found['version']}, and this is {here}: install the same"
                " version there"
            )
        return cls(python, found["backend"])


def _variables(python: str) -> dict[str, str]:
    """Returns the environment for an interpreter: another one chooses a backend for itself."""
    is_other = python != sys.executable
    return {k: v for k, v in os.environ.items() if not (is_other and k == VARIABLE)}


def run(
    task: BenchTask,
    num_ranks: int,
    name: str,
    python: str = sys.executable,
    limit_s: float | None = None,
) -> list[Outcome]:
    """Runs a job, of this name in messages, to its end; returns the outcome of each rank.

    Call it from the main thread. Raises what `execute` raises.
    """
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as directory:
        Path(directory, TASK_FILE).write_bytes(pickle.dumps(task))
        command = [*module_command(__name__, python), directory]
        command = on_this_machine(num_ranks, command, python).command
        execute(command, Path(directory), name, _variables(python) | task.environment, limit_s)
        outcomes: list[Outcome] = pickle.loads(Path(directory, OUTCOMES_FILE).read_bytes())
        return outcomes


def execute(
    command: Sequence[str],
    directory: Path,
    name: str,
    variables: Mapping[str, str] = os.environ,
    limit_s: float | None = None,
) -> None:
    """Executes a command of a job, which ends with this call, with its output in the directory.

    Raises:
        CandleError: The job ended with an error that the user can resolve, which is its message.
        SetupError: The job was killed, or ended because it took longer than `limit_s`.
        RuntimeError: It failed in another way; holds everything it printed.
    """
    output = directory / "output.log"
    with output.open("wb") as file:
        variables = without_terminal(variables)
        code, is_late = run_to_end(command, variables, file, limit_s, grace_s=GRACE_S)
    if is_late:
        raise SetupError(f"{name}: ended after the {limit_s:.0f} s that were left for it")
    if not code:
        return
    text = output.read_text(encoding="utf-8", errors="replace")
    errors = [line for line in text.splitlines() if line.startswith(ERROR_MARK)]
    if code == EXIT_CODE and errors:
        raise CandleError(f"{name}: {errors[0].removeprefix(ERROR_MARK)}")
    if code in KILLED:
        raise SetupError(
            f"{name}: the job was killed, probably because the memory ran out: use fewer ranks or"
            " smaller data, or omit this one"
        )
    raise RuntimeError(f"the job that measured {name} ended with code {code}:\n{text}")


@contextmanager
def errors_end(comm: Communicator) -> Iterator[None]:
    """Ends this process and all other ranks where the body raises an error, which is printed."""
    try:
        yield
    except CandleError as error:
        if comm.rank == 0 or not error.agreed:
            print_error(error)
        if not error.agreed:
            comm.abort(EXIT_CODE)
        comm.end(EXIT_CODE)
    except Exception:
        traceback.print_exc()
        comm.abort(1)


def serve() -> None:
    """Does the task of the directory that is the argument; rank 0 writes all outcomes into it."""
    directory = Path(sys.argv[1])
    try:
        comm = connect()
    except CandleError as error:
        print_error(error)
        sys.exit(EXIT_CODE)
    with errors_end(comm):
        task: BenchTask = pickle.loads((directory / TASK_FILE).read_bytes())
        agree(comm, task.choose_backend)
        outcomes = comm.gather(task.measure(comm))
        if outcomes is not None:
            (directory / OUTCOMES_FILE).write_bytes(pickle.dumps(outcomes))


def seconds_of(
    work: Callable[[], Any],
    num_calls: int,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Returns what a function makes of the times of several calls, in s, after one not timed."""
    work()
    return of(timeit.repeat(work, number=1, repeat=num_calls))


if __name__ == "__main__":
    from candle_p1.bench.task import serve  # of the module that tasks refer to

    serve()
