"""Efficiencies of parallel runs, as the POP project defines them.

Source: POP, "Standard Metrics for Performance Analysis", https://pop-coe.eu/node/69.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.records.record import over_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFINITION = (
    "POP: load balance = mean(useful) / max(useful), communication efficiency = max(useful) /"
    " runtime, parallel efficiency = their product; useful is a rank's time outside of collectives;"
    " an allreduce that back-propagation hides does not count as one"
)


def efficiencies(useful_s: Sequence[float], runtime_s: float) -> dict[str, Any]:
    """Returns load balance, communication efficiency and parallel efficiency.

    Args:
        useful_s: The time that each rank spent outside of communication.
        runtime_s: The duration of the whole.

    Returns:
        The three, in [0, 1], with what they were computed from. The parallel efficiency is
        mean(useful) / runtime, the product of the other two.
    """
    useful = over_ranks(useful_s, "s")
    longest = useful["max_s"]
    return {
        "load_balance": useful["mean_s"] / longest if longest else 1.0,
        "communication_efficiency": longest / runtime_s if runtime_s else 1.0,
        "parallel_efficiency": useful["mean_s"] / runtime_s if runtime_s else 1.0,
        "runtime_s": runtime_s,
        "useful": useful,
    }
