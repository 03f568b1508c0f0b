"""Submitting jobs: single ones, chains that continue one run, and arrays.

Scripts are stored beside the records. The script of an array has the directives: the scheduler
starts it once for each job, with an index, and it becomes the job's own script, whose directives
are then only comments. An array of a single job is submitted as an ordinary one, because PBS
refuses arrays of one.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from candle_p1.checkpoints.policy import are_saved
from candle_p1.cluster.chain import CHAIN_NAME, CONTINUE, Chain, begin_chain
from candle_p1.cluster.job import JobRequest, render
from candle_p1.cluster.machine import Machine
from candle_p1.cluster.schedulers import SCHEDULERS, ArraySyntax, find_scheduler
from candle_p1.distributed.launch_environment import without_allocation
from candle_p1.errors import ParameterError, SetupError
from candle_p1.files import write_atomically
from candle_p1.parameters.catalog import INTERVALS
from candle_p1.text import count

SCRIPT_STEM = "job"
"""The name of a script without the scheduler's suffix."""
ID_NAME = "job.id"
"""The file beside a submitted script that holds the ids of its jobs, one on each line."""
OUTPUT_NAME = "job.out"
"""What a job of an array prints, beside its own script."""
CHAIN_FLAGS = {"ckpt_every_s": "600", "ckpt_save_best": "False", "ckpt_keep_limit": "2"}
"""The flags of a chain whose user sets no interval between checkpoints.

A chain needs the newest checkpoint, and the one before it in case of damage. By default every epoch
that is the best so far would be saved as well.
"""


def continues(params: Mapping[str, Any]) -> bool:
    """Returns whether a run with these parameters writes checkpoints and resumes from them."""
    return are_saved(params) and params["ckpt_restart_mode"] != "off"


def check_continues(params: Mapping[str, Any]) -> None:
    """Raises ParameterError if the jobs of a chain with these parameters would start over."""
    if not continues(params):
        raise ParameterError(
            "--chain continues runs from checkpoints, which the flags turn off: leave"
            f" --ckpt_restart_mode at auto, and set one of {', '.join(INTERVALS)}, or none of them"
        )


def script_path(machine: Machine, directory: Path) -> Path:
    """Returns the path of the script of a job whose record will be in this directory."""
    return directory / f"{SCRIPT_STEM}{find_scheduler(machine.scheduler).suffix}"


def _scripts(directory: Path) -> list[Path]:
    suffixes = dict.fromkeys(scheduler.suffix for scheduler in SCHEDULERS.values())
    return [directory / f"{SCRIPT_STEM}{suffix}" for suffix in suffixes]


