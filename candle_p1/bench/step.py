"""Compares variants of a training step on the same batches, that of a run first.

Variants that should compute the same must agree in their losses and in the updates of the first
steps; otherwise no result is reported. Models of two backends begin with different random numbers,
so they are compared by their times alone. Keras 2 draws other random numbers for dropout, so where
there is some, it is compared by further jobs without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from candle_p1.bench import harness
from candle_p1.bench.harness import GIGA, MB, TIME, Job, Measured, Result, ms, number, option
from candle_p1.bench.node_state import peak_of_sum_bytes
from candle_p1.bench.step_task import StepTask
from candle_p1.bench.task import OtherEnvironment, Outcome
from candle_p1.benchmark import find_benchmark
from candle_p1.distributed.backend import AUTO, choose_backend
from candle_p1.errors import CandleError, ParameterError
from candle_p1.models.keras2 import check_directory
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.reports.statistics import summarize
from candle_p1.text import count

OURS, PLAIN, KERAS2 = "candle_p1", "plain Keras", "Keras 2"
ONE_PROCESS = "one process"
PLAIN_STEP = {"kernels": "plain", "inputs": "arrays"}
DETERMINISTIC = "deterministic"
"""The purpose of jobs whose steps draw no random numbers."""
TOLERANCES = {"loss": 1e-4, "update": 1e-2}
"""Of mean losses, relative; and of an update, relative to the norm of the other one. The steps of
Adam have the same size for gradients of any size, and small gradients have large errors."""
LEAST_UPDATE = 1e-6
"""Weights that change by less than this part of the largest change are compared with that part."""


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
        "Compare with plain Keras (several ranks: one process, and no averaging), or not.",
        choices=["plain", "none"],
    )
    num_steps: int = harness.count_option(5, "Timed steps of a job, after a warm-up.", "--steps")
    num_rounds: int = harness.rounds_option(2, "Jobs of each variant", of=" steps in total")
    compare_env: str | None = option(
        None,
        "Also measure in this interpreter's environment, such as JAX beside TensorFlow.",
        metavar="PYTHON",
    )
    keras2: str | None = option(
        None,
        "Also compare with tf_keras in this directory, where `make keras2` has installed it.",
        metavar="DIRECTORY",
    )
    by_weight: bool = option(False, "List the differences of each weight between variants.")

    @cached_property
    def other(self) -> OtherEnvironment | None:
        """The environment of `compare_env`."""
        return OtherEnvironment.of(self.compare_env) if self.compare_env else None

    @property
    def other_name(self) -> str:
        """What the other environment's variants are called after: its backend."""
        backend = self.other.backend if self.other else ""
        return f"other {backend}" if backend == choose_backend() else backend

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
        variants: dict[str, dict[str, Any]] = {OURS: {}}
        if self.baseline == "plain" and self.num_ranks > 1:
            variants |= {"no allreduce": {"averages_gradients": False}, ONE_PROCESS: {}}
        elif self.baseline == "plain":
            names = find_benchmark(self.benchmark).other_sample_names
            others = {f"plain, {name}": PLAIN_STEP | {"inputs": name} for name in names}
            variants |= {PLAIN: PLAIN_STEP, **others}
        if self.keras2 is not None:
            variants[KERAS2] = {**PLAIN_STEP, "keras2": self.keras2}
        jobs = [self.job(n, StepTask, num_steps=self.num_steps, **v) for n, v in variants.items()]
        jobs = [replace(job, num_ranks=1) if job.variant == ONE_PROCESS else job for job in jobs]
        for job in [*jobs] if self.other else ():
            if job.variant != KERAS2:
                name = f"{job.variant}, {self.other_name}"
                jobs.append(replace(job, variant=name, other=self.other))
        return jobs

    def _params(self) -> ParameterSet:
        task = StepTask(benchmark=self.benchmark, flags=self.flags)
        return task.bind(find_benchmark(self.benchmark))

    def _random_parameters(self) -> list[str]:
        params = self._params()
        names = find_benchmark(self.benchmark).random_parameters(params) if self.keras2 else ()
        return [f"--{name} {params[name]:g}" for name in names]

    def jobs(self) -> list[Job]:
        variants = self.variants()
        jobs = [
            job.changed(
                measures_memory=job.round == 1,
                measures_bound=job.round == 1 and job.variant == OURS,
            )
            for job in harness.rounds(variants, self.num_rounds)
        ]
        compared = (OURS, KERAS2) if self._random_parameters() else ()
        alike = {"is_random": False, "num_steps": 1}
        return jobs + [j.changed(DETERMINISTIC, **alike) for j in variants if j.variant in compared]

    def _differences(self, variants: Sequence[Job], measured: Measured) -> dict[str, Any]:
        found = {}
        for other in {job.other: None for job in variants} if self.num_ranks == 1 else ():
            first, *rest = (job.variant for job in variants if job.other == other)
            for name in rest:
                is_random = name != KERAS2 or not self._random_parameters()
                purpose = TIME if is_random else DETERMINISTIC
                pair = (measured.of(each, purpose)[0][0] for each in (first, name))
                found[name] = difference(*pair)
                for what, limit in TOLERANCES.items():
                    if not found[name][what] <= limit:  # also NaN
                        raise CandleError(
                            f"{name} trains a different model: after the first steps the {what}"
                            f" differs by {found[name][what]:.2g}, which is more than rounding"
                            f" explains ({limit:g})"
                        )
        return found

    def report(self, measured: Measured) -> dict[str, Any]:
        variants = self.variants()
        differences = self._differences(variants, measured)
        results = [self._result(job, measured.of(job.variant)) for job in variants]
        for result in results:
            result["speedup"] = {
                other["variant"]: result["samples_per_s"] / other["samples_per_s"]
                for other in results[1:]
            }
        here, there = (
            _communication([each for each in results if bool(each["python"]) == is_other])
            for is_other in (False, True)
        )
        other = self.other and {
            "python": self.other.python,
            "name": self.other_name,
            "communication": there,
        }
        return {
            "num_steps": self.num_steps,
            "num_rounds": self.num_rounds,
            "results": results,
            "differences": differences,
            "keras2_compared_without": self._random_parameters(),
            "roofline": measured.of(OURS)[0][0]["roofline"],
            "communication": here,
            "other": other,
        }

    def _result(self, job: Job, jobs: list[list[Outcome]]) -> Result:
        ranks = jobs[0]
        columns = [zip(*(rank["steps_s"] for rank in each), strict=True) for each in jobs]
        times = summarize([max(step) for steps in columns for step in steps])
        flops = [rank["flops"] for rank in ranks]
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
            "peak_bytes": peak_of_sum_bytes([rank["memory"] for rank in ranks]),
            "state_bytes": sum(rank["state_bytes"] for rank in ranks),
        }

    def render(self, report: harness.Report) -> harness.Parts:
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
                "the fast kernels are for TensorFlow on CPUs and for JAX on GPUs: elsewhere, a run"
                " differs from plain Keras in how batches are made, and in rows of tables"
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
            without = f", without {', '.join(flags)}, which differs in Keras 2" if flags else ""
            yield (
                f"{name} trains the same model: the largest relative difference is"
                f" {found['loss']:.1g} in the losses and {found['update']:.1g} in the first updates"
                f"{without}"
            )
            if self.by_weight:
                yield harness.table(found["weights"], WEIGHT_COLUMNS)
        yield from _bound(report["roofline"], ours["median_s"])
        others = [(f", {other['name']}", other["communication"])] if other else []
        for of, found in [("", report["communication"]), *others]:
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


