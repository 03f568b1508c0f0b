"""A job as it is asked for: where it runs, for how long, and what it executes."""

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
        name: What the scheduler calls it.
        program: The script of the benchmark; a relative path starts at the checkout's top.
        flags: Flags of the benchmark.
        minutes: Its time limit, in minutes.
        output: Path of the file for its output, without the ending that the scheduler adds.
        project: What it is charged to.
        queue: Its queue; None is the machine's.
        root: The checkout; None is the directory that the job is submitted from.
        venv: The virtual environment, where it is not .venv of the checkout.
        heading: What the script says about itself, in lines.
        environment: Environment variables of this job's own.
        study_script: Where the script of a run of a study will lie; None of any other job. Such a
            script takes flags and nodes from the study alone, and says there if it fails early.
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
    heading: Sequence[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    study_script: str | None = None

    def check(self) -> None:
        """Makes sure that the machine takes such a job.

        Raises:
            ParameterError: It does not: no project, too few nodes, too much time, or a path or a
                name that the scheduler would read as several words.
        """
        machine, nodes = self.machine, self.layout.num_nodes
        if machine.project_required and self.project is None:
            raise ParameterError(
                f"{machine.name} charges jobs to a project: name yours by --project, or in"
                " $CANDLE_P1_PROJECT"
            )
        for value in (self.name, self.output, self.project or "", self.queue or ""):
            if value.split() not in ([], [value]):
                raise ParameterError(f"{value!r} holds a blank, which no scheduler's directive may")
        if self.minutes < 1:
            raise ParameterError(f"time {self.minutes}: a job takes a minute or more")
        if self.queue is not None and self.queue != machine.queue:
            return
        if nodes < machine.min_nodes:
            raise ParameterError(
                f"{count(nodes, 'node')}: the queue {machine.queue} of {machine.name} takes"
                f" {machine.min_nodes} or more; choose another one by --queue"
            )
        longest = machine.longest_minutes(nodes)
        if longest is not None and self.minutes > longest:
            raise ParameterError(
                f"{self.minutes} minutes on {count(nodes, 'node')}: {machine.name} gives"
                f" {longest} at most to jobs of that size; take less --time, or another --queue"
            )
