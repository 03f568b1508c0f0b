"""How far this rank has come, as numbers in memory that other threads and processes may read.

The watchdog compares them between ranks: the one that the others wait for is behind.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_WAITING, FOR_ALL, FOR_SOME, FOR_DISK = range(4)


class ProgressCounters(NamedTuple):
    """How far a rank has come.

    Attributes:
        steps: The training steps that it has begun.
        collectives: The collectives of all ranks that it has begun.
        waiting: FOR_ALL within one of these, FOR_SOME while it waits for some ranks only, FOR_DISK
            while it waits for its disk, NOT_WAITING elsewhere.
    """

    steps: int = 0
    collectives: int = 0
    waiting: int = NOT_WAITING

    @property
    def position(self) -> int:
        """How many collectives of all ranks it has begun and left, together."""
        return 2 * self.collectives - (self.waiting == FOR_ALL)


STEPS, COLLECTIVES, WAITING = range(3)
NUM_BYTES = 8 * len(ProgressCounters._fields)


def _make_numbers() -> memoryview:
    return memoryview(bytearray(NUM_BYTES)).cast("q")


_numbers = _make_numbers()


def use(memory: memoryview) -> None:
    """Counts in some memory from now on, from zero: int64, shape (3,).

    All ranks call it between the same collectives.
    """
    global _numbers
    for number in range(len(memory)):
        memory[number] = 0
    _numbers = memory


def stop() -> None:
    """Counts in memory that nobody reads."""
    global _numbers
    _numbers = _make_numbers()


def count_steps(num: int) -> None:
    """Counts training steps that begin."""
    _numbers[STEPS] += num


@contextmanager
def waiting(for_whom: int) -> Iterator[None]:
    """Marks that this rank waits, in the body, for all ranks, for some, or for its disk."""
    numbers = _numbers
    if for_whom == FOR_ALL:
        numbers[COLLECTIVES] += 1
    numbers[WAITING] = for_whom
    try:
        yield
    finally:
        numbers[WAITING] = NOT_WAITING
