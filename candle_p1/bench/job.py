"""Measuring jobs: fresh processes, started for one measurement and ended with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

import psutil

from candle_p1.cluster.launchers import Launch, mpirun
from candle_p1.errors import EXIT_CODE, CandleError, SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

ERROR_MARK = "error: "
END_S = 5.0
"""How long a job may take to end when it is asked to."""
KILLED = (-9, 128 + 9)
"""Exit codes of a process killed by SIGKILL, and of a launcher that saw one."""


@dataclass(frozen=True)
class Job:
    """What the ranks of a job are to measure; its fields go to them as JSON.

    Attributes:
        worker: The module that each rank runs, with the job's directory as its argument; see
            candle_p1.bench.worker.
    """

    worker: ClassVar[str]

    @property
    def name(self) -> str:
        """What is measured, for messages."""
        raise NotImplementedError

    def write(self, directory: Path) -> None:
        """Writes the job into its directory."""
        (directory / "job.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads a job from its directory."""
        return cls(**json.loads((directory / "job.json").read_text(encoding="utf-8")))


def write_outcomes(directory: Path, outcomes: Sequence[Any]) -> None:
    """Writes what the ranks have measured, a dataclass each, into their job's directory."""
    content = json.dumps([asdict(outcome) for outcome in outcomes])
    (directory / "outcomes.json").write_text(content, encoding="utf-8")


def launch(worker: str, num_ranks: int, directory: str) -> Launch:
    """Returns the command that starts a job's ranks; its directory holds the job."""
    command = [sys.executable, "-m", worker, directory]
    return mpirun(num_ranks, command) if num_ranks > 1 else Launch(command)


def run(job: Job, num_ranks: int) -> list[dict[str, Any]]:
    """Runs a job to its end; returns what each rank has measured, as a dictionary.

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
            _process(launch(job.worker, num_ranks, name).command, file) as process,
        ):
            code = process.wait()
        if code:
            raise _failure(job, code, output.read_text(encoding="utf-8", errors="replace"))
        outcomes = json.loads((directory / "outcomes.json").read_text(encoding="utf-8"))
        return list(outcomes)


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


def _failure(job: Job, code: int, output: str) -> Exception:
    """Returns the error that a job's exit code and output tell of."""
    told = [line for line in output.splitlines() if line.startswith(ERROR_MARK)]
    if code == EXIT_CODE and told:
        return CandleError(f"{job.name}: {told[0].removeprefix(ERROR_MARK)}")
    if code in KILLED:
        return SetupError(
            f"{job.name}: the job was killed, as the system does when its memory runs out: try"
            " fewer ranks, a smaller data set, or leave this method out"
        )
    return RuntimeError(f"the job that measured {job.name} ended with code {code}:\n{output}")
