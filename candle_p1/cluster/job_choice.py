"""What a user chooses about all jobs of a command, whatever they run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from candle_p1.cluster.schedulers import find_scheduler, scheduler_of
from candle_p1.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.cluster.job_request import JobRequest
    from candle_p1.cluster.machine import Machine

_NODE = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NODES_OF_SLURM = rf"{_NODE}(\[[0-9,-]+\][A-Za-z0-9._-]*)*"
"""Also several names, as in "n[1-3,7]"."""


@dataclass(frozen=True)
class JobChoice:
    """What a user chooses about jobs.

    Attributes:
        project: The project to charge.
        queue: The queue; None takes the machine's default.
        exclude: Names of nodes that jobs must not use.
        container: The image of a container in which the ranks run; None is no container.
        staged: The archive of the environment that jobs copy to their nodes; None is no copy.
    """

    project: str | None = None
    queue: str | None = None
    exclude: Sequence[str] = ()
    container: str | None = None
    staged: str | None = None

    def applied_to(self, job: JobRequest) -> JobRequest:
        """Returns a job with these choices."""
        leaves_out = scheduler_of(job).leaves_out
        return replace(
            job,
            project=self.project,
            queue=self.queue,
            exclude=self.exclude,
            num_spare=len(self.exclude) if leaves_out else 0,
            container=self.container,
            staged=self.staged,
        )


def check_exclude(machine: Machine, names: Sequence[str]) -> None:
    """Checks that jobs on a machine can be kept off nodes with these names.

    Raises:
        ParameterError: They cannot, or something is not the name of a node.
    """
    scheduler = find_scheduler(machine.scheduler)
    if names and scheduler.exclude is None and not scheduler.leaves_out:
        raise ParameterError(
            f"--exclude {','.join(names)}: jobs on {machine.name} cannot be kept off nodes"
        )
    pattern = _NODES_OF_SLURM if machine.scheduler == "slurm" else _NODE
    for name in names:
        if not re.fullmatch(pattern, name):
            raise ParameterError(f"--exclude {name}: this is not the name of a node")
