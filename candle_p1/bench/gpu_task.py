"""What the ranks of ``candle-p1 bench gpu`` do: measure the device, and time blocks of steps.

Steps are not timed one by one, because that would make the host wait for each of them, which a run
does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from candle_p1.bench.task import BenchmarkTask, Outcome, seconds_of
from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.gpus import GPUS_VARIABLE, visible_gpus, why_none
from candle_p1.errors import SetupError
from candle_p1.instrument.power.amd import AmdSource
from candle_p1.instrument.power.gpus import JobGpus, visible_here
from candle_p1.instrument.power.nvml import NvmlSource
from candle_p1.instrument.power.sampler import Sampler
from candle_p1.instrument.power.source import PowerSource, SensorError

if TYPE_CHECKING:
    from candle_p1.data.batches import TrainBatches
    from candle_p1.records.power_trace import Trace

REPEATS, NUM_REPEATED = 5, 8
"""How often a rate is measured, and what is repeated without the host between."""
SIZES = {"gpu": (8192, 1 << 30), "cpu": (1024, 1 << 26)}
"""The edge of matrices, and the bytes of an array that is copied."""
DRIVER_FILES = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
WARM_UP_STEPS, MIN_BLOCKS, MAX_BLOCKS = 3, 3, 10_000
MAX_ARRAY_BYTES = 2 << 30
"""How large the arrays may be with which plain Keras trains; P1B3's would not fit into memory."""
HZ = 20.0
"""NVML updates its values every 20 to 100 ms."""
PRECISIONS = {
    "float32": ("f32", "highest"),
    "tf32": ("f32", "tensorfloat32"),
    "bfloat16": ("bf16", "default"),
}
"""The values of ``--data_type`` and of JAX_DEFAULT_MATMUL_PRECISION. On GPUs "highest" computes
products with all bits of float32, and "tensorfloat32" with 10 of its 23 where the device has that
(NVIDIA from Ampere on), as JAX does by default. CPUs always use all bits."""


