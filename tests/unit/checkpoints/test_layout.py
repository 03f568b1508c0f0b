from __future__ import annotations

import math
import tempfile

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.checkpoints import layout
from candle_p1.checkpoints.layout import (
    TYPE_NAMES,
    ArraySpec,
    PartLayout,
    Piece,
    numpy_type,
    share_arrays,
)
from candle_p1.checkpoints.memory import CopyMemory
from candle_p1.errors import CheckpointError

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
array_specs = st.builds(ArraySpec, st.sampled_from(sorted(TYPE_NAMES)), shapes)
states = st.lists(array_specs, max_size=8).map(
    lambda specs: {f"array {i}": spec for i, spec in enumerate(specs)}
)


@pytest.fixture(params=[1, 100], autouse=True)
def small_bytes(request, monkeypatch):
    monkeypatch.setattr(layout, "SMALL_BYTES", request.param)
    return request.param


def num_bytes(pieces, specs):
    return sum(specs[name].rows(start, stop).num_bytes for name, start, stop in pieces)


@given(specs=states, num_parts=st.integers(1, 12))
def test_parts_are_all_rows_once_and_of_about_the_same_size(specs, num_parts):
    parts = share_arrays(specs, num_parts)
    assert len(parts) == num_parts
    rows = {name: [] for name in specs}
    for part in parts:
        for name, start, stop in part:
            rows[name] += range(start, stop)
            assert start < stop or not specs[name].num_bytes
    assert rows == {name: list(range(spec.num_rows)) for name, spec in specs.items()}
    whole = [name for part in parts for name, *_ in part if not specs[name].num_bytes]
    assert whole == [name for name, spec in specs.items() if not spec.num_bytes]

    # A cut is moved by at most half of what is not divided, and a part has two cuts.
    unit = max(
        (
            spec.num_bytes
            if spec.num_bytes < layout.SMALL_BYTES
            else spec.num_bytes // spec.num_rows
            for spec in specs.values()
        ),
        default=0,
    )
    share = sum(spec.num_bytes for spec in specs.values()) / num_parts
    assert all(abs(num_bytes(part, specs) - share) <= unit + 1 for part in parts)


def test_an_array_without_dimensions_has_one_row():
    parts = share_arrays({"step": ArraySpec("int64", ())}, 2)
    assert [piece for part in parts for piece in part] == [Piece("step", 0, 1)]


@given(specs=states, num_parts=st.integers(1, 4), data=st.data())
def test_the_safetensors_library_reads_every_part(specs, num_parts, data):
    arrays = {}
    for name, spec in specs.items():
        dtype = numpy_type(spec.dtype)
        size = math.prod(spec.shape) * dtype.itemsize
        raw = np.random.default_rng(data.draw(st.integers(0, 9))).integers(0, 2, size, np.uint8)
        arrays[name] = raw.view(dtype).reshape(spec.shape)
    for pieces in share_arrays(specs, num_parts):
        part = PartLayout(specs, pieces)
        memory = CopyMemory(part.num_bytes)
        for piece, out in part.fill(memory):
            assert out.ctypes.data % out.itemsize == 0
            array = arrays[piece.array]
            np.copyto(out, array[piece.start : piece.stop] if array.ndim else array)
        with tempfile.NamedTemporaryFile() as file:
            file.write(memory.buffer[: part.num_bytes])
            file.flush()
            content = safetensors.numpy.load_file(file.name)
        assert len(content) == len(pieces)
        for piece in pieces:
            spec = specs[piece.array]
            is_whole = piece.stop - piece.start == spec.num_rows
            key = piece.array if is_whole else f"{piece.array}[{piece.start}:{piece.stop}]"
            array = arrays[piece.array]
            expected = array[piece.start : piece.stop] if array.ndim else array
            assert content[key].dtype == expected.dtype
            assert content[key].shape == expected.shape
            assert content[key].tobytes() == expected.tobytes()


def test_types_that_files_cannot_hold_are_named():
    with pytest.raises(CheckpointError, match=r"'names'.*<U3"):
        ArraySpec.of("names", np.array(["abc"]))
    assert ArraySpec.of("x", np.zeros(2, ml_dtypes.bfloat16)) == ArraySpec("bfloat16", (2,))


def test_a_name_that_the_header_needs_is_refused():
    specs = {"__metadata__": ArraySpec("bool", (1,))}
    with pytest.raises(CheckpointError, match="__metadata__"):
        PartLayout(specs, [Piece("__metadata__", 0, 1)])
