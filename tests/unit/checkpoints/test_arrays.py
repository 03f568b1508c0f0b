import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.checkpoints import arrays as arrays_module
from candle_p1.checkpoints.arrays import TYPE_NAMES, ArraySpec, Rows, ShardLayout, divide
from candle_p1.errors import CheckpointError

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
array_specs = st.builds(ArraySpec, st.sampled_from(sorted(TYPE_NAMES)), shapes)
states = st.lists(array_specs, max_size=8).map(
    lambda specs: {f"array {i}": spec for i, spec in enumerate(specs)}
)


@pytest.fixture(params=[1, 100], autouse=True)
def small_bytes(request, monkeypatch):
    monkeypatch.setattr(arrays_module, "SMALL_BYTES", request.param)


@given(specs=states, num_shards=st.integers(1, 12))
def test_shards_are_all_rows_once_and_of_about_the_same_size(specs, num_shards):
    shards = divide(specs, num_shards)
    rows = {name: [] for name in specs}
    for shard in shards:
        for name, start, stop in shard:
            rows[name] += range(start, stop)
            assert start < stop or not specs[name].num_bytes
    assert rows == {name: list(range(spec.num_rows)) for name, spec in specs.items()}
    whole = [name for shard in shards for name, *_ in shard if not specs[name].num_bytes]
    assert whole == [name for name, spec in specs.items() if not spec.num_bytes]

    # A cut is moved by at most half of what is not divided, and a shard has two cuts.
    units = [
        spec.num_bytes // (1 if spec.num_bytes < arrays_module.SMALL_BYTES else spec.num_rows)
        for spec in specs.values()
    ]
    share = sum(spec.num_bytes for spec in specs.values()) / num_shards
    sizes = [
        sum(specs[name].rows(start, stop).num_bytes for name, start, stop in shard)
        for shard in shards
    ]
    assert len(sizes) == num_shards
    assert all(abs(size - share) <= max(units, default=0) + 1 for size in sizes)


def test_types_that_files_cannot_hold_are_named():
    with pytest.raises(CheckpointError, match=r"'names'.*<U3"):
        ArraySpec.of("names", np.array(["abc"]))
    assert ArraySpec.of("x", np.zeros(2, ml_dtypes.bfloat16)) == ArraySpec("bfloat16", (2,))


@pytest.mark.parametrize("name", ["__metadata__", "x[0:1]"])
def test_a_name_that_files_need_themselves_is_refused(name):
    with pytest.raises(CheckpointError, match=re.escape(name)):
        ShardLayout({name: ArraySpec("bool", (1,))}, [Rows(name, 0, 1)])
