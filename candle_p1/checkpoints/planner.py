"""Which ranks write which shards: those of rank 0's node, or of all nodes if the state is large."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from candle_p1.checkpoints import arrays
from candle_p1.checkpoints.arrays import ArraySpec, Rows, ShardLayout, divide
from candle_p1.distributed.comm import Communicator

LARGE_BYTES = 1 << 30
"""A state of more bytes is written by the ranks of all nodes."""
APPEAR_S = 3.0
"""How long a network file system may take to show on one node what another has created."""


@dataclass(frozen=True)
class ShardPlan:
    """Who writes what of a state: the first of the ranks, which is rank 0, shard 0, and so on."""

    specs: Mapping[str, ArraySpec]
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        return sum(spec.num_bytes for spec in self.specs.values())

    @cached_property
    def shards(self) -> list[list[Rows]]:
        """The rows of every shard."""
        return divide(self.specs, len(self.ranks))

    def layout_of(self, rank: int) -> ShardLayout | None:
        """Returns the content of the file that a rank writes; None if it writes none."""
        if rank not in self.ranks:
            return None
        return ShardLayout(self.specs, self.shards[self.ranks.index(rank)])


class ShardPlanner:
    """Divides the work among ranks. Creating one is collective.

    The sign is a file that rank 0 has created in the directory of the checkpoints; nodes that see
    it and may write there can take part. None: the directory cannot be written now, so that nobody
    knows.
    """

    def __init__(self, comm: Communicator, sign: Path | None) -> None:
        self._of_node = [rank for rank, _ in comm.collect(comm.node == 0 or None)]
        self._of_all = self._of_node
        if comm.num_nodes > 1:
            sees = comm.local.broadcast(comm.local_rank == 0 and _sees(comm, sign))
            blind = {rank for rank, _ in comm.collect(None if sees else True)}  # few, if any
            self._of_all = [rank for rank in range(comm.size) if rank not in blind]

    def plan(self, specs: Mapping[str, ArraySpec]) -> ShardPlan:
        """Returns who writes what; the same on all ranks."""
        num_bytes = ShardPlan(specs, ()).num_bytes
        ranks = self._of_all if num_bytes > LARGE_BYTES else self._of_node
        num_shards = max(1, min(len(ranks), num_bytes // arrays.SMALL_BYTES))
        spread = tuple(ranks[shard * len(ranks) // num_shards] for shard in range(num_shards))
        return ShardPlan(specs, spread)


def _sees(comm: Communicator, sign: Path | None) -> bool:
    if comm.node == 0:
        return True
    return sign is not None and _appears(sign) and os.access(sign.parent, os.W_OK)


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + APPEAR_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
