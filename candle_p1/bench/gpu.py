"""Measures training with JAX on this machine's GPUs, by precision, beside what the device can do.

Every measurement is a job of its own, in rounds whose order alternates. Each variant has a cache of
compiled programs of its own, which is empty in the first round, so the first job of a variant shows
a cold start and the later ones a warm one.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from candle_p1.bench.job import Job, launch, run
from candle_p1.benchmark import find_benchmark
from candle_p1.cluster.launchers import check_alone
from candle_p1.distributed.gpus import GPUS_VARIABLE
from candle_p1.errors import SetupError
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.training.setup import locate_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from candle_p1.bench.job import OnStart

BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")
DEVICES = ("gpu", "cpu")
OURS, PLAIN = "as in a run", "plain Keras"


class Precision(NamedTuple):
    """How matrix products are computed.

    Attributes:
        data_type: The value of ``--data_type``.
        products: That of JAX_DEFAULT_MATMUL_PRECISION. On GPUs "highest" computes with all bits of
            float32, and "tensorfloat32" with 10 of its 23 where the device has that (NVIDIA from
            Ampere on), which is also what JAX does by default. CPUs always use all bits.
    """

    data_type: str
    products: str


PRECISIONS = {
    "float32": Precision("f32", "highest"),
    "tf32": Precision("f32", "tensorfloat32"),
    "bfloat16": Precision("bf16", "default"),
}
OF_SEVERAL = "tf32"
"""The precision in which several ranks are measured."""


@dataclass(frozen=True)
class DeviceJob(Job):
    """Measures the device; see candle_p1.bench.device_rates.

    Attributes:
        device: One of DEVICES.
    """

    worker: ClassVar[str] = "candle_p1.bench.device_rates"

    device: str = "gpu"

    @property
    def name(self) -> str:
        """The device."""
        return "the device"

    @property
    def settings(self) -> dict[str, Any]:
        """One epoch, with JAX and its fastest kernels, as jobs of the paper's sizes have them."""
        return super().settings | {"engine": "jax", "deterministic": False}

    @property
    def environment(self) -> dict[str, str]:
        """Chooses the device."""
        if self.device == "gpu":
            return {}
        return {"JAX_PLATFORMS": "cpu", GPUS_VARIABLE: "0"}


@dataclass(frozen=True)
class GpuJob(DeviceJob):
    """What a job trains, and how.

    Attributes:
        precision: One of PRECISIONS.
        inputs: "samples" for batches as in a run, "arrays" for whole NumPy arrays.
        num_steps: The steps of a timed block; fewer if an epoch has fewer.
        seconds: How long blocks are timed.
        cache_dir: The directory of compiled programs.
    """

    worker: ClassVar[str] = "candle_p1.bench.gpu_worker"

    precision: str = OF_SEVERAL
    inputs: str = "samples"
    num_steps: int = 200
    seconds: float = 10.0
    cache_dir: str = ""

    @property
    def name(self) -> str:
        """The benchmark, the precision and the variant."""
        return f"{self.benchmark}, {self.precision}, {self.variant}"

    @property
    def variant(self) -> str:
        """What is trained: a run's batches, or plain Keras."""
        return OURS if self.inputs == "samples" else PLAIN

    @property
    def settings(self) -> dict[str, Any]:
        """Adds the precision."""
        return super().settings | {"data_type": PRECISIONS[self.precision].data_type}

    @property
    def environment(self) -> dict[str, str]:
        """Adds the precision of products, and the cache, which keeps all programs."""
        return super().environment | {
            "JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[self.precision].products,
            "JAX_COMPILATION_CACHE_DIR": self.cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }


