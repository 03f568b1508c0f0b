"""Runs measuring jobs in another Python environment, which has what this one cannot have.

TensorFlow 2.18 and the JAX of today cannot be installed together, so engines are compared by jobs
of two environments, in turn. This module is also what the other one executes.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import candle_p1
from candle_p1.bench.task import GRACE_S, OUTCOMES_FILE, TASK_FILE, BenchTask, Outcome, execute, run
from candle_p1.cluster.process import Interrupted, signals_interrupt
from candle_p1.distributed.backend import VARIABLE, choose_backend
from candle_p1.distributed.launch_environment import without_terminal
from candle_p1.errors import EXIT_CODE, CandleError, ParameterError
from candle_p1.text import print_error

DESCRIBE_S = 60  # that an environment may take to describe itself
# As candle_p1.distributed.launch_environment.module_command: nothing from the working directory.
PROGRAM = (
    "import sys; sys.path[:] = [each for each in sys.path if each];"
    " from candle_p1.bench.other_environment import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True)
class OtherEnvironment:
    """Another Python environment: its interpreter, and the backend that Keras has there."""

    python: str
    backend: str

    @classmethod
    def of(cls, python: str) -> OtherEnvironment:
        """Returns the environment of an interpreter.

        Raises:
            ParameterError: It cannot be started, or has not this version of this package.
        """
        command, given = [python, "-c", PROGRAM], f"--compare_env {python}"
        try:
            done = subprocess.run(
                command, env=_variables(), capture_output=True, text=True, timeout=DESCRIBE_S
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

    def run(self, task: BenchTask, num_ranks: int, name: str) -> list[Outcome]:
        """Does what candle_p1.bench.task.run does, in the other environment."""
        with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as directory:
            Path(directory, TASK_FILE).write_bytes(pickle.dumps(task))
            command = [self.python, "-c", PROGRAM, directory, str(num_ranks)]
            # The other process needs the time to end its own job.
            execute(command, Path(directory), name, _variables(), 2 * GRACE_S)
            outcomes: list[Outcome] = pickle.loads(Path(directory, OUTCOMES_FILE).read_bytes())
            return outcomes


def _variables() -> dict[str, str]:
    """Returns this process's environment without what it has chosen for itself."""
    return {name: value for name, value in without_terminal(os.environ).items() if name != VARIABLE}


def main(arguments: Sequence[str]) -> int:
    """Describes this environment or, given a directory and a number of ranks, runs a job in it."""
    try:
        if not arguments:
            print(json.dumps({"version": candle_p1.__version__, "backend": choose_backend()}))
            return 0
        directory, num_ranks = Path(arguments[0]), int(arguments[1])
        task: BenchTask = pickle.loads((directory / TASK_FILE).read_bytes())
        with signals_interrupt():
            outcomes = run(task, num_ranks, sys.executable)
        (directory / OUTCOMES_FILE).write_bytes(pickle.dumps(outcomes))
    except CandleError as error:
        print_error(error)
        return EXIT_CODE
    except Interrupted as interrupted:
        return 128 + signal.Signals(interrupted.number)
    return 0
