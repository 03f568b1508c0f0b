"""What the ranks make sure of together before they train: the same parameters and the same data.

Each rank compares what it has with rank 0's, so that none receives what all others have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.errors import DistributedError

if TYPE_CHECKING:
    from candle_p1.data.reader import Reader
    from candle_p1.distributed.comm import Communicator
    from candle_p1.parameters.parameter_set import ParameterSet


def check_same_parameters(params: ParameterSet, comm: Communicator) -> None:
    """Checks that all ranks were given the same parameters; collective.

    Raises:
        DistributedError: They were not; the same on every rank.
    """
    first = comm.broadcast(dict(params))
    different = sorted(
        name
        for name in {*first, *params}
        if (name in first) != (name in params) or first[name] != params[name]
    )
    found = comm.first(different or None)
    if found:
        rank, names = found
        raise DistributedError(
            f"rank {rank} and rank 0 have different values of {', '.join(names)}: start all ranks"
            " with the same command and the same files"
        ).on_all_ranks()


def check_same_data(reader: Reader, comm: Communicator) -> None:
    """Checks that all ranks have read the same values from the same files; collective.

    Raises:
        DistributedError: They have not; the same on every rank.
    """
    different = comm.find_different((reader.digests, reader.sizes))
    if different:
        raise DistributedError(
            f"ranks {', '.join(map(str, different))} have read values that differ from rank 0's in"
            f" {', '.join(str(path) for path in reader.files.paths.values())}: some node has a"
            " different copy"
        ).on_all_ranks()