@dataclass(frozen=True)
class DeviceFacts:
    """What `DeviceJob` returns.

    Attributes:
        kind: The device's name, as JAX knows it.
        platform: What JAX calls the platform, with its version.
        driver: The driver's version, if it can be read.
        num_devices: How many devices this process sees.
        memory_bytes: The memory that JAX may use on one device; None if it does not say.
        flops_per_s: The rate of matrix products in each precision.
        copy_bytes_per_s: The rate of the device's memory: bytes read and written.
        upload_bytes_per_s: The rate at which arrays get from the host's memory to the device's.
    """

    kind: str
    platform: str
    driver: str | None
    num_devices: int
    memory_bytes: int | None
    flops_per_s: Mapping[str, float]
    copy_bytes_per_s: float
    upload_bytes_per_s: float


@dataclass(frozen=True)
class GpuOutcome:
    """What a rank of a `GpuJob` has measured.

    Attributes:
        steps_s: For each timed block, the time of a step: that of the block divided by its steps.
        steps_per_epoch: The steps of an epoch of this rank.
        batch_size: Samples in a step of this rank.
        flops: Operations in the matrix products of a step; None if they are not known.
        optimizer_bytes: What the optimizer reads and writes in a step.
        prepared_s: From the process's start until data and model were ready.
        first_step_s: From there to the end of the first step, which is compiled in it.
        step_energies_j: The energy of a step by reading, "energy" for the counters of the devices
            and "power" for integrated power; absent if it is not known, or not from this rank.
        no_energy: Why there is no energy; None if there is.
    """

    steps_s: list[float]
    steps_per_epoch: int
    batch_size: int
    flops: float | None
    optimizer_bytes: int
    prepared_s: float
    first_step_s: float
    step_energies_j: dict[str, float]
    no_energy: str | None


