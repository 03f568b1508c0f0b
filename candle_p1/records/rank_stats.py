"""A quantity measured by every rank, as a record holds it: summarised, not listed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from typing_extensions import Self

PERCENTILES = (10, 50, 90)
DECIMALS = 9
"""Nanoseconds, the resolution of the clock."""


class Section(BaseModel):
    """A part of a record: every key is known, every value has its type, numbers are finite."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="null",
    )


class RankStats(Section):
    """Minimum, mean, maximum and percentiles over ranks; each subclass names the unit.

    The raw values are written beside the record, under its path within it
    (see candle_p1.records.record).
    """

    unit: ClassVar[str]
    is_integer: ClassVar[bool] = False

    min_rank: int = Field(ge=0)
    """The first rank that has the minimum; for devices, the first in the order of nodes."""
    max_rank: int = Field(ge=0)
    """The first rank that has the maximum; likewise for devices."""

    _values: NDArray[np.float64] | None = PrivateAttr(default=None)

    @classmethod
    def over(cls, per_rank: Sequence[float | None] | NDArray[np.float64], **facts: Any) -> Self:
        """Returns the statistics of one value per rank.

        A rank that has none has None; at least one has one. `facts` are a subclass's other fields.
        """
        values = np.array([np.nan if value is None else value for value in per_rank], np.float64)
        stats = cls(**_summarize(values, cls.unit, cls.is_integer), **facts)
        stats._values = values
        return stats

    def __eq__(self, other: object) -> bool:
        """Compares what a record file contains, whether or not the raw values are present."""
        return type(self) is type(other) and self.__dict__ == other.__dict__

    @property
    def values(self) -> NDArray[np.float64] | None:
        """The raw values, NaN for a rank that has none; None in a record read from a file."""
        return self._values


def _summarize(values: NDArray[np.float64], unit: str, is_integer: bool) -> dict[str, Any]:
    known = values[~np.isnan(values)]
    low, *middle, high = np.percentile(known, (0, *PERCENTILES, 100))
    mean, percentiles = known.mean(), dict(zip(PERCENTILES, middle, strict=True))
    exact: Callable[[float], float] = int if is_integer else _rounded
    return {
        f"min_{unit}": exact(low),
        f"mean_{unit}": _rounded(mean),
        f"max_{unit}": exact(high),
        **{f"p{percent}_{unit}": _rounded(value) for percent, value in percentiles.items()},
        "min_rank": int(np.nanargmin(values)),
        "max_rank": int(np.nanargmax(values)),
    }


def _rounded(value: Any) -> float:
    return round(float(value), DECIMALS)


class Seconds(RankStats):
    """Times, over all ranks."""

    unit: ClassVar[str] = "s"

    min_s: float
    mean_s: float
    max_s: float
    p10_s: float
    p50_s: float
    p90_s: float


class Counts(RankStats):
    """Numbers of events, over all ranks."""

    unit: ClassVar[str] = "num"
    is_integer: ClassVar[bool] = True

    min_num: int
    mean_num: float
    max_num: int
    p10_num: float
    p50_num: float
    p90_num: float


class Bytes(RankStats):
    """Amounts of data or memory, over all ranks."""

    unit: ClassVar[str] = "bytes"
    is_integer: ClassVar[bool] = True

    min_bytes: int
    mean_bytes: float
    max_bytes: int
    p10_bytes: float
    p50_bytes: float
    p90_bytes: float


class Joules(RankStats):
    """Energies, over devices."""

    unit: ClassVar[str] = "j"

    min_j: float
    mean_j: float
    max_j: float
    p10_j: float
    p50_j: float
    p90_j: float


class Watts(RankStats):
    """Mean powers, over devices."""

    unit: ClassVar[str] = "w"

    min_w: float
    mean_w: float
    max_w: float
    p10_w: float
    p50_w: float
    p90_w: float
