"""Submitting jobs: writes the script, passes it to the scheduler, and reads the job's id."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.cluster.chain import CHAIN_NAME, Chain, begin_chain
from candle_p1.cluster.schedulers import SCHEDULERS, scheduler_of
from candle_p1.distributed.launch_environment import without_allocation
from candle_p1.errors import ParameterError, SetupError
from candle_p1.files import write_atomically
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.cluster.job_request import JobRequest

SCRIPT_STEM = "job"
"""The name of a script without the scheduler's suffix; scripts are stored beside the record."""
ID_NAME = "job.id"
"""The file beside a submitted script that holds the ids of its jobs, one on each line."""


def script_path(job: JobRequest, directory: Path) -> Path:
    """Returns the path of the script of a job whose record will be in this directory."""
    return directory / f"{SCRIPT_STEM}{scheduler_of(job).suffix}"


def was_submitted(directory: Path) -> bool:
    """Tells whether a job was submitted whose record will be in this directory.

    A job of a study that failed before its ranks started does not count: it renamed its script.
    Nor do the jobs of a chain, if none of them will continue the run any more.
    """
    suffixes = {scheduler.suffix for scheduler in SCHEDULERS.values()}
    if not any((directory / f"{SCRIPT_STEM}{suffix}").exists() for suffix in suffixes):
        return False
    chain = Chain.read(directory)
    return not chain.num_jobs or chain.has_jobs_left


def submitted_id(directory: Path) -> str | None:
    """Returns the id of the last job whose script is in a directory; None if it is not known."""
    try:
        return (directory / ID_NAME).read_text(encoding="utf-8").split()[-1]
    except (OSError, IndexError):
        return None


def release(directory: Path) -> None:
    """Removes the script of jobs that have ended, so that the run can be submitted again.

    Raises:
        ParameterError: It cannot be removed.
    """
    names = [f"{SCRIPT_STEM}{scheduler.suffix}" for scheduler in SCHEDULERS.values()]
    try:
        for name in (*names, ID_NAME, CHAIN_NAME):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise ParameterError(f"cannot write in {directory}: {error.strerror}") from error


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


def write_script(script: Path, text: str, num_jobs: int | None = None) -> None:
    """Writes a script and makes it executable, which Cobalt requires.

    Args:
        script: Its path.
        text: Its text.
        num_jobs: How many jobs it is for, if they form a chain.

    Raises:
        ParameterError: It exists already, or cannot be written.
    """
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.open("x").close()  # claims the directory: no two jobs share one
        write_atomically(script, text)
        script.chmod(0o755)
        if num_jobs is not None:
            begin_chain(script.parent, num_jobs)
    except OSError as error:
        raise ParameterError(f"output_dir: cannot write {script}: {error.strerror}") from error


def submit(
    job: JobRequest, script: Path, after: str | None = None, num_jobs: int | None = None
) -> list[str]:
    """Submits a script to the scheduler; returns the ids of its jobs.

    Args:
        job: The job.
        script: Its script.
        after: The id of a job that has to end before this one may start.
        num_jobs: How many jobs the chain has, if the job is one of a chain, as in `write_script`.
            Each of them waits for the end of the one before.

    Raises:
        SetupError: There is no scheduler here, or it refuses the first job; the script is removed,
            so that the job can be submitted again. Or it refuses a further job of a chain, which
            then consists of the jobs before it. Or it printed no id.
    """
    scheduler, ids = scheduler_of(job), list[str]()
    for number in range(1, (num_jobs or 1) + 1):
        own_output = None if number == 1 else f"{job.output}-{number}"
        command = scheduler.submit_command(script, ids[-1] if ids else after, own_output)
        try:
            output = output_of(command, job.machine.name)
        except SetupError as error:
            if not ids:
                release(script.parent)
                raise
            begin_chain(script.parent, len(ids))
            raise SetupError(
                f"{count(len(ids), 'job')} of {num_jobs} submitted ({', '.join(ids)}), which"
                f" continue the run as a shorter chain; {error}"
            ) from error
        ids.append(scheduler.read_job_id(output))
        write_atomically(script.with_name(ID_NAME), "".join(f"{each}\n" for each in ids))
    return ids


def output_of(command: Sequence[str], machine: str) -> str:
    """Returns the output of a submit command.

    Raises:
        SetupError: There is no scheduler here, or it refuses the job.
    """
    try:
        env = without_allocation(os.environ)
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    except FileNotFoundError as error:
        raise SetupError(
            f"{command[0]}, which submits jobs on {machine}, is not in $PATH: submit on a machine"
            " that has it, or only print the script with --dry_run"
        ) from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip()
        raise SetupError(f"{shlex.join(command)} ended with code {done.returncode}: {output}")
    return done.stdout
