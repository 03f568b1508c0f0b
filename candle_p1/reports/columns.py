"""The columns of the table of runs that are shown, with names and units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from candle_p1.reports.frame import PARTS

NOT_EVALUATED = "no run evaluated its model (--eval_bool False)"


@dataclass(frozen=True)
class Quantity:
    """A column of numbers, its name in sentences, and its unit, if it has one."""

    name: str
    title: str
    unit: str = ""

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def phase_time(phase: str) -> Quantity:
    """Returns the time of a phase on its slowest rank."""
    return Quantity(f"phase_{phase}_s", f"phase {phase}", "s")


TOTAL = Quantity("total_s", "total time", "s")
LOAD = Quantity("phase_load_s", "data loading", "s")
TRAIN = Quantity("phase_train_s", "training", "s")
BROADCAST = Quantity("broadcast_overhead_s", "broadcast overhead", "s")
WAIT = Quantity("broadcast_wait_s", "waiting for the slowest loader", "s")
TRANSFER = Quantity("broadcast_transfer_s", "transfer of the weights", "s")
EPOCH = Quantity("epoch_s", "time per epoch", "s")
FIRST_STEP = Quantity("first_step_s", "first step", "s")
SAMPLES = Quantity("samples_per_s", "training rate", "samples/s")
COMMUNICATION = Quantity("communication_share", "communication's share of training")
LOAD_BALANCE = Quantity("load_balance", "load balance")
COMMUNICATION_EFFICIENCY = Quantity("communication_efficiency", "communication efficiency")
PARALLEL_EFFICIENCY = Quantity("parallel_efficiency", "POP efficiency")
ENERGY = Quantity("energy_j", "energy", "J")
POWER = Quantity("power_w", "mean power", "W")
"""These two are sums over all devices of the job."""

GPU_POWER = Quantity("power_per_gpu_w", "mean power per GPU", "W")
GPU_ENERGY = Quantity("energy_per_gpu_j", "energy per GPU", "J")
NODE_POWER = Quantity("power_per_node_w", "mean power per node", "W")
NODE_ENERGY = Quantity("energy_per_node_j", "energy per node", "J")
POWER_AND_ENERGY = ((GPU_POWER, GPU_ENERGY), (NODE_POWER, NODE_ENERGY))
"""As the paper states them: per GPU on Summit, per node on Theta."""

FIGURES_OF_MERIT = {"accuracy": True, "loss": False}
"""What models are judged by, in order of preference, and whether more is better."""


def known(runs: pd.DataFrame, column: Quantity | str) -> list[Any]:
    """Returns the values of a column, of the runs that have one."""
    name = column if isinstance(column, str) else column.name
    return runs[name].dropna().tolist() if name in runs else []


def time_parts(runs: pd.DataFrame) -> pd.DataFrame:
    """Returns the parts of the time of each run, in s: a column for each of PARTS, NaN if unknown.

    The parts of a run add up to its total.
    """
    return pd.DataFrame(list(runs["parts"]), columns=list(PARTS), dtype=float)


def merit(runs: pd.DataFrame) -> str | None:
    """Returns the name of the figure by which the runs' models are judged; None without one."""
    names = {name for names in runs["merits"] for name in names}
    return next((name for name in FIGURES_OF_MERIT if name in names), min(names, default=None))


def num_diverged(runs: pd.DataFrame, name: str) -> int:
    """Returns how many runs recorded a figure of merit that is not a number."""
    return sum(name in names for names in runs["merits"]) - len(known(runs, f"test_{name}"))


def more_is_better(name: str) -> bool:
    """Returns whether more of a figure of merit is better."""
    return FIGURES_OF_MERIT.get(name, True)


def quality_on_test(name: str) -> Quantity:
    """Returns a figure of merit of the trained model on the test set."""
    return Quantity(f"test_{name}", f"test {name}")


def qualities(name: str) -> tuple[Quantity, Quantity]:
    """Returns a figure of merit on the training samples in the last epoch, and on the test set.

    The paper's is that on the training samples.
    """
    return Quantity(f"training_{name}", f"training {name}"), quality_on_test(name)


def naive(name: str) -> Quantity:
    """Returns a figure of merit of the naive predictor on the test set."""
    return Quantity(f"naive_{name}", f"naive predictor's {name}")


def covered(runs: pd.DataFrame) -> list[str]:
    """Returns the parts of the machine that energies cover, in words: one entry if all agree."""
    parts = set(runs.loc[runs["energy_j"].notna(), "energy_covers"])
    return sorted(" and ".join(each) or "unknown parts" for each in parts)


def energy_kinds(runs: pd.DataFrame) -> set[str]:
    """Returns how the energies were obtained: measured, estimated, simulated."""
    return set(runs.loc[runs["energy_j"].notna(), "energy_kind"])


def labelled(quantity: Quantity, runs: pd.DataFrame) -> Quantity:
    """Returns an energy or a power with a title that says where it is not measured."""
    title, parts = quantity.title, covered(runs)
    if quantity in (NODE_POWER, NODE_ENERGY) and len(parts) == 1 and parts != ["node"]:
        title = f"{title}, {parts[0]}"
    kinds = energy_kinds(runs)
    others = sorted(kinds - {"measured"})
    if others:
        partly = "partly " if len(kinds) > 1 else ""
        title = f"{title} ({partly}{' and '.join(others)})"
    return replace(quantity, title=title)


def comparable_energy(runs: pd.DataFrame) -> Sequence[tuple[Quantity, Quantity]]:
    """Returns power and energy, per GPU or else per node.

    None if they were not measured, or cover different parts of the machine in the runs.
    """
    if len(covered(runs)) != 1:
        return []
    per_gpu = len(known(runs, GPU_ENERGY)) >= len(known(runs, ENERGY))
    power, energy = POWER_AND_ENERGY[0 if per_gpu else 1]
    return [(labelled(power, runs), labelled(energy, runs))]
