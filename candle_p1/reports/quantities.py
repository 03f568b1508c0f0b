"""What of a run is shown: quantities with their names and units, and the parts of its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from candle_p1.reports.runs import RecordedRun


@dataclass(frozen=True)
class Quantity:
    """A number that a run may have.

    Attributes:
        name: In file columns.
        title: In words.
        unit: "" where it has none.
        of: Returns it; None where the run does not know it.
    """

    name: str
    title: str
    unit: str
    of: Callable[[RecordedRun], float | None]

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


TOTAL = Quantity("total_s", "total time", "s", lambda run: run.total_s)
LOAD = Quantity("load_s", "data loading", "s", lambda run: run.load_s)
TRAIN = Quantity("train_s", "training", "s", lambda run: run.train_s)
WAIT = Quantity(
    "broadcast_wait_s", "waiting for the slowest loader", "s", lambda run: run.broadcast_wait_s
)
EPOCH = Quantity("epoch_s", "time per epoch", "s", lambda run: run.epoch_s)
FIRST_STEP = Quantity("first_step_s", "first step", "s", lambda run: run.first_step_s)
SAMPLES = Quantity(
    "samples_per_s",
    "training rate",
    "samples/s",
    lambda run: run.samples_per_s,
)
ENERGY = Quantity("energy_j", "energy", "J", lambda run: run.energy_j)
POWER = Quantity("power_w", "mean power", "W", lambda run: run.power_w)
COMMUNICATION = Quantity(
    "communication_share",
    "communication's share of training",
    "",
    lambda run: run.communication_share,
)
LOAD_BALANCE = Quantity(
    "load_balance", "load balance", "", lambda run: run.efficiency.get("load_balance")
)
COMMUNICATION_EFFICIENCY = Quantity(
    "communication_efficiency",
    "communication efficiency",
    "",
    lambda run: run.efficiency.get("communication_efficiency"),
)
PARALLEL_EFFICIENCY = Quantity(
    "parallel_efficiency",
    "parallel efficiency",
    "",
    lambda run: run.efficiency.get("parallel_efficiency"),
)


def covered(runs: Iterable[RecordedRun]) -> list[str]:
    """Returns the parts of the machine that energies are of, in words: one entry if all agree."""
    parts = {run.energy_covers for run in runs if run.energy_j is not None}
    return sorted(" and ".join(each) or "unknown parts" for each in parts)


def labelled(quantity: Quantity, runs: Iterable[RecordedRun]) -> Quantity:
    """Returns ENERGY or POWER with what it is, where that is not measured, in its title."""
    kinds = {run.energy_kind for run in runs if run.energy_j is not None}
    others = sorted(kinds - {"measured"})
    if not others:
        return quantity
    partly = "partly " if len(kinds) > 1 else ""
    return replace(quantity, title=f"{quantity.title} ({partly}{' and '.join(others)})")


FIGURES_OF_MERIT = {"accuracy": True, "loss": False}
"""What a model is judged by first, and whether more is better."""


def merit(runs: Iterable[RecordedRun]) -> str | None:
    """Returns the name of the figure by which the runs' models are judged; None where none is."""
    names = {name for run in runs for name in run.quality_names}
    return next((name for name in FIGURES_OF_MERIT if name in names), min(names, default=None))


def more_is_better(name: str) -> bool:
    """Returns whether more of a figure of merit is better."""
    return FIGURES_OF_MERIT.get(name, True)


def quality_on_test(name: str) -> Quantity:
    """Returns a figure of the trained model on the test set."""
    return Quantity(f"test_{name}", f"test {name}", "", partial(_tested, name))


def quality_on_training(name: str) -> Quantity:
    """Returns a figure of the training samples in the last epoch, which is what the paper shows."""
    return Quantity(f"training_{name}", f"training {name}", "", partial(_trained, name))


def naive(name: str) -> Quantity:
    """Returns a figure of the naive predictor on the test set, which may depend on the split."""
    return Quantity(f"naive_{name}", f"naive predictor's {name}", "", partial(_guessed, name))


def _tested(name: str, run: RecordedRun) -> float | None:
    return run.quality.get(name)


def _trained(name: str, run: RecordedRun) -> float | None:
    return run.last_epoch.get(name)


def _guessed(name: str, run: RecordedRun) -> float | None:
    return run.naive.get(name)


STARTUP, LOADING, WAITING, TRAINING, COMMUNICATING, NOT_PARTED, OTHER = PARTS = (
    "start-up",
    "data loading",
    "waiting for the slowest loader",
    "training",
    "communication",
    "training with communication",
    "the rest",
)
"""Of a run's time. Communication is what of training a rank did nothing else in, and the transfer
of the weights; where it was not measured, it stands with the training, as one part. The rest is
preprocessing, building, evaluation and digests."""


def parts_s(run: RecordedRun) -> dict[str, float]:
    """Returns the time of those of PARTS that are known, in s, the mean over ranks.

    They add up to the total.
    """
    train_s, transfer_s = run.mean_s("train"), run.mean_s("broadcast", "transfer")
    parts = {
        STARTUP: run.mean_s("startup"),
        LOADING: run.mean_s("load"),
        WAITING: run.mean_s("broadcast", "wait"),
    }
    if run.communication_share is None:
        parts[NOT_PARTED] = train_s + transfer_s
    else:
        exposed_s = run.communication_share * train_s
        parts |= {TRAINING: train_s - exposed_s, COMMUNICATING: exposed_s + transfer_s}
    return parts | {OTHER: max(0.0, (run.total_s or 0.0) - sum(parts.values()))}


def share_of(part: str) -> Callable[[RecordedRun], float | None]:
    """Returns a function that tells a part's share of the total time."""
    return partial(_share, part)


def _share(part: str, run: RecordedRun) -> float | None:
    parts = parts_s(run)
    total = sum(parts.values())
    return parts[part] / total if total and part in parts else None
