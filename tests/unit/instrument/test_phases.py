import itertools
import math
import mmap
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.instrument import collectives, reading
from candle_p1.instrument.collectives import (
    CommunicationLog,
    collective,
    note_collective,
    summarize_communication,
)
from candle_p1.instrument.epochs import Epoch, summarize_epoch
from candle_p1.instrument.phases import (
    Phase,
    PhaseTimer,
    Usage,
    active,
    add_communication,
    length,
    memory_bytes,
    process_age_s,
    region,
    union,
)
from candle_p1.instrument.phases import active as timer_active
from candle_p1.instrument.phases import summarize_phases as summarize
from candle_p1.instrument.reading import NUM_INTERVALS, Read, ReadLog, summarize_reading


def test_phases_nest_and_add_up_and_the_first_may_begin_before_the_timer():
    entered = []
    phases = PhaseTimer(entered.append, itertools.count().__next__, begin=-3)
    with phases("broadcast"):  # -3 to 4
        with phases("wait"):
            pass
        with phases("transfer"):
            pass
    for _ in range(2):
        with phases("train"):
            pass
    assert {path: phase.seconds for path, phase in phases.phases.items()} == {
        ("broadcast", "wait"): 1,
        ("broadcast", "transfer"): 1,
        ("broadcast",): 7,
        ("train",): 2,
    }
    assert entered[:2] == [("broadcast",), ("broadcast", "wait")]
    assert phases.intervals() == [("broadcast", -3, 4), ("train", 5, 7)]


def test_the_phase_in_which_an_error_occurs_is_known_and_timed():
    phases = PhaseTimer()
    with pytest.raises(ValueError, match="x"), phases("load"), phases("parse"):
        raise ValueError("x")
    assert phases.failed_in == ("load", "parse")
    with phases("report"):
        pass
    assert set(phases.phases) == {("load",), ("load", "parse"), ("report",)}


def test_code_without_a_timer_uses_the_active_one():
    phases = PhaseTimer(clock=itertools.count().__next__)
    with region("lost"):
        add_communication(100.0)
    with active(phases), phases("load"):
        with region("read"):
            add_communication(0.5)
        with region("parse"):
            pass
        with region("read"):
            pass
        add_communication(0.25)
    with region("lost"):
        pass
    assert set(phases.phases) == {("load",), ("load", "read"), ("load", "parse")}
    read = phases.phases["load", "read"]
    assert (read.seconds, read.communication_s, read.usage) == (2, 0.5, None)
    assert phases.phases["load",].communication_s == 0.75


