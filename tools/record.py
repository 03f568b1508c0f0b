"""How large a run's record is at many ranks, and how long writing, reading and reporting it take.

``make bench-record``. The record is that of a simulated run (tools.simulated_run).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from statistics import median

import click

from candle_p1.records.record import (
    PER_RANK_NAME,
    RECORD_NAME,
    read_per_rank,
    read_record,
    write_record,
)
from tools.scale import count_traffic

RANKS_PER_NODE = 6
NUM_REPEATS = 3
REPORT = [sys.executable, "-m", "candle_p1.cli", "report", "-o"]


@click.command()
@click.option("--ranks", type=click.IntRange(1, 8192), default=384)
def main(ranks: int) -> None:
    """Measure the size of a record of many ranks, and the time to write, read and report it."""
    with tempfile.TemporaryDirectory(prefix="candle-p1-record-") as name:
        directory = Path(name)
        count_traffic(ranks, RANKS_PER_NODE, directory)
        (path,) = directory.glob(f"output/**/{RECORD_NAME}")
        click.echo(f"the record of {ranks:,} ranks, with 6 GPUs on each node")
        for each in (path, path.with_name(PER_RANK_NAME)):
            click.echo(f"{each.name}: {each.stat().st_size / 2**20:.2f} MiB")
        record = read_record(path)
        timed = {
            "write": lambda: write_record(path, record),
            "read": lambda: read_record(path),
            "read raw values": lambda: read_per_rank(path, record),
            "report": lambda: subprocess.check_output([*REPORT, directory / "report", path]),
        }
        for what, work in timed.items():
            repeat = 1 if what == "report" else NUM_REPEATS
            seconds = timeit.repeat(work, number=1, repeat=repeat)
            click.echo(f"{what}: {median(seconds):.2f} s")


if __name__ == "__main__":
    main()
