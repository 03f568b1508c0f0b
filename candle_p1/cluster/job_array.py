"""Job arrays: one submission for many jobs of the same size, which do not wait for each other.

The script of an array has the directives. The scheduler starts it once for each job, with an index,
and it becomes the job's own script, whose directives are then only comments. A single job is
submitted as an ordinary one, because PBS refuses arrays of one.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from candle_p1.cluster.job_script import job_script
from candle_p1.cluster.schedulers import scheduler_of
from candle_p1.cluster.submission import (
    ID_NAME,
    output_of,
    release,
    script_path,
    submit,
    write_script,
)
from candle_p1.errors import ParameterError, SetupError
from candle_p1.files import write_atomically
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from candle_p1.cluster.job_request import JobRequest
    from candle_p1.cluster.schedulers import ArraySyntax

OUTPUT_NAME = "job.out"
"""What a job of an array prints, beside its own script."""


@dataclass(frozen=True)
class JobArray:
    """A job array.

    Attributes:
        name: Its name in the scheduler.
        jobs: Its jobs, which request the same number of nodes for the same time.
        scripts: Their scripts.
        at_once: How many of them may run at the same time; None is all.
        directory: Where the array's script and output go.
    """

    name: str
    jobs: Sequence[JobRequest]
    scripts: Sequence[Path]
    at_once: int | None
    directory: Path

    @property
    def is_array(self) -> bool:
        """Whether there are several jobs."""
        return len(self.jobs) > 1

    @property
    def script(self) -> Path:
        """The path of the script that is submitted: the array's, or that of the only job."""
        if not self.is_array:
            return self.scripts[0]
        return script_path(self.jobs[0], self.directory)

    def text(self) -> str:
        """Returns the text of the script that is submitted.

        Raises:
            ParameterError: The machine's scheduler has no arrays.
        """
        if not self.is_array:
            return job_script(self.jobs[0])
        syntax, job = array_syntax(self.jobs[0]), self.jobs[0]
        is_limited = self.at_once is not None and self.at_once < len(self.jobs)
        numbers = {
            "first": syntax.first,
            "last": syntax.first + len(self.jobs) - 1,
            "limit": f"%{self.at_once}" if is_limited else "",
        }
        request = replace(
            job,
            name=syntax.name.format(name=self.name, **numbers),
            output=f"{self.directory / 'job'}.{syntax.place}",
        )
        scheduler = scheduler_of(job)
        options = [option.format(**numbers) for option in syntax.options]
        index = f"{syntax.index} - {syntax.first}" if syntax.first else syntax.index
        lines = [
            "#!/bin/bash",
            f"# {count(len(self.jobs), 'job')} of the same size, which do not wait for each other.",
            *scheduler.lines(request, options),
            "set -euo pipefail",
            "",
            "scripts=(",
            *(f"  {shlex.quote(str(script))}" for script in self.scripts),
            ")",
            f"script=${{scripts[{index}]}}",
            f'exec bash "$script" >>"${{script%/*}}/{OUTPUT_NAME}" 2>&1',
        ]
        return "\n".join(lines) + "\n"

    def submit(self, after: str | None = None) -> str:
        """Submits the array, or its only job; the jobs have their scripts already. Returns the id.

        Args:
            after: The id of an array or job that has to end before any of these jobs may start.

        Raises:
            SetupError: There is no scheduler here, or it refuses the array; the scripts are
                removed.
            ParameterError: The directory cannot be written.
        """
        job = self.jobs[0]
        if not self.is_array:
            return submit(job, self.script, after)[0]
        scheduler = scheduler_of(job)
        write_script(self.script, self.text())
        try:
            output = output_of(scheduler.submit_command(self.script, after), job.machine.name)
        except SetupError:
            for script in (*self.scripts, self.script):
                release(script.parent)
            raise
        array_id = scheduler.read_job_id(output)
        syntax = array_syntax(job)
        for index, script in enumerate(self.scripts, syntax.first):
            own_id = syntax.own_id.format(id=array_id, index=index)
            write_atomically(script.with_name(ID_NAME), f"{own_id}\n")
        write_atomically(self.script.with_name(ID_NAME), f"{array_id}\n")
        return array_id


def array_syntax(job: JobRequest) -> ArraySyntax:
    """Returns how the scheduler of a job's machine writes arrays.

    Raises:
        ParameterError: It has none.
    """
    syntax = scheduler_of(job).array
    if syntax is None:
        raise ParameterError(
            f"--array: the scheduler of {job.machine.name}, {job.machine.scheduler}, has no job"
            " arrays; without --array, each run becomes a job of its own"
        )
    return syntax
