from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.reports.timeline.intervals import RunningUnion

LAST_US = 60
intervals = st.lists(
    st.tuples(st.integers(0, LAST_US), st.integers(0, LAST_US)).map(sorted).map(tuple), max_size=12
)


@given(intervals)
def test_a_running_union_has_the_length_of_a_bitmap(several):
    covered = np.zeros(LAST_US, dtype=bool)
    union = RunningUnion()
    marks = [mark for begin, end in several for mark in ((begin, False), (end, True))]
    for us, is_end in sorted(marks, key=lambda mark: mark[0]):
        union.end(us) if is_end else union.begin(us)
    for begin, end in several:
        covered[begin:end] = True
    assert union.total_us == covered.sum()
    assert union.num_intervals == len(several)
    assert union.num_open == 0
    if several:
        assert union.first_us == min(begin for begin, _ in several)
        assert union.last_us == max(end for _, end in several)


def test_open_intervals_end_with_the_timeline():
    union = RunningUnion()
    union.begin(3)
    union.begin(5)
    union.end(6)
    assert union.total_us == 0
    union.end_all(10)
    union.end(12)  # nothing is open
    assert (union.total_us, union.last_us, union.num_open) == (7, 10, 0)
