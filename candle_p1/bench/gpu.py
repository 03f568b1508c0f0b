"""Measures training with JAX on this machine's GPUs, by precision, beside what the device can do.

A job is a process for one benchmark and one precision, in which the variants train in turn, because
starting one takes longer than measuring. The most important jobs come first. Each has a cache of
compiled programs of its own, which is empty in the first round.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import pydantic

from candle_p1.bench import harness
from candle_p1.bench.gpu_task import OURS, PLAIN, PRECISIONS, SENSORS, VARIANTS, DeviceTask, GpuTask
from candle_p1.bench.harness import GIGA, Job, Result, count_option, ms, number, option
from candle_p1.bench.task import Outcome, run
from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import check_alone, on_this_machine
from candle_p1.errors import CandleError, DataError, SetupError
from candle_p1.files import read_json
from candle_p1.records.record import utc_now
from candle_p1.text import count
from candle_p1.training.setup import locate_files

BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")
DEFAULT = "tf32"
"""The precision of JAX's default settings."""
DETERMINISTIC = f"{OURS}, deterministic"
WORTH_SAYING = 1.5
"""How many times as fast a setting has to be to be recommended."""
TERA = 1e12
POLL_S = 0.2
NOTHING = "-"


class PeerResult(pydantic.BaseModel):
    """What another program measured of a benchmark; steps in seconds."""

    benchmark: str
    precision: str
    variant: str
    batch_size: int = pydantic.Field(gt=0)
    step_s: float = pydantic.Field(gt=0)
    range_s: tuple[float, float]
    first_steps_s: list[float]


class Peer(pydantic.BaseModel):
    """The file of ``--peer``, as tools/torch_peer.py writes it."""

    peer: str
    device: str
    results: list[PeerResult]


