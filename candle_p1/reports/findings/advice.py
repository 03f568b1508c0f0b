"""What to change, by the part of the time that dominates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.improvements import NOT_SHOWN, improvements
from candle_p1.reports.points import STRONG
from candle_p1.reports.published import published
from candle_p1.reports.quantities import (
    COMMUNICATING,
    LOADING,
    NOT_PARTED,
    STARTUP,
    TOTAL,
    TRAINING,
    WAITING,
)
from candle_p1.reports.words import interval, number

if TYPE_CHECKING:
    from candle_p1.reports.points import Experiment, Series

SLOW_LOADERS = ("original", "chunked", "chunked_rows", "dask", "arrow", "polars")
"""With these every rank reads the whole file."""


def advice(experiment: Experiment, series: Series, part: str) -> str:
    """Returns what to do about a part that dominates the runs of a series on the most workers.

    Args:
        experiment: That the series is in.
        series: With times.
        part: One of quantities.PARTS.
    """
    runs = series.timed[-1].runs
    loader = runs[0].loader
    if part in (LOADING, WAITING):
        if loader in SLOW_LOADERS:
            return "--loader parallel reads every byte once per job" + _measured_gain(
                experiment, series
            )
        if loader == "parallel":
            return "--loader cached, where the same files are read again, or more --load_threads."
        return "--stage_dir on a disk of each node's own, if the cache is on a shared file system."
    if part == COMMUNICATING:
        return (
            "fewer or smaller exchanges: a larger batch (--batch_size, --batch_scaling),"
            " --backward_passes_per_step, --compression fp16, or --deterministic False, which lets"
            " Horovod fuse tensors; or fewer workers."
        )
    if part == TRAINING:
        return _about_training(experiment, series)
    if part == NOT_PARTED:
        return (
            "communication was not measured (on GPUs it cannot be, else --communication_log True"
            " does), so it is not known which of the two to change: how the time per epoch grows"
            " with the workers tells."
        )
    if part == STARTUP:
        return (
            "nothing in the benchmark: importing the framework does not get shorter with more"
            " workers; a run with more epochs or more data makes it count less."
        )
    return "look at the phases of a run with candle-p1 show: preprocessing, building, evaluation."


def _about_training(experiment: Experiment, series: Series) -> str:
    if experiment.mode != STRONG:
        return "a larger batch, faster kernels or devices: more workers do not shorten an epoch."
    trained = series.timed[-1].runs[0].epochs_per_rank or 0
    for each in published(experiment.benchmark, experiment.mode, "epochs_needed"):
        if each.value and trained < each.value:
            return (
                f"a larger batch, faster kernels or devices: {trained} epochs per worker are"
                f" already fewer than the {each.value:g} that the paper found to be needed, so more"
                " workers would cost quality."
            )
        if each.value:
            return (
                f"more workers shorten it as long as each trains the {each.value:g} epochs that the"
                f" paper found to be needed; here it is {trained}."
            )
    return "more workers shorten it as long as the quality holds."


def _measured_gain(experiment: Experiment, series: Series) -> str:
    """Returns what the parallel loader gained here, if that was measured."""
    for other in experiment.series:
        without = {name: v for name, v in other.settings.items() if name != "loader"}
        same = {name: v for name, v in series.settings.items() if name != "loader"}
        if without == same and other.settings.get("loader") == "parallel":
            found = improvements(series, other, TOTAL.of)
            here = [each for each in found if each.num_ranks == series.timed[-1].num_ranks]
            for each in here:
                change = each.percent
                claim = ": not shown" if each.verdict == NOT_SHOWN else ""
                did = f"took {number(change.value)} % off"
                if change.value < 0:
                    change = change.map(lambda percent: -percent)
                    did = f"added {number(change.value)} % to"
                return f"; here it {did} the total time ({interval(change)}{claim})."
    return "; it was not measured here."
