"""What runs outside a study tell about how long its runs will take.

A run of the same network on the same data and the same processor is scaled: its training by the
number of steps and the square root of the batch size, between steps whose time does not depend on
the batch and steps whose time is proportional to it; both by the cores that each rank has. The rest
of its time, which goes into start-up and loading, grows only where ranks share cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, sqrt
from typing import TYPE_CHECKING

from candle_p1.benchmark import find_benchmark
from candle_p1.errors import CandleError
from candle_p1.parameters.catalog import role_of
from candle_p1.parameters.parameter import Role
from candle_p1.records.environment import available_cores, cpu_model
from candle_p1.records.parts import is_continued
from candle_p1.records.record import RECORD_NAME, read_record
from candle_p1.scaling import ScalingPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from candle_p1.records.types import RunRecord
    from candle_p1.studies.planned_run import PlannedRun

MAX_RECORDS = 50
"""How many of the newest records are read."""
MIN_STEPS = 10
"""A run with fewer steps says little about the time of a step."""
DEPTHS = ("*", "*/*", "*/*/*")
"""Where runs are: STUDY/RUN, BENCHMARK/EXPERIMENT/RUN, and less deep."""
SCALED = frozenset(
    ("epochs", "epochs_scaling", "batch_size", "batch_scaling", "learning_rate", "lr_scaling",
     "warmup_epochs", "base_lr", "data_parallel", "train_steps", "val_steps", "test_steps")
)  # fmt: skip
"""Parameters whose effect on the time is estimated, or small; runs that differ in others are not
similar."""


@dataclass(frozen=True)
class SimilarRuns:
    """Runs that took place on this machine.

    Attributes:
        records: Their records.
        num_cores: The cores of this machine.
    """

    records: Sequence[RunRecord]
    num_cores: int

    @classmethod
    def beside(cls, study: Path) -> SimilarRuns:
        """Returns the newest runs below the directory that holds a study's, without its own."""
        found = [path for depth in DEPTHS for path in study.parent.glob(f"{depth}/{RECORD_NAME}")]
        others = [path for path in found if study not in path.parents and path.is_file()]
        records = []
        for path in sorted(others, key=lambda path: -path.stat().st_mtime)[:MAX_RECORDS]:
            try:
                record = read_record(path)
            except CandleError:  # reports name it
                continue
            environment = record.environment
            if record.status == "ok" and environment and environment.cpu == cpu_model():
                records.append(record)
        return cls(records, len(available_cores()))

    def estimate_s(self, run: PlannedRun) -> float | None:
        """Returns how long a run will take, in s; None if no run is similar to it."""
        name = find_benchmark(run.benchmark).name
        candidates = [
            (different, abs(log2(run.num_ranks / record.num_ranks)), i)
            for i, record in enumerate(self.records)
            if record.benchmark == name and (different := _differences(run, record)) is not None
        ]
        for *_, i in sorted(candidates):
            seconds = self._scaled_s(run, self.records[i])
            if seconds is not None:
                return seconds
        return None

    def _scaled_s(self, run: PlannedRun, record: RunRecord) -> float | None:
        training, phases, plan = record.training, record.phases, record.plan
        if not (training and training.epochs and phases and plan and record.ranks):
            return None
        if record.total_s is None or "train" not in phases or training.traced or training.profiled:
            return None
        if is_continued(record):
            return None
        num_steps = len(training.epochs) * plan.steps_per_epoch
        if num_steps < MIN_STEPS:
            return None
        steps = training.epochs[0].steps
        first_s = steps.first.max_s if steps and steps.first else 0.0  # includes compiling
        steady_s = phases["train"].max_s - first_s
        outside_s = record.total_s - steady_s
        planned = _plan(run, (record.data and record.data.num_train) or plan.samples_per_epoch)
        work = (planned.epochs_per_rank * planned.steps_per_epoch * sqrt(planned.batch_size)) / (
            len(training.epochs) * plan.steps_per_epoch * sqrt(plan.batch_size)
        )
        threads = run.threads or max(1, self.num_cores // run.num_ranks)
        cores = self._cores(run.num_ranks, threads)
        work *= self._cores(record.num_ranks, record.ranks[0].threads) / cores
        crowding = self._crowding(run.num_ranks) / self._crowding(record.num_ranks)
        return outside_s * crowding + steady_s * work

    def _cores(self, num_ranks: int, threads: int) -> float:
        """Returns how many cores a rank keeps busy."""
        return min(threads, self.num_cores / num_ranks)

    def _crowding(self, num_ranks: int) -> float:
        """Returns how many ranks share a core, at least 1."""
        return max(1.0, num_ranks / self.num_cores)


def _plan(run: PlannedRun, num_samples: int) -> ScalingPlan:
    settings = run.settings
    return ScalingPlan.make(
        num_ranks=run.num_ranks,
        epochs=settings["epochs"],
        batch_size=settings["batch_size"],
        learning_rate=1.0,  # does not change the time
        num_samples=num_samples,
        epochs_scaling=settings["epochs_scaling"],
        batch_scaling=settings["batch_scaling"],
        data_parallel=settings["data_parallel"],
        max_steps=settings["train_steps"] or 0,
    )


def _differences(run: PlannedRun, record: RunRecord) -> int | None:
    """Returns in how many settings of speed a run differs; None if it trains something else."""
    number = 0
    for name, value in run.settings.items():
        if name in SCALED or name not in record.parameters:
            continue
        if record.parameters[name].value != value:
            role = role_of(name)
            if role in (Role.LEARNING, Role.PLACE):
                return None
            number += role is Role.SPEED
    return number
