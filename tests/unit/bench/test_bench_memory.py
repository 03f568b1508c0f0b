from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench.file_cache import cool, resident_share, warm
from candle_p1.bench.memory import MemorySampler, growth, peak_bytes, peak_of_sum_bytes
from candle_p1.bench.reads import ReadCounter
from candle_p1.errors import SetupError

MIB = 2**20
SAMPLES = st.lists(
    st.tuples(st.floats(0, 100), st.integers(0, 10**12)), min_size=1, max_size=20
).map(sorted)


def test_growth_is_relative_to_the_first_sample():
    assert growth([(1.0, 100), (2.0, 150), (3.0, 90)]) == [(1.0, 0), (2.0, 50), (3.0, -10)]


def test_peaks_at_different_times_do_not_add_up():
    first = [(0.0, 0), (1.0, 100), (2.0, 10)]
    second = [(0.5, 0), (2.5, 70), (3.0, 5)]
    assert peak_of_sum_bytes([first, second]) == 100
    assert peak_of_sum_bytes([first, [(0.5, 0), (1.5, 70)]]) == 170


@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_the_peak_of_the_sum_lies_between_the_largest_peak_and_their_sum(samples_of_ranks):
    peaks = [peak_bytes(samples) for samples in samples_of_ranks]
    assert max(peaks) <= peak_of_sum_bytes(samples_of_ranks) <= sum(peaks)


@given(SAMPLES, st.integers(1, 4))
def test_ranks_with_the_same_samples_add_up(samples, num_ranks):
    ends = dict(samples)  # one sample at a time
    alike = [list(ends.items())] * num_ranks
    assert peak_of_sum_bytes(alike) == num_ranks * peak_bytes(alike[0])


def test_the_sampler_counts_allocated_memory_and_not_mapped_files(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(64 * MIB))
    with MemorySampler() as sampler, file.open("rb") as opened:
        held = np.ones(32 * MIB, np.uint8)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[::4096]) == 0
            samples = sampler.stop()
    assert held.all()
    assert 30 * MIB < growth(samples)[-1][1] < 40 * MIB
    assert samples == sorted(samples)


def test_reads_are_counted_exactly(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(3 * MIB + 17))
    counter = ReadCounter()
    with file.open("rb", buffering=0) as opened:
        while opened.read(MIB):
            pass
    assert counter.count().bytes_read == 3 * MIB + 17
    assert counter.count().storage_bytes_read >= 0


def test_mapped_files_are_not_counted_as_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(MIB))
    with file.open("rb") as opened:
        counter = ReadCounter()
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[::4096]) == 0
    assert counter.count().bytes_read == 0


def test_a_file_that_has_been_read_is_in_the_file_cache(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(MIB + 5))
    warm([file])
    assert resident_share(file) == 1
    (tmp_path / "empty").touch()
    assert resident_share(tmp_path / "empty") == 0


def test_a_file_that_stays_in_the_cache_is_not_cold(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(MIB))
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sum(mapped[::4096]) == 0  # mapped pages are not dropped
        with pytest.raises(SetupError, match="100%"):
            cool([file])
