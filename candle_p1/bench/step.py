"""Compares variants of a training step on the same batches, that of a run first.

Every measurement is a job of its own, which trains a few steps. Variants that should compute the
same must agree in their losses and in the updates of the first steps; otherwise no result is
reported. Models of two backends of Keras begin with different random numbers, so they are compared
by their times alone. Keras 2 draws other random numbers than Keras 3 for dropout, so where there is
some, the two are compared by further jobs without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from candle_p1.bench import harness, roofline, step_prediction
from candle_p1.bench.harness import GIGA, MB, TIME, Job, Measured, Result, ms, option
from candle_p1.bench.memory import MemorySampler, peak_of_sum_bytes
from candle_p1.bench.other_environment import OtherEnvironment
from candle_p1.bench.step_differences import check, difference, elements
from candle_p1.bench.task import BenchmarkTask, Outcome, backend_version
from candle_p1.benchmark import Benchmark, find_benchmark
from candle_p1.distributed.backend import AUTO, choose_backend
from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import ParameterError
from candle_p1.models.keras2 import check_directory
from candle_p1.reports.statistics import summarize
from candle_p1.text import count

if TYPE_CHECKING:
    from rich.table import Table

    from candle_p1.bench.training import Course, Training
    from candle_p1.parameters.parameter_set import ParameterSet

OURS, PLAIN, KERAS2 = "candle_p1", "plain Keras", "Keras 2"
ALONE, ONE_PROCESS = "no allreduce", "one process"
WARM_UP_STEPS = 2
"""Steps of every job that are not timed; the first one traces the model."""
DETERMINISTIC = "deterministic"
"""The purpose of jobs whose steps draw no random numbers."""


@dataclass(frozen=True, kw_only=True)
class StepTask(BenchmarkTask):
    """Trains a benchmark for some steps and times each of them.

    Attributes:
        kernels: "fast" or "plain".
        inputs: "samples" for batches as in a run, "arrays" for whole NumPy arrays, or the name of
            one of the benchmark's `other_samples`.
        averages_gradients: Whether the ranks average their gradients.
        num_steps: The number of timed steps.
        measures_machine: Whether to measure the roofline bound, and the memory in a further step.
        is_predicted: Whether to predict the step at the rates measured before and after it.
        keras2: The directory of tf_keras, which trains CANDLE's network; None: Keras 3 trains.
        is_random: Whether the step draws random numbers, such as for dropout, as the flags say.
    """

    own_flags: ClassVar[Mapping[str, str]] = {"kernels": "both kinds are measured"}

    kernels: str = "fast"
    inputs: str = "samples"
    averages_gradients: bool = True
    num_steps: int = 5
    measures_machine: bool = False
    is_predicted: bool = False
    keras2: str | None = None
    is_random: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """One epoch, and the kernels."""
        return super().settings | {"kernels": self.kernels}

    @property
    def environment(self) -> dict[str, str]:
        """Where Python finds tf_keras."""
        paths = [self.keras2, os.environ.get("PYTHONPATH")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))} if self.keras2 else {}

    def bind(self, benchmark: Benchmark) -> ParameterSet:
        params = super().bind(benchmark)
        zeros = {} if self.is_random else dict.fromkeys(benchmark.random_parameters(params), 0.0)
        return params.replace(zeros)

    @property
    def all_steps(self) -> int:
        """The number of steps, including those that are not timed."""
        return WARM_UP_STEPS + self.num_steps + self.measures_machine

    def measure(self, comm: Communicator) -> Outcome:
        from candle_p1.bench import step_keras2
        from candle_p1.bench.training import prepare_training
        from candle_p1.models import fast

        partners = comm if self.averages_gradients else SerialCommunicator()
        training = prepare_training(self, comm, partners=partners, num_steps=self.all_steps)
        device, size, model = training.device, training.plan.batch_size, training.models[0]
        found: Outcome = {
            **training.facts,
            "has_fast_kernels": fast.exist(on_cpu=not device.is_gpu),
            "flops": roofline.matrix_product_flops(model, size),
            "roofline": None,
            "memory": [],
            "predictions": {},
        }
        if self.keras2 is not None:
            del model  # there would be two of them
            return found | step_keras2.train(self, comm, training, found)
        if self.measures_machine:
            found["roofline"] = roofline.bound(model, size, device.threads)
        is_predicted = self.is_predicted and fast.are_fast()
        before = roofline.fastest_rates(device.threads) if is_predicted else None
        self._train(comm, training, found)
        if before is not None:
            rates = before.faster(roofline.fastest_rates(device.threads))
            ours, plain = step_prediction.predict_variants(training, rates)
            found["predictions"] = {OURS: ours, PLAIN: plain} if ours and plain else {}
        return found | {"state_bytes": roofline.state_bytes(model), "backend": backend_version()}

    def _train(self, comm: Communicator, training: Training, found: Outcome) -> None:
        import keras

        from candle_p1.bench.training import step_callback
        from candle_p1.data.samples import join_batches
        from candle_p1.models.fast.batches import for_fit

        data, (model,) = training.data, training.models
        own = self.inputs in ("samples", "arrays")
        samples = data.train if own else training.benchmark.other_samples(data)[self.inputs]
        batches = training.batches(samples)

        def weights(model: Any) -> dict[str, Any]:
            return {
                f"{number} {weight.path}": keras.ops.convert_to_numpy(weight.value)
                for number, weight in enumerate(model.trainable_weights)
            }

        course = self.course(comm, weights, found)
        callbacks = [step_callback(course, keras.callbacks.Callback)]
        epoch: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
        if self.inputs == "arrays":
            x, y = join_batches([batches[step] for step in range(self.all_steps)])
            model.fit(x, y, batch_size=training.plan.batch_size, **epoch)
        else:
            model.fit(for_fit(batches), steps_per_epoch=self.all_steps, **epoch)

    def course(
        self, comm: Communicator, weights: Callable[[Any], Mapping[str, Any]], found: Outcome
    ) -> Callable[[Any], Course]:
        """Returns the course of the training, which ranks begin together after the warm-up.

        It adds to what is found: ``steps_s``, the time of each timed step; ``losses``, after every
        step; ``updates``, by weight what the warm-up has added to some of its elements; ``values``,
        the same elements after all timed steps; and ``memory`` during a further step.
        """

        def course(callback: Any) -> Course:
            before, losses, steps_s = elements(weights(callback.model)), [], []
            for _ in range(WARM_UP_STEPS):
                _, loss = yield
                losses.append(loss)
            after = elements(weights(callback.model))
            updates = {name: (after[name] - before[name]).tolist() for name in after}
            comm.barrier()
            for _ in range(self.num_steps):
                seconds, loss = yield
                losses.append(loss)
                steps_s.append(seconds)
            values = {name: e.tolist() for name, e in elements(weights(callback.model)).items()}
            found.update(losses=losses, steps_s=steps_s, updates=updates, values=values)
            if self.measures_machine:
                sampler = MemorySampler()
                yield
                found["memory"] = sampler.stop()

        return course


@dataclass(kw_only=True)
class Step(harness.BenchmarkComparison):
    """Compare BENCHMARK's training step with that of plain Keras and with its roofline bound.

    The bound is the time of the matrix products and of the optimizer's memory traffic at the rates
    that this machine reaches, which are measured in the same job. The step has the engine of this
    environment (--engine), and with --compare_env that of another one, too.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench step nt3 --np 2 --batch_size 40",
        "candle-p1 bench step nt3 --np 2 --compare_env .venv-jax/bin/python",
        "candle-p1 bench step nt3 --keras2 .venv-keras2 --by_weight",
    )

    baseline: str = option(
        "plain",
        "Plain Keras (of several ranks: one process, and no averages of gradients), or nothing.",
        choices=["plain", "none"],
    )
    num_steps: int = harness.count_option(5, "Timed steps of a job, after a warm-up.", "--steps")
    num_rounds: int = harness.rounds_option(2, "Jobs of each variant", of=" steps in total")
    compare_env: str | None = option(
        None,
        "Measure in turn in this interpreter's environment, such as JAX beside TensorFlow.",
        metavar="PYTHON",
    )
    keras2: str | None = option(
        None,
        "Compare with tf_keras in this directory, too, where `make keras2` has put it.",
        metavar="DIRECTORY",
    )
    by_weight: bool = option(False, "List the differences of each weight between variants.")

    @cached_property
    def other(self) -> OtherEnvironment | None:
        """The other environment."""
        return OtherEnvironment.of(self.compare_env) if self.compare_env else None

    @property
    def other_name(self) -> str | None:
        """What the other environment's variants are called after: its backend."""
        if self.other is None:
            return None
        is_same = self.other.backend == choose_backend()
        return f"other {self.other.backend}" if is_same else self.other.backend

    def prepare(self, progress: harness.Progress | None = None) -> list[str]:
        params = self._params()
        if self.keras2 is not None:
            if self.num_ranks > 1 or self.baseline == "none":
                raise ParameterError(
                    "--keras2 compares a single rank with Keras 2 and plain Keras: leave out --np"
                    " and --baseline"
                )
            backend = choose_backend(params.get("engine", AUTO))
            if backend != "tensorflow":
                raise ParameterError(
                    f"--keras2 needs TensorFlow, and this engine computes with {backend}"
                )
            self.keras2 = check_directory(self.keras2)
        if self.other is not None and params.origin("engine").kind == "flag":
            raise ParameterError(
                "--engine cannot be combined with --compare_env: each environment trains with its"
                " own engine"
            )
        return super().prepare(progress)

    def variants(self) -> list[Job]:
        """Returns a job of each variant, that of a run first; then those of the other Python."""
        more: dict[str, Any] = {"num_steps": self.num_steps}
        here = [self.job(OURS, StepTask, **more)]
        plain = {**more, "kernels": "plain", "inputs": "arrays"}
        if self.baseline == "plain" and self.num_ranks > 1:
            here.append(self.job(ALONE, StepTask, **more, averages_gradients=False))
            here.append(replace(here[0], variant=ONE_PROCESS, num_ranks=1))
        elif self.baseline == "plain":
            names = find_benchmark(self.benchmark).other_sample_names
            inputs = {PLAIN: "arrays", **{f"plain, {name}": name for name in names}}
            here += [
                self.job(name, StepTask, **plain | {"inputs": of}) for name, of in inputs.items()
            ]
        there = [
            replace(job, variant=f"{job.variant}, {self.other_name}", other=self.other)
            for job in (here if self.other else ())
        ]
        if self.keras2 is not None:
            here.append(self.job(KERAS2, StepTask, **plain, keras2=self.keras2))
        return [*here, *there]

    def _params(self) -> ParameterSet:
        task = StepTask(benchmark=self.benchmark, flags=self.flags)
        return task.bind(find_benchmark(self.benchmark))

    def _random_parameters(self) -> list[str]:
        """Returns what makes a step draw random numbers, as flags, if Keras 2 is compared."""
        params = self._params()
        names = find_benchmark(self.benchmark).random_parameters(params) if self.keras2 else ()
        return [f"--{name} {params[name]:g}" for name in names]

    def jobs(self) -> list[Job]:
        variants = self.variants()
        predicted = OURS if self.num_ranks == 1 else None
        jobs = [
            job.changed(measures_machine=job.round == 1, is_predicted=job.variant == predicted)
            for job in harness.rounds(variants, self.num_rounds)
        ]
        names = (OURS, KERAS2) if self._random_parameters() else ()
        compared = [job for job in variants if job.variant in names]
        return jobs + [job.changed(DETERMINISTIC, is_random=False, num_steps=1) for job in compared]

    def _differences(self, variants: Sequence[Job], measured: Measured) -> dict[str, Any]:
        """Returns how far the variants of each environment are from its first one."""
        found = {}
        for other in {job.other: None for job in variants} if self.num_ranks == 1 else ():
            first, *rest = (job.variant for job in variants if job.other == other)
            for name in rest:
                is_random = name != KERAS2 or not self._random_parameters()
                purpose = TIME if is_random else DETERMINISTIC
                pair = (measured.of(each, purpose)[0][0] for each in (first, name))
                found[name] = difference(*pair)
        return found

    def report(self, measured: Measured) -> dict[str, Any]:
        variants = self.variants()
        differences = self._differences(variants, measured)
        check(differences)
        results = [self._result(job, measured.of(job.variant)) for job in variants]
        for result in results:
            result["speedup"] = {
                other["variant"]: result["samples_per_s"] / other["samples_per_s"]
                for other in results[1:]
            }
        there = [result for result in results if result["python"]]
        other = {
            "python": self.other and self.other.python,
            "name": self.other_name,
            "communication": _communication(there),
        }
        return {
            "num_steps": self.num_steps,
            "num_rounds": self.num_rounds,
            "results": results,
            "differences": differences,
            "keras2_compared_without": self._random_parameters(),
            "roofline": measured.of(OURS)[0][0]["roofline"],
            "prediction": step_prediction.compare_prediction(
                {each["variant"]: min(each["repeats_s"]) for each in results},
                [ranks[0]["predictions"] for ranks in measured.of(OURS)],
            ),
            "communication": _communication([each for each in results if not each["python"]]),
            "other": other if there else None,
        }

    def _result(self, job: Job, jobs: list[list[Outcome]]) -> Result:
        """Returns the times of a variant; a step takes as long as on its slowest rank."""
        ranks = jobs[0]
        columns = [zip(*(rank["steps_s"] for rank in each), strict=True) for each in jobs]
        times = summarize([max(step) for steps in columns for step in steps])
        flops = [rank["flops"] for rank in ranks]
        memory = [rank["memory"] for rank in ranks]
        names = ("threads", "device", "backend", "has_fast_kernels", "batch_size", "matrix_bytes")
        return {
            **asdict(job.task),
            "variant": job.variant,
            "python": job.other and job.other.python,
            "num_ranks": len(ranks),
            **{name: ranks[0][name] for name in names},
            **times,
            "samples_per_s": sum(rank["batch_size"] for rank in ranks) / times["median_s"],
            "flops_per_s": None if None in flops else sum(flops) / times["median_s"],
            "peak_bytes": peak_of_sum_bytes(memory) if all(memory) else None,
            "state_bytes": sum(rank["state_bytes"] for rank in ranks),
        }

    def render(self, report: Mapping[str, Any]) -> Iterator[str | Table]:
        results, other = report["results"], report["other"]
        ours = results[0]
        yield (
            f"{report['benchmark']}: training step, {ours['batch_size']} samples per rank,"
            f" {ours['device']}, {ours['backend']}, {count(report['num_rounds'], 'round')} of"
            f" {count(report['num_steps'], 'step')}"
        )
        if other:
            version = next(each["backend"] for each in results if each["python"])
            yield f"{other['name']}: the same with {version}, by {other['python']}"
        if any(each["kernels"] == "plain" and not each["has_fast_kernels"] for each in results):
            yield (
                "the fast kernels are for TensorFlow on CPUs only: elsewhere, a run and plain Keras"
                " compute with the same layers and optimizers, and differ in how batches are made"
            )
        columns: dict[str, Any] = {
            "variant": "variant",
            "ranks x\nthreads": lambda r: f"{r['num_ranks']} x {r['threads']}",
            "median\n(ms)": ("median_s", 1e-3),
            "{spread}\n(ms)": lambda r: harness.interval(r, unit=1e-3),
            "samples\n/s": "samples_per_s",
            "GFLOP\n/s": ("flops_per_s", GIGA),
        }
        if len(results) > 1:
            columns["speed-up of\nthe first"] = lambda r: ours["speedup"].get(r["variant"], 1.0)
        yield harness.table(results, columns)
        for name, found in report["differences"].items():
            flags = report["keras2_compared_without"] if name == KERAS2 else []
            yield (
                f"{name} trains the same model: the largest relative difference is"
                f" {found['loss']:.1g} in the losses and {found['update']:.1g} in the first updates"
            ) + (
                f" (of jobs of their own without {', '.join(flags)}: Keras 2 draws other random"
                " numbers, so the losses of the timed steps cannot be compared)"
                if flags
                else ""
            )
            if self.by_weight:
                yield harness.table(found["weights"], WEIGHT_COLUMNS)
        yield roofline.describe(report["roofline"], ours["median_s"])
        if report["prediction"]:
            yield from step_prediction.render(report["prediction"])
        exposed = {"": report["communication"]}
        if other:
            exposed[f", {other['name']}"] = other["communication"]
        for of, found in exposed.items():
            if found:
                yield (
                    f"exposed communication{of}: {ms(found['exposed_s'])} ms per step,"
                    f" {100 * found['share']:.1f} % of the step"
                )
        memory: harness.Columns = {
            "variant": "variant",
            "memory of\nthe node (MB)": ("peak_bytes", MB),
            "weights, gradients,\nstate (MB)": ("state_bytes", MB),
            "matrices\n(MB)": ("matrix_bytes", MB),
        }
        yield harness.table(results, memory)
        yield from harness.remarks(report, "step")


VERB = Step


def _number(name: str) -> Callable[[Result], str]:
    return lambda each: "not known" if each[name] is None else f"{each[name]:.1e}"


WEIGHT_COLUMNS: harness.Columns = {
    "weight": "weight",
    "values\ncompared": lambda each: f"{each['num_compared']:,}",
    "first updates:\ndifference": _number("update"),
    "\nlargest": _number("largest_update"),
    "values at the end:\ndifference": _number("value"),
    "at the end:\nlargest": _number("largest_value"),
}


def _communication(results: Sequence[Result]) -> dict[str, float] | None:
    """Returns how long a step of an environment waits for allreduces of gradients."""
    alone = [each["median_s"] for each in results if not each["averages_gradients"]]
    if not alone:
        return None
    step_s = results[0]["median_s"]
    return {"exposed_s": step_s - alone[0], "share": (step_s - alone[0]) / step_s}
