from __future__ import annotations

import math
import re
import tempfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.checkpoints import arrays as arrays_module
from candle_p1.checkpoints.arrays import (
    TYPE_NAMES,
    ArraySpec,
    Rows,
    ShardLayout,
    divide,
)
from candle_p1.checkpoints.shard_file import CopyMemory
from candle_p1.errors import CheckpointError

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
array_specs = st.builds(ArraySpec, st.sampled_from(sorted(TYPE_NAMES)), shapes)
states = st.lists(array_specs, max_size=8).map(
    lambda specs: {f"array {i}": spec for i, spec in enumerate(specs)}
)


@pytest.fixture(params=[1, 100], autouse=True)
def small_bytes(request, monkeypatch):
    monkeypatch.setattr(arrays_module, "SMALL_BYTES", request.param)
    return request.param


def num_bytes(shard, specs):
    return sum(specs[name].rows(start, stop).num_bytes for name, start, stop in shard)


@given(specs=states, num_shards=st.integers(1, 12))
def test_shards_are_all_rows_once_and_of_about_the_same_size(specs, num_shards):
    shards = divide(specs, num_shards)
    assert len(shards) == num_shards
    rows = {name: [] for name in specs}
    for shard in shards:
        for name, start, stop in shard:
            rows[name] += range(start, stop)
            assert start < stop or not specs[name].num_bytes
    assert rows == {name: list(range(spec.num_rows)) for name, spec in specs.items()}
    whole = [name for shard in shards for name, *_ in shard if not specs[name].num_bytes]
    assert whole == [name for name, spec in specs.items() if not spec.num_bytes]

    # A cut is moved by at most half of what is not divided, and a shard has two cuts.
    unit = max(
        (
            spec.num_bytes
            if spec.num_bytes < arrays_module.SMALL_BYTES
            else spec.num_bytes // spec.num_rows
            for spec in specs.values()
        ),
        default=0,
    )
    share = sum(spec.num_bytes for spec in specs.values()) / num_shards
    assert all(abs(num_bytes(shard, specs) - share) <= unit + 1 for shard in shards)


@given(specs=states, num_shards=st.integers(1, 4), data=st.data())
def test_the_safetensors_library_reads_every_shard(specs, num_shards, data):
    arrays = {}
    for name, spec in specs.items():
        dtype = spec.numpy_type
        size = math.prod(spec.shape) * dtype.itemsize
        raw = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 2, size, np.uint8)
        arrays[name] = raw.view(dtype).reshape(spec.shape)
    for held in divide(specs, num_shards):
        shard = ShardLayout(specs, held)
        memory = CopyMemory(shard.num_bytes)
        for rows, out in shard.fill(memory.bytes):
            assert out.ctypes.data % out.itemsize == 0
            array = arrays[rows.array]
            np.copyto(out, array[rows.start : rows.stop] if array.ndim else array)
        with tempfile.NamedTemporaryFile() as file:
            file.write(memory.buffer[: shard.num_bytes])
            file.flush()
            content = safetensors.numpy.load_file(file.name)
        assert len(content) == len(held)
        for name, start, stop in held:
            is_whole = stop - start == specs[name].num_rows
            key = name if is_whole else f"{name}[{start}:{stop}]"
            array = arrays[name]
            expected = array[start:stop] if array.ndim else array
            assert content[key].dtype == expected.dtype
            assert content[key].shape == expected.shape
            assert content[key].tobytes() == expected.tobytes()


def test_types_that_files_cannot_hold_are_named():
    with pytest.raises(CheckpointError, match=r"'names'.*<U3"):
        ArraySpec.of("names", np.array(["abc"]))
    assert ArraySpec.of("x", np.zeros(2, ml_dtypes.bfloat16)) == ArraySpec("bfloat16", (2,))


@pytest.mark.parametrize("name", ["__metadata__", "x[0:1]"])
def test_a_name_that_files_need_themselves_is_refused(name):
    with pytest.raises(CheckpointError, match=re.escape(name)):
        ShardLayout({name: ArraySpec("bool", (1,))}, [Rows(name, 0, 1)])
