"""How often to save: the intervals that Young and Daly advise.

Both minimise the expected time of a run that failures interrupt at random, with a constant mean
time M between them. After each, the run is started again, which takes the time R, and repeats what
it has done since its last checkpoint. A checkpoint delays training by the time C. The interval is
the time of training between two checkpoints.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the
ACM 17(9), 1974. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns Young's interval, in s: sqrt(2 C M).

    Args:
        cost_s: The time C by which a checkpoint delays training, in s; above 0.
        mtbf_s: The mean time M between failures of the whole job, in s; above 0.

    Raises:
        ValueError: An argument is not above 0, or not finite.
    """
    _check(cost_s=cost_s, mtbf_s=mtbf_s)
    return math.sqrt(2) * math.sqrt(cost_s) * math.sqrt(mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns Daly's interval of higher order, in s.

    sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + (C / 2 M) / 9) - C for C < 2 M, else M (Daly, equation
    37). The time of a restart changes only how large the minimum is, not where; see
    `expected_ratio`.

    Args:
        cost_s: The time C by which a checkpoint delays training, in s; above 0.
        mtbf_s: The mean time M between failures of the whole job, in s; above 0.

    Raises:
        ValueError: An argument is not above 0, or not finite.
    """
    _check(cost_s=cost_s, mtbf_s=mtbf_s)
    share = cost_s / 2 / mtbf_s
    if share >= 1:
        return mtbf_s
    young_s = young_interval_s(cost_s, mtbf_s)
    return young_s * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def expected_ratio(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Returns the expected time of a long run divided by its time without failures and checkpoints.

    M / T exp(R / M) (exp((T + C) / M) - 1) for the interval T (Daly, equation 20), which holds if
    failures may also strike during a checkpoint or a restart.

    Args:
        interval_s: The time T of training between two checkpoints, in s; above 0.
        cost_s: The time C by which a checkpoint delays training, in s; above 0.
        mtbf_s: The mean time M between failures of the whole job, in s; above 0.
        restart_s: The time R from a failure until training goes on, in s; not below 0.

    Returns:
        The ratio, above 1; infinity if it is too large for a float.

    Raises:
        ValueError: An argument is out of its range, or not finite.
    """
    _check(interval_s=interval_s, cost_s=cost_s, mtbf_s=mtbf_s)
    if not 0 <= restart_s < math.inf:
        raise ValueError(f"restart_s must be a finite number from 0, not {restart_s}")
    try:
        growth = math.expm1((interval_s + cost_s) / mtbf_s)
        return mtbf_s / interval_s * math.exp(restart_s / mtbf_s) * growth
    except OverflowError:
        return math.inf


def _check(**seconds: float) -> None:
    for name, value in seconds.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, not {value}")
