"""What the ranks of ``candle-p1 bench gpu`` do: measure the device, and time blocks of steps.

Steps are not timed one by one, because that would make the host wait for each of them, which a run
does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from candle_p1.bench.task import BenchmarkTask, Outcome, seconds_of
from candle_p1.bench.training import (
    MAX_EPOCHS,
    Training,
    matrix_product_flops,
    optimizer_bytes,
    prepare_training,
)
from candle_p1.data.samples import join_batches
from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.gpus import GPUS_VARIABLE, visible_gpus, why_none
from candle_p1.errors import SetupError
from candle_p1.files import write_atomically
from candle_p1.instrument.power.gpus import AmdSource, JobGpus, NvmlSource, visible_here
from candle_p1.instrument.power.sampler import PowerSource, Sampler, SensorError
from candle_p1.records.power_trace import MIN_SAMPLES, Trace

REPEATS, NUM_REPEATED = 5, 8
"""How often a rate is measured, and what is repeated without the host between."""
SIZES = {"gpu": (8192, 1 << 30), "cpu": (1024, 1 << 26)}
"""The edge of matrices, and the bytes of an array that is copied."""
DRIVER_FILES = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
MIN_BLOCKS, WARM_UP_S = 3, 1.0
"""NVML's power is the mean of the last second, which has to be one of training."""
MAX_ARRAY_BYTES = 2 << 30
"""How large the arrays may be with which plain Keras trains; P1B3's would not fit into memory."""
HZ = 20.0
"""NVML updates its values every 20 to 100 ms."""
SENSORS = {"energy": "counter", "power": "integrated power"}
"""What is read of a GPU."""
OURS, OURS_PLAIN, PLAIN = VARIANTS = ("candle_p1", "candle_p1, plain kernels", "plain Keras")
"""As runs train, also with ``--kernels plain``, and by Keras's fit."""
PRECISIONS = {
    "tf32": ("f32", "tensorfloat32"),
    "bfloat16": ("bf16", "default"),
    "float32": ("f32", "highest"),
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
    """Trains a benchmark in one of PRECISIONS, in one variant after the other.

    Of each variant, blocks of steps are timed for so many seconds; a block has fewer steps if an
    epoch has. What each has measured is written into `directory` as soon as it is known. None is
    begun after the `deadline` (Unix time). Compiled programs are kept in `cache_dir`.
    """

    precision: str
    variants: Sequence[str] = (OURS,)
    deterministic: bool = False
    num_steps: int = 200
    seconds: float = 5.0
    directory: str = ""
    deadline: float = inf
    cache_dir: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        data_type = PRECISIONS[self.precision][0]
        return super().settings | {"data_type": data_type, "deterministic": self.deterministic}

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {
            "JAX_DEFAULT_MATMUL_PRECISION": PRECISIONS[self.precision][1],
            "JAX_COMPILATION_CACHE_DIR": self.cache_dir,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def measure(self, comm: Communicator) -> Outcome:
        """Measures the variants, as far as there is time; collective.

        Each result is a JSON file with the variant and, in ``ranks``, what `train` returned.
        """
        training = prepare_training(self, comm)
        if training.device.is_gpu != (self.device == "gpu"):
            raise SetupError(f"this rank computes on {training.device.name}").on_all_ranks()
        prepared_s = time.time() - psutil.Process().create_time()
        for number, variant in enumerate(self.variants):
            if comm.broadcast(time.time() > self.deadline):
                break
            if number:
                training.rebuild("fast" if variant == OURS else "plain")
            found = {"prepared_s": prepared_s, **self.train(training, comm, variant)}
            ranks = comm.gather(found)
            if ranks is not None:
                text = json.dumps({"variant": variant, "ranks": ranks})
                write_atomically(Path(self.directory, f"{number}.json"), text)
        return {}

    def train(self, training: Training, comm: Communicator, variant: str) -> Outcome:
        """Returns what this rank has measured of a variant; collective.

        ``steps_s`` has the time of a step for each timed block; ``first_step_s`` is that of the
        first step, which is compiled in it; ``step_energies_j`` is the energy of a step, by the
        devices' counters ("energy") and by integrated power, and ``no_energy`` why one is absent.
        """
        plan, model = training.plan, training.model
        found = {
            "steps_per_epoch": plan.steps_per_epoch,
            "batch_size": plan.batch_size,
            "flops": matrix_product_flops(model, plan.batch_size),
            "optimizer_bytes": optimizer_bytes(model),
        }
        num_steps = min(self.num_steps, plan.steps_per_epoch)
        train, num_steps = (_by_keras if variant == PLAIN else _as_in_runs)(training, num_steps)
        begin = time.perf_counter()
        train(1, lambda: True)
        first_step_s = time.perf_counter() - begin
        ends_s: list[float] = []
        warm_up_s = WARM_UP_S if self.device == "gpu" else 0.0

        def enough() -> bool:
            now_s = time.perf_counter()
            if not ends_s or ends_s[0] - before_s < warm_up_s:
                ends_s[:] = [now_s]  # the first block is left out: something is compiled in it
            else:
                ends_s.append(now_s)
            is_long = len(ends_s) > MIN_BLOCKS and ends_s[-1] - ends_s[0] >= self.seconds
            return bool(comm.broadcast(is_long))

        sampler, absent = open_sampler(comm)
        comm.barrier()
        with sampler or nullcontext():
            before_s = time.perf_counter()
            train(num_steps, enough)
        traces = sampler.traces() if sampler else []
        joules, reasons = energies(traces, ends_s[0], ends_s[-1])
        num_timed = (len(ends_s) - 1) * num_steps
        return found | {
            "steps_s": [(end - begin) / num_steps for begin, end in pairwise(ends_s)],
            "first_step_s": first_step_s,
            "step_energies_j": {reading: j / num_timed for reading, j in joules.items()},
            "no_energy": reasons | absent,
        }


Train = Callable[[int, Callable[[], bool]], None]
"""Trains blocks of a number of steps, and asks after each, when it is done, whether to end."""


def _as_in_runs(training: Training, num_steps: int) -> tuple[Train, int]:
    """Returns what trains as a run does, and the steps of a block."""
    steps, per_epoch = training.steps(), training.plan.steps_per_epoch
    done = 0

    def train(num_steps: int, is_over: Callable[[], bool]) -> None:
        nonlocal done
        while True:
            end = done + num_steps
            while done < end:
                epoch, step = divmod(done, per_epoch)
                num = min(steps.most(step), end - done)
                logs = steps.train(epoch, step, num)
                done += num
            float(logs["loss"])  # waits for the last step
            if is_over():
                return

    return train, num_steps


def _by_keras(training: Training, num_steps: int) -> tuple[Train, int]:
    """Returns what trains by Keras's fit from arrays in the host's memory, and a block's steps.

    There are fewer of these if the arrays would be too large.
    """
    import keras

    model, batches = training.model, training.batches()
    batch_bytes = sum(array.nbytes for array in keras.tree.flatten(batches[0]))
    num_steps = max(1, min(num_steps, MAX_ARRAY_BYTES // batch_bytes))
    x, y = join_batches([batches[step] for step in range(num_steps)])

    def train(num_steps: int, is_over: Callable[[], bool]) -> None:
        def end(epoch: int, logs: Mapping[str, float]) -> None:
            float(logs["loss"])
            model.stop_training = is_over()

        model.fit(
            *(x, y),
            batch_size=training.plan.batch_size,
            epochs=MAX_EPOCHS,
            steps_per_epoch=num_steps,
            shuffle=False,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=end)],
        )

    return train, num_steps


def open_sampler(comm: Communicator) -> tuple[Sampler | None, dict[str, str]]:
    """Returns what samples this job's GPUs on rank 0's node, or why nothing does; collective.

    Both readings of a card are sampled at the same time, so that they can be compared: where NVML's
    counter and the integral of its power differ, one of them is wrong.
    """
    job = JobGpus(comm.local.allgather(visible_here()))
    if comm.rank:
        return None, dict.fromkeys(SENSORS, "rank 0 measures it")
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
    if sources:
        return Sampler(sources, HZ), {}
    return None, dict.fromkeys(SENSORS, "; ".join(reasons))


def energies(
    traces: Iterable[Trace], begin_s: float, end_s: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns the energy of all GPUs in J by reading, and why a reading is absent.

    A reading that lacks one of the cards is left out, because its sum would be too small.
    """
    found: dict[str, float] = {}
    reasons: dict[str, str] = {}
    reading: str
    for trace in traces:
        reading, energy = trace.channel.reading, trace.energy(begin_s, end_s)
        if energy.energy_j is None or energy.few_samples:
            needed_s = MIN_SAMPLES * (trace.channel.resolution_s or 0.0)
            few = (
                f"{end_s - begin_s:.3g} s are too short for a sensor that needs {needed_s:.3g} s:"
                " raise --seconds"
            )
            reasons[reading] = energy.reason or few
        else:
            found[reading] = found.get(reading, 0.0) + energy.energy_j
    for reading in SENSORS:
        if reading not in found:
            reasons.setdefault(reading, "no sensor of this machine has it")
    return {reading: j for reading, j in found.items() if reading not in reasons}, reasons
