"""Errors that a rank may have only because another rank has ended.

They come from libraries, whose types are not imported here, so they are known by their text. One
that is mistaken for a consequence costs a moment, in which the watchdog looks for a cause.
"""

from __future__ import annotations

HOROVOD_SHUTDOWN = "Horovod has been shut down"
"""The error of Horovod's operations after a stall, and after another rank has died."""
NOT_COME = "has not come to average its gradients"
"""The error of averages in shared memory after a stall."""
SIGNS = (
    HOROVOD_SHUTDOWN,
    NOT_COME,
    "HorovodInternalError",
    "Connection reset by peer",  # Gloo (Horovod's and JAX's), UCX, libfabric, gRPC
    "Connection closed by peer",
    "Connection refused",  # one that had to be made anew
    "Broken pipe",
    "Socket closed",  # gRPC, Open MPI
    "Gloo ",  # "Gloo all-reduce failed"; also if it has waited too long
    "coordination service",  # JAX's
    "JAX distributed service",
    "MPI_ERR_PROC_",  # failed, aborted
    "MPI_ERR_REVOKED",
    "MPI_ERR_OTHER",  # what most MPI libraries say of a lost connection
    "NCCL",  # "unhandled system error", "remote process exited or there was a network error"
)
"""Parts of their messages, whatever the case of the letters."""


def may_have_lost_peer(message: str) -> bool:
    """Whether an error may be the consequence of another rank's end.

    Args:
        message: Its message, after the name of its class.
    """
    text = message.lower()
    return any(sign.lower() in text for sign in SIGNS)


def has_stalled(message: str) -> bool:
    """Whether an error may be that of a collective which has waited for too long."""
    return HOROVOD_SHUTDOWN in message or NOT_COME in message
