"""A measurement of communication, as ``candle-p1 bench comm --json`` writes it, for models.

Of the file, this reads ``fits``, a list with an entry for each operation and number of ranks::

    {"operation": "allreduce", "ranks": 4, "latency_s": 2.1e-5, "bandwidth_bytes_per_s": 8.4e9,
     "latency_s_interval": [2.0e-5, 2.3e-5], "bandwidth_bytes_per_s_interval": [8.1e9, 8.6e9]}

``latency_s`` (alpha) is the time of an operation without data, ``bandwidth_bytes_per_s`` (beta) the
rate at which its data are added to that: a message of n bytes takes alpha + n / beta. Everything
else in the file is left alone. Where ``ranks`` is missing in an entry, that of the file stands.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite, log2
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ModelError
from candle_p1.files import read_regular_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.modelling.shape import JobShape

ALLREDUCE = "allreduce"
MAX_FILE_BYTES = 2**26


@dataclass(frozen=True)
class CommunicationFit:
    """Latency and bandwidth of an operation.

    Attributes:
        operation: Its name.
        num_ranks: The ranks among which it was measured; None where the file does not say.
        latency_s: Alpha, in s.
        bandwidth_bytes_per_s: Beta, in bytes/s.
        latency_interval_s: The ends of its interval; None without one.
        bandwidth_interval: The ends of its interval, in bytes/s; None without one.
    """

    operation: str
    num_ranks: int | None
    latency_s: float
    bandwidth_bytes_per_s: float
    latency_interval_s: tuple[float, float] | None
    bandwidth_interval: tuple[float, float] | None

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
        transfer_s = shape.weight_bytes / self.bandwidth_bytes_per_s
        return levels * self.latency_s + share * transfer_s


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


def allreduce_of(path: Path, fits: list[CommunicationFit]) -> CommunicationFit:
    """Returns the fit of the allreduce, of several that on the most ranks.

    Raises:
        ModelError: There is none.
    """
    found = [each for each in fits if each.operation == ALLREDUCE]
    if not found:
        names = ", ".join(sorted({each.operation for each in fits}))
        raise ModelError(f"--comm {path}: there is no fit of {ALLREDUCE}, only of {names}")
    return max(found, key=lambda each: each.num_ranks or 0)


def _fit(path: Path, i: int, entry: Any, content: dict[str, Any]) -> CommunicationFit:
    where = f"--comm {path}: fits[{i}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("operation"), str):
        raise ModelError(f"{where} has no operation")
    ranks = entry.get("ranks", content.get("ranks"))
    if ranks is not None and not (type(ranks) is int and ranks > 1):
        raise ModelError(f"{where}.ranks is {ranks!r}: at least 2 ranks communicate")
    return CommunicationFit(
        entry["operation"],
        ranks,
        _number(where, entry, "latency_s", least=0.0),
        _number(where, entry, "bandwidth_bytes_per_s"),
        _interval(where, entry, "latency_s_interval"),
        _interval(where, entry, "bandwidth_bytes_per_s_interval"),
    )


def _number(where: str, entry: dict[str, Any], key: str, least: float | None = None) -> float:
    value = entry.get(key)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
        if isfinite(number) and (number > 0 or number == least):
            return number
    raise ModelError(f"{where}.{key} is {value!r}: a positive number is needed")


def _interval(where: str, entry: dict[str, Any], key: str) -> tuple[float, float] | None:
    value = entry.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2:
        raise ModelError(f"{where}.{key} is {value!r}: two numbers are needed")
    low, high = (_number(where, {key: each}, key, least=0.0) for each in value)
    return low, high
