"""Compares training steps: the same batches, in the form of a run and in others.

Every measurement is a job of its own, which trains a few steps. The jobs go in rounds through all
variants, every second round in reverse order: a steady drift of the machine hits all alike.
Variants that should compute the same must agree in their losses and in what the first steps have
changed, or none is reported.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.bench.job import run
from candle_p1.bench.measurement import Measurement, Starting, unheard
from candle_p1.bench.memory import peak_of_sum_bytes
from candle_p1.bench.step_job import StepJob, StepOutcome
from candle_p1.benchmark import find_benchmark
from candle_p1.errors import CandleError
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.reports.statistics import summarize

if TYPE_CHECKING:
    from candle_p1.data.reader import FileSet

OURS = "as in a run"
PLAIN = "plain Keras"
ALONE = "no exchange"
ONE_PROCESS = "one process"
LOSS_TOLERANCE = 1e-4
"""Relative, of mean losses."""
UPDATE_TOLERANCE = 1e-2
"""Of the norm of an update, relative to that of the other one. Adam makes steps of the same size of
gradients of any size, of which small ones are rounded differently."""


@dataclass(frozen=True)
class Variant:
    """What is compared.

    Attributes:
        job: What each of its jobs measures.
        num_ranks: Of its jobs.
        same: Whether its losses must be those of the first variant.
    """

    job: StepJob
    num_ranks: int
    same: bool = True


@dataclass(frozen=True)
class StepComparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        against: Whether to compare with other forms.
        num_steps: Timed steps of a job.
        num_rounds: Jobs of each variant.
    """

    job = StepJob

    against: bool = True
    num_steps: int = 3
    num_rounds: int = 2

    def variants(self) -> list[Variant]:
        """Returns what is compared, the form of a run first."""
        ours = StepJob(self.benchmark, list(self.flags), OURS, num_steps=self.num_steps)
        found = [Variant(ours, self.num_ranks)]
        if not self.against:
            return found
        if self.num_ranks > 1:
            alone = replace(ours, variant=ALONE, exchange=False)
            one = replace(ours, variant=ONE_PROCESS)
            return [*found, Variant(alone, self.num_ranks, same=False), Variant(one, 1, same=False)]
        plain = replace(ours, variant=PLAIN, kernels="plain", inputs="arrays")
        others = find_benchmark(self.benchmark).other_sample_names
        return [
            *found,
            Variant(plain, 1),
            *(Variant(replace(plain, variant=f"plain, {name}", inputs=name), 1) for name in others),
        ]

    def measure(self, files: FileSet, starting: Starting = unheard) -> dict[str, Any]:
        """Runs all jobs; see Measurement.

        Raises:
            CandleError: A job cannot train, or variants that should agree do not.
            RuntimeError: A job has failed otherwise.
        """
        started, variants = utc_now(), self.variants()
        measured: dict[str, list[list[StepOutcome]]] = {each.job.variant: [] for each in variants}
        total = len(variants) * self.num_rounds
        for number in range(self.num_rounds):
            for variant in variants if number % 2 == 0 else variants[::-1]:
                job = replace(variant.job, measures_machine=number == 0)
                done = sum(map(len, measured.values()))
                starting(done, total, f"{job.variant}, round {number + 1}")
                outcomes = run(job, variant.num_ranks)
                measured[job.variant].append([StepOutcome(**outcome) for outcome in outcomes])
        first = measured[variants[0].job.variant][0][0]
        differences = {
            name: difference(first, jobs[0][0])
            for variant in variants[1:]
            if variant.same
            for name, jobs in [(variant.job.variant, measured[variant.job.variant])]
        }
        _check(differences)
        results = [_result(variant, measured[variant.job.variant]) for variant in variants]
        for result in results:
            result["speedup"] = {
                other["variant"]: result["samples_per_s"] / other["samples_per_s"]
                for other in results[1:]
            }
        return {
            "benchmark": find_benchmark(self.benchmark).name,
            "command": sys.argv,
            "started": started,
            "synthetic": files.synthetic,
            "num_steps": self.num_steps,
            "num_rounds": self.num_rounds,
            "results": results,
            "differences": differences,
            "floor": _floor(first),
            "communication": _communication(results) if self.num_ranks > 1 else None,
            "machine": environment.capture(),
        }


