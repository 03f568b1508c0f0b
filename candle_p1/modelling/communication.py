"""A measurement of communication, as ``candle-p1 bench comm --json`` writes it, for models.

Of the file, this reads ``fits``, a list with an entry for each transport and operation::

    {"transport": "horovod", "operation": "allreduce", "num_ranks": 4,
     "latency_s": 2.1e-5, "latency_ci95_s": [2.0e-5, 2.3e-5],
     "bandwidth_bytes_per_s": 8.4e9, "bandwidth_ci95_bytes_per_s": [8.1e9, null]}

``latency_s`` (alpha) is the time of an operation without data, ``bandwidth_bytes_per_s`` (beta) the
rate at which its data add to that: n bytes take alpha + n / beta. Beta is null where the time does
not grow with the size, and an end of an interval where it has no bound. Everything else in the file
is left alone. Where ``num_ranks`` is missing in an entry, that of the file stands.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, log2
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from candle_p1.errors import ModelError
from candle_p1.files import read_regular_bytes
from candle_p1.modelling.laws import JobShape
from candle_p1.records.types import RunRecord
from candle_p1.text import count, printable

ALLREDUCE, MPI, SHARED_MEMORY = "allreduce", "mpi", "shared_memory"
MAX_FILE_BYTES = 2**26

Ranks = Annotated[int, Field(gt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class CommunicationFit(BaseModel):
    """Latency and bandwidth of an operation, with 95 % intervals, as they stand in the file."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)

    operation: str
    transport: str = ""
    num_ranks: Ranks | None = None
    latency_s: NotNegative
    latency_ci95_s: tuple[NotNegative, NotNegative] | None = None
    bandwidth_bytes_per_s: Positive | None = None
    bandwidth_ci95_bytes_per_s: tuple[Positive | None, Positive | None] | None = None

    def __str__(self) -> str:
        name = f"{self.operation} through {self.transport}" if self.transport else self.operation
        of = f" on {count(self.num_ranks, 'rank')}" if self.num_ranks else ""
        alpha, beta = self.latency_s, self.bandwidth_bytes_per_s or inf
        low_s, high_s = sorted(self.latency_ci95_s or (alpha, alpha))
        low, high = sorted(each or inf for each in self.bandwidth_ci95_bytes_per_s or (beta, beta))
        return (
            f"{printable(name)}{of}: latency {alpha:.3g} s ({low_s:.3g} to"
            f" {high_s:.3g}), bandwidth {beta:.3g} bytes/s ({low:.3g} to {high:.3g})"
        )

    def allreduce_s(self, shape: JobShape) -> float:
        """Returns the time of averaging all gradients of a step once.

        A ring or a recursive halving sends 2 n (P - 1) / P bytes in messages whose number grows
        with log2 P, so what was measured among some ranks is scaled to others by that. See Thakur,
        Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
        IJHPCA 19 (2005).
        """
        if shape.num_ranks == 1:
            return 0.0
        measured = self.num_ranks or shape.num_ranks
        levels = log2(shape.num_ranks) / log2(measured)
        share = (shape.num_ranks - 1) / shape.num_ranks / ((measured - 1) / measured)
        transfer_s = shape.weight_bytes / (self.bandwidth_bytes_per_s or inf)
        return levels * self.latency_s + share * transfer_s


class _Measurement(BaseModel):
    model_config = ConfigDict(strict=True)

    num_ranks: Ranks | None = None
    fits: Annotated[list[CommunicationFit], Field(min_length=1)]


def measured_for(path: Path, records: Iterable[RunRecord]) -> CommunicationFit:
    """Returns the fit of a measurement that describes how runs have averaged their gradients.

    That is the allreduce through the same transport, on the most ranks. If this is unknown or was
    not measured, it is one through an engine between nodes: engines average the gradients, and only
    JAX on several CPUs leaves that to MPI.

    Raises:
        ModelError: The file cannot be read, or has no such fit; names the file and the entry.
    """
    try:
        content = _Measurement.model_validate_json(read_regular_bytes(path, MAX_FILE_BYTES))
    except OSError as error:
        raise ModelError(f"--comm {path}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{each}]" if type(each) is int else f".{each}" for each in first["loc"])
        raise ModelError(
            f"--comm {path}: {place.lstrip('.') or 'the file'}: {first['msg']}; give what candle-p1"
            " bench comm --json wrote"
        ) from error
    found = [each for each in content.fits if each.operation == ALLREDUCE]
    if not found:
        names = ", ".join(sorted({printable(each.operation) for each in content.fits}))
        raise ModelError(f"--comm {path}: there is no fit of {ALLREDUCE}, only of {names}")
    transports = {
        (each.distributed.settings or {}).get("averaging", each.distributed.backend)
        for each in records
        if each.num_ranks > 1 and each.distributed is not None
    }
    through = transports.pop().replace(" ", "_") if len(transports) == 1 else None

    def preference(fit: CommunicationFit) -> tuple[bool, bool, int]:
        is_engine = fit.transport not in (MPI, SHARED_MEMORY)
        return fit.transport == through, is_engine, fit.num_ranks or content.num_ranks or 0

    best = max(found, key=preference)
    return best.model_copy(update={"num_ranks": best.num_ranks or content.num_ranks})
