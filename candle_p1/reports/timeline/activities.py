"""What the names of a timeline's events mean.

For every tensor Horovod logs the negotiation (from the first rank that is ready to the last), then
the operation itself (from the end of the negotiation), and within the operation its activities, one
after the other::

    NEGOTIATE_ALLREDUCE
    ALLREDUCE
      QUEUE                      waiting for the accelerator's stream
      MEMCPY_IN_FUSION_BUFFER
      NCCL_ALLREDUCE             performed by a communication library
      MEMCPY_OUT_FUSION_BUFFER
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

OPERATIONS = {
    "ALLREDUCE": "allreduce",
    "ADASUM": "allreduce",
    "ALLGATHER": "allgather",
    "BROADCAST": "broadcast",
    "ALLTOALL": "alltoall",
    "REDUCESCATTER": "reducescatter",
    "JOIN": "join",
    "BARRIER": "barrier",
}
LIBRARIES = ("NCCL", "MPI", "GLOO", "CCL", "DDL")
LIBRARY_OPERATIONS = OPERATIONS | {"BCAST": "broadcast", "REDUCE": "reduce"}
"""By the last word of the name: NCCL_BCAST, MPI_CROSS_ALLGATHER."""

NEGOTIATE = "negotiate"
TRANSFER = "transfer"
KINDS_BY_WORD = {
    "QUEUE": "queue",
    "WAIT": "wait",
    "MEMCPY": "memcpy",
    "COPY": "memcpy",
    "INIT": "setup",
    "ALLOCATE": "setup",
}
"""By the first word of the name: WAIT_FOR_DATA, INIT_NCCL."""


class Activity(NamedTuple):
    """The meaning of an event's name.

    Attributes:
        name: As in the file.
        kind: "negotiate"; the operation ("allreduce", "broadcast", ...), which lasts from the end
            of its negotiation; or, within an operation, "queue", "wait" (for a tensor's data),
            "memcpy", "setup" (of buffers and communicators), "transfer" (by a library) or "other".
        operation: The operation that is negotiated or performed; else None.
        library: The communication library that performs it; else None.
    """

    name: str
    kind: str
    operation: str | None = None
    library: str | None = None


@cache
def classify(name: str) -> Activity:
    """Returns the meaning of an event's name; an unknown name is of kind "other"."""
    if name in OPERATIONS:
        return Activity(name, OPERATIONS[name], OPERATIONS[name])
    first, _, rest = name.partition("_")
    if first == "NEGOTIATE":
        return Activity(name, NEGOTIATE, OPERATIONS.get(rest, rest.lower()))
    operation = LIBRARY_OPERATIONS.get(name.rpartition("_")[2])
    if first in LIBRARIES and operation:
        return Activity(name, TRANSFER, operation, first)
    return Activity(name, KINDS_BY_WORD.get(first, "other"))
