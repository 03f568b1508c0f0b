"""A job as it is requested: where it runs, for how long, and what it executes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.cluster.layout import Layout
    from candle_p1.cluster.machine import Machine


@dataclass(frozen=True)
class JobRequest:
    """A job.

    Attributes:
        machine: Where it runs.
        layout: Its nodes and ranks.
        name: Its name in the scheduler.
        program: The script of the benchmark; relative paths start at the top of the checkout.
        flags: Flags of the benchmark.
        minutes: Its time limit, in minutes.
        output: Path of the output file, without the suffix that the scheduler adds.
        project: The project that it is charged to.
        queue: Its queue; None is the machine's default.
        root: The checkout; None is the directory from which the job is submitted.
        venv: The virtual environment; None is .venv of the checkout.
        exclude: Names of nodes that it must not use.
        num_spare: How many more nodes it requests, because its script has to leave those out.
        container: The image of a container in which its ranks run; None is no container.
        staged: The archive of the environment that is copied to the nodes' own storage (see
            candle_p1.cluster.staging); None uses the virtual environment where it is.
        heading: Comment lines at the top of the script.
        environment: Environment variables of this job alone.
        study_script: The path of the script, if the job is a run of a study. Such a script takes
            flags and nodes from the study alone, and renames itself if it fails early.
        chain_directory: The directory of the record, if the job is one of several that continue
            the run in it (see candle_p1.cluster.chain).
    """

    machine: Machine
    layout: Layout
    name: str
    program: str
    flags: Sequence[str]
    minutes: int
    output: str
    project: str | None = None
    queue: str | None = None
    root: str | None = None
    venv: str | None = None
    exclude: Sequence[str] = ()
    num_spare: int = 0
    container: str | None = None
    staged: str | None = None
    heading: Sequence[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    study_script: str | None = None
    chain_directory: str | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes that it requests."""
        return self.layout.num_nodes + self.num_spare

    def check(self) -> None:
        """Checks that the machine accepts the job.

        Raises:
            ParameterError: It does not: there is no project, too few nodes, too much time, or a
                path or name with blanks, which the scheduler would split.
        """
        machine, nodes = self.machine, self.num_nodes
        if machine.project_required and self.project is None:
            raise ParameterError(
                f"{machine.name} charges jobs to a project: name yours with --project or in"
                " $CANDLE_P1_PROJECT"
            )
        if machine.num_nodes is not None and nodes > machine.num_nodes:
            raise ParameterError(
                f"{count(nodes, 'node')}, of which {self.num_spare} are for those to exclude: a job"
                f" on {machine.name} can have at most {machine.num_nodes:,}"
            )
        for value in (self.name, self.output, self.project or "", self.queue or ""):
            if value.split() not in ([], [value]):
                raise ParameterError(f"{value!r}: a scheduler's directives cannot contain blanks")
        if self.minutes < 1:
            raise ParameterError(f"time limit {self.minutes}: a job needs at least a minute")
        if self.queue is not None and self.queue != machine.queue:
            self._check_queue(self.queue)
            return
        if nodes < machine.min_nodes:
            others = machine.queues_for(nodes)
            hint = f", which takes them: {' or '.join(others)}" if others else ""
            raise ParameterError(
                f"{count(nodes, 'node')}: the queue {machine.queue} of {machine.name} requires"
                f" {machine.min_nodes} or more; choose another one with --queue{hint}"
            )
        longest = machine.longest_minutes(nodes)
        if longest is not None and self.minutes > longest:
            raise ParameterError(
                f"{self.minutes} minutes on {count(nodes, 'node')}: {machine.name} limits jobs of"
                f" that size to {longest} minutes; choose a shorter --time or another --queue"
            )

    def _check_queue(self, queue: str) -> None:
        """Checks the job against the limits of another queue than the default, if known."""
        machine, nodes = self.machine, self.num_nodes
        if queue not in machine.queues:
            return
        fewest, most, longest = machine.queues[queue]
        if not fewest <= nodes <= most:
            others = [name for name in machine.queues_for(nodes) if name != queue]
            if machine.queue is not None and nodes >= machine.min_nodes:
                others.append(machine.queue)
            hint = f"; {' and '.join(others)} would take them" if others else ""
            raise ParameterError(
                f"{count(nodes, 'node')}: the queue {queue} of {machine.name} takes {fewest} to"
                f" {most:,}{hint}"
            )
        if self.minutes > longest:
            raise ParameterError(
                f"{self.minutes} minutes: the queue {queue} of {machine.name} limits jobs to"
                f" {longest} minutes; choose a shorter --time or another --queue"
            )
