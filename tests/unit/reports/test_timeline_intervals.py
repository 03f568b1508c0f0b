from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.reports.timeline.intervals import (
    Overlap,
    RunningUnion,
    merge,
    subtract,
    total_us,
)

LAST_US = 60
intervals = st.lists(
    st.tuples(st.integers(0, LAST_US), st.integers(0, LAST_US)).map(sorted).map(tuple), max_size=12
)


def bitmap(several):
    """The same read plainly: whether each µs is covered."""
    covered = np.zeros(LAST_US, dtype=bool)
    for begin, end in several:
        covered[begin:end] = True
    return covered


def disjoint(several):
    return all(a[1] < b[0] for a, b in itertools.pairwise(several))


def running(several):
    """Feeds intervals as a timeline does: begins and ends in the order of time."""
    marks = [mark for begin, end in several for mark in ((begin, False), (end, True))]
    pieces = []
    union = RunningUnion(lambda begin, end: pieces.append((begin, end)))
    for us, is_end in sorted(marks, key=lambda mark: mark[0]):
        union.end(us) if is_end else union.begin(us)
    return union, pieces


@given(intervals)
def test_a_running_union_is_the_bitmap(several):
    union, pieces = running(several)
    assert union.total_us == bitmap(several).sum()
    assert np.array_equal(bitmap(pieces), bitmap(several))
    assert union.num_intervals == len(several)
    assert union.num_open == 0
    if several:
        assert union.first_us == min(begin for begin, _ in several)
        assert union.last_us == max(end for _, end in several)


@given(intervals)
def test_merge_is_the_bitmap(several):
    merged = merge(several)
    assert np.array_equal(bitmap(merged), bitmap(several))
    assert disjoint(merged)
    assert total_us(merged) == bitmap(several).sum()


@given(intervals, intervals)
def test_subtract_is_the_bitmap(several, others):
    left = subtract(several, others)
    assert np.array_equal(bitmap(left), bitmap(several) & ~bitmap(others))
    assert left == merge(left)


@given(intervals, intervals)
def test_overlap_is_the_bitmap(several, others):
    overlap = Overlap(others)
    for begin, end in running(several)[1]:
        overlap.add(begin, end)
    assert overlap.total_us == (bitmap(several) & bitmap(others)).sum()


def test_what_is_open_ends_with_the_timeline():
    union = RunningUnion()
    union.begin(3)
    union.begin(5)
    union.end(6)
    assert union.total_us == 0
    union.end_all(10)
    union.end(12)  # nothing is open
    assert (union.total_us, union.last_us, union.num_open) == (7, 10, 0)
