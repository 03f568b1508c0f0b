"""Compares a GPU's energy counter with its integrated power, and finds what sampling costs.

One job trains the benchmark in windows of some seconds, of which every other one is sampled. In
these each NVIDIA GPU is read by both its counter and its power; the step times of the two windows
of a round tell what the sampler costs.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from candle_p1.bench.job import run
from candle_p1.bench.measurement import Measurement, Starting, unheard
from candle_p1.bench.power_job import PowerJob, PowerOutcome, Window
from candle_p1.benchmark import find_benchmark
from candle_p1.records import environment
from candle_p1.records.record import utc_now
from candle_p1.reports.statistics import median_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.data.reader import FileSet

MAX_DIFFERENCE = 0.03
"""Of the two energies of a GPU, in windows of MIN_WINDOW_S and more."""
MIN_WINDOW_S = 10.0
MAX_OVERHEAD = 0.01
"""Of sampling, relative to a step without it."""


@dataclass(frozen=True)
class PowerComparison(Measurement):
    """What is measured, and under which conditions.

    Attributes:
        window_s: The length of a window.
        num_rounds: Rounds of one window that is sampled and one that is not.
        power_hz: Samples per second.
    """

    job = PowerJob

    window_s: float = MIN_WINDOW_S
    num_rounds: int = 6
    power_hz: float = 10.0

    @property
    def notes(self) -> list[str]:
        """What a user should know beforehand."""
        if self.window_s >= MIN_WINDOW_S:
            return []
        return [
            f"windows below {MIN_WINDOW_S:g} s compare the two energies of a GPU with less than the"
            f" {MAX_DIFFERENCE:.0%} that are asked for"
        ]

    def measure(self, files: FileSet, starting: Starting = unheard) -> dict[str, Any]:
        """Runs the job; see Measurement."""
        started = utc_now()
        job = PowerJob(
            self.benchmark, list(self.flags), self.window_s, self.num_rounds, self.power_hz
        )
        seconds = 2 * self.num_rounds * self.window_s
        starting(0, 1, f"{2 * self.num_rounds} windows, {seconds:g} s in all")
        (found,) = run(job, 1)
        found["windows"] = [Window(**window) for window in found["windows"]]
        outcome = PowerOutcome(**found)
        return {
            "benchmark": find_benchmark(self.benchmark).name,
            "command": sys.argv,
            "started": started,
            "synthetic": files.synthetic,
            "window_s": self.window_s,
            "num_rounds": self.num_rounds,
            "power_hz": self.power_hz,
            "device": outcome.device,
            "backend": outcome.backend,
            "threads": outcome.threads,
            "sources": outcome.sources,
            "absent": outcome.absent,
            "readings": readings(outcome),
            "overhead": overhead(outcome),
            "machine": environment.capture(),
        }


def readings(outcome: PowerOutcome) -> list[dict[str, Any]]:
    """Returns, for each GPU, the energy by its power over that by its counter, of all windows.

    A GPU that lacks one of them in a window has a reason instead.
    """
    found = []
    for device, label in outcome.gpus.items():
        energies = [w.energies_j.get(device, {}) for w in outcome.windows if w.sampled]
        pairs = [(each.get("power"), each.get("counter")) for each in energies]
        ratios = [power / counter for power, counter in pairs if power and counter]
        facts: dict[str, Any] = {"device": device, "label": label, "energies_j": energies}
        if len(ratios) < len(pairs) or not ratios:
            facts["reason"] = "one of its two energies is absent"
        else:
            facts |= _summary(ratios, "ratio", 1 - MAX_DIFFERENCE, 1 + MAX_DIFFERENCE)
        found.append(facts)
    return found


def overhead(outcome: PowerOutcome) -> dict[str, Any]:
    """Returns by how much sampling makes a step longer, relative, of all rounds."""
    windows = outcome.windows
    slower = []
    for first, second in zip(windows[::2], windows[1::2], strict=True):
        sampled, plain = (first, second) if first.sampled else (second, first)
        step_s = [window.seconds / window.num_steps for window in (sampled, plain)]
        slower.append(step_s[0] / step_s[1] - 1)
    shares = [window.cpu_share for window in windows if window.cpu_share is not None]
    return {
        **_summary(slower, "slower", -inf, MAX_OVERHEAD),
        "median_cpu_share": statistics.median(shares),
        "num_channels": sum(outcome.sources.values()),
        "simulated": "replay" in outcome.sources,
        "windows": [
            {"sampled": w.sampled, "num_steps": w.num_steps, "seconds": w.seconds} for w in windows
        ],
    }


def _summary(values: Sequence[float], what: str, least: float, most: float) -> dict[str, Any]:
    """Returns median, 95 % interval (None of too few), range and values, and what they say.

    "within" is whether the median lies within limits: True where the interval does, or the range
    where there is none; False where it lies outside of them, and None where that cannot be told.
    """
    interval = median_interval(values)
    low, high = interval or (min(values), max(values))
    within = None
    if least <= low and high <= most:
        within = True
    elif high < least or low > most:
        within = False
    return {
        f"median_{what}": statistics.median(values),
        f"ci95_{what}": list(interval) if interval else None,
        f"range_{what}": [min(values), max(values)],
        f"values_{what}": list(values),
        "within": within,
    }
