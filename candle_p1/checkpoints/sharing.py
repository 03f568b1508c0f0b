"""Which ranks write: those of rank 0's node, or of all nodes, whichever is faster."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from candle_p1.checkpoints.layout import SMALL_BYTES, ArraySpec, PartLayout, Piece, share_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from candle_p1.distributed.comm import Communicator

APPEAR_S = 3.0
"""How long a network file system may take to show on one node what another has created."""


@dataclass(frozen=True)
class WritePlan:
    """Who writes what of a state, while neither the arrays nor the writers change.

    Attributes:
        specs: The type and the shape of every array.
        mode: "node" or "all".
        ranks: The ranks that write; the first, which is rank 0, writes part 0, and so on.
    """

    specs: Mapping[str, ArraySpec]
    mode: str
    ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of all arrays."""
        return sum(spec.num_bytes for spec in self.specs.values())

    @cached_property
    def parts(self) -> list[list[Piece]]:
        """The pieces of every part."""
        return share_arrays(self.specs, len(self.ranks))

    def part_of(self, rank: int) -> int | None:
        """Returns the number of the part that a rank writes; None if it writes none."""
        return self.ranks.index(rank) if rank in self.ranks else None

    def layout(self, part: int) -> PartLayout:
        """Returns the content of a part's file."""
        return PartLayout(self.specs, self.parts[part])


class Sharing:
    """Divides the work among ranks. Creating one is collective.

    With "auto", the ranks of rank 0's node and those of all nodes each write once, and those that
    were faster write from then on. If they fail, the others write, until those fail as well.

    Args:
        comm: The communicator.
        sign: A file that rank 0 has created in the directory of the checkpoints; the nodes that see
            it can write there. None: the directory cannot be written now, so that nobody knows.
        writers: "auto", "node" or "all".
        say: Receives a sentence if a node does not see the directory; called on rank 0.
    """

    def __init__(
        self, comm: Communicator, sign: Path | None, writers: str, say: Callable[[str], None]
    ) -> None:
        self._ranks = {"node": [rank for rank, _ in comm.collect(comm.node == 0 or None)]}
        self._modes = [writers]
        if comm.num_nodes == 1 or writers == "node":
            self._modes = ["node"]
        else:
            sees = comm.local.broadcast(comm.local_rank == 0 and _sees(comm, sign))
            blind = {rank for rank, _ in comm.collect(None if sees else True)}
            self._ranks["all"] = [rank for rank in range(comm.size) if rank not in blind]
            if writers == "auto":
                self._modes = ["node"] if blind else ["node", "all"]
            elif blind and sign is not None and comm.rank == 0:
                say(
                    f"{len(blind)} ranks do not see {sign.parent}, which is on another node, and"
                    " write no checkpoints"
                )
        self._bytes_per_s: dict[str, float] = {}
        self._failed: frozenset[str] = frozenset()  # never all modes

    @property
    def first(self) -> str:
        """Who writes the first checkpoint, "node" or "all"."""
        return self._modes[0]

    def choose(self) -> str:
        """Returns who writes the next checkpoint, "node" or "all"; for rank 0."""
        failed = self._failed
        return max(
            (mode for mode in self._modes if mode not in failed),
            key=lambda mode: self._bytes_per_s.get(mode, math.inf),  # each is tried
        )

    def measured(self, mode: str, bytes_per_s: float) -> None:
        """Tells how fast a checkpoint was written; for rank 0."""
        self._bytes_per_s[mode] = max(bytes_per_s, self._bytes_per_s.get(mode, 0.0))

    def failed(self, mode: str) -> None:
        """Tells that a checkpoint could not be written; for rank 0.

        Once every mode has failed, the cause is something else, and none is avoided any longer.
        """
        failed = self._failed | {mode}
        self._failed = frozenset() if failed.issuperset(self._modes) else failed

    def plan(self, specs: Mapping[str, ArraySpec], mode: str) -> WritePlan:
        """Returns who writes what; the same on all ranks."""
        num_bytes = sum(spec.num_bytes for spec in specs.values())
        ranks = self._ranks[mode]
        num_parts = max(1, min(len(ranks), num_bytes // SMALL_BYTES))
        spread = tuple(ranks[part * len(ranks) // num_parts] for part in range(num_parts))
        return WritePlan(specs, mode, spread)


def _sees(comm: Communicator, sign: Path | None) -> bool:
    return comm.node == 0 or (sign is not None and _appears(sign))


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + APPEAR_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
