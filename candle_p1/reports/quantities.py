"""The quantities of a run that are shown, with names and units, and the parts of its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from candle_p1.reports.runs import RecordedRun

NOT_EVALUATED = "no run evaluated its model (--eval_bool False)"


@dataclass(frozen=True)
class Quantity:
    """A number that a run may have.

    Attributes:
        name: Its name in file columns.
        title: Its name in sentences.
        unit: The unit; "" where it has none.
        of: Returns its value; None where it is unknown.
    """

    name: str
    title: str
    unit: str
    of: Callable[[RecordedRun], float | None]

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


def _attribute(name: str, title: str, unit: str = "") -> Quantity:
    return Quantity(name, title, unit, attrgetter(name))


def phase_time(phase: str) -> Quantity:
    """Returns the time of a phase on its slowest rank."""
    return Quantity(f"phase_{phase}_s", f"phase {phase}", "s", lambda run: run.phase_s.get(phase))


def _recorded(section: str, key: str, name: str, title: str, unit: str = "") -> Quantity:
    return Quantity(name, title, unit, lambda run: getattr(getattr(run.record, section), key, None))


def _efficiency(name: str, title: str) -> Quantity:
    return _recorded("efficiency", name, name, title)


TOTAL = _attribute("total_s", "total time", "s")
LOAD = replace(phase_time("load"), name="load_s", title="data loading")
TRAIN = replace(phase_time("train"), name="train_s", title="training")
BROADCAST = _attribute("broadcast_overhead_s", "broadcast overhead", "s")
WAIT = _attribute("broadcast_wait_s", "waiting for the slowest loader", "s")
TRANSFER = _attribute("broadcast_transfer_s", "transfer of the weights", "s")
EPOCH = _attribute("epoch_s", "time per epoch", "s")
FIRST_STEP = _attribute("first_step_s", "first step", "s")
SAMPLES = _recorded("training", "samples_per_s", "samples_per_s", "training rate", "samples/s")
ENERGY = _attribute("energy_j", "energy", "J")
POWER = _recorded("energy", "mean_w", "power_w", "mean power", "W")
"""These two are sums over all devices of the job."""

GPU_ENERGY = Quantity("energy_per_gpu_j", "energy per GPU", "J", lambda run: run.gpu_j)
GPU_POWER = Quantity("power_per_gpu_w", "mean power per GPU", "W", lambda run: run.gpu_w)
NODE_ENERGY = Quantity("energy_per_node_j", "energy per node", "J", lambda run: run.node_j)
NODE_POWER = Quantity("power_per_node_w", "mean power per node", "W", lambda run: run.node_w)
POWER_AND_ENERGY = ((GPU_POWER, GPU_ENERGY), (NODE_POWER, NODE_ENERGY))
"""As the paper states them: per GPU on Summit, per node on Theta."""

COMMUNICATION = _attribute("communication_share", "communication's share of training")
LOAD_BALANCE = _efficiency("load_balance", "load balance")
COMMUNICATION_EFFICIENCY = _efficiency("communication_efficiency", "communication efficiency")
PARALLEL_EFFICIENCY = _efficiency("parallel_efficiency", "POP efficiency")


def covered(runs: Iterable[RecordedRun]) -> list[str]:
    """Returns the parts of the machine that energies cover, in words: one entry if all agree."""
    parts = {run.energy_covers for run in runs if run.energy_j is not None}
    return sorted(" and ".join(each) or "unknown parts" for each in parts)


def labelled(quantity: Quantity, runs: Iterable[RecordedRun]) -> Quantity:
    """Returns an energy or a power with a title that says where it is not measured."""
    runs = list(runs)
    title, parts = quantity.title, covered(runs)
    if quantity in (NODE_POWER, NODE_ENERGY) and len(parts) == 1 and parts != ["node"]:
        title = f"{title}, {parts[0]}"
    kinds = {run.energy_kind for run in runs if run.energy_j is not None}
    others = sorted(kinds - {"measured"})
    if others:
        partly = "partly " if len(kinds) > 1 else ""
        title = f"{title} ({partly}{' and '.join(others)})"
    return replace(quantity, title=title)


def comparable_energy(runs: Sequence[RecordedRun]) -> list[tuple[Quantity, Quantity]]:
    """Returns power and energy, per GPU or else per node.

    None if they were not measured, or cover different parts of the machine in the runs.
    """
    if len(covered(runs)) != 1:
        return []
    measured = [run for run in runs if run.energy_j is not None]
    per_gpu = all(run.gpu_j is not None for run in measured)
    power, energy = POWER_AND_ENERGY[0 if per_gpu else 1]
    return [(labelled(power, runs), labelled(energy, runs))]


FIGURES_OF_MERIT = {"accuracy": True, "loss": False}
"""What models are judged by, in order of preference, and whether more is better."""


def merit(runs: Iterable[RecordedRun]) -> str | None:
    """Returns the name of the figure by which the runs' models are judged; None without one."""
    names = {name for run in runs for name in run.figures_of_merit}
    return next((name for name in FIGURES_OF_MERIT if name in names), min(names, default=None))


