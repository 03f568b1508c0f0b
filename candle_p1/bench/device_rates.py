"""A measuring job that asks JAX what the device is, and measures what it can do.

``python -m candle_p1.bench.device_rates DIRECTORY``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from candle_p1.bench.gpu import PRECISIONS, DeviceFacts, DeviceJob
from candle_p1.bench.worker import median_s, serve
from candle_p1.distributed.gpus import why_none
from candle_p1.distributed.installation import visible_gpus
from candle_p1.errors import SetupError

if TYPE_CHECKING:
    from candle_p1.distributed.comm import Communicator

REPEATS = 5
NUM_PRODUCTS = NUM_PASSES = 8
"""Products, and passes through an array, that follow one another without the host."""
MATRIX_SIZE = {"gpu": 8192, "cpu": 1024}
ARRAY_BYTES = {"gpu": 1 << 30, "cpu": 1 << 26}
DRIVER_FILES = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


def measure(job: DeviceJob, comm: Communicator) -> DeviceFacts:
    """Returns the device and its rates.

    Raises:
        SetupError: A GPU is to be measured, and JAX finds none.
    """
    try:
        found = visible_gpus("jax") if job.device == "gpu" else []
    except SetupError:
        found = []
    if job.device == "gpu" and not found:
        lack = why_none("jax")
        raise SetupError(
            f"JAX finds no GPU: {lack.why}. Fix: {lack.fix}; to try this command on CPUs, add"
            " --device cpu --size small"
        )
    import jax

    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    return DeviceFacts(
        kind=str(device.device_kind),
        platform=" ".join(str(device.client.platform_version).split()),
        driver=_driver(),
        num_devices=len(found) or 1,
        memory_bytes=memory.get("bytes_limit"),
        flops_per_s={name: _products_per_s(MATRIX_SIZE[job.device], name) for name in PRECISIONS},
        copy_bytes_per_s=_copy_bytes_per_s(ARRAY_BYTES[job.device]),
        upload_bytes_per_s=_upload_bytes_per_s(ARRAY_BYTES[job.device] // 4),
    )


def _products_per_s(size: int, name: str) -> float:
    """Returns the floating-point operations per second of products of square matrices."""
    import jax

    precision = PRECISIONS[name]
    dtype = "bfloat16" if precision.data_type == "bf16" else "float32"
    values = np.random.default_rng(0).standard_normal((size, size), np.float32) / size**0.5
    matrix = jax.numpy.asarray(values, dtype)

    def multiply(given: Any) -> Any:
        def product(_: int, other: Any) -> Any:
            return jax.numpy.matmul(given, other, precision=precision.products)

        return jax.lax.fori_loop(0, NUM_PRODUCTS, product, given)

    compiled = jax.jit(multiply)
    seconds = median_s(lambda: jax.block_until_ready(compiled(matrix)), REPEATS)
    return 2.0 * NUM_PRODUCTS * size**3 / seconds


def _copy_bytes_per_s(num_bytes: int) -> float:
    """Returns the bytes per second, read and written, of passes through an array."""
    import jax

    given = jax.numpy.zeros(num_bytes // 4, "float32")

    def add(values: Any) -> Any:
        return jax.lax.fori_loop(0, NUM_PASSES, lambda _, each: each + 1, values)

    compiled = jax.jit(add)
    seconds = median_s(lambda: jax.block_until_ready(compiled(given)), REPEATS)
    return 2.0 * NUM_PASSES * num_bytes / seconds


def _upload_bytes_per_s(num_bytes: int) -> float:
    """Returns the bytes per second of copies of an array of the host to the device."""
    import jax

    given, device = np.zeros(num_bytes // 4, np.float32), jax.devices()[0]
    return num_bytes / median_s(
        lambda: jax.block_until_ready(jax.device_put(given, device, may_alias=False)), REPEATS
    )


def _driver() -> str | None:
    """Returns what the driver says of its version, without blanks in a row."""
    for name in DRIVER_FILES:
        try:
            return " ".join(Path(name).read_text().splitlines()[0].split())
        except (OSError, IndexError):
            continue
    return None


if __name__ == "__main__":
    serve(measure)