def test_a_phase_measures_what_it_uses(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    phases = PhaseTimer()
    num_bytes = 64 << 20
    with phases("first"):
        with phases("large"):
            memory = mmap.mmap(-1, num_bytes)
            memory.write(b"x" * num_bytes)
            del memory
            with phases("small"):
                pass
        (tmp_path / "file").read_bytes()
        sum(range(1_000_000))
    with phases("second"):
        pass
    first, second = phases.phases["first",], phases.phases["second",]
    assert first.usage.read_bytes >= 3_000_000 > second.usage.read_bytes
    assert first.usage.cpu_s > second.usage.cpu_s
    assert first.usage.num_minor_faults >= num_bytes / mmap.PAGESIZE > second.usage.num_minor_faults
    # The peak of a phase includes those of its parts, but not those of earlier phases.
    large = phases.phases["first", "large"]
    assert first.peak_rss_bytes >= large.peak_rss_bytes > second.peak_rss_bytes + num_bytes / 2
    assert phases.peak_rss_bytes == first.peak_rss_bytes
    assert 0 < second.pss_bytes <= second.peak_rss_bytes
    assert large.pss_bytes is None


def test_the_summary_has_the_values_of_all_ranks_in_order_of_time():
    used = Usage(1.5, 1, 2, 3, 4, 5)
    first = {
        ("load", "read"): Phase(10.25, 0.5),
        ("load",): Phase(10.0, 1.0, 0.25, used, 100, 50),
        ("broadcast", "wait"): Phase(11.0, 3.0),
        ("broadcast",): Phase(11.0, 3.5, 0.0, used, 100, 50),
    }
    second = {
        ("load",): Phase(20.0, 4.0, 0.0, used._replace(cpu_s=0.5), 300, 40),
        ("broadcast",): Phase(24.0, 0.5, 0.0, used, 300, 40),
    }
    summary = summarize([first, second], [10.0, 19.0])
    assert list(summary) == ["load", "broadcast"]
    load, broadcast = summary.values()
    assert load.values.tolist() == [1.0, 4.0]
    assert load.begin.values.tolist() == [0.0, 1.0]
    assert load.communication.values.tolist() == [0.25, 0.0]
    assert load.usage.cpu.values.tolist() == [1.5, 0.5]
    assert load.usage.peak_rss.max_bytes == 300
    assert (load.usage.pss.mean_bytes, load.usage.read.max_bytes) == (45, 5)
    assert load.regions["read"].values.tolist() == [0.5, 0.0]
    assert load.regions["read"].begin.values == pytest.approx([0.25, float("nan")], nan_ok=True)
    assert load.regions["read"].usage is None
    assert broadcast.regions["wait"].max_s == 3.0
    assert broadcast.communication is None

    unknown = used._replace(read_bytes=math.nan)
    summary = summarize([{("load",): Phase(0.0, 1.0, 0.0, unknown.since(unknown), 100)}], [0.0])
    assert summary["load"].usage.read is summary["load"].usage.pss is None


ROLLUP = """\
00400000-7ffe40f52000 ---p 00000000 00:00 0                          [rollup]
Rss:                1708 kB
Pss:                 328 kB
Pss_Anon:            112 kB
Pss_File:            206 kB
Pss_Shmem:            10 kB
"""


def test_the_file_cache_is_not_counted_as_memory_where_the_kernel_tells_it_apart():
    assert memory_bytes(ROLLUP) == 122 * 1024
    old = "".join(line for line in ROLLUP.splitlines(True) if not line.startswith("Pss_"))
    assert memory_bytes(old) == 328 * 1024


def test_the_age_of_a_process_counts_from_its_own_start():
    now_s = time.perf_counter()
    assert process_age_s(now_s - 1) == pytest.approx(max(process_age_s(now_s) - 1, 0), abs=0.05)
    program = (
        "import time; from candle_p1.instrument.phases import process_age_s;"
        " print(process_age_s(time.perf_counter()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert 0 < float(done.stdout) < process_age_s(time.perf_counter())


def test_calls_are_added_up_by_name_and_by_size():
    one, other = CommunicationLog(), CommunicationLog()
    one.add("mpi", "barrier", 0, 0.5)
    one.add("horovod", "allreduce a", 1024, 2.0, num_calls=4)
    one.add("horovod", "allreduce b", 2047, 1.0)
    other.add("horovod", "allreduce a", 1024, 6.0, num_calls=4)
    facts = summarize_communication([one, other])
    named = {each.name: each for each in facts.collectives}
    assert list(named) == ["barrier", "allreduce a", "allreduce b"]
    first = named["allreduce a"]
    assert (first.num_calls, first.num_bytes) == (8, 8192)
    assert first.time.values.tolist() == [2.0, 6.0]
    (sizes,) = facts.message_sizes  # a barrier carries nothing
    assert (sizes.from_bytes, sizes.below_bytes, sizes.num_calls) == (1024, 2048, 9)
    assert sizes.bytes_per_s == pytest.approx((8 * 1024 + 2047) / 9.0)


def test_a_collective_is_added_to_log_and_phase_even_if_it_fails():
    log, timer = CommunicationLog(), PhaseTimer()
    with collective("mpi", "unheard", lambda: pytest.fail("nobody asked")):
        pass
    with collectives.active(log), timer_active(timer), timer("load"):
        note_collective("horovod", "broadcast", 8, 0.25)
        with pytest.raises(ValueError, match="x"), collective("mpi", "broadcast", lambda: 3):
            raise ValueError("x")
    assert log.by_name["mpi", "broadcast"].num_bytes == 3
    waited_s = log.by_name["mpi", "broadcast"].seconds
    assert timer.phases["load",].communication_s == pytest.approx(0.25 + waited_s)


def test_an_epoch_separates_its_first_step_and_shows_a_slow_rank():
    fast = Epoch(1.0, 1.0, [0.4, 0.1, 0.2, 0.3], exposed_s=0.36, allreduce_s=0.4)
    slow = Epoch(1.0, 1.0, [0.5, 0.2, 0.2, 0.1], exposed_s=0.2, allreduce_s=0.3)
    ranks = [replace(each, first_step=0).summarize() for each in (fast, slow)]
    facts = summarize_epoch(1, ranks, {})
    assert facts.steps.num == 4
    assert facts.steps.first.values.tolist() == [0.4, 0.5]
    assert facts.steps.median.values.tolist() == pytest.approx([0.2, 0.2])
    assert facts.efficiency.load_balance == pytest.approx(0.9)
    assert facts.efficiency.communication_efficiency == pytest.approx(0.8)
    assert facts.efficiency.parallel_efficiency == pytest.approx(0.72)
    assert facts.hidden_share == pytest.approx(1 - 0.56 / 0.7)
    later = summarize_epoch(2, [fast.summarize(0.5), slow.summarize(0.75)], {})
    assert later.steps.first is None
    assert later.steps.median.values.tolist() == pytest.approx([0.25, 0.2])
    p99_s = np.percentile([fast.steps_s, slow.steps_s], 99, axis=1)
    assert later.steps.p99.values.tolist() == p99_s.tolist()
    assert later.validation.values.tolist() == [0.5, 0.75]


def test_an_epoch_of_two_segments_of_a_run_is_as_long_as_both():
    earlier = Epoch(7.0, 0.5, [0.2, 0.3], 0.1, 0.2)
    rest = Epoch(1.0, 1.2, [0.9, 0.1, 0.2], 0.2, None, 0)
    whole = rest.after(earlier)
    assert whole == Epoch(1.0, 1.7, [0.9, 0.1, 0.2], pytest.approx(0.3), None, 0, num_earlier=2)
    facts = summarize_epoch(3, [whole.summarize()], {}, segment=2)
    assert (facts.segment, facts.steps.num) == (2, 5)
    assert facts.steps.first.values.tolist() == [0.9]  # the first step of a process compiles
    assert facts.steps.median.values.tolist() == pytest.approx([0.15])  # of the later segment's


def test_what_is_not_measured_of_an_epoch_is_absent():
    facts = summarize_epoch(1, [Epoch(0.0, 1.0, [1.0], None, None, 0).summarize()], {})
    assert facts.model_fields_set == {"epoch", "metrics", "begin", "train", "steps"}
    assert facts.steps.model_fields_set == {"num", "first"}
    alone = summarize_epoch(2, [Epoch(0.0, 1.0, [0.5, 0.5]).summarize()], {})
    assert alone.efficiency.parallel_efficiency == 1.0
    assert alone.hidden_share is None


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
