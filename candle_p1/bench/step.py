"""Compares variants of a training step on the same batches, that of a run first.

Every measurement is a job of its own, which trains a few steps. The jobs run in rounds of all
variants, every second round in reverse order, so that a steady drift of the machine affects all
variants alike. Variants that should compute the same must agree in their losses and in the updates
of the first steps; otherwise no result is reported. Models of two backends of Keras begin with
different random numbers, so they are compared by their times alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from candle_p1.bench.job import Job, Measurement, OnStart, run
from candle_p1.bench.memory import peak_of_sum_bytes
from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.backend import choose_backend
from candle_p1.errors import CandleError, ParameterError
from candle_p1.reports.statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from candle_p1.bench.elsewhere import Elsewhere
    from candle_p1.bench.memory import MemorySamples
    from candle_p1.data.reader import FileSet

OURS = "as in a run"
PLAIN = "plain Keras"
ALONE = "no allreduce"
ONE_PROCESS = "one process"
LOSS_TOLERANCE = 1e-4
"""Relative tolerance of mean losses."""
UPDATE_TOLERANCE = 1e-2
"""Tolerance of an update, relative to the norm of the other one. The steps of Adam have the same
size for gradients of any size, and small gradients have large rounding errors."""
WARM_UP_STEPS = 2
"""Steps of every job that are not timed; the first one traces the model."""
MAX_COMPARED = 4096
"""The number of elements of a weight that are compared."""


@dataclass(frozen=True)
class StepJob(Job):
    """What a job trains, and how.

    Attributes:
        variant: The name of what is measured.
        kernels: "fast" or "plain".
        inputs: "samples" for batches as in a run, "arrays" for whole NumPy arrays, or the name of
            one of the benchmark's `other_samples`.
        averages_gradients: Whether the ranks average their gradients.
        num_steps: The number of timed steps.
        measures_machine: Whether to measure the machine's rates, and the memory in a further step.
        python: The interpreter of another environment in which it is measured; None: this one.
    """

    worker: ClassVar[str] = "candle_p1.bench.step_worker"
    own_flags: ClassVar[Mapping[str, str]] = {"kernels": "both kinds are measured"}

    variant: str = OURS
    kernels: str = "fast"
    inputs: str = "samples"
    averages_gradients: bool = True
    num_steps: int = 5
    measures_machine: bool = False
    python: str | None = None

    @property
    def name(self) -> str:
        """The variant."""
        return self.variant

    @property
    def settings(self) -> dict[str, Any]:
        """One epoch, and the kernels."""
        return super().settings | {"kernels": self.kernels}

    @property
    def all_steps(self) -> int:
        """The number of steps, including those that are not timed."""
        return WARM_UP_STEPS + self.num_steps + self.measures_machine


@dataclass(frozen=True)
class StepOutcome:
    """What a rank has measured.

    Attributes:
        steps_s: The time of each timed step.
        losses: The mean loss of the epoch after each step, including the warm-up.
        updates: For each weight, what the warm-up steps have added to some of its elements.
        batch_size: The number of samples in a step of this rank.
        threads: The number of threads of an operation.
        device: "cpu", or the GPU's name.
        backend: Keras's backend and its version.
        has_fast_kernels: Whether there are fast kernels for this backend and device.
        flops: Operations in the matrix products of a step; see candle_p1.bench.roofline. None if
            they are not known.
        state_bytes: Size of the weights, gradients and optimizer state.
        matrix_bytes: Size of the matrices that the ranks of a node share.
        roofline: See candle_p1.bench.roofline.bound; None if it is not known or not measured.
        memory: Memory samples of this process in a further step; empty if none were taken.
    """

    steps_s: list[float]
    losses: list[float]
    updates: dict[str, list[float]]
    batch_size: int
    threads: int
    device: str
    backend: str
    has_fast_kernels: bool
    flops: float | None
    state_bytes: int
    matrix_bytes: int
    roofline: dict[str, float] | None = None
    memory: MemorySamples = field(default_factory=list)


@dataclass(frozen=True)
class StepComparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        against: Whether to compare with other variants.
        num_rounds: Jobs of each variant.
        other: Another environment, in which all variants are measured, too; None: there is none.
    """

    job: StepJob
    against: bool = True
    num_rounds: int = 2
    other: Elsewhere | None = None

    def locate_files(self, progress: Callable[[str, int, int], None] | None = None) -> FileSet:
        """Returns the benchmark's files; see Measurement.

        Raises:
            CandleError: See Measurement; or one engine is chosen for two environments.
        """
        if self.other is not None:
            benchmark = find_benchmark(self.job.benchmark)
            if self.job.bind(benchmark).origin("engine").kind == "flag":
                raise ParameterError(
                    "--engine cannot be combined with --other_python: each environment trains with"
                    " its own engine"
                )
        return super().locate_files(progress)

    @property
    def other_name(self) -> str | None:
        """What the other environment's variants are called after: its backend."""
        if self.other is None:
            return None
        is_same = self.other.backend == choose_backend()
        return f"other {self.other.backend}" if is_same else self.other.backend

    def variants(self) -> list[StepJob]:
        """Returns a job of each variant, that of a run first; then those of the other Python."""
        here = self._variants()
        if self.other is None:
            return here
        there = [
            replace(job, variant=f"{job.variant}, {self.other_name}", python=self.other.python)
            for job in here
        ]
        return [*here, *there]

    def _variants(self) -> list[StepJob]:
        if not self.against:
            return [self.job]
        if self.num_ranks > 1:
            alone = replace(self.job, variant=ALONE, averages_gradients=False)
            return [self.job, alone, replace(self.job, variant=ONE_PROCESS)]
        plain = replace(self.job, variant=PLAIN, kernels="plain", inputs="arrays")
        others = find_benchmark(self.job.benchmark).other_sample_names
        more = [replace(plain, variant=f"plain, {name}", inputs=name) for name in others]
        return [self.job, plain, *more]

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; see Measurement."""
        variants = self.variants()
        measured: dict[str, list[list[StepOutcome]]] = {job.variant: [] for job in variants}
        total = len(variants) * self.num_rounds
        for number in range(self.num_rounds):
            for variant in variants if number % 2 == 0 else variants[::-1]:
                job = replace(variant, measures_machine=number == 0)
                done = sum(map(len, measured.values()))
                on_start(done, total, f"{job.variant}, round {number + 1}")
                num_ranks = 1 if job.variant.startswith(ONE_PROCESS) else self.num_ranks
                run_there = run if self.other is None or job.python is None else self.other.run
                measured[job.variant].append(run_there(job, num_ranks))
        differences = {}
        for of_python in _by_python(variants) if self.num_ranks == 1 else ():
            first = measured[of_python[0].variant][0][0]
            for job in of_python[1:]:
                differences[job.variant] = difference(first, measured[job.variant][0][0])
        _check(differences)
        results = [_result(job, measured[job.variant]) for job in variants]
        for result in results:
            result["speedup"] = {
                other["variant"]: result["samples_per_s"] / other["samples_per_s"]
                for other in results[1:]
            }
        here, *there = (
            [result for result in results if result["python"] == of_python[0].python]
            for of_python in _by_python(variants)
        )
        other = {"python": there[0][0]["python"], "name": self.other_name} if there else None
        return {
            "num_steps": self.job.num_steps,
            "num_rounds": self.num_rounds,
            "results": results,
            "differences": differences,
            "roofline": measured[OURS][0][0].roofline,
            "communication": _communication(here),
            "other": other and other | {"communication": _communication(there[0])},
        }


def _by_python(variants: list[StepJob]) -> list[list[StepJob]]:
    """Returns the variants of each environment, this one first."""
    pythons = dict.fromkeys(job.python for job in variants)
    return [[job for job in variants if job.python == python] for python in pythons]


def difference(one: StepOutcome, other: StepOutcome) -> dict[str, float]:
    """Returns the largest relative differences between two trainings on the same batches.

    The difference of losses is relative to the loss, that of the update of a weight to the norm of
    the elements compared. Weights that hardly change are compared with the largest update of all.
    """
    losses = np.array(one.losses), np.array(other.losses)
    num = min(map(len, losses))
    loss = np.max(np.abs(losses[0][:num] - losses[1][:num]) / np.abs(losses[1][:num]))
    norms = {name: np.linalg.norm(values) for name, values in other.updates.items()}
    least = 1e-6 * max(norms.values())
    update = max(
        np.linalg.norm(np.subtract(one.updates[name], other.updates[name]))
        / max(norms[name], least)
        for name in norms
    )
    return {"loss": float(loss), "update": float(update)}


def _check(differences: dict[str, dict[str, float]]) -> None:
    for name, found in differences.items():
        for what, limit in {"loss": LOSS_TOLERANCE, "update": UPDATE_TOLERANCE}.items():
            if not found[what] <= limit:  # also NaN
                raise CandleError(
                    f"{name} trains a different model: after the first steps the {what} differs by"
                    f" {found[what]:.2g}, which is more than rounding explains ({limit:g})"
                )


def _result(job: StepJob, jobs: list[list[StepOutcome]]) -> dict[str, Any]:
    """Returns the times of a variant; a step takes as long as on its slowest rank."""
    first = jobs[0]
    seconds = [
        max(times)
        for ranks in jobs
        for times in zip(*(rank.steps_s for rank in ranks), strict=True)
    ]
    summary = summarize(seconds)
    samples = sum(rank.batch_size for rank in first)
    flops = None if first[0].flops is None else sum(rank.flops or 0 for rank in first)
    memory = [rank.memory for rank in first]
    return {
        **asdict(job),
        "num_ranks": len(first),
        "threads": first[0].threads,
        "device": first[0].device,
        "backend": first[0].backend,
        "has_fast_kernels": first[0].has_fast_kernels,
        "batch_size": first[0].batch_size,
        **summary,
        "samples_per_s": samples / summary["median_s"],
        "flops_per_s": None if flops is None else flops / summary["median_s"],
        "peak_bytes": peak_of_sum_bytes(memory) if all(memory) else None,
        "state_bytes": sum(rank.state_bytes for rank in first),
        "matrix_bytes": first[0].matrix_bytes,
    }


def _communication(results: list[dict[str, Any]]) -> dict[str, float] | None:
    """Returns the exposed communication: how long a step waits for allreduces of gradients.

    Args:
        results: Those of one environment.
    """
    ours = results[0]["median_s"]
    alone = [each["median_s"] for each in results if not each["averages_gradients"]]
    if not alone:
        return None
    return {"exposed_s": ours - alone[0], "share": (ours - alone[0]) / ours}
