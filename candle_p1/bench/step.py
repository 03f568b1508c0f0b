"""Compares variants of a training step on the same batches, that of a run first.

Every measurement is a job of its own, which trains a few steps. The jobs run in rounds of all
variants, every second round in reverse order, so that a steady drift of the machine affects all
variants alike. Variants that should compute the same must agree in their losses and in the updates
of the first steps; otherwise no result is reported. Models of two backends of Keras begin with
different random numbers, so they are compared by their times alone. Keras 2 draws other random
numbers than Keras 3 for dropout, so where there is some, the two are compared by further jobs
without it.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench.job import Job, Measurement, OnStart, run
from candle_p1.bench.memory import peak_of_sum_bytes
from candle_p1.bench.step_differences import check, difference
from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.backend import AUTO, choose_backend
from candle_p1.errors import ParameterError
from candle_p1.reports.statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from candle_p1.bench.elsewhere import Elsewhere
    from candle_p1.bench.memory import MemorySamples
    from candle_p1.benchmark import Benchmark
    from candle_p1.data.reader import FileSet
    from candle_p1.parameters.parameter_set import ParameterSet

OURS = "as in a run"
PLAIN = "plain Keras"
ALONE = "no allreduce"
ONE_PROCESS = "one process"
KERAS2 = "Keras 2"
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
        measures_machine: Whether to measure the roofline bound, and the memory in a further step.
        is_predicted: Whether to predict the step at the rates measured before and after it.
        python: The interpreter of another environment in which it is measured; None: this one.
        keras2: The directory of tf_keras, which trains CANDLE's network; None: Keras 3 trains.
        is_random: Whether the step draws random numbers, such as for dropout, as the flags say.
    """

    worker: ClassVar[str] = "candle_p1.bench.step_worker"
    own_flags: ClassVar[Mapping[str, str]] = {"kernels": "both kinds are measured"}

    variant: str = OURS
    kernels: str = "fast"
    inputs: str = "samples"
    averages_gradients: bool = True
    num_steps: int = 5
    measures_machine: bool = False
    is_predicted: bool = False
    python: str | None = None
    keras2: str | None = None
    is_random: bool = True

    @property
    def name(self) -> str:
        """The variant."""
        return self.variant

    @property
    def settings(self) -> dict[str, Any]:
        """One epoch, and the kernels."""
        return super().settings | {"kernels": self.kernels}

    @property
    def environment(self) -> dict[str, str]:
        """Where Python finds tf_keras."""
        if self.keras2 is None:
            return {}
        already = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([self.keras2, *([already] if already else [])])}

    def bind(self, benchmark: Benchmark) -> ParameterSet:
        """Returns the benchmark's parameters for this job; see Job."""
        params = super().bind(benchmark)
        if self.is_random:
            return params
        return params.replace(dict.fromkeys(benchmark.random_parameters(params), 0.0))

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
        values: The same elements after all timed steps.
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
        predictions: What candle_p1.bench.step_prediction predicts at the highest rates before and
            after the steps, of the variants OURS and PLAIN; empty if it was not to, or there are
            no fast kernels, or the model has what is not counted.
    """

    steps_s: list[float]
    losses: list[float]
    updates: dict[str, list[float]]
    values: dict[str, list[float]]
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
    predictions: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class StepComparison(Measurement):
    """What is compared, and under which conditions.

    Attributes:
        against: Whether to compare with other variants.
        num_rounds: Jobs of each variant.
        other: Another environment, in which all variants are measured, too; None: there is none.
        keras2: The directory of tf_keras, whose training is measured, too; None: it is not.
    """

    job: StepJob
    against: bool = True
    num_rounds: int = 2
    other: Elsewhere | None = None
    keras2: str | None = None

    def locate_files(self, progress: Callable[[str, int, int], None] | None = None) -> FileSet:
        """Returns the benchmark's files; see Measurement.

        Raises:
            CandleError: See Measurement; or one engine is chosen for two environments, or Keras 2
                cannot be compared.
        """
        self._check_keras2()
        if self.other is not None:
            benchmark = find_benchmark(self.job.benchmark)
            if self.job.bind(benchmark).origin("engine").kind == "flag":
                raise ParameterError(
                    "--engine cannot be combined with --other_python: each environment trains with"
                    " its own engine"
                )
        return super().locate_files(progress)

    def _check_keras2(self) -> None:
        """Raises ParameterError if Keras 2 is to be compared where it is not a peer."""
        if self.keras2 is None:
            return
        if self.num_ranks > 1 or not self.against:
            raise ParameterError(
                "--keras2 compares a single rank with Keras 2 and plain Keras: leave out --np and"
                " --against"
            )
        benchmark = find_benchmark(self.job.benchmark)
        backend = choose_backend(self.job.bind(benchmark).get("engine", AUTO))
        if backend != "tensorflow":
            raise ParameterError(
                f"--keras2 needs TensorFlow, and this engine computes with {backend}"
            )

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
        if self.keras2 is not None:
            here.append(self._of_keras2())
        if self.other is None:
            return here
        there = [
            replace(job, variant=f"{job.variant}, {self.other_name}", python=self.other.python)
            for job in here
            if job.keras2 is None
        ]
        return [*here, *there]

    def _of_keras2(self) -> StepJob:
        return replace(
            self.job, variant=KERAS2, kernels="plain", inputs="arrays", keras2=self.keras2
        )

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

    def _random_parameters(self) -> list[str]:
        """Returns what makes a step draw random numbers, as flags, if Keras 2 is compared."""
        if self.keras2 is None:
            return []
        benchmark = find_benchmark(self.job.benchmark)
        params = self.job.bind(benchmark)
        return [f"--{name} {params[name]:g}" for name in benchmark.random_parameters(params)]

    def _jobs_without_randomness(self) -> list[StepJob]:
        """Returns jobs whose losses can be compared with Keras 2's, if those of variants cannot."""
        if not self._random_parameters():
            return []
        jobs = self.job, self._of_keras2()
        return [replace(job, is_random=False, num_steps=1) for job in jobs]

    def results(self, files: FileSet, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; see Measurement."""
        variants = self.variants()
        calm = self._jobs_without_randomness()
        measured: dict[str, list[list[StepOutcome]]] = {job.variant: [] for job in variants}
        total = len(variants) * self.num_rounds + len(calm)
        for number in range(self.num_rounds):
            for variant in variants if number % 2 == 0 else variants[::-1]:
                job = replace(
                    variant,
                    measures_machine=number == 0,
                    is_predicted=variant is variants[0] and self.num_ranks == 1,
                )
                done = sum(map(len, measured.values()))
                on_start(done, total, f"{job.variant}, round {number + 1}")
                num_ranks = 1 if job.variant.startswith(ONE_PROCESS) else self.num_ranks
                run_there = run if self.other is None or job.python is None else self.other.run
                measured[job.variant].append(run_there(job, num_ranks))
        differences = {}
        for of_python in _by_python(variants) if self.num_ranks == 1 else ():
            first = measured[of_python[0].variant][0][0]
            for job in of_python[1:]:
                if job.keras2 is None or not calm:
                    found = difference(first, measured[job.variant][0][0])
                    differences[job.variant] = found
        if calm:
            outcomes = []
            for number, job in enumerate(calm):
                on_start(total - len(calm) + number, total, f"{job.variant}, not random")
                outcomes += run(job, 1)
            differences[KERAS2] = difference(*outcomes)
        check(differences)
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
            "keras2_compared_without": self._random_parameters(),
            "roofline": measured[OURS][0][0].roofline,
            "prediction": _prediction(
                {each["variant"]: min(each["repeats_s"]) for each in results},
                [of_ranks[0].predictions for of_ranks in measured[OURS]],
            ),
            "communication": _communication(here),
            "other": other and other | {"communication": _communication(there[0])},
        }


def _prediction(
    fastest_s: dict[str, float], predictions: Sequence[dict[str, dict[str, Any]]]
) -> dict[str, Any] | None:
    """Returns the predicted steps and their ratio beside the measured ones; None without them.

    The model is fitted to times that nothing has disturbed, so the fastest steps of all rounds are
    compared with the shortest predictions. A deviation is that of the prediction, relative to the
    measurement.

    Args:
        fastest_s: The fastest step of each variant.
        predictions: What each round predicted, by variant.
    """
    shortest: dict[str, dict[str, Any]] = {}
    for of_round in predictions:
        for name, each in of_round.items():
            if name not in shortest or each["total_s"] < shortest[name]["total_s"]:
                shortest[name] = each
    steps = {
        name: found
        | {"fastest_s": fastest_s[name], "deviation": found["total_s"] / fastest_s[name] - 1}
        for name, found in shortest.items()
        if name in fastest_s
    }
    if len(steps) < len((OURS, PLAIN)):
        return None
    predicted, measured = (steps[PLAIN][key] / steps[OURS][key] for key in ("total_s", "fastest_s"))
    speedup = {"predicted": predicted, "measured": measured, "deviation": predicted / measured - 1}
    return {"steps": steps, "speedup": speedup}


def _by_python(variants: list[StepJob]) -> list[list[StepJob]]:
    """Returns the variants of each environment, this one first."""
    pythons = dict.fromkeys(job.python for job in variants)
    return [[job for job in variants if job.python == python] for python in pythons]


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
