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

import json
from dataclasses import dataclass
from math import inf, isfinite, log2
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ModelError
from candle_p1.files import read_regular_bytes
from candle_p1.modelling.samples import ValueInterval
from candle_p1.text import count, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from candle_p1.modelling.shape import JobShape
    from candle_p1.records.types import RunRecord

ALLREDUCE, MPI, SHARED_MEMORY = "allreduce", "mpi", "shared_memory"
MAX_FILE_BYTES = 2**26


@dataclass(frozen=True)
class CommunicationFit:
    """Latency and bandwidth of an operation.

    Attributes:
        operation: Its name.
        transport: What performed it: mpi, or the name of an engine; "" where the file does not say.
        num_ranks: The ranks among which it was measured; None where the file does not say.
        latency: Alpha, in s, with its interval.
        bandwidth: Beta, in bytes/s, with its interval; infinite where the time does not grow.
    """

    operation: str
    transport: str
    num_ranks: int | None
    latency: ValueInterval
    bandwidth: ValueInterval

    def __str__(self) -> str:
        of = f" on {count(self.num_ranks, 'rank')}" if self.num_ranks else ""
        through = f" through {self.transport}" if self.transport else ""
        alpha, beta = self.latency, self.bandwidth
        return (
            f"{self.operation}{through}{of}: latency {alpha.value:.3g} s ({alpha.low:.3g} to"
            f" {alpha.high:.3g}), bandwidth {beta.value:.3g} bytes/s ({beta.low:.3g} to"
            f" {beta.high:.3g})"
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
        transfer_s = shape.weight_bytes / self.bandwidth.value
        return levels * self.latency.value + share * transfer_s


def read_communication(path: Path) -> list[CommunicationFit]:
    """Returns the fits of a measurement of communication.

    Raises:
        ModelError: The file cannot be read, or has no fits; names the file and the entry.
    """
    try:
        content = json.loads(read_regular_bytes(path, MAX_FILE_BYTES))
    except OSError as error:
        raise ModelError(f"--comm {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"--comm {path}: not JSON: {error}") from error
    entries = content.get("fits") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ModelError(
            f"--comm {path}: there is no list of fits: give what candle-p1 bench comm --json wrote"
        )
    return [_fit(path, i, entry, content) for i, entry in enumerate(entries)]


def measured_for(path: Path, records: Sequence[RunRecord]) -> CommunicationFit:
    """Returns the fit of a measurement that describes how runs have averaged their gradients.

    Raises:
        ModelError: The file cannot be read, or has no fit of the allreduce.
    """
    return allreduce_of(path, read_communication(path), averaged_through(records))


def averaged_through(records: Iterable[RunRecord]) -> str | None:
    """Returns the transport that has averaged the gradients of runs; None if they had several."""
    found = {
        (each.distributed.settings or {}).get("averaging", each.distributed.backend)
        for each in records
        if each.num_ranks > 1 and each.distributed is not None
    }
    return found.pop().replace(" ", "_") if len(found) == 1 else None


def allreduce_of(
    path: Path, fits: list[CommunicationFit], through: str | None = None
) -> CommunicationFit:
    """Returns the fit of the allreduce through a transport, on the most ranks.

    If that is unknown or was not measured, it is one through an engine between nodes: engines
    average the gradients, and only JAX on several CPUs leaves that to MPI.

    Raises:
        ModelError: There is none.
    """
    found = [each for each in fits if each.operation == ALLREDUCE]
    if not found:
        names = ", ".join(sorted({each.operation for each in fits}))
        raise ModelError(f"--comm {path}: there is no fit of {ALLREDUCE}, only of {names}")

    def rank(each: CommunicationFit) -> tuple[bool, bool, int]:
        is_engine = each.transport not in (MPI, SHARED_MEMORY)
        return each.transport == through, is_engine, each.num_ranks or 0

    return max(found, key=rank)


def _fit(path: Path, i: int, entry: Any, content: dict[str, Any]) -> CommunicationFit:
    where = f"--comm {path}: fits[{i}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("operation"), str):
        raise ModelError(f"{where} has no operation")
    ranks = entry.get("num_ranks", content.get("num_ranks"))
    if ranks is not None and not (type(ranks) is int and ranks > 1):
        raise ModelError(f"{where}.num_ranks is {ranks!r}: at least 2 ranks communicate")
    transport = entry.get("transport", "")
    if not isinstance(transport, str):
        raise ModelError(f"{where}.transport is {transport!r}: a name is needed")
    return CommunicationFit(
        printable(entry["operation"]),
        printable(transport),
        ranks,
        _interval(where, entry, "latency_s", "latency_ci95_s", least=0.0, unbounded=False),
        _interval(where, entry, "bandwidth_bytes_per_s", "bandwidth_ci95_bytes_per_s"),
    )


def _interval(
    where: str,
    entry: dict[str, Any],
    key: str,
    interval_key: str,
    *,
    least: float | None = None,
    unbounded: bool = True,
) -> ValueInterval:
    """Returns a number with its interval; without one, the number is both ends."""
    value = _number(f"{where}.{key}", entry.get(key), least, unbounded=unbounded)
    ends = entry.get(interval_key)
    if ends is None:
        return ValueInterval(value, value, value, 0.95)
    if not isinstance(ends, list) or len(ends) != 2:
        raise ModelError(f"{where}.{interval_key} is {ends!r}: two numbers are needed")
    place = f"{where}.{interval_key}"
    low, high = (_number(place, end, 0.0, unbounded=unbounded) for end in ends)
    return ValueInterval(value, min(low, high), max(low, high), 0.95)


def _number(place: str, value: Any, least: float | None, *, unbounded: bool) -> float:
    if value is None and unbounded:
        return inf
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
        if isfinite(number) and (number > 0 or number == least):
            return number
    raise ModelError(f"{place} is {value!r}: a positive number is needed")