@dataclass(frozen=True)
class GpuMeasurement:
    """What is measured, and under which conditions.

    Attributes:
        benchmarks: The benchmarks.
        size: "small" or "full".
        device: One of DEVICES.
        num_ranks: The ranks that also train together, one on each device; None: one for each GPU.
        num_steps: See GpuJob.
        seconds: See GpuJob.
        num_rounds: Jobs of each variant.
    """

    benchmarks: Sequence[str] = BENCHMARKS
    size: str = "full"
    device: str = "gpu"
    num_ranks: int | None = None
    num_steps: int = 200
    seconds: float = 10.0
    num_rounds: int = 2

    def measure_device(self, on_start: OnStart) -> DeviceFacts:
        """Returns what the device is and can do; called first, as it checks that there is one.

        Raises:
            CandleError: There is no such device, no JAX or no such benchmark, or several ranks
                cannot be started.
        """
        check_alone()
        if find_spec("jax") is None:
            raise SetupError(
                "bench gpu measures training with JAX, which is not installed here: run make setup"
                " ENGINE=jax GPU=1, or install candle-p1[jax-gpu]"
            )
        for name in self.benchmarks:
            find_benchmark(name)
        on_start(0, 1, "the device")
        device: DeviceFacts = run(DeviceJob(self.benchmarks[0], self._flags, self.device), 1)[0]
        launch(GpuJob.worker, self._num_ranks(device), "")
        return device

    def make_data(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Generates synthetic files that are missing; see candle_p1.training.setup.locate_files."""
        for name in self.benchmarks:
            benchmark = find_benchmark(name)
            locate_files(benchmark, benchmark.read_parameters(self._flags), progress)

    def measure(self, device: DeviceFacts, on_start: OnStart) -> dict[str, Any]:
        """Runs all jobs; returns what ``--json`` writes.

        Args:
            device: What `measure_device` has returned.
            on_start: Called before each job.

        Raises:
            CandleError: A job cannot do its work.
            RuntimeError: A job failed in another way.
        """
        started = utc_now()
        with tempfile.TemporaryDirectory(prefix="candle-p1-compiled-") as directory:
            measured = self._measure(self._num_ranks(device), directory, on_start)
        return {
            "device": asdict(device),
            "on": self.device,
            "size": self.size,
            "num_rounds": self.num_rounds,
            "seconds": self.seconds,
            "results": [_result(*each, device) for each in measured],
            "command": sys.argv,
            "started": started,
            "synthetic": True,
            "machine": environment.capture(),
        }

    @property
    def _flags(self) -> list[str]:
        return ["--size", self.size]

    def _num_ranks(self, device: DeviceFacts) -> int:
        """Returns how many ranks train together."""
        return self.num_ranks or (device.num_devices if self.device == "gpu" else 1)

    def _jobs(self, num_ranks: int, directory: str) -> list[tuple[GpuJob, int]]:
        """Returns the job of each variant with its number of ranks."""
        found: list[tuple[GpuJob, int]] = []
        for name in self.benchmarks:
            job = GpuJob(
                name,
                self._flags,
                self.device,
                num_steps=self.num_steps,
                seconds=self.seconds,
            )
            found += [
                (replace(job, precision=precision, inputs=inputs), 1)
                for precision in PRECISIONS
                for inputs in ("samples", "arrays")
            ]
            if num_ranks > 1:
                found.append((job, num_ranks))
        return [
            (replace(job, cache_dir=f"{directory}/{number}"), ranks)
            for number, (job, ranks) in enumerate(found)
        ]

    def _measure(
        self, num_ranks: int, directory: str, on_start: OnStart
    ) -> list[tuple[GpuJob, list[list[GpuOutcome]]]]:
        jobs = self._jobs(num_ranks, directory)
        measured: list[tuple[GpuJob, list[list[GpuOutcome]]]] = [(job, []) for job, _ in jobs]
        order = list(range(len(jobs)))
        for number in range(self.num_rounds):
            for done, which in enumerate(order if number % 2 == 0 else order[::-1]):
                job, ranks = jobs[which]
                what = f"{job.name}, round {number + 1}"
                on_start(number * len(jobs) + done, len(jobs) * self.num_rounds, what)
                measured[which][1].append(run(job, ranks))
        return measured


def _result(job: GpuJob, rounds: list[list[GpuOutcome]], device: DeviceFacts) -> dict[str, Any]:
    """Returns what was measured of a variant, with the bound of its step on this device."""
    first = rounds[0]
    blocks_s = [
        max(of_ranks)
        for ranks in rounds
        for of_ranks in zip(*(rank.steps_s for rank in ranks), strict=True)
    ]
    step_s, steps_per_epoch = median(blocks_s), first[0].steps_per_epoch
    starts_s = [max(rank.prepared_s + rank.first_step_s for rank in ranks) for ranks in rounds]
    energies = {
        reading: median(ranks[0].step_energies_j[reading] for ranks in rounds) * steps_per_epoch
        for reading in first[0].step_energies_j
        if all(reading in ranks[0].step_energies_j for ranks in rounds)
    }
    return {
        "benchmark": job.benchmark,
        "precision": job.precision,
        "variant": job.variant,
        "num_ranks": len(first),
        "batch_size": first[0].batch_size,
        "step_s": step_s,
        "range_s": [min(blocks_s), max(blocks_s)],
        "blocks_s": blocks_s,
        "samples_per_s": sum(rank.batch_size for rank in first) / step_s,
        "steps_per_epoch": steps_per_epoch,
        "epoch_s": step_s * steps_per_epoch,
        "bound_s": _bound_s(first[0], device, job.precision),
        "flops": first[0].flops,
        "optimizer_bytes": first[0].optimizer_bytes,
        "cold_start_s": starts_s[0],
        "warm_start_s": median(starts_s[1:]) if len(starts_s) > 1 else None,
        "first_steps_s": [max(rank.first_step_s for rank in ranks) for ranks in rounds],
        "epoch_energies_j": energies,
        "no_energy": first[0].no_energy,
    }


def _bound_s(outcome: GpuOutcome, device: DeviceFacts, precision: str) -> float | None:
    """Returns the shortest possible time of a step; None if its operations are not known."""
    if outcome.flops is None:
        return None
    products_s = outcome.flops / device.flops_per_s[precision]
    return products_s + outcome.optimizer_bytes / device.copy_bytes_per_s
