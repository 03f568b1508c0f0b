import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.instrument import reading
from candle_p1.instrument.phases import length, union
from candle_p1.instrument.reading import NUM_INTERVALS, Read, ReadLog, summarize_reading


def logged(*reads):
    return ReadLog(0.0, [Read(*read) for read in reads]).since_zero()


def test_reads_are_logged_from_any_thread_and_only_into_its_log():
    log, other = ReadLog(), ReadLog()

    def read(into):
        with into.noted(20):
            pass

    def be_another_rank():
        with reading.active(other):
            read(reading.current())

    with reading.active(log):
        threads = [threading.Thread(target=read, args=[reading.current()]) for _ in range(3)]
        threads.append(threading.Thread(target=be_another_rank))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(ZeroDivisionError), reading.current().noted(7):
            raise ZeroDivisionError
    read(reading.current())
    assert [each.num_bytes for each in log.reads] == [20] * 3
    assert len(other.reads) == 1
    assert all(each.begin_s <= each.end_s for each in log.reads)
    assert len(log.since_zero()) == 0, "without a common moment"


def test_ranks_that_read_at_the_same_time():
    facts = summarize_reading([logged((0, 4, 400)), logged((2, 4, 100)), logged()], zero_s=10)
    assert facts.begin.values == pytest.approx([10, 12, np.nan], nan_ok=True)
    assert facts.end.values == pytest.approx([14, 14, np.nan], nan_ok=True)
    assert facts.busy.values.tolist() == [4, 2, 0]
    assert facts.read.values.tolist() == [400, 100, 0]
    assert facts.union_s == 4
    assert facts.mean_ranks == pytest.approx(1.5)
    assert facts.interval_s == pytest.approx(4 / NUM_INTERVALS)
    half = NUM_INTERVALS // 2
    assert facts.num_ranks == pytest.approx([1] * half + [2] * half)
    assert facts.bytes_per_s == pytest.approx([100] * half + [150] * half)


TIMES = st.floats(0, 1000).map(lambda time_s: round(time_s, 6))


@given(st.lists(st.lists(st.tuples(TIMES, TIMES, st.integers(0, 10**9)), max_size=8), max_size=5))
def test_any_reads_are_summarized_consistently(of_ranks):
    ranks = [[(min(a, b), max(a, b), size) for a, b, size in reads] for reads in of_ranks]
    facts = summarize_reading([logged(*reads) for reads in ranks], zero_s=0)
    if facts is None:
        assert not any(ranks)
        return
    assert facts.read.values.sum() == sum(size for reads in ranks for *_, size in reads)
    assert 0 <= facts.union_s <= facts.end.max_s - facts.begin.min_s + 1e-6
    assert facts.busy.max_s <= facts.union_s + 1e-6
    assert 0 <= facts.mean_ranks <= len(ranks) + 1e-6
    busy_s = sum(facts.num_ranks) * facts.interval_s
    assert busy_s == pytest.approx(facts.busy.values.sum(), rel=1e-6, abs=1e-6)
    if facts.interval_s:
        lasting = sum(size for reads in ranks for a, b, size in reads if b > a)
        num_bytes = sum(facts.bytes_per_s) * facts.interval_s
        assert num_bytes == pytest.approx(lasting, rel=1e-3, abs=1)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-3, 12)), max_size=15))
def test_the_union_of_intervals_counts_every_second_once(intervals):
    spans = np.array([(begin, begin + lasting) for begin, lasting in intervals], float)
    pieces = union(spans.reshape(-1, 2))
    covered = {s for begin, lasting in intervals for s in range(begin, begin + lasting)}
    assert length(pieces) == len(covered)
    assert (pieces[1:, 0] > pieces[:-1, 1]).all()
