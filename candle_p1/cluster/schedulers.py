"""Schedulers: the directives of a job script, and the command that submits it.

A signal shortly before the time limit lets a run write its record as interrupted. LSF and Slurm
send it; under the others the script does so itself (``job_limit`` in common/job_env.sh).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from candle_p1.errors import ParameterError, SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from candle_p1.cluster.job_request import JobRequest

WARNING_S = 60
"""How long before the time limit the ranks are told to end."""


class Scheduler(ABC):
    """A scheduler.

    Attributes:
        suffix: The suffix of its scripts.
        prefix: What its directives begin with.
        project_option: The option that names the project.
        queue_option: The option that names the queue.
        submit: The command that submits a script, with its constant options.
        job_id: A regular expression that finds the job's id in the output of that command.
        sends_warning: Whether it signals a job before its time is over.
        waits_for_success: Whether a job starts only if the one it waits for has succeeded.
        preamble: Lines that its scripts need before all others.
    """

    suffix: ClassVar[str] = ".sh"
    prefix: ClassVar[str]
    project_option: ClassVar[str] = "-A"
    queue_option: ClassVar[str] = "-q"
    submit: ClassVar[Sequence[str]]
    job_id: ClassVar[str]
    sends_warning: ClassVar[bool] = False
    waits_for_success: ClassVar[bool] = False
    preamble: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def directives(self, job: JobRequest) -> list[str]:
        """Returns the options for the size, time and output of a job, without the prefix."""

    @abstractmethod
    def after(self, job_id: str) -> list[str]:
        """Returns the options that make a job wait until another one has ended.

        Unless `waits_for_success`, it does not matter whether that one succeeded.
        """

    def lines(self, job: JobRequest) -> list[str]:
        """Returns the directives of a job as lines of its script."""
        options = []
        if job.project is not None:
            options.append(f"{self.project_option} {job.project}")
        queue = job.queue or job.machine.queue
        if queue is not None:
            options.append(f"{job.machine.queue_option or self.queue_option} {queue}")
        options += [*self.directives(job), *job.machine.directives]
        return [f"{self.prefix} {option}" for option in options]

    def submit_command(self, script: str | Path, after: str | None = None) -> list[str]:
        """Returns the command that submits a script.

        Args:
            script: Its path.
            after: The id of a job that has to end before this one may start.
        """
        wait = [] if after is None else self.after(after)
        return [*self.submit, *wait, str(script)]

    def read_job_id(self, output: str) -> str:
        """Returns the id of a job from the output of the submit command.

        Raises:
            SetupError: The output does not contain it.
        """
        found = re.search(self.job_id, output, re.MULTILINE)
        if found is None:
            raise SetupError(f"{self.submit[0]} printed no job id, but {output.strip()!r}")
        return found.group(1)


class Lsf(Scheduler):
    """IBM Spectrum LSF, as on Summit."""

    suffix = ".lsf"
    prefix = "#BSUB"
    project_option = "-P"
    submit = ("bsub",)
    job_id = r"Job <(\d+)>"
    sends_warning = True

    def directives(self, job: JobRequest) -> list[str]:
        """Returns name, nodes, time, output, and the signal two minutes before the end."""
        hours, minutes = divmod(job.minutes, 60)
        return [
            f"-J {job.name}",
            f"-nnodes {job.layout.num_nodes}",
            f"-W {hours}:{minutes:02d}",
            f"-o {job.output}.%J.out",
            "-wa TERM",
            "-wt 2",
        ]

    def after(self, job_id: str) -> list[str]:
        """Returns -w with the condition."""
        return ["-w", f"ended({job_id})"]


class Cobalt(Scheduler):
    """Argonne's Cobalt, as on Theta. It ends jobs without a warning.

    According to its manual (qsub, --dependencies), a job waits until others finish with status 0.
    """

    prefix = "#COBALT"
    submit = ("qsub",)
    job_id = r"^(\d+)$"
    waits_for_success = True

    def directives(self, job: JobRequest) -> list[str]:
        """Returns nodes, minutes, name and the prefix of the output files."""
        return [
            f"-n {job.layout.num_nodes}",
            f"-t {job.minutes}",
            f"--jobname {job.name}",
            f"-O {job.output}",
        ]

    def after(self, job_id: str) -> list[str]:
        """Returns --dependencies."""
        return ["--dependencies", job_id]


class Slurm(Scheduler):
    """Slurm. It signals the script, which passes the signal on to the ranks."""

    prefix = "#SBATCH"
    project_option = "--account"
    queue_option = "--partition"
    submit = ("sbatch", "--parsable")
    job_id = r"^(\d+)(?:;.*)?$"
    sends_warning = True

    def directives(self, job: JobRequest) -> list[str]:
        """Returns name, nodes, ranks per node, time, output and the signal."""
        layout = job.layout
        lines = [
            f"--job-name={job.name}",
            f"--nodes={layout.num_nodes}",
            f"--ntasks-per-node={layout.ranks_per_node}",
        ]
        if layout.cores_per_rank is not None:
            lines.append(f"--cpus-per-task={layout.cores_per_rank * layout.cpus_per_core}")
        return [
            *lines,
            f"--time={_clock(job.minutes)}",
            f"--output={job.output}.%j.out",
            f"--signal=B:TERM@{WARNING_S}",
        ]

    def lines(self, job: JobRequest) -> list[str]:
        """Returns the directives, with "=" between an option and its value."""
        return [
            re.sub(rf"^({self.prefix} --[a-z-]+) ", r"\1=", line) for line in super().lines(job)
        ]

    def after(self, job_id: str) -> list[str]:
        """Returns --dependency."""
        return [f"--dependency=afterany:{job_id}"]


class Pbs(Scheduler):
    """PBS Professional and OpenPBS. Jobs start in the home directory.

    The signal that PBS sends when the time is over leaves too little time.
    """

    prefix = "#PBS"
    preamble = ('cd "${PBS_O_WORKDIR:-$PWD}"',)
    submit = ("qsub",)
    job_id = r"^(\d+\S*)$"

    def directives(self, job: JobRequest) -> list[str]:
        """Returns name, nodes, time and the file for both output and errors."""
        layout = job.layout
        chunk = [f"{layout.num_nodes}", f"mpiprocs={layout.ranks_per_node}"]
        if job.machine.shared_nodes:
            cpus = (layout.cores_per_rank or 0) * layout.cpus_per_core * layout.ranks_per_node
            gpus = layout.gpus_per_rank * layout.ranks_per_node
            chunk += [f"{name}={num}" for name, num in (("ncpus", cpus), ("ngpus", gpus)) if num]
        return [
            f"-N {job.name}",
            f"-l select={':'.join(chunk)}",
            f"-l walltime={_clock(job.minutes)}",
            "-j oe",
            f"-o {job.output}.out",
        ]

    def after(self, job_id: str) -> list[str]:
        """Returns -W with the condition."""
        return ["-W", f"depend=afterany:{job_id}"]


class NoScheduler(Scheduler):
    """No scheduler: a script runs immediately, on this machine."""

    prefix = "#"
    submit = ("bash",)
    job_id = r"^$"

    def directives(self, job: JobRequest) -> list[str]:
        """Returns none."""
        return []

    def lines(self, job: JobRequest) -> list[str]:
        """Returns none."""
        return []

    def after(self, job_id: str) -> list[str]:
        """Returns none: jobs run one after the other anyway."""
        return []


SCHEDULERS: dict[str, Scheduler] = {
    "lsf": Lsf(),
    "cobalt": Cobalt(),
    "slurm": Slurm(),
    "pbs": Pbs(),
    "none": NoScheduler(),
}
"""By their names in machine files."""


def find_scheduler(name: str) -> Scheduler:
    """Returns a scheduler by its name.

    Raises:
        ParameterError: There is no such scheduler.
    """
    if name not in SCHEDULERS:
        raise ParameterError(f"scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]


def scheduler_of(job: JobRequest) -> Scheduler:
    """Returns the scheduler of a job's machine."""
    return find_scheduler(job.machine.scheduler)


def _clock(minutes: int) -> str:
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:00"