def more_is_better(name: str) -> bool:
    """Returns whether more of a figure of merit is better."""
    return FIGURES_OF_MERIT.get(name, True)


def qualities(name: str) -> tuple[Quantity, Quantity]:
    """Returns a figure of merit on the training samples in the last epoch, and on the test set.

    The paper's is that on the training samples.
    """
    trained = Quantity(
        f"training_{name}", f"training {name}", "", lambda run: run.last_epoch.get(name)
    )
    return trained, quality_on_test(name)


def quality_on_test(name: str) -> Quantity:
    """Returns a figure of merit of the trained model on the test set."""
    return Quantity(f"test_{name}", f"test {name}", "", lambda run: run.quality.get(name))


def naive(name: str) -> Quantity:
    """Returns a figure of merit of the naive predictor on the test set."""
    return Quantity(f"naive_{name}", f"naive predictor's {name}", "", lambda r: r.naive.get(name))


STARTUP, LOADING, WAITING, TRAINING, COMMUNICATING, UNDIVIDED, OTHER = PARTS = (
    "start-up",
    "data loading",
    "waiting for the slowest loader",
    "training",
    "communication",
    "training with communication",
    "the rest",
)
"""The parts of a run's time. Communication is the time in training in which a rank does nothing
else, and the transfer of the weights; where it was not measured, training and communication are one
part, UNDIVIDED. The rest is preprocessing, building the model, evaluation and digests."""


def parts_s(run: RecordedRun) -> dict[str, float]:
    """Returns the known parts of a run's time, in s, mean over ranks. They add up to the total."""
    train_s, transfer_s = run.mean_s("train"), run.mean_s("broadcast", "transfer")
    parts = {
        STARTUP: run.mean_s("startup"),
        LOADING: run.mean_s("load"),
        WAITING: run.mean_s("broadcast", "wait"),
    }
    if run.communication_share is None:
        parts[UNDIVIDED] = train_s + transfer_s
    else:
        exposed_s = run.communication_share * train_s
        parts |= {TRAINING: train_s - exposed_s, COMMUNICATING: exposed_s + transfer_s}
    return parts | {OTHER: max(0.0, (run.total_s or 0.0) - sum(parts.values()))}


def share_of(part: str) -> Callable[[RecordedRun], float | None]:
    """Returns a function that returns a part's share of the total time of a run."""

    def share(run: RecordedRun) -> float | None:
        parts = parts_s(run)
        total_s = sum(parts.values())
        return parts[part] / total_s if total_s and part in parts else None

    return share


def known_values(runs: Sequence[RecordedRun], quantity: Quantity) -> list[float]:
    """Returns the values of a quantity, of the runs that have it."""
    return [value for run in runs if (value := quantity.of(run)) is not None]
