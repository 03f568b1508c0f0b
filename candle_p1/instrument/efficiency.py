"""Efficiencies of parallel runs, as the POP project defines them.

Source: POP, "Standard Metrics for Performance Analysis", https://pop-coe.eu/node/69.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.records.spread import Seconds
from candle_p1.records.types import Efficiency

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFINITION = (
    "POP: load balance = mean(useful) / max(useful), communication efficiency = max(useful) /"
    " runtime, parallel efficiency = their product; useful is a rank's time outside collectives;"
    " an allreduce that back-propagation hides does not count as one"
)


def efficiencies(useful_s: Sequence[float], runtime_s: float, **facts: Any) -> Efficiency:
    """Returns load balance, communication efficiency and parallel efficiency.

    Args:
        useful_s: The time of each rank outside communication, in s.
        runtime_s: The total time, in s.
        facts: Other fields of the section.

    Returns:
        The three, in [0, 1], with the values they were computed from. The parallel efficiency is
        mean(useful) / runtime, the product of the other two.
    """
    useful = Seconds.over(useful_s)
    mean_s, longest_s = sum(useful_s) / len(useful_s), max(useful_s)
    return Efficiency(
        load_balance=mean_s / longest_s if longest_s else 1.0,
        communication_efficiency=longest_s / runtime_s if runtime_s else 1.0,
        parallel_efficiency=mean_s / runtime_s if runtime_s else 1.0,
        runtime_s=runtime_s,
        useful=useful,
        **facts,
    )
