import subprocess
import sys
import time

import pytest

from candle_p1.instrument.usage import memory_bytes, process_age_s

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
        "import time; from candle_p1.instrument.usage import process_age_s;"
        " print(process_age_s(time.perf_counter()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert 0 < float(done.stdout) < process_age_s(time.perf_counter())
