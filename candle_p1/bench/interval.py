"""How often to save: the intervals that Young and Daly advise.

Both minimise the expected time of a run that failures interrupt at random, with a constant mean
time M between them. After each, the run is started again, which takes the time R, and repeats what
it has done since its last checkpoint. A checkpoint delays training by the time C. The interval is
the time of training between two checkpoints. All times are in s; C and M are above 0.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the
ACM 17(9), 1974. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math


def young_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns Young's interval, in s: sqrt(2 C M)."""
    return math.sqrt(2) * math.sqrt(cost_s) * math.sqrt(mtbf_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns Daly's interval of higher order, in s.

    sqrt(2 C M) (1 + sqrt(C / 2 M) / 3 + (C / 2 M) / 9) - C for C < 2 M, else M (Daly, equation
    37). The time of a restart changes only how large the minimum is, not where.
    """
    share = cost_s / 2 / mtbf_s
    if share >= 1:
        return mtbf_s
    return young_interval_s(cost_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def expected_ratio(interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Returns the expected time of a long run divided by its time without failures and checkpoints.

    M / T exp(R / M) (exp((T + C) / M) - 1) for the interval T (Daly, equation 20), which holds if
    failures may also strike during a checkpoint or a restart. Infinity if too large for a float.
    """
    try:
        growth = math.expm1((interval_s + cost_s) / mtbf_s)
        return mtbf_s / interval_s * math.exp(restart_s / mtbf_s) * growth
    except OverflowError:
        return math.inf
