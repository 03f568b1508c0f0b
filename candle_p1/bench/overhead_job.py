"""What the job of a measurement of overheads trains, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from candle_p1.bench.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class OverheadJob(Job):
    """What the job trains.

    Attributes:
        benchmark: Its name, path or module.
        flags: Of the benchmark.
        num_epochs: Epochs of a stretch.
        num_rounds: Rounds of a stretch with measuring and one without.
    """

    worker: ClassVar[str] = "candle_p1.bench.overhead_worker"

    benchmark: str
    flags: Sequence[str]
    num_epochs: int
    num_rounds: int

    @property
    def name(self) -> str:
        """What is measured."""
        return "overhead of measuring"


@dataclass(frozen=True)
class OverheadOutcome:
    """What a rank has found.

    Attributes:
        measured_s: The time of each stretch with measuring.
        bare_s: The time of each stretch without.
        threads: Of one operation.
        device: "cpu", or the GPU's name.
        batch_size: Samples of a step of this rank.
        steps_per_epoch: Steps of an epoch.
        direct_s: What the measuring of one step takes by itself; see `direct_cost_s` of the worker.
    """

    measured_s: list[float]
    bare_s: list[float]
    threads: int
    device: str
    batch_size: int
    steps_per_epoch: int
    direct_s: float
