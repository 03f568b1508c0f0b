"""Engines: what averages the gradients of several ranks, and with which framework.

`Engine` is the interface. An engine is one module of this package, which names its class ENGINE,
and one entry of `candle_p1.distributed.backend.ENGINES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from candle_p1.distributed.backend import AUTO, ENGINES, choose_backend, engine_of
from candle_p1.distributed.engines.serial import SerialEngine

if TYPE_CHECKING:
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.engines.engine import Engine

ENGINE_CHOICES = (AUTO, *ENGINES)


def make_engine(name: str, comm: Communicator) -> Engine:
    """Returns the engine with which a job trains; before Keras is imported.

    Args:
        name: One of ENGINE_CHOICES. "auto" takes the one that trains with Keras's backend, which
            `candle_p1.distributed.backend.choose_backend` chooses. A single rank needs no engine,
            but trains with the backend of the one that is named.
        comm: The ranks.

    Raises:
        SetupError: The engine trains with another backend than this process must use.
    """
    backend = choose_backend(name)
    if comm.size == 1:
        return SerialEngine(comm, backend)
    chosen = engine_of(backend) if name == AUTO else name
    engine: Engine = import_module(f"{__name__}.{chosen}").ENGINE(comm, backend)
    return engine