def was_submitted(directory: Path) -> bool:
    """Returns whether a job has been submitted whose record will be in this directory.

    A job of a study that failed before its ranks started does not count: it renamed its script.
    Nor do the jobs of a chain if none of them is left to continue the run.
    """
    if not any(script.exists() for script in _scripts(directory)):
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

    Raises ParameterError if it cannot be removed.
    """
    try:
        for path in (*_scripts(directory), directory / ID_NAME, directory / CHAIN_NAME):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ParameterError(f"cannot write in {directory}: {error.strerror}") from error


def checkout() -> Path:
    """Returns the checkout this package runs from, or raises SetupError.

    Scripts find common/job_env.sh there.
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
    """Writes a script, for a chain of `num_jobs`, and makes it executable, as Cobalt requires.

    Raises ParameterError if it exists already, or cannot be written.
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
    """Submits a script once for each job of its chain, after the job with the id `after`.

    Returns the ids of the jobs, each of which waits for the end of the previous one.

    Raises:
        SetupError: There is no scheduler here, or it refuses the first job; the script is removed,
            so that the job can be submitted again. Or it refuses a further job of a chain, which
            then consists of the jobs before it. Or it printed no id.
    """
    ids = list[str]()
    for number in range(1, (num_jobs or 1) + 1):
        own_output = None if number == 1 else f"{job.output}-{number}"
        try:
            output = _submit(job, script, ids[-1] if ids else after, own_output)
        except SetupError as error:
            if not ids:
                release(script.parent)
                raise
            begin_chain(script.parent, len(ids))
            raise SetupError(
                f"{count(len(ids), 'job')} of {num_jobs} submitted ({', '.join(ids)}), which"
                f" continue the run as a shorter chain; {error}"
            ) from error
        ids.append(job.scheduler.read_job_id(output))
        write_atomically(script.with_name(ID_NAME), "".join(f"{each}\n" for each in ids))
    return ids


def _submit(job: JobRequest, script: Path, after: str | None, output: str | None = None) -> str:
    command = job.scheduler.submit_command(script, after, output)
    try:
        env = without_allocation(os.environ)
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env)
    except FileNotFoundError as error:
        raise SetupError(
            f"{command[0]}, which submits jobs on {job.machine.name}, is not in $PATH: submit on a"
            " machine that has it, or only print the script with --dry_run"
        ) from error
    if done.returncode:
        printed = (done.stderr or done.stdout).strip()
        raise SetupError(f"{shlex.join(command)} ended with code {done.returncode}: {printed}")
    return done.stdout


def run_here(command: Sequence[str], directory: Path, num_jobs: int = 1) -> int:
    """Runs the command of a job up to `num_jobs` times, until the run in a directory is complete.

    Ctrl-C reaches the running job; this waits for its end, and starts no other. Returns the exit
    code of the last job.
    """
    interrupts = list[object]()
    # Not SIG_IGN, which the job would inherit.
    previous = signal.signal(signal.SIGINT, lambda *signal: interrupts.append(signal))
    try:
        for _ in range(num_jobs):
            code = subprocess.call(command, env=without_allocation(os.environ, here=True))
            if code == 0 or interrupts or Chain.read(directory).decide()[0] != CONTINUE:
                break
    finally:
        signal.signal(signal.SIGINT, previous)
    return code if code >= 0 else 128 - code


def array_syntax(job: JobRequest) -> ArraySyntax:
    """Returns how the scheduler of a job's machine writes arrays; ParameterError if it has none."""
    if job.scheduler.array is None:
        raise ParameterError(
            f"--array: the scheduler of {job.machine.name}, {job.machine.scheduler}, has no job"
            " arrays; without --array, each run becomes a separate job"
        )
    return job.scheduler.array


@dataclass(frozen=True)
class JobArray:
    """A job array: one submission for many jobs, which do not wait for each other."""

    name: str  # Its name in the scheduler
    jobs: Sequence[JobRequest]  # Its jobs, which request the same number of nodes for the same time
    scripts: Sequence[Path]  # Their scripts
    at_once: int | None  # How many of them may run at the same time; None is all
    directory: Path  # Where the array's script and output go

    @property
    def is_array(self) -> bool:
        """Whether there are several jobs."""
        return len(self.jobs) > 1

    @property
    def script(self) -> Path:
        """The path of the script that is submitted: the array's, or that of the only job."""
        of_array = script_path(self.jobs[0].machine, self.directory)
        return of_array if self.is_array else self.scripts[0]

    def text(self) -> str:
        """Returns the text of the script that is submitted."""
        job = self.jobs[0]
        if not self.is_array:
            return job.script()
        syntax, num_jobs = array_syntax(job), len(self.jobs)
        numbers = {
            "first": syntax.first,
            "last": syntax.first + num_jobs - 1,
            "limit": f"%{self.at_once}" if (self.at_once or num_jobs) < num_jobs else "",
        }
        name = syntax.name.format(name=self.name, **numbers)
        array = replace(job, name=name, output=f"{self.directory / 'job'}.{syntax.place}")
        return render(
            "array.sh.jinja",
            directives=array.directives([option.format(**numbers) for option in syntax.options]),
            scripts=self.scripts,
            syntax=syntax,
            output_name=OUTPUT_NAME,
        )

    def submit(self, after: str | None = None) -> str:
        """Submits the array, or its only job, after the array with the id `after`; returns the id.

        The scripts of the jobs already exist.

        Raises:
            SetupError: There is no scheduler here, or it refuses the array; all scripts are gone.
            ParameterError: The directory cannot be written.
        """
        job = self.jobs[0]
        if not self.is_array:
            return submit(job, self.script, after)[0]
        write_script(self.script, self.text())
        try:
            output = _submit(job, self.script, after)
        except SetupError:
            for script in (*self.scripts, self.script):
                release(script.parent)
            raise
        array_id, syntax = job.scheduler.read_job_id(output), array_syntax(job)
        ids = {self.script: array_id}
        for index, script in enumerate(self.scripts, syntax.first):
            ids[script] = syntax.own_id.format(id=array_id, index=index)
        for script, own_id in ids.items():
            write_atomically(script.with_name(ID_NAME), f"{own_id}\n")
        return array_id