@dataclass(kw_only=True)
class Gpu(harness.Comparison):
    """Measure training with JAX on this machine's GPUs, by precision; by default all benchmarks.

    Shows the time of a step and of an epoch in TF32, bfloat16 and float32, each beside plain Keras
    on JAX and beside the bound that follows from the device's own rates, which are measured, too;
    what --deterministic True costs; the time of the first step, with and without compiled programs
    on disk; and the energy of an epoch, by the GPUs' counters and by their integrated power.

    Results are printed and written as soon as they are measured. Exits with code 2 if there is
    no GPU.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench gpu --json gpu.json",
        "candle-p1 bench gpu nt3 --device cpu --size small --budget 120",
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
    num_ranks: int | None = count_option(
        None, "Ranks that train together, beside one (default: one for each GPU).", "--np"
    )
    num_steps: int = count_option(
        200, "Steps of a timed block, at most those of an epoch.", "--steps"
    )
    seconds: float = option(
        5.0,
        "How long each variant repeats such blocks; power sensors need three seconds.",
        within=(0.0, 3600.0),
    )
    num_rounds: int = count_option(
        2, "Jobs of each precision; the first one starts without compiled programs.", "--rounds"
    )
    budget: float | None = option(
        None, "Seconds after which to end with what has been measured.", within=(1.0, 1e6)
    )
    peer: Path | None = option(
        None, "Also show what tools/torch_peer.py has measured here.", is_readable=True
    )
    facts: Outcome = field(init=False)
    peers: Sequence[Peer] = field(init=False, default=())
    deadline: float = field(init=False, default=inf)
    directory: str = field(init=False, default="")
    absent: dict[str, str] = field(init=False, default_factory=dict)
    found: dict[tuple[Any, ...], list[list[Outcome]]] = field(init=False, default_factory=dict)
    """The ranks' outcomes in each job, by benchmark, precision, variant and number of ranks."""

    def prepare(self, progress: harness.Progress | None = None) -> list[str]:
        """Measures the device, which checks that there is one, and makes missing files."""
        check_alone()
        if find_spec("jax") is None:
            raise SetupError(
                "bench gpu measures training with JAX, which is not installed here: run make setup"
                " ENGINE=jax GPU=1, or install candle-p1[jax-gpu]"
            )
        self.peers = self._read_peer()
        self.deadline = time.time() + (self.budget or inf)
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
        """Returns the jobs of all benchmarks and precisions, the most important ones first."""
        jobs: list[Job] = []
        plan: list[tuple[str, tuple[str, ...], bool, int]] = [
            (DEFAULT, VARIANTS, False, 1),
            (DEFAULT, (OURS,), True, 1),
            *((each, VARIANTS, False, 1) for each in PRECISIONS if each != DEFAULT),
        ]
        if self.num_ranks and self.num_ranks > 1:
            plan.append((DEFAULT, (OURS,), False, self.num_ranks))
        for precision, variants, deterministic, num_ranks in plan:
            of = ", deterministic" * deterministic
            of += f", {count(num_ranks, 'rank')}" if num_ranks > 1 else ""
            for name in self.benchmarks:
                task = GpuTask(
                    benchmark=name,
                    flags=["--size", self.size],
                    device=self.device,
                    precision=precision,
                    variants=variants,
                    deterministic=deterministic,
                    num_steps=self.num_steps,
                    seconds=self.seconds,
                    deadline=self.deadline,
                    cache_dir=f"{self.directory}/{len(jobs)}",
                )
                jobs.append(Job(f"{name}, {precision}{of}", task, num_ranks))
        return harness.rounds(jobs, self.num_rounds)

    def measure(self, on_start: harness.OnStart) -> dict[str, Any] | None:
        """Runs the jobs, as many as the budget allows; one that fails is told, and not repeated.

        Raises:
            CandleError: No job could do its work.
        """
        made = self.conditions() | harness.envelope(utc_now())
        with tempfile.TemporaryDirectory(prefix="candle-p1-compiled-") as self.directory:
            jobs = self.jobs()
            for done, job in enumerate(jobs):
                if job.variant in self.absent:
                    continue
                on_start(done, len(jobs), str(job))
                try:
                    self._measure(job, made)
                except (CandleError, RuntimeError) as error:
                    self.absent.setdefault(job.variant, str(error))
        if not self.found:
            raise SetupError(f"nothing was measured: {next(iter(self.absent.values()))}")
        return self._report() | made

    def _measure(self, job: Job, made: dict[str, Any]) -> None:
        """Runs a job, and tells its results while it runs."""
        left_s = self.deadline - time.time()
        if left_s <= 0:
            raise SetupError(f"the budget of {self.budget:g} s was used up")
        task, left_out = job.task, list(job.task.variants)

        def use(text: str) -> None:
            found = json.loads(text)
            ranks: list[Outcome] = found["ranks"]
            left_out.remove(found["variant"])
            variant = DETERMINISTIC if task.deterministic else found["variant"]
            key = (task.benchmark, task.precision, variant, job.num_ranks)
            self.found.setdefault(key, []).append(ranks)
            of = f" on {count(job.num_ranks, 'rank')}" if job.num_ranks > 1 else ""
            line = (
                f"{task.benchmark}, {task.precision}, {variant}{of}:"
                f" {ms(median(_blocks_s(ranks)))} ms a step; the first took"
                f" {number(max(rank['first_step_s'] for rank in ranks))} s"
            )
            self.on_result(line, self._report() | made)

        with tempfile.TemporaryDirectory(dir=self.directory) as directory:
            limit_s = None if left_s == inf else left_s
            with _following(Path(directory), use):
                here = replace(task, directory=directory)
                run(here, job.num_ranks, job.variant, limit_s=limit_s)
        if left_out:
            raise SetupError(
                f"the budget of {self.budget:g} s was used up before {len(left_out)} of its"
                " variants"
            )

    def _read_peer(self) -> list[Peer]:
        if self.peer is None:
            return []
        try:
            return [Peer.model_validate(read_json(self.peer))]
        except ValueError as error:
            why = str(error)
            if isinstance(error, pydantic.ValidationError):
                first = error.errors()[0]
                why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise DataError(
                f"this is not what tools/torch_peer.py writes: {why}", self.peer
            ) from error

    def conditions(self) -> dict[str, Any]:
        on = {"device": self.facts, "on": self.device, "synthetic": True, "budget_s": self.budget}
        return on | {name: getattr(self, name) for name in ("size", "num_rounds", "seconds")}

    def _report(self) -> dict[str, Any]:
        """Returns what has been measured so far, in the order of benchmarks, and what was not."""
        results = [self._result(key, rounds) for key, rounds in self.found.items()]
        ours_s = {_conditions(each): each["step_s"] for each in results if each["variant"] == OURS}
        steps = {each["benchmark"]: each["steps_per_epoch"] for each in results}
        for peer, of in ((p, each) for p in self.peers for each in p.results):
            num_steps = steps.get(of.benchmark)
            results.append(
                of.model_dump()
                | {"variant": f"{peer.peer}, {of.variant}", "num_ranks": 1, "bound_s": None}
                | {"samples_per_s": of.batch_size / of.step_s, "peer_device": peer.device}
                | {"epoch_s": num_steps * of.step_s if num_steps else None}
            )
        for each in results:
            fair_s = ours_s.get(_conditions(each))
            each["times_ours"] = each["step_s"] / fair_s if fair_s else None
        order = {name: i for i, name in enumerate((*self.benchmarks, *PRECISIONS))}
        names = ("benchmark", "precision")
        results.sort(key=lambda r: ([order.get(r[n], len(order)) for n in names], r["num_ranks"]))
        return {"results": results, "absent": self.absent}

    def _result(self, key: tuple[Any, ...], rounds: Sequence[list[Outcome]]) -> Result:
        """Returns what was measured of a variant, with the bound of its step on this device.

        The bound is None if the operations of a step are not known.
        """
        first, precision = rounds[0][0], key[1]
        blocks_s = [each for ranks in rounds for each in _blocks_s(ranks)]
        step_s, steps_per_epoch = median(blocks_s), first["steps_per_epoch"]
        energies = [ranks[0]["step_energies_j"] for ranks in rounds]
        bound_s = None
        if first["flops"] is not None:
            bound_s = first["flops"] / self.facts["flops_per_s"][precision]
            bound_s += first["optimizer_bytes"] / self.facts["copy_bytes_per_s"]
        copied = ("batch_size", "steps_per_epoch", "flops", "optimizer_bytes", "no_energy")
        return {
            **dict(zip(("benchmark", "precision", "variant", "num_ranks"), key, strict=True)),
            "step_s": step_s,
            "range_s": [min(blocks_s), max(blocks_s)],
            "blocks_s": blocks_s,
            "samples_per_s": sum(rank["batch_size"] for rank in rounds[0]) / step_s,
            "epoch_s": step_s * steps_per_epoch,
            "bound_s": bound_s,
            "prepared_s": [max(rank["prepared_s"] for rank in ranks) for ranks in rounds],
            "first_steps_s": [max(rank["first_step_s"] for rank in ranks) for ranks in rounds],
            "epoch_energies_j": {
                reading: median(each[reading] for each in energies) * steps_per_epoch
                for reading in energies[0]
                if all(reading in each for each in energies)
            },
            **{key: first[key] for key in copied},
        }

    def render(self, report: harness.Report) -> harness.Parts:
        device, results = report["device"], report["results"]
        if report["on"] == "cpu":
            yield "MEASURED ON CPUs (--device cpu), which shows nothing of any GPU"
        yield (
            f"{device['kind']}, {count(device['num_devices'], 'device')}, {device['platform']};"
            f" driver: {device['driver'] or 'not known'};"
            f" JAX {report['machine']['packages'].get('jax', 'of an unknown version')}"
        )
        products = device["flops_per_s"].items()
        rates = {f"matrix products, {name}": f"{number(r / TERA)} TFLOP/s" for name, r in products}
        rates["its memory"] = f"{number(device['copy_bytes_per_s'] / GIGA)} GB/s"
        rates["from the host to it"] = f"{number(device['upload_bytes_per_s'] / GIGA)} GB/s"
        shown = [{"what": what, "rate": rate} for what, rate in rates.items()]
        yield harness.table(shown, {"what the device does": "what", "rate": "rate"})
        yield (
            f"training, {report['size']} size, {count(report['num_rounds'], 'round')} of at least"
            f" {report['seconds']:g} s for each variant; the range is that of blocks of steps"
        )
        yield harness.table(results, {**VARIANT, **STEPS}, "training")
        yield "bound: the step's matrix products and the optimizer's traffic, at the rates above"
        yield (
            f"{PLAIN} copies each batch from the host's memory; peers train on batches that are on"
            " the device"
        )
        for row in results:
            if row["variant"] == DETERMINISTIC and (row["times_ours"] or 0) >= WORTH_SAYING:
                yield (
                    f"{row['benchmark']}: --deterministic False is"
                    f" {number(row['times_ours'])} times as fast as the default"
                )
        yield harness.table(results, {**VARIANT, **STARTS}, "the first step")
        own = [row for row in results if "no_energy" in row]
        if any(row["epoch_energies_j"] for row in own):
            title = "energy of the GPUs, or Grace Hopper modules"
            yield harness.table(own, {**VARIANT, **ENERGIES}, title)
        lacks: dict[str, set[str]] = {}
        for row in own:
            for reading, why in row["no_energy"].items():
                lacks.setdefault(why, set()).add(SENSORS[reading])
        for why, readings in lacks.items():
            yield f"energy by {' and '.join(sorted(readings))}: absent ({why})"
        for name, why in report["absent"].items():
            yield f"not measured: {name}: {why.splitlines()[-1].removeprefix(f'{name}: ')}"
        yield "the data are synthetic"


