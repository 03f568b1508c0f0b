"""Submits jobs: keeps the script, hands it to the scheduler, reads the job's id."""

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
"""Scripts are named so, with the scheduler's ending, and lie beside the record."""
ID_NAME = "job.id"
"""Beside a script that was submitted, the id of its job."""


def script_path(job: JobRequest, directory: Path) -> Path:
    """Returns where the script of a job goes, whose record will be in this directory."""
    return directory / f"{SCRIPT_STEM}{scheduler_of(job).suffix}"


def was_submitted(directory: Path) -> bool:
    """Tells whether a job was submitted whose record goes into this directory.

    A job of a study that fails before its ranks start takes its script's name away: it was not.
    """
    suffixes = {scheduler.suffix for scheduler in SCHEDULERS.values()}
    return any((directory / f"{SCRIPT_STEM}{suffix}").exists() for suffix in suffixes)


def submitted_id(directory: Path) -> str | None:
    """Returns the id of the job whose script lies in a directory; None where it is not known."""
    try:
        return (directory / ID_NAME).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def checkout() -> Path:
    """Returns the checkout this package runs from, which scripts read common/job_env.sh of.

    Raises:
        SetupError: It runs from none.
    """
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "common/job_env.sh").is_file():
        raise SetupError(
            f"{root} holds no common/job_env.sh, which job scripts need: install this package from"
            " a checkout, in place (make setup)"
        )
    return root


def environment_of(root: Path) -> str | None:
    """Returns the virtual environment that a script has to name; None is .venv of the checkout."""
    prefix = sys.prefix
    return None if Path(prefix) == root / ".venv" or prefix == sys.base_prefix else prefix


def keep_script(script: Path, text: str) -> None:
    """Writes a script, executable, which Cobalt requires.

    Raises:
        ParameterError: It is there already, or cannot be written.
    """
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.open("x").close()  # claimed: two jobs never share a directory
        write_atomically(script, text)
        script.chmod(0o755)
    except OSError as error:
        raise ParameterError(f"output_dir: cannot write {script}: {error.strerror}") from error


def hand_over(job: JobRequest, script: Path, after: str | None = None) -> str:
    """Hands a script to the scheduler; returns the job's id.

    Args:
        job: The job.
        script: Its script.
        after: The id of a job that has to end before.

    Raises:
        SetupError: There is no scheduler here, or it does not take the job: then the script is
            removed, so that it can be submitted again. Or it printed no id.
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
    """Returns what the submit command prints."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SetupError(
            f"{command[0]}, which takes jobs of {machine}, is not in $PATH: submit where it is, or"
            " write the script alone with --dry-run"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise SetupError(f"{shlex.join(command)} ended with {done.returncode}: {said}")
    return done.stdout
