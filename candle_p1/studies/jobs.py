"""Studies as batch jobs: one job for each run; later jobs wait for earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.job import NO_OPTIONS, JobOptions, JobRequest
from candle_p1.cluster.machine import Layout, Machine
from candle_p1.cluster.submission import (
    CHAIN_FLAGS,
    JobArray,
    array_syntax,
    check_continues,
    checkout,
    release,
    script_path,
    submit,
    submitted_id,
    virtual_environment,
    write_script,
)
from candle_p1.errors import ParameterError
from candle_p1.parameters.catalog import INTERVALS
from candle_p1.studies.plan import Plan, PlannedRun, make_plan, to_argv
from candle_p1.studies.state import RunState, states_of
from candle_p1.text import count

ARRAYS = "arrays"
"""The directory of a study that holds the scripts of its job arrays."""


def with_checkpoints(plan: Plan, output: Path) -> Plan:
    """Returns a plan whose runs can be continued by the jobs of a chain, with results in `output`.

    Raises:
        ParameterError: The study turns checkpoints off in one of its runs.
    """
    given = {name for run in plan.runs for name in run.flags}
    if given.isdisjoint(INTERVALS):
        added = {name: value for name, value in CHAIN_FLAGS.items() if name not in given}
        choice = replace(plan.choice, flags=[*plan.choice.flags, *to_argv(added)])
        plan = make_plan(plan.study, choice, output)
    for run in plan.runs:
        check_continues(run.settings)
    return plan


@dataclass(frozen=True)
class StudyJobs:
    """The jobs of a study on a machine.

    `ranks_per_node` is the largest number of ranks on a node, and `minutes` the time limit of each
    job; None takes the machine's, or the study's. `num_jobs` is how many jobs continue each run,
    one after the other; None is no chain.
    """

    plan: Plan
    machine: Machine
    ranks_per_node: int | None = None
    minutes: int | None = None
    options: JobOptions = NO_OPTIONS
    num_jobs: int | None = None

    def due(
        self, benchmark: str, retry_failed: bool = False
    ) -> tuple[list[tuple[Path, JobRequest]], list[RunState]]:
        """Returns the jobs that still have to be submitted, each with the directory of its record.

        They are those of this benchmark, in the study's order. The runs that have been submitted
        and have not ended are returned, too. Raises ParameterError if the study does not train the
        benchmark, or the machine cannot execute one of its runs.
        """
        names = [find_benchmark(run.benchmark).name for run in self.plan.runs]
        runs = [run for run, name in zip(self.plan.runs, names, strict=True) if name == benchmark]
        if not runs:
            raise ParameterError(
                f"the study {self.plan.study.name} does not train {benchmark}; it trains"
                f" {', '.join(sorted(set(names)))}"
            )
        if self.machine.scheduler == "none":
            raise ParameterError(
                f"{self.machine.name} has no scheduler: use candle-p1 study run there"
            )
        for run in runs:
            self._job(run, run.directory()).check()
        states = states_of(runs)
        under_way = [state for state in states if state.status in ("running", "submitted")]
        due = [state for state in states if state.is_due(retry_failed)]
        jobs = [(place := state.next_directory, self._job(state.run, place)) for state in due]
        return jobs, under_way

    def submit(
        self,
        jobs: Sequence[tuple[Path, JobRequest]],
        at_once: int,
        under_way: Sequence[RunState] = (),
    ) -> Iterator[tuple[list[str], Path]]:
        """Submits the jobs of runs; yields the ids and the script of each.

        At most `at_once` runs are under way at a time: the first job of each waits for the last one
        of the run that is this many places before it. Runs that are under way come first.

        Raises:
            SetupError: The scheduler rejects a job, after the jobs before it have been submitted.
            ParameterError: The directory of a run cannot be written.
        """
        self.plan.write_manifest()
        known = (submitted_id(state.directory) for state in under_way if state.directory)
        ids = [each for each in known if each is not None]
        for directory, job in jobs:
            script = script_path(self.machine, directory)
            release(directory)  # the jobs of a run that is continued here have ended
            write_script(script, job.script(), self.num_jobs)
            after = ids[-at_once] if len(ids) >= at_once else None
            of_run = submit(job, script, after, self.num_jobs)
            ids.append(of_run[-1])
            yield of_run, script

    def arrays(
        self, jobs: Sequence[tuple[Path, JobRequest]], at_once: int | None = None
    ) -> list[JobArray]:
        """Returns job arrays for jobs: those of the same size form one, also if it is only one.

        At most `at_once` jobs of an array run at a time; None is all of them. Raises ParameterError
        if the machine's scheduler has no arrays.
        """
        groups: dict[tuple[Layout, int], list[tuple[Path, JobRequest]]] = {}
        for directory, job in jobs:
            array_syntax(job)
            groups.setdefault((job.layout, job.minutes), []).append((directory, job))
        arrays = self.plan.directory / ARRAYS
        taken = 1 + max((int(path.name) for path in arrays.glob("[0-9]*")), default=-1)
        return [
            JobArray(
                name=self.plan.study.name,
                jobs=[job for _, job in group],
                scripts=[script_path(self.machine, directory) for directory, _ in group],
                at_once=at_once,
                directory=arrays / f"{number:03d}",
            )
            for number, group in enumerate(groups.values(), taken)
        ]

    def submit_arrays(self, arrays: Sequence[JobArray]) -> Iterator[tuple[str, JobArray]]:
        """Submits job arrays; yields the id of each. An array waits for the end of the one before.

        Raises as `submit` does.
        """
        self.plan.write_manifest()
        after = None
        for array in arrays:
            for job, script in zip(array.jobs, array.scripts, strict=True):
                release(script.parent)
                write_script(script, job.script())
            after = array.submit(after)
            yield after, array

    def _job(self, run: PlannedRun, directory: Path) -> JobRequest:
        root = checkout()
        layout = self._layout(run)
        return JobRequest(
            machine=self.machine,
            layout=layout,
            name=run.name,
            program=str(find_benchmark(run.benchmark).script),
            flags=run.command_flags(directory),
            minutes=run.minutes if self.minutes is None else self.minutes,
            output=str(directory / "job"),
            root=str(root),
            venv=virtual_environment(root),
            heading=[
                f"{self.plan.study.title}.",
                f"{run.name}: {count(run.num_ranks, 'rank')} on {self.machine.title}.",
                f"{layout.explain()}; epochs of each rank: {run.epochs_per_rank}.",
            ],
            environment=run.variables,
            options=self.options,
            study_script=str(script_path(self.machine, directory)),
            chain_directory=None if self.num_jobs is None else str(directory),
        )

    def _layout(self, run: PlannedRun) -> Layout:
        per_node = Layout.on(self.machine, 1, self.ranks_per_node).ranks_per_node
        per_node = min(run.num_ranks, per_node)
        if run.num_ranks % per_node:
            raise ParameterError(
                f"{run.name}: {run.num_ranks} ranks is not a multiple of {per_node}, the number on"
                f" each node of {self.machine.name}: choose another --ranks_per_node"
            )
        return Layout.on(self.machine, run.num_ranks // per_node, per_node)
