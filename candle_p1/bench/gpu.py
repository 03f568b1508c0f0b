"""Measures training with JAX on this machine's GPUs, by precision, beside what the device can do.

Every measurement is a job of its own, in rounds whose order alternates. Each variant has a cache of
compiled programs of its own, which is empty in the first round, so the first job of a variant shows
a cold start and the later ones a warm one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from statistics import median
from typing import Any, ClassVar

from rich.table import Table

from candle_p1.bench import harness
from candle_p1.bench.gpu_task import PRECISIONS, DeviceTask, GpuTask
from candle_p1.bench.harness import (
    GIGA,
    Job,
    Measured,
    Result,
    count_option,
    format_significant,
    ms,
    option,
)
from candle_p1.bench.task import Outcome
from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import check_alone, on_this_machine
from candle_p1.errors import SetupError
from candle_p1.records.tables import empty_table
from candle_p1.text import count
from candle_p1.training.setup import locate_files

BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")
OURS, PLAIN = "candle_p1", "plain Keras"
OF_SEVERAL = "tf32"
"""The precision in which several ranks are measured."""
TERA = 1e12
NOTHING = "-"


@dataclass(kw_only=True)
class Gpu(harness.Comparison):
    """Measure training with JAX on this machine's GPUs, by precision; by default all benchmarks.

    Shows the time of a step and of an epoch in float32, TF32 and bfloat16, each beside plain Keras
    on JAX and beside the bound that follows from the device's own rates, which are measured, too;
    the time from the start to the first step, with and without compiled programs on disk; and the
    energy of an epoch, by the GPUs' counters and by their integrated power.

    Exits with code 2 if there is no GPU.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench gpu --json gpu.json",
        "candle-p1 bench gpu nt3 --device cpu --size small",
    )

    benchmarks: Sequence[str] = option(
        (), "", is_argument=True, metavar="[BENCHMARK]...", nargs=-1, complete="benchmarks"
    )
    device: str = option(
        "gpu",
        "What to measure; with cpu, the results say nothing about GPUs.",
        choices=["gpu", "cpu"],
    )
    size: str = option("full", "The size of the synthetic files.", choices=["small", "full"])
    num_ranks: int | None = option(
        None,
        "Ranks that train together, beside one (default: one for each GPU).",
        "--np",
        within=(1, 100_000),
    )
    num_steps: int = count_option(
        200, "Steps of a timed block, at most those of an epoch.", "--steps"
    )
    seconds: float = option(
        10.0,
        "How long each job repeats such blocks; energy sensors need several seconds.",
        within=(0.0, 3600.0),
    )
    num_rounds: int = count_option(
        2, "Jobs of each variant; the first one starts cold.", "--rounds"
    )
    facts: Outcome = field(init=False)
    directory: str = field(init=False, default="")

    def prepare(self, progress: harness.Progress | None = None) -> list[str]:
        """Measures the device, which checks that there is one, and makes missing files."""
        check_alone()
        if find_spec("jax") is None:
            raise SetupError(
                "bench gpu measures training with JAX, which is not installed here: run make setup"
                " ENGINE=jax GPU=1, or install candle-p1[jax-gpu]"
            )
        self.benchmarks = self.benchmarks or BENCHMARKS
        found, flags = [find_benchmark(name) for name in self.benchmarks], ["--size", self.size]
        task = DeviceTask(benchmark=self.benchmarks[0], flags=flags, device=self.device)
        self.facts = self.run(Job("the device", task))[0]
        on_gpus: int = self.facts["num_devices"]
        self.num_ranks = self.num_ranks or (on_gpus if self.device == "gpu" else 1)
        notes = on_this_machine(self.num_ranks, []).notes
        for benchmark in found:
            locate_files(benchmark, benchmark.read_parameters(flags), progress)
        return notes

    def jobs(self) -> list[Job]:
        """Returns the jobs of all variants; several ranks are measured in one precision."""
        jobs: list[Job] = []

        def add(name: str, precision: str, variant: str, num_ranks: int = 1) -> None:
            task = GpuTask(
                benchmark=name,
                flags=["--size", self.size],
                device=self.device,
                precision=precision,
                inputs="samples" if variant == OURS else "arrays",
                num_steps=self.num_steps,
                seconds=self.seconds,
                cache_dir=f"{self.directory}/{len(jobs)}",
            )
            of = f", {count(num_ranks, 'rank')}" if num_ranks > 1 else ""
            jobs.append(Job(f"{name}, {precision}, {variant}{of}", task, num_ranks))

        for name in self.benchmarks:
            for precision, variant in product(PRECISIONS, (OURS, PLAIN)):
                add(name, precision, variant)
            if self.num_ranks and self.num_ranks > 1:
                add(name, OF_SEVERAL, OURS, self.num_ranks)
        return harness.rounds(jobs, self.num_rounds)

    def measure(self, on_start: harness.OnStart) -> dict[str, Any] | None:
        """Runs all jobs, whose caches of compiled programs are temporary."""
        with tempfile.TemporaryDirectory(prefix="candle-p1-compiled-") as self.directory:
            return super().measure(on_start)

    def conditions(self) -> dict[str, Any]:
        conditions = {"size": self.size, "num_rounds": self.num_rounds, "seconds": self.seconds}
        return {"device": self.facts, "on": self.device, "synthetic": True, **conditions}

    def result(self, variant: str, measured: Measured) -> Result:
        """Returns what was measured of a variant, with the bound of its step on this device.

        The bound is None if the operations of a step are not known.
        """
        task: GpuTask = next(job.task for job, _ in measured if job.variant == variant)
        rounds = measured.of(variant)
        first = rounds[0][0]
        blocks_s = [
            max(of_ranks)
            for ranks in rounds
            for of_ranks in zip(*(rank["steps_s"] for rank in ranks), strict=True)
        ]
        step_s, steps_per_epoch = median(blocks_s), first["steps_per_epoch"]
        starts_s = [max(r["prepared_s"] + r["first_step_s"] for r in ranks) for ranks in rounds]
        energies = [ranks[0]["step_energies_j"] for ranks in rounds]
        bound_s = None
        if first["flops"] is not None:
            bound_s = first["flops"] / self.facts["flops_per_s"][task.precision]
            bound_s += first["optimizer_bytes"] / self.facts["copy_bytes_per_s"]
        copied = ("batch_size", "steps_per_epoch", "flops", "optimizer_bytes", "no_energy")
        return {
            "benchmark": task.benchmark,
            "precision": task.precision,
            "variant": OURS if task.inputs == "samples" else PLAIN,
            "num_ranks": len(rounds[0]),
            "step_s": step_s,
            "range_s": [min(blocks_s), max(blocks_s)],
            "blocks_s": blocks_s,
            "samples_per_s": sum(rank["batch_size"] for rank in rounds[0]) / step_s,
            "epoch_s": step_s * steps_per_epoch,
            "bound_s": bound_s,
            "cold_start_s": starts_s[0],
            "warm_start_s": median(starts_s[1:]) if len(starts_s) > 1 else None,
            "first_steps_s": [max(rank["first_step_s"] for rank in ranks) for ranks in rounds],
            "epoch_energies_j": {
                reading: median(each[reading] for each in energies) * steps_per_epoch
                for reading in energies[0]
                if all(reading in each for each in energies)
            },
            **{key: first[key] for key in copied},
        }

    def render(self, report: Mapping[str, Any]) -> Iterator[str | Table]:
        device, results = report["device"], report["results"]
        if report["on"] == "cpu":
            yield "MEASURED ON CPUs (--device cpu), which shows nothing of any GPU"
        yield (
            f"{device['kind']}, {count(device['num_devices'], 'device')}, {device['platform']};"
            f" driver: {device['driver'] or 'not known'};"
            f" JAX {report['machine']['packages'].get('jax', 'of an unknown version')}"
        )
        rates = [(f"matrix products, {n}", r, "TFLOP/s") for n, r in device["flops_per_s"].items()]
        rates += [("its memory", device["copy_bytes_per_s"], "GB/s")]
        rates += [("from the host to it", device["upload_bytes_per_s"], "GB/s")]
        shown = empty_table("", "what the device does", "rate")
        for what, rate, unit in rates:
            scale = TERA if unit == "TFLOP/s" else GIGA
            shown.add_row(what, f"{format_significant(rate / scale)} {unit}")
        yield shown
        yield (
            f"training, {report['size']} size, {count(report['num_rounds'], 'round')} of at least"
            f" {report['seconds']:g} s for each variant; the range is that of blocks of steps"
        )
        keys = ("benchmark", "precision", "num_ranks")
        plain_s = {tuple(r[k] for k in keys): r["step_s"] for r in results if r["variant"] == PLAIN}

        def speedup(row: Result) -> Any:
            found_s = plain_s.get(tuple(row[key] for key in keys))
            return found_s / row["step_s"] if found_s and row["variant"] == OURS else NOTHING

        columns = {**VARIANT, **STEPS, f"{PLAIN}\n/ {OURS}": speedup}
        yield harness.table(results, columns, "training")
        yield "bound: the step's matrix products and the optimizer's traffic, at the rates above"
        yield harness.table(results, {**VARIANT, **STARTS}, "from the start to the first step")
        if any(each["epoch_energies_j"] for each in results):
            title = "energy of the GPUs, or Grace Hopper modules"
            yield harness.table(results, {**VARIANT, **ENERGIES}, title)
        else:
            yield f"energy: absent ({results[0]['no_energy']})"
        yield "the data are synthetic"


