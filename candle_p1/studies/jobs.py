"""Studies as jobs: a job for each run, which wait for one another."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.job_request import JobRequest
from candle_p1.cluster.job_script import job_script
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.submission import (
    checkout,
    environment_of,
    hand_over,
    keep_script,
    script_path,
    submitted_id,
)
from candle_p1.errors import ParameterError
from candle_p1.studies.manifest import keep
from candle_p1.studies.state import RUNNING, SUBMITTED, RunState, states_of
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from candle_p1.cluster.machine import Machine
    from candle_p1.studies.plan import Plan
    from candle_p1.studies.planned import PlannedRun


@dataclass(frozen=True)
class StudyJobs:
    """The jobs of a study on a machine.

    Attributes:
        plan: The study's runs.
        machine: Where they run.
        ranks_per_node: The most ranks on a node; None is the machine's usual number.
        minutes: Time limit of each job; None is the study's.
        project: What they are charged to.
        queue: Their queue; None is the machine's.
    """

    plan: Plan
    machine: Machine
    ranks_per_node: int | None = None
    minutes: int | None = None
    project: str | None = None
    queue: str | None = None

    def due(
        self, benchmark: str, retry_failed: bool = False
    ) -> tuple[list[tuple[Path, JobRequest]], list[RunState]]:
        """Returns what is to be submitted: jobs with the directories of their records.

        Args:
            benchmark: The name of the benchmark whose runs are wanted.
            retry_failed: Whether to submit runs that failed before.

        Returns:
            The jobs in the study's order, and the runs that were submitted before and have not
            ended.

        Raises:
            ParameterError: The study does not train this benchmark, or the machine does not take
                one of its runs.
        """
        runs = [run for run in self.plan.runs if find_benchmark(run.benchmark).name == benchmark]
        if not runs:
            names = sorted({find_benchmark(run.benchmark).name for run in self.plan.runs})
            raise ParameterError(
                f"the study {self.plan.study.name} does not train {benchmark}, but"
                f" {', '.join(names)}"
            )
        if self.machine.scheduler == "none":
            raise ParameterError(
                f"{self.machine.name} has no scheduler: candle-p1 study run performs a study there"
            )
        for run in runs:
            self._job(run, run.directory()).check()
        states = states_of(runs)
        under_way = [state for state in states if state.status in (RUNNING, SUBMITTED)]
        places = [(s.run, s.run.next_directory()) for s in states if s.is_due(retry_failed)]
        return [(place, self._job(run, place)) for run, place in places], under_way

    def submit(
        self,
        jobs: Sequence[tuple[Path, JobRequest]],
        at_once: int,
        under_way: Sequence[RunState] = (),
    ) -> Iterator[tuple[str, Path]]:
        """Submits jobs; yields the id and the script of each.

        Args:
            jobs: From `due`.
            at_once: How many may run at a time: each waits for the one that many before it.
            under_way: From `due`: runs whose jobs come before these.

        Raises:
            SetupError: The scheduler does not take one, and those before it are submitted; or the
                study's directory cannot be written.
        """
        keep(self.plan)
        known = [submitted_id(state.directory) for state in under_way if state.directory]
        ids = [job_id for job_id in known if job_id is not None]
        for place, job in jobs:
            script = script_path(job, place)
            keep_script(script, job_script(job))
            after = ids[-at_once] if len(ids) >= at_once else None
            ids.append(hand_over(job, script, after))
            yield ids[-1], script

    def _job(self, run: PlannedRun, place: Path) -> JobRequest:
        root = checkout()
        layout = self._layout(run)
        job = JobRequest(
            machine=self.machine,
            layout=layout,
            name=run.name,
            program=str(find_benchmark(run.benchmark).script),
            flags=run.command_flags(place),
            minutes=run.minutes if self.minutes is None else self.minutes,
            output=str(place / "job"),
            project=self.project,
            queue=self.queue,
            root=str(root),
            venv=environment_of(root),
            heading=[
                f"{self.plan.study.title}.",
                f"{run.name}: {count(run.num_ranks, 'rank')} on {self.machine.title}.",
                f"{layout.explain()}; epochs of each rank: {run.epochs_per_rank}.",
            ],
            environment=run.variables,
        )
        return replace(job, study_script=str(script_path(job, place)))

    def _layout(self, run: PlannedRun) -> Layout:
        most = Layout.on(self.machine, 1, self.ranks_per_node).ranks_per_node
        per_node = min(run.num_ranks, most)
        if run.num_ranks % per_node:
            raise ParameterError(
                f"{run.name}: {run.num_ranks} ranks are no multiple of the {per_node} on each node"
                f" of {self.machine.name}: choose other --ranks-per-node"
            )
        return Layout.on(self.machine, run.num_ranks // per_node, per_node)
