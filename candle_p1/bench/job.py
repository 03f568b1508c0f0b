"""Measuring jobs: each measurement runs in fresh processes, which end with it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from candle_p1.cluster.launchers import on_this_machine
from candle_p1.cluster.process import run_to_end
from candle_p1.errors import EXIT_CODE, CandleError, ParameterError, SetupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from candle_p1.benchmark import Benchmark
    from candle_p1.cluster.launchers import Launch
    from candle_p1.parameters.parameter_set import ParameterSet

Outcome = TypeVar("Outcome")

ERROR_MARK = "error: "
GRACE_S = 5.0
"""How long a job may take to end after SIGTERM."""
KILLED = (-9, 128 + 9)
"""Exit codes of a process that was killed by SIGKILL, and of its launcher."""


@dataclass(frozen=True)
class Job:
    """What the ranks of a job measure. The fields are passed to them as JSON.

    Attributes:
        worker: The module that each rank executes, with the job's directory as its argument; see
            candle_p1.bench.worker.
        own_flags: Flags of the benchmark that the job sets itself, with what to do instead.
        benchmark: The benchmark's name, path or module.
        flags: Flags for the benchmark.
    """

    worker: ClassVar[str]
    own_flags: ClassVar[Mapping[str, str]] = {}

    benchmark: str
    flags: Sequence[str]

    @property
    def name(self) -> str:
        """What is measured, for messages."""
        raise NotImplementedError

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters that the job sets itself: here one epoch, for any number of ranks."""
        return {"epochs": 1, "epochs_scaling": "none", "train_steps": 0}

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

    def write(self, directory: Path) -> None:
        """Writes the job into its directory."""
        (directory / "job.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads a job from its directory."""
        return cls(**json.loads((directory / "job.json").read_text(encoding="utf-8")))


def write_outcomes(directory: Path, outcomes: Sequence[Any]) -> None:
    """Writes the outcomes of all ranks, a dataclass each, into the directory of their job."""
    content = json.dumps([asdict(outcome) for outcome in outcomes])
    (directory / "outcomes.json").write_text(content, encoding="utf-8")


def launch(worker: str, num_ranks: int, directory: str) -> Launch:
    """Returns the command that starts the ranks of the job in a directory."""
    return on_this_machine(num_ranks, [sys.executable, "-m", worker, directory])


def run(job: Job, num_ranks: int, outcome_type: type[Outcome]) -> list[Outcome]:
    """Runs a job until it ends; returns the outcome of each rank.

    The job ends with this call, even if an exception ends it. Call it from the main thread.

    Raises:
        CandleError: The job ended with an error that the user can resolve, which is its message.
        SetupError: The job was killed.
        RuntimeError: It failed in another way; holds everything it printed.
    """
    with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
        directory = Path(name)
        job.write(directory)
        output = directory / "output.log"
        command = launch(job.worker, num_ranks, name).command
        with output.open("wb") as file:
            code, _ = run_to_end(command, os.environ, file, grace_s=GRACE_S)
        if code:
            raise _failure(job, code, output.read_text(encoding="utf-8", errors="replace"))
        outcomes = json.loads((directory / "outcomes.json").read_text(encoding="utf-8"))
        return [outcome_type(**outcome) for outcome in outcomes]


def _failure(job: Job, code: int, output: str) -> Exception:
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