VARIANT: harness.Columns = {
    "variant": lambda row: f"{row['benchmark']}, {row['variant']}",
    "precision": "precision",
    "ranks": "num_ranks",
}
STEPS: harness.Columns = {
    "step\n(ms)": lambda row: ms(row["step_s"]),
    "range\n(ms)": lambda row: " to ".join(map(ms, row["range_s"])),
    "samples\n/s": "samples_per_s",
    "epoch\n(s)": "epoch_s",
    "bound\n(ms)": lambda row: ms(row["bound_s"]) if row["bound_s"] else NOTHING,
    "times the\nbound": lambda row: row["step_s"] / row["bound_s"] if row["bound_s"] else NOTHING,
}
STARTS: harness.Columns = {
    "nothing compiled\nbefore (s)": "cold_start_s",
    "compiled\nbefore (s)": lambda row: row["warm_start_s"] or NOTHING,
    "of this, the first\nstep (s)": lambda row: ", then ".join(
        map(format_significant, row["first_steps_s"])
    ),
}
ENERGIES: harness.Columns = {
    "counter\n(J per epoch)": lambda row: row["epoch_energies_j"].get("energy", NOTHING),
    "integrated power\n(J per epoch)": lambda row: row["epoch_energies_j"].get("power", NOTHING),
}
VERB = Gpu