@dataclass(frozen=True, kw_only=True)
class DeviceTask(BenchmarkTask):
    """Asks JAX what the device is, "gpu" or "cpu", and measures what it can do."""

    device: str = "gpu"

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"engine": "jax", "deterministic": False}

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.device == "gpu" else {"JAX_PLATFORMS": "cpu", GPUS_VARIABLE: "0"}

    def measure(self, comm: Communicator) -> Outcome:
        """Returns the device and its rates; bytes are those read and written.

        Raises:
            SetupError: A GPU is to be measured, and JAX finds none.
        """
        found: list[Any] = []
        with suppress(SetupError):
            found = visible_gpus("jax") if self.device == "gpu" else []
        if self.device == "gpu" and not found:
            lack = why_none("jax")
            raise SetupError(
                f"JAX finds no GPU: {lack.why}. Fix: {lack.fix}; to try this command on CPUs, add"
                " --device cpu --size small"
            )
        import jax

        device, (size, num_bytes) = jax.devices()[0], SIZES[self.device]
        drivers = [path for path in map(Path, DRIVER_FILES) if path.is_file()]
        array, of_host = jax.numpy.zeros(num_bytes // 4), np.zeros(num_bytes // 16, np.float32)
        random = np.random.default_rng(0).standard_normal((size, size), np.float32) / size**0.5

        def seconds(work: Callable[[], Any]) -> float:
            return seconds_of(lambda: jax.block_until_ready(work()), REPEATS)

        def repeated_s(step: Callable[[Any], Any], array: Any) -> float:
            many = jax.jit(lambda x: jax.lax.fori_loop(0, NUM_REPEATED, lambda _, y: step(y), x))
            return seconds(lambda: many(array)) / NUM_REPEATED

        def flops_per_s(data_type: str, products: str) -> float:
            matrix = jax.numpy.asarray(random, {"f32": "float32", "bf16": "bfloat16"}[data_type])
            product = partial(jax.numpy.matmul, matrix, precision=products)
            return 2.0 * size**3 / repeated_s(product, matrix)

        return {
            "kind": str(device.device_kind),
            "platform": " ".join(str(device.client.platform_version).split()),
            "driver": " ".join(drivers[0].read_text().splitlines()[0].split()) if drivers else None,
            "num_devices": len(found) or 1,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
            "flops_per_s": {name: flops_per_s(*each) for name, each in PRECISIONS.items()},
            "copy_bytes_per_s": 2.0 * num_bytes / repeated_s(lambda x: x + 1, array),
            "upload_bytes_per_s": of_host.nbytes
            / seconds(lambda: jax.device_put(of_host, device, may_alias=False)),
        }


@dataclass(frozen=True, kw_only=True)
class GpuTask(DeviceTask):
    """Trains a benchmark in one of PRECISIONS, and times blocks of steps for so many seconds.

    Inputs are "samples", batches as in a run, or "arrays", whole NumPy arrays. A block has fewer
    steps if an epoch has. Compiled programs are kept in `cache_dir`.
    """

    precision: str
    inputs: str = "samples"
    num_steps: int = 200
    seconds: float = 10.0
    cache_dir: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"data_type": PRECISIONS[self.precision][0]}

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[self.precision][1],
            "JAX_COMPILATION_CACHE_DIR": self.cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def measure(self, comm: Communicator) -> Outcome:
        """Returns what this rank has measured; collective.

        ``steps_s`` has the time of a step for each timed block; ``prepared_s`` is the time from the
        process's start until data and model were ready, and ``first_step_s`` that from there to the
        end of the first step, which is compiled in it; ``step_energies_j`` is the energy of a step,
        by the devices' counters ("energy") and by integrated power.
        """
        import keras

        from candle_p1.bench.roofline import matrix_product_flops, optimizer_bytes
        from candle_p1.bench.training import prepare_training
        from candle_p1.data.samples import join_batches
        from candle_p1.models.fast.batches import for_fit

        training = prepare_training(self, comm)
        if training.device.is_gpu != (self.device == "gpu"):
            raise SetupError(f"this rank computes on {training.device.name}").on_all_ranks()
        plan, model, batches = training.plan, training.model, training.batches()
        num_steps = min(self.num_steps, plan.steps_per_epoch)
        if self.inputs == "arrays":
            batch_bytes = sum(array.nbytes for array in keras.tree.flatten(batches[0]))
            num_steps = max(1, min(num_steps, MAX_ARRAY_BYTES // batch_bytes))
            x, y = join_batches([batches[step] for step in range(num_steps)])
            given = {"x": x, "y": y, "batch_size": plan.batch_size}
        else:
            given = {"x": for_fit(_blocks(batches, num_steps))}
        fit = partial(model.fit, **given, shuffle=False, verbose=0)
        prepared_s = time.time() - psutil.Process().create_time()
        begin = time.perf_counter()
        fit(steps_per_epoch=1)
        first_step_s = time.perf_counter() - begin
        fit(steps_per_epoch=min(WARM_UP_STEPS, num_steps))
        comm.barrier()
        sampler, absent = open_sampler(comm)
        with sampler or nullcontext():
            blocks = _time_blocks(fit, model, comm, self.seconds)
        ends_s = blocks[0][0], blocks[-1][1]
        energies_j, no_energy = energies(sampler.traces(), *ends_s) if sampler else ({}, absent)
        steps = len(blocks) * num_steps
        return {
            "steps_s": [(end - begin) / num_steps for begin, end in blocks],
            "steps_per_epoch": plan.steps_per_epoch,
            "batch_size": plan.batch_size,
            "flops": matrix_product_flops(model, plan.batch_size),
            "optimizer_bytes": optimizer_bytes(model),
            "prepared_s": prepared_s,
            "first_step_s": first_step_s,
            "step_energies_j": {reading: j / steps for reading, j in energies_j.items()},
            "no_energy": no_energy,
        }


def _blocks(batches: TrainBatches, num_steps: int) -> Any:
    """Returns the batches of an epoch, of which each of Keras's epochs takes a number in turn.

    Keras itself would end an epoch of ``steps_per_epoch`` early where the batches end.
    """
    import keras

    class Blocks(keras.utils.PyDataset):  # type: ignore[misc]
        first = 0

        def __len__(self) -> int:
            return num_steps

        def __getitem__(self, step: int) -> tuple[Any, Any]:
            return batches[(self.first + step) % len(batches)]

        def on_epoch_end(self) -> None:
            self.first += num_steps

    return Blocks()


def _time_blocks(
    fit: Callable[..., Any], model: Any, comm: Communicator, limit_s: float
) -> list[tuple[float, float]]:
    """Returns when blocks of steps, which are Keras's epochs, began and ended; collective.

    Rank 0 says when there are enough. The first block is left out: something is still compiled in
    it.
    """
    import keras

    begins: list[float] = []
    ends: list[float] = []

    def end(epoch: int, logs: dict[str, float]) -> None:
        float(logs["loss"])  # waits for the last step
        ends.append(time.perf_counter())
        enough = epoch >= MIN_BLOCKS and ends[-1] - begins[1] >= limit_s
        if epoch and comm.broadcast(enough):
            model.stop_training = True

    timer = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: begins.append(time.perf_counter()), on_epoch_end=end
    )
    fit(epochs=MAX_BLOCKS, callbacks=[timer])
    return list(zip(begins, ends, strict=True))[1:]


def open_sampler(comm: Communicator) -> tuple[Sampler | None, str]:
    """Returns what samples this job's GPUs on rank 0's node, or why nothing does; collective.

    Both readings of a card are sampled at the same time, so that they can be compared: where NVML's
    counter and the integral of its power differ, one of them is wrong.
    """
    job = JobGpus(comm.local.allgather(visible_here()))
    if comm.rank:
        return None, "rank 0 measures it"
    sources: list[PowerSource] = []
    reasons: dict[str, None] = {}
    for make in (
        lambda: NvmlSource(job, ("energy",)),
        lambda: NvmlSource(job, ("power",)),
        lambda: AmdSource(job),
    ):
        try:
            sources.append(make())
        except SensorError as error:
            reasons[str(error)] = None
    return (Sampler(sources, HZ), "") if sources else (None, "; ".join(reasons))


def energies(
    traces: Iterable[Trace], begin_s: float, end_s: float
) -> tuple[dict[str, float], str | None]:
    """Returns the energy of all GPUs in J by reading, and why there is none.

    A reading that lacks one of the cards is left out, because its sum would be too small.
    """
    found: dict[str, float] = {}
    reasons: dict[str, str] = {}
    for trace in traces:
        reading, energy = trace.channel.reading, trace.energy(begin_s, end_s)
        if energy.energy_j is None or energy.few_samples:
            reasons[reading] = energy.reason or "too few samples: raise --seconds"
        else:
            found[reading] = found.get(reading, 0.0) + energy.energy_j
    found = {reading: joules for reading, joules in found.items() if reading not in reasons}
    return found, None if found else "; ".join(reasons.values())
