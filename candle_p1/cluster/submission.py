"""Submitting jobs: writes the script, passes it to the scheduler, and reads the job's id."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.cluster.schedulers import SCHEDULERS, scheduler_of
from candle_p1.errors import ParameterError, SetupError
from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.cluster.job_request import JobRequest

SCRIPT_STEM = "job"
"""The name of a script without the scheduler's suffix; scripts are stored beside the record."""
ID_NAME = "job.id"
"""The file beside a submitted script that holds the id of the job."""


def script_path(job: JobRequest, directory: Path) -> Path:
    """Returns the path of the script of a job whose record will be in this directory."""
    return directory / f"{SCRIPT_STEM}{scheduler_of(job).suffix}"


def was_submitted(directory: Path) -> bool:
    """Tells whether a job was submitted whose record will be in this directory.

    A job of a study that failed before its ranks started does not count: it renamed its script.
    """
    suffixes = {scheduler.suffix for scheduler in SCHEDULERS.values()}
    return any((directory / f"{SCRIPT_STEM}{suffix}").exists() for suffix in suffixes)


def submitted_id(directory: Path) -> str | None:
    """Returns the id of the job whose script is in a directory; None if it is not known."""
    try:
        return (directory / ID_NAME).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def checkout() -> Path:
    """Returns the checkout this package runs from, in which scripts find common/job_env.sh.

    Raises:
        SetupError: The package does not run from a checkout.
    """
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "common/job_env.sh").is_file():
        raise SetupError(
            f"{root} has no common/job_env.sh, which job scripts need: install this package in"
            " editable mode from a checkout (make setup)"
        )
    return root


def virtual_environment(root: Path) -> str | None:
    """Returns the virtual environment that a script has to name; None is .venv of the checkout."""
    is_usual = Path(sys.prefix) == root / ".venv" or sys.prefix == sys.base_prefix
    return None if is_usual else sys.prefix


def write_script(script: Path, text: str) -> None:
    """Writes a script and makes it executable, which Cobalt requires.

    Raises:
        ParameterError: It exists already, or cannot be written.
    """
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.open("x").close()  # claims the directory: no two jobs share one
        write_atomically(script, text)
        script.chmod(0o755)
    except OSError as error:
        raise ParameterError(f"output_dir: cannot write {script}: {error.strerror}") from error


def submit(job: JobRequest, script: Path, after: str | None = None) -> str:
    """Submits a script to the scheduler; returns the job's id.

    Args:
        job: The job.
        script: Its script.
        after: The id of a job that has to end before this one may start.

    Raises:
        SetupError: There is no scheduler here, or it refuses the job; the script is removed, so
            that the job can be submitted again. Or the scheduler printed no id.
    """
    scheduler = scheduler_of(job)
    command = scheduler.submit_command(script, after)
    try:
        output = _output(command, job.machine.name)
    except SetupError:
        script.unlink()
        raise
    job_id = scheduler.read_job_id(output)
    write_atomically(script.with_name(ID_NAME), f"{job_id}\n")
    return job_id


def _output(command: Sequence[str], machine: str) -> str:
    """Returns the output of the submit command."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SetupError(
            f"{command[0]}, which submits jobs on {machine}, is not in $PATH: submit on a machine"
            " that has it, or only print the script with --dry-run"
        ) from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise SetupError(f"{shlex.join(command)} ended with code {done.returncode}: {output}")
    return done.stdout
