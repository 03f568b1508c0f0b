"""What MPI need not look for when it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from candle_p1.distributed.launch_environment import LaunchedRank

VARIABLE = "OMPI_MCA_btl"
"""Names what Open MPI may send messages through."""
WITHOUT_OFI = "^ofi"
"""All but libfabric, whose search for network cards takes Open MPI 5 a second."""


def prepare(rank: LaunchedRank, environ: MutableMapping[str, str]) -> None:
    """Tells Open MPI before it starts what ranks of one node do without.

    They exchange messages through memory. What the user has chosen, by this variable or by an
    option of mpirun, holds. Other libraries take no notice.

    Args:
        rank: This process's place among those that the launcher started.
        environ: The environment.
    """
    if rank.size is not None and rank.size == rank.local_size:
        environ.setdefault(VARIABLE, WITHOUT_OFI)
