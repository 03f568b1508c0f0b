"""Runs measuring jobs in another Python environment, which has what this one cannot have.

TensorFlow 2.18 and the JAX of today cannot be installed together, so engines are compared by jobs
of two environments, in turn, in one command. The other environment starts its own ranks: this
module is what it executes.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import candle_p1
from candle_p1.bench.job import GRACE_S, JOB_FILE, run
from candle_p1.cluster.process import Interrupted, run_to_end, signals_interrupt
from candle_p1.distributed.backend import VARIABLE, choose_backend
from candle_p1.distributed.launch_environment import without_terminal
from candle_p1.errors import EXIT_CODE, CandleError, ParameterError
from candle_p1.text import ERROR_MARK, print_error

if TYPE_CHECKING:
    from candle_p1.bench.job import BareJob

FOUND_FILE = "found.pickle"
"""The outcomes of the ranks that the other environment has started."""
DESCRIBE_S = 60
"""How long an environment may take to describe itself."""
# As candle_p1.distributed.launch_environment.module_command: nothing from the working directory.
PROGRAM = (
    "import sys; sys.path[:] = [each for each in sys.path if each];"
    " from candle_p1.bench.elsewhere import main; sys.exit(main(sys.argv[1:]))"
)


@dataclass(frozen=True)
class Elsewhere:
    """Another Python environment.

    Attributes:
        python: The path of its interpreter.
        backend: The backend of Keras there.
    """

    python: str
    backend: str

    @classmethod
    def of(cls, python: str) -> Elsewhere:
        """Returns the environment of an interpreter.

        Raises:
            ParameterError: It cannot be started, or has not this version of this package.
        """
        try:
            done = subprocess.run(
                [python, "-c", PROGRAM],
                env=_variables(),
                capture_output=True,
                text=True,
                timeout=DESCRIBE_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            why = getattr(error, "strerror", f"it takes more than {DESCRIBE_S} s")
            raise ParameterError(f"--other_python {python} cannot be started: {why}") from error
        if done.returncode:
            why = (done.stderr.strip() or f"it ends with code {done.returncode}").splitlines()[-1]
            raise ParameterError(
                f"--other_python {python} cannot import candle_p1: {why}. Install this package"
                " there, too"
            )
        found = json.loads(done.stdout)
        if found["version"] != candle_p1.__version__:
            raise ParameterError(
                f"--other_python {python} has candle_p1 {found['version']}, and this is"
                f" {candle_p1.__version__}: install the same version there"
            )
        return cls(python, found["backend"])

    def run(self, job: BareJob, num_ranks: int) -> list[Any]:
        """Does what candle_p1.bench.job.run does, in the other environment.

        Raises:
            CandleError: See there.
            RuntimeError: The job failed in another way; holds everything it printed.
        """
        with tempfile.TemporaryDirectory(prefix="candle-p1-bench-") as name:
            directory = Path(name)
            (directory / JOB_FILE).write_bytes(pickle.dumps(job))
            log = directory / "elsewhere.log"
            command = [self.python, "-c", PROGRAM, name, str(num_ranks)]
            with log.open("wb") as file:
                # The other process needs the time to end its own job.
                code, _ = run_to_end(command, _variables(), file, grace_s=2 * GRACE_S)
            if code:
                output = log.read_text(encoding="utf-8", errors="replace")
                errors = [line for line in output.splitlines() if line.startswith(ERROR_MARK)]
                if code == EXIT_CODE and errors:
                    raise CandleError(errors[0].removeprefix(ERROR_MARK))
                raise RuntimeError(f"{self.python} ended with code {code}:\n{output}")
            outcomes: list[Any] = pickle.loads((directory / FOUND_FILE).read_bytes())
            return outcomes


def _variables() -> dict[str, str]:
    """Returns this process's environment without what it has chosen for itself."""
    return {name: value for name, value in without_terminal(os.environ).items() if name != VARIABLE}


def main(arguments: list[str]) -> int:
    """Describes this environment, or runs a job in it; returns the exit code.

    Args:
        arguments: Nothing, or the directory of the job and its number of ranks.
    """
    try:
        if not arguments:
            facts = {"version": candle_p1.__version__, "backend": choose_backend()}
            print(json.dumps(facts))
            return 0
        directory, num_ranks = Path(arguments[0]), int(arguments[1])
        job = pickle.loads((directory / JOB_FILE).read_bytes())
        with signals_interrupt():
            outcomes = run(job, num_ranks)
        (directory / FOUND_FILE).write_bytes(pickle.dumps(outcomes))
    except CandleError as error:
        print_error(error)
        return EXIT_CODE
    except Interrupted as interrupted:
        return 128 + signal.Signals(interrupted.number)
    return 0