def _bound(bound: Mapping[str, float] | None, median_s: float) -> harness.Parts:
    if bound is None:
        yield "roofline bound: unknown, because the model does not say which products it computes"
        return
    rows = [{**bound, "form": "direct"}]
    if bound["used_flops"] < bound["flops"]:
        used = {"total_s": bound["used_total_s"], "flops": bound["used_flops"]}
        rows.append({"form": "as computed", **used})
    columns: harness.Columns = {
        "roofline bound\nof a rank": "form",
        "total\n(ms)": ("total_s", 1e-3),
        "a step takes\n(times as long)": lambda row: median_s / row["total_s"],
        "products\n(GFLOP)": ("flops", GIGA),
        "products\n(ms)": lambda row: ms(row["gemm_s"]) if "gemm_s" in row else "",
    }
    yield harness.table(rows, columns)
    yield (
        f"at {number(bound['matmul_flops_per_s'] / GIGA)} GFLOP/s, and"
        f" {number(bound['copy_bytes_per_s'] / GIGA)} GB/s, at which the optimizer's"
        f" {number(bound['optimizer_bytes'] / GIGA)} GB take {ms(bound['optimizer_s'])} ms"
    )


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
    alone = [each["median_s"] for each in results if not each["averages_gradients"]]
    if not alone:
        return None
    step_s = results[0]["median_s"]
    return {"exposed_s": step_s - alone[0], "share": (step_s - alone[0]) / step_s}


def difference(one: Outcome, other: Outcome) -> dict[str, Any]:
    """Returns the relative differences between two trainings on the same batches.

    ``loss`` and ``update`` are the largest ones of a mean loss, and of a weight's update by the
    first steps. ``weights`` has those of each weight, also of its values at the end, None after
    different numbers of steps; relative to the norm of the elements compared, of which "largest"
    is that of one.
    """
    num = min(len(one["losses"]), len(other["losses"]))
    losses = np.array(one["losses"][:num]), np.array(other["losses"][:num])
    least = LEAST_UPDATE * max(float(np.linalg.norm(e)) for e in other["updates"].values())
    weights = []
    for name, update in other["updates"].items():
        of_update = _relative(one["updates"][name], update, least)
        of_value: tuple[float | None, float | None] = (None, None)
        if len(one["steps_s"]) == len(other["steps_s"]):
            of_value = _relative(one["values"][name], other["values"][name])
        found: dict[str, Any] = {"weight": name, "num_compared": len(update)}
        found["update"], found["largest_update"] = of_update
        found["value"], found["largest_value"] = of_value
        weights.append(found)
    return {
        "loss": float(np.max(np.abs(losses[0] - losses[1]) / np.abs(losses[1]))),
        # max() would pass over a NaN.
        "update": float(np.max([each["update"] for each in weights])),
        "weights": weights,
    }


def _relative(one: Any, other: Any, least: float = 0.0) -> tuple[float, float]:
    apart = np.subtract(one, other)
    # Where the other one is nothing but zeros, the difference is whole.
    norm = max(float(np.linalg.norm(other)), least) or float(np.linalg.norm(apart)) or 1.0
    return float(np.linalg.norm(apart)) / norm, float(np.abs(apart).max()) / norm
