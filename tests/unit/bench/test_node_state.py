import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.bench import node_state
from candle_p1.bench.node_state import MemorySampler, prepare_files, resident_share
from candle_p1.errors import SetupError

MIB = 2**20
SAMPLES = st.dictionaries(st.floats(0, 100), st.integers(0, 10**12), min_size=1, max_size=20).map(
    lambda samples: sorted(samples.items())
)


@given(st.lists(SAMPLES, min_size=1, max_size=4))
def test_the_peak_of_the_sum_lies_between_the_largest_peak_and_their_sum(samples_of_ranks):
    peaks = [max(num_bytes for _, num_bytes in samples) for samples in samples_of_ranks]
    assert max(peaks) <= node_state.peak_of_sum_bytes(samples_of_ranks) <= sum(peaks)
    assert node_state.peak_of_sum_bytes(samples_of_ranks[:1] * 3) == 3 * peaks[0]


def test_the_sampler_counts_allocated_memory_and_not_mapped_files(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(64 * MIB))
    sampler = MemorySampler()
    with file.open("rb") as opened:
        held = np.ones(32 * MIB, np.uint8)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert sum(mapped[::4096]) == 0
            samples = sampler.stop()
    assert held.all()
    assert 30 * MIB < samples[-1][1] - samples[0][1] < 40 * MIB
    assert samples == sorted(samples)


def test_a_file_that_has_been_read_is_in_the_file_cache(tmp_path):
    file, empty = tmp_path / "file", tmp_path / "empty"
    file.write_bytes(bytes(MIB + 5))
    empty.touch()
    prepare_files("warm", [file, empty])
    assert (resident_share(file), resident_share(empty)) == (1, 0)
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert sum(mapped[::4096]) == 0  # mapped pages are not dropped
        with pytest.raises(SetupError, match="100%"):
            prepare_files("cold", [file])
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        prepare_files("warm", [tmp_path])
