"""Schedulers: the directives of a job script, and the command that submits it.

A signal shortly before the time limit lets a run save its state and end as interrupted. LSF and
Slurm send it to the script; under the others the script does so itself (``job_limit`` in
common/job_env.sh). What the script does with it is the same everywhere (``job_warn``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from candle_p1.errors import ParameterError, SetupError

WARNING_S = 90
"""How long before the time limit the ranks are told to save and end.

Saving may take 45 s, and the ranks 5 s to agree on the step. What has not ended after 50 s is told
to end at once, which takes at most 30 s. 10 s remain for what a job does before its script starts.
"""
WARNING_SHARE = 8
"""In short jobs the warning comes this part of the time limit before its end."""


def warning_s(minutes: int) -> int:
    """Returns how long before a time limit of so many minutes the ranks are told to end, in s."""
    return min(WARNING_S, minutes * 60 // WARNING_SHARE)


@dataclass(frozen=True)
class ArraySyntax:
    """How a scheduler writes job arrays."""

    index: str  # The environment variable that holds the index of a job
    first: int  # The first index
    # The options that request an array, with "{first}" and "{last}" for its indices, and
    # "{limit}" for the number of jobs that may run at the same time, as "%4", or "".
    options: Sequence[str]
    place: str  # What stands for the index in the name of an output file
    own_id: str  # The id by which others wait for one job, with the array's "{id}" and "{index}"
    name: str = "{name}"  # The name of an array, with these and "{name}"


@dataclass(frozen=True)
class Scheduler:
    """A scheduler."""

    prefix: str  # What its directives begin with; "" if it has none
    submit: Sequence[str]  # The command that submits a script, with its constant options
    job_id: str  # A regular expression that finds the job's id in the output of that command
    wait: Sequence[str]  # Options of a job that waits for the end of another one, with the id "{}"
    # The options for the name, size, time and output of a job, with values of
    # candle_p1.cluster.job; those without a value are left out.
    directives: Sequence[str]
    array: ArraySyntax | None = None  # How it writes job arrays; None if it has none
    exclude: str = ""  # The option that keeps a job off nodes; "" if it has none
    # Whether scripts leave nodes out themselves; the job requests one more for each.
    excludes_in_script: bool = False
    # The options that give a further job of a chain an output of its own, with "{}" for its
    # path without a suffix; () if the name in the directives contains the job's id.
    output: Sequence[str] = ()
    project_option: str = "-A"  # The option that names the project
    queue_option: str = "-q"  # The option that names the queue
    separator: str = " "  # What stands between a long option and its value
    suffix: str = ".sh"  # The suffix of its scripts
    sends_warning: bool = False  # Whether it signals a job before its time is over
    waits_for_success: bool = False  # Whether a job that waits starts only after success
    preamble: str = ""  # A line that its scripts need before all others

    def submit_command(
        self, script: str | Path, after: str | None = None, output: str | None = None
    ) -> list[str]:
        """Returns the command that submits a script, to start after the job with the id `after`.

        Its output goes to the path `output`, without a suffix, instead of the one in the script.
        """
        wait = [] if after is None else [option.format(after) for option in self.wait]
        place = [] if output is None else [option.format(output) for option in self.output]
        return [*self.submit, *wait, *place, str(script)]

    def read_job_id(self, output: str) -> str:
        """Returns the id of a job that the submit command has printed; SetupError without one."""
        found = re.search(self.job_id, output, re.MULTILINE)
        if found is None:
            raise SetupError(f"{self.submit[0]} printed no job id, but {output.strip()!r}")
        return found.group(1)


SCHEDULERS = {
    # IBM Spectrum LSF, as on Summit.
    "lsf": Scheduler(
        prefix="#BSUB",
        submit=("bsub",),
        job_id=r"Job <(\d+)>",
        wait=("-w", "ended({})"),
        directives=(
            "-J {name}",
            "-nnodes {nodes}",
            "-W {hours_minutes}",
            "-o {output}.%J.out",
            # LSF signals all processes of the script. By default they ignore SIGURG, which also
            # IBM's reference has as its example (bsub: -wa). The unit of -wt is minutes.
            "-wa URG",
            "-wt {warning_minutes}",
        ),
        exclude='-R "select[{unlike_excluded}]"',
        array=ArraySyntax(
            index="LSB_JOBINDEX",
            first=1,
            options=(),
            name='"{name}[{first}-{last}]{limit}"',
            place="%I",
            own_id="{id}[{index}]",
        ),
        project_option="-P",
        suffix=".lsf",
        sends_warning=True,
    ),
    # Argonne's Cobalt, as on Theta. Its manual (qsub, --dependencies) says that a job waits until
    # others finish with status 0.
    "cobalt": Scheduler(
        prefix="#COBALT",
        submit=("qsub",),
        job_id=r"^(\d+)$",
        wait=("--dependencies", "{}"),
        directives=("-n {nodes}", "-t {minutes}", "--jobname {name}", "-O {output}"),
        output=("-O", "{}"),
        waits_for_success=True,
    ),
    "slurm": Scheduler(
        prefix="#SBATCH",
        submit=("sbatch", "--parsable"),
        job_id=r"^(\d+)(?:;.*)?$",
        wait=("--dependency=afterany:{}",),
        directives=(
            "--job-name {name}",
            "--nodes {nodes}",
            "--ntasks-per-node {ranks_per_node}",
            "--cpus-per-task {cpus_per_rank}",
            "--gpus-per-node {gpus_per_node}",
            "--time {time}",
            "--output {output}.%j.out",
            "--signal B:USR1@{warning_s}",  # to the script alone
        ),
        exclude="--exclude {excluded}",
        array=ArraySyntax(
            index="SLURM_ARRAY_TASK_ID",
            first=0,
            options=("--array {first}-{last}{limit}",),
            place="%a",
            own_id="{id}_{index}",
        ),
        project_option="--account",
        queue_option="--partition",
        separator="=",
        sends_warning=True,
    ),
    # PBS Professional and OpenPBS. Jobs start in the home directory, and the signal that PBS sends
    # when the time is over leaves too little time.
    "pbs": Scheduler(
        prefix="#PBS",
        submit=("qsub",),
        job_id=r"^(\d+\S*)$",
        wait=("-W", "depend=afterany:{}"),
        directives=(
            "-N {name}",
            "-l select={nodes}{chunk}",
            "-l walltime={time}",
            "-j oe",
            "-o {output}.out",
        ),
        excludes_in_script=True,
        # A limit exists since PBS 2020.1. Jobs can wait only for an array as a whole.
        array=ArraySyntax(
            index="PBS_ARRAY_INDEX",
            first=0,
            options=("-J {first}-{last}{limit}",),
            place="^array_index^",
            own_id="{id}",
        ),
        output=("-o", "{}.out"),
        preamble='cd "${PBS_O_WORKDIR:-$PWD}"',
    ),
    # No scheduler: a script runs immediately, on this machine.
    "none": Scheduler(prefix="", submit=("bash",), job_id=r"^$", wait=(), directives=()),
}
"""By their names in machine files."""


def find_scheduler(name: str) -> Scheduler:
    """Returns a scheduler by its name, or raises ParameterError."""
    if name not in SCHEDULERS:
        raise ParameterError(f"scheduler {name!r}: choose one of {', '.join(SCHEDULERS)}")
    return SCHEDULERS[name]
