"""The shards of a checkpoint: what is in them, and who writes them.

What that costs in large jobs is in tests/unit/tools/test_scale.py.
"""

import os
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.checkpoints import shards
from candle_p1.checkpoints.shards import (
    TYPE_NAMES,
    ArraySpec,
    Rows,
    ShardLayout,
    ShardPlanner,
    divide,
)
from candle_p1.errors import CheckpointError
from tools.simulated import SimulatedJob

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
array_specs = st.builds(ArraySpec, st.sampled_from(sorted(TYPE_NAMES)), shapes)
states = st.lists(array_specs, max_size=8).map(
    lambda specs: {f"array {i}": spec for i, spec in enumerate(specs)}
)


@given(specs=states, num_shards=st.integers(1, 12), small_bytes=st.sampled_from([1, 100]))
def test_shards_are_all_rows_once_and_of_about_the_same_size(specs, num_shards, small_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SMALL_BYTES", small_bytes)
        found = divide(specs, num_shards)
    rows = {name: [] for name in specs}
    for shard in found:
        for name, start, stop in shard:
            rows[name] += range(start, stop)
            assert start < stop or not specs[name].num_bytes
    assert rows == {name: list(range(spec.num_rows)) for name, spec in specs.items()}
    whole = [name for shard in found for name, *_ in shard if not specs[name].num_bytes]
    assert whole == [name for name, spec in specs.items() if not spec.num_bytes]

    # A cut is moved by at most half of what is not divided, and a shard has two cuts.
    units = [
        spec.num_bytes // (1 if spec.num_bytes < small_bytes else spec.num_rows)
        for spec in specs.values()
    ]
    share = sum(spec.num_bytes for spec in specs.values()) / num_shards
    sizes = [
        sum(specs[name].rows(start, stop).num_bytes for name, start, stop in shard)
        for shard in found
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


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Returns the ranks that write so many bytes, in a job with a file as a sign."""
    monkeypatch.setattr(shards, "SMALL_BYTES", 1000)
    monkeypatch.setattr(shards, "LARGE_BYTES", 100_000)
    monkeypatch.setattr(shards, "APPEAR_S", 0.0)

    def plan(num_bytes, num_ranks, sign=tmp_path):
        specs = {"x": ArraySpec("uint8", (num_bytes,))}
        job = SimulatedJob(num_ranks, ranks_per_node=num_ranks // 2)
        (found,) = set(job.run(lambda comm: ShardPlanner(comm, sign).plan(specs).ranks))
        return found

    return plan


@pytest.mark.parametrize(
    ("num_bytes", "ranks"),
    [(100_001, (0, 1, 2, 3, 4, 5, 6, 7)), (100_000, (0, 1, 2, 3)), (2_000, (0, 2)), (0, (0,))],
)
def test_few_bytes_are_written_by_few_ranks_and_many_by_all_nodes(plan, num_bytes, ranks):
    assert plan(num_bytes, 8) == ranks


def test_nodes_that_do_not_see_the_directory_write_nothing(plan, tmp_path, monkeypatch):
    assert plan(10**6, 4, None) == plan(10**6, 4, tmp_path / "missing") == (0, 1)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert plan(10**6, 4) == (0, 1)
