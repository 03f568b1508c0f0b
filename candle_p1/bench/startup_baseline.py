"""The least that a run has to do before it trains: imports a framework and reads bytes.

This is a program of its own and imports nothing of this package, so that its time is theirs alone.

Usage: python startup_baseline.py FRAMEWORK OUTCOME NUM_PROCESSES FILE ... PROCESS
where OUTCOME is the beginning of the names of the files into which each process, numbered from 0,
writes when it began, had imported, and had read its share of each file, in s since 1970.
"""

from __future__ import annotations

import time

BEGAN_S = time.time()

import importlib  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

BLOCK_BYTES = 1 << 22


def read_share(path: str, share: int, num_shares: int) -> int:
    """Reads one of several equal shares of a file; returns its number of bytes."""
    num_bytes = os.path.getsize(path)  # noqa: PTH202
    begin, end = (num_bytes * each // num_shares for each in (share, share + 1))
    block, first = memoryview(bytearray(BLOCK_BYTES)), begin
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        file.seek(begin)
        while begin < end and (num_read := file.readinto(block[: end - begin])):
            begin += num_read
    return begin - first


def main(argv: list[str]) -> None:
    """Imports, reads, and writes when that was done."""
    framework, outcome, num_processes, *paths, process = argv
    importlib.import_module(framework)
    imported_s = time.time()
    for path in paths:
        read_share(path, int(process), int(num_processes))
    with open(f"{outcome}.{process}", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(f"{BEGAN_S!r} {imported_s!r} {time.time()!r}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