def _blocks_s(ranks: Sequence[Outcome]) -> list[float]:
    """Returns the time of a step in each block, which is that of the slowest rank."""
    return [max(each) for each in zip(*(rank["steps_s"] for rank in ranks), strict=True)]


def _conditions(result: Result) -> tuple[Any, ...]:
    return tuple(result[key] for key in ("benchmark", "precision", "num_ranks"))


@contextmanager
def _following(directory: Path, use: Callable[[str], None]) -> Iterator[None]:
    """Calls a function, in a thread, with the text of each JSON file that appears in a directory.

    Raises what the function raises.
    """
    has_ended, used = threading.Event(), set[Path]()

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = has_ended.wait(POLL_S)
            for path in sorted(set(directory.glob("*.json")) - used):
                used.add(path)
                use(path.read_text(encoding="utf-8"))

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        try:
            yield
        finally:
            has_ended.set()
            following.result()


VARIANT: harness.Columns = {
    "variant": lambda row: f"{row['benchmark']}, {row['variant']}",
    "precision": "precision",
    "ranks": "num_ranks",
}
STEPS: harness.Columns = {
    "step\n(ms)": lambda row: ms(row["step_s"]),
    "range\n(ms)": lambda row: " to ".join(map(ms, row["range_s"])),
    "samples\n/s": "samples_per_s",
    "epoch\n(s)": lambda row: row["epoch_s"] or NOTHING,
    "bound\n(ms)": lambda row: ms(row["bound_s"]) if row["bound_s"] else NOTHING,
    "times the\nbound": lambda row: row["step_s"] / row["bound_s"] if row["bound_s"] else NOTHING,
    f"times\n{OURS}": lambda row: row["times_ours"] or NOTHING,
}
STARTS: harness.Columns = {
    "nothing compiled\nbefore (s)": lambda row: row["first_steps_s"][0],
    "compiled\nbefore (s)": lambda row: (
        median(row["first_steps_s"][1:]) if len(row["first_steps_s"]) > 1 else NOTHING
    ),
}
ENERGIES: harness.Columns = {
    "counter\n(J per epoch)": lambda row: row["epoch_energies_j"].get("energy", NOTHING),
    "integrated power\n(J per epoch)": lambda row: row["epoch_energies_j"].get("power", NOTHING),
}
VERB = Gpu