def difference(one: StepOutcome, other: StepOutcome) -> dict[str, float]:
    """Returns the largest relative differences of two trainings of the same batches.

    Of a loss, relative to it; of the update of a weight by the first steps, by the norm of the
    elements compared. Weights that hardly move are compared with the largest move of all.
    """
    losses = np.array(one.losses), np.array(other.losses)
    num = min(map(len, losses))
    loss = np.max(np.abs(losses[0][:num] - losses[1][:num]) / np.abs(losses[1][:num]))
    moved = {name: np.linalg.norm(values) for name, values in other.updates.items()}
    least = 1e-6 * max(moved.values())
    update = max(
        np.linalg.norm(np.subtract(one.updates[name], other.updates[name]))
        / max(moved[name], least)
        for name in moved
    )
    return {"loss": float(loss), "update": float(update)}


def _check(differences: dict[str, dict[str, float]]) -> None:
    for name, found in differences.items():
        limits = {"loss": LOSS_TOLERANCE, "update": UPDATE_TOLERANCE}
        for what, limit in limits.items():
            if not found[what] <= limit:  # also NaN
                raise CandleError(
                    f"{name} trains another model: after the first steps the {what} differs by"
                    f" {found[what]:.2g}, more than rounding explains ({limit:g})"
                )


def _result(variant: Variant, jobs: list[list[StepOutcome]]) -> dict[str, Any]:
    """Returns the times of a variant; a step takes as long as its slowest rank."""
    first = jobs[0]
    seconds = [
        max(times)
        for ranks in jobs
        for times in zip(*(rank.steps_s for rank in ranks), strict=True)
    ]
    summary = summarize(seconds)
    samples = sum(rank.batch_size for rank in first)
    flops = sum(rank.flops for rank in first)
    memory = [rank.memory for rank in first]
    return {
        "variant": variant.job.variant,
        **asdict(variant.job),
        "num_ranks": variant.num_ranks,
        "threads": first[0].threads,
        "device": first[0].device,
        "batch_size": first[0].batch_size,
        **summary,
        "samples_per_s": samples / summary["median_s"],
        "flops_per_s": flops / summary["median_s"],
        "peak_bytes": peak_of_sum_bytes(memory) if all(memory) else None,
        "state_bytes": sum(rank.state_bytes for rank in first),
        "matrix_bytes": first[0].matrix_bytes,
    }


def _floor(outcome: StepOutcome) -> dict[str, Any]:
    """Returns what a step of one rank cannot be faster than, and what that follows from."""
    assert outcome.matmul_flops_per_s is not None
    assert outcome.copy_bytes_per_s is not None
    products_s = outcome.flops / outcome.matmul_flops_per_s
    optimizer_s = outcome.optimizer_bytes / outcome.copy_bytes_per_s
    return {
        "flops": outcome.flops,
        "matmul_flops_per_s": outcome.matmul_flops_per_s,
        "products_s": products_s,
        "optimizer_bytes": outcome.optimizer_bytes,
        "copy_bytes_per_s": outcome.copy_bytes_per_s,
        "optimizer_s": optimizer_s,
        "total_s": products_s + optimizer_s,
    }


def _communication(results: list[dict[str, Any]]) -> dict[str, float] | None:
    """Returns how long a step waits for the exchange of gradients, not hidden behind its work."""
    median_s = {result["variant"]: result["median_s"] for result in results}
    if ALONE not in median_s:
        return None
    exposed_s = median_s[OURS] - median_s[ALONE]
    return {"exposed_s": exposed_s, "share": exposed_s / median_s[OURS]}
