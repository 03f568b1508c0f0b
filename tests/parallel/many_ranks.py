"""Two recorded, watched runs of many ranks, without TensorFlow; the second one does not end.

Every rank leaves the files of tests/cluster/watched_run.py; rank 0 leaves shared_bytes, the memory
that the matrices in memory shared between ranks take up, over all ranks.
"""

import os
import re
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

import watched_run

from candle_p1 import train
from candle_p1.benchmark import find_benchmark


def shared_bytes():
    """Returns the proportional size of what this process has mapped of the job's shared memory."""
    sizes = re.findall(
        r"^[0-9a-f]+-[0-9a-f]+ .*candle_p1-.*\n(?:\S+: .*\n)*?Pss: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        re.MULTILINE,
    )
    return 1024 * sum(map(int, sizes))


def look(run):
    run.comm.barrier()
    total = run.comm.allreduce_sum(np.array([shared_bytes()]))
    run.comm.barrier()
    if run.comm.rank == 0:
        watched_run.leave_file("shared_bytes", str(total[0]))


def run_twice(benchmark, params, comm):
    os.environ["STEPS"] = "2"
    watched_run.run_without_network(benchmark, params, comm, look)
    Path(f"rank{comm.rank}.phase").unlink()
    os.environ["STEPS"] = "1000000"
    watched_run.run_without_network(benchmark, params, comm)


train._run = run_twice
train.main(find_benchmark("nt3"))
