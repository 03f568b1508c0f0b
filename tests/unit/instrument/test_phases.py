import itertools
import math
import mmap
import subprocess
import sys
import time

import pytest

from candle_p1.instrument.phases import (
    Phase,
    PhaseTimer,
    Usage,
    active,
    add_communication,
    memory_bytes,
    process_age_s,
    region,
)
from candle_p1.instrument.phases import summarize_phases as summarize


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


def test_what_the_kernel_does_not_count_is_left_out():
    unknown = Usage(1.0, 0, 0, 0, 0, math.nan)
    summary = summarize([{("load",): Phase(0.0, 1.0, 0.0, unknown.since(unknown), 100)}], [0.0])
    assert summary["load"].usage.read is None
    assert summary["load"].usage.pss is None


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
