"""Samples in the memory of a rank's device, where JAX's compiled steps take their batches from.

Each array is copied once, however many sets of samples share it. CPUs read aligned arrays in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.samples import Gather, Samples
from candle_p1.records.environment import memory_limit_bytes

CHUNK_BYTES = 1 << 26
"""What is copied at once of an array."""
ALIGNMENT = 64
"""XLA reads arrays of the host in place if their addresses are multiples of this, in bytes."""
GPU_SHARE, CPU_SHARE = 2, 4
"""The share of the device's free memory, or of a rank's part of the node's, that data may take."""

Show = Callable[[int, int, int], None]
"""Called with the bytes copied before an array, those of all arrays, and those copied of it."""


class DeviceData(NamedTuple):
    """Samples on the device: JAX's arrays, in the form of those of `Gather`."""

    arrays: Any
    take: Callable[[Any, Any], Any]  # returns the batch for these and a JAX array of indices


class Placement(NamedTuple):
    """Where samples are."""

    data: list[DeviceData] | None  # each set on the device; None: they are streamed
    copied_bytes: int = 0
    in_place_bytes: int = 0  # which the device reads in the memory of the host
    reason: str = ""  # why samples are streamed, if they are


def limit_bytes(local_size: int) -> int:
    """Returns how many bytes each of a node's ranks may copy if the user sets no limit."""
    import jax

    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return memory_limit_bytes() // (CPU_SHARE * local_size)
    stats = device.memory_stats() or {}  # some of JAX's allocators know no limit
    return int(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)) // GPU_SHARE


def place(
    sets: Sequence[Samples],
    limit: int,
    any_rank: Callable[[bool], bool] = bool,
    show: Show = lambda before, total, num: None,
) -> Placement:
    """Puts sets of samples on each rank's device, if all of them can be there on all ranks.

    They must not change any more. `limit` is how many bytes may be copied; 0 keeps all samples on
    the host. `any_rank` returns whether something holds on any rank, and is collective.
    """
    import jax

    gathers = [samples.as_gather() for samples in sets]
    known = [gather for gather in gathers if gather]
    if len(known) < len(gathers):
        return Placement(None, reason="batches are computed from the samples on the host")
    device = jax.local_devices()[0]
    arrays = {_key(each): each for gather in known for each in jax.tree.leaves(gather.arrays)}
    in_place = {key for key, each in arrays.items() if _is_read_in_place(each, device)}
    sizes = {key: each.size * _dtype(each).itemsize for key, each in arrays.items()}
    in_place_bytes = sum(sizes[key] for key in in_place)
    total = sum(sizes.values()) - in_place_bytes
    if any_rank(total > limit or not limit):
        return Placement(
            None,
            reason=f"the samples take {total / 2**20:,.0f} MiB on the device of this rank, where"
            f" {limit / 2**20:,.0f} MiB may be used, or too much on that of another",
        )
    # Not committed to the device by name, because the model's variables are not: JAX would compile
    # a step again when it meets both kinds.
    placed, done = {}, 0
    for key, array in arrays.items():
        if key in in_place or array.nbytes <= CHUNK_BYTES:
            placed[key] = jax.device_put(np.asarray(array, _dtype(array)))
        else:
            placed[key] = _in_chunks(array, partial(show, done, total))
        done += sizes[key] * (key not in in_place)

    def on_device(gather: Gather) -> DeviceData:
        moved = jax.tree.map(lambda array: placed[_key(array)], gather.arrays)
        return DeviceData(moved, lambda arrays, which: gather.take(jax.numpy, arrays, which))

    return Placement(list(map(on_device, known)), total, in_place_bytes)


def _key(array: NDArray[Any]) -> tuple[Any, ...]:
    """Returns what two arrays have in common only if they are the same memory."""
    return array.ctypes.data, array.shape, array.strides, array.dtype.str


def _dtype(array: NDArray[Any]) -> np.dtype[Any]:
    """Returns the dtype in which JAX holds an array, such as int32 for int64."""
    import jax

    return np.dtype(jax.dtypes.canonicalize_dtype(array.dtype))


def _is_read_in_place(array: NDArray[Any], device: Any) -> bool:
    is_aligned = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    return bool(device.platform == "cpu" and is_aligned and array.dtype == _dtype(array))


def _in_chunks(array: NDArray[Any], show: Callable[[int], None]) -> Any:
    """Returns a copy on the device; of the host's memory, no more than a chunk is needed."""
    import jax

    placed = jax.numpy.zeros(array.shape, _dtype(array))
    num_rows = max(1, CHUNK_BYTES // max(1, array[:1].nbytes))
    for first in range(0, len(array), num_rows):
        rows = np.ascontiguousarray(array[first : first + num_rows], _dtype(array))
        placed = _write()(placed, *jax.device_put((rows, np.int32(first))))
        placed.block_until_ready()
        show(placed.nbytes * min(first + num_rows, len(array)) // len(array))
    return placed


@cache
def _write() -> Any:
    import jax

    def write(whole: Any, rows: Any, first: Any) -> Any:
        return jax.lax.dynamic_update_slice_in_dim(whole, rows, first, 0)

    return jax.jit(write, donate_argnums=0)
