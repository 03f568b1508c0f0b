"""What a job of a comparison of training steps measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from candle_p1.bench.job import Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.bench.memory import Samples

WARM_UP_STEPS = 2
"""Of every job: the first one traces the model. The weights are compared after the last of them."""
MAX_COMPARED = 4096
"""Elements of a weight that are compared."""


@dataclass(frozen=True)
class StepJob(Job):
    """What a job trains, and how.

    Attributes:
        benchmark: Its name, path or module.
        flags: Of the benchmark.
        variant: The name of what is measured.
        kernels: "fast" or "plain".
        inputs: "samples" for batches as in a run, "arrays" for whole NumPy arrays, or the name of
            one of the benchmark's `other_samples`.
        exchange: Whether the ranks average their gradients.
        num_steps: Timed steps.
        measures_machine: Whether to measure what the machine can do, and the memory.
    """

    worker: ClassVar[str] = "candle_p1.bench.step_worker"

    benchmark: str
    flags: Sequence[str]
    variant: str
    kernels: str = "fast"
    inputs: str = "samples"
    exchange: bool = True
    num_steps: int = 5
    measures_machine: bool = False

    @property
    def name(self) -> str:
        """The variant."""
        return self.variant


@dataclass(frozen=True)
class StepOutcome:
    """What a rank has measured.

    Attributes:
        steps_s: The time of each timed step.
        losses: The mean loss of the epoch after each step, those of the warm-up among them.
        updates: For each weight, what the steps of the warm-up have added to some of its elements.
        batch_size: Samples of a step of this rank.
        threads: Of one operation.
        device: "cpu", or the GPU's name.
        flops: Of the matrix products of a step; see candle_p1.bench.roofline.
        optimizer_bytes: That an optimizer has to read and write in a step.
        state_bytes: Of weights, gradients and the optimizer's state.
        matrix_bytes: Of the matrices that the ranks of a node share.
        matmul_flops_per_s: What matrix products reach; None where it was not measured.
        copy_bytes_per_s: What copies in memory reach, read and written; None likewise.
        memory: Samples of this process's memory in a further step; none where they were not taken.
    """

    steps_s: list[float]
    losses: list[float]
    updates: dict[str, list[float]]
    batch_size: int
    threads: int
    device: str
    flops: float
    optimizer_bytes: int
    state_bytes: int
    matrix_bytes: int
    matmul_flops_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    memory: Samples = field(default_factory=list)
