"""What to change, depending on the part that takes the most time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.gains import NOT_SHOWN, improvements
from candle_p1.reports.points import STRONG
from candle_p1.reports.published import published
from candle_p1.reports.quantities import (
    COMMUNICATING,
    LOADING,
    STARTUP,
    TOTAL,
    TRAINING,
    UNDIVIDED,
    WAITING,
)
from candle_p1.reports.words import interval, number

if TYPE_CHECKING:
    from candle_p1.reports.points import Experiment, Series

SLOW_LOADERS = ("original", "chunked", "chunked_rows", "dask", "arrow", "polars")
"""With these, every rank reads the whole file."""

FASTER_TRAINING = "use a larger batch, faster kernels or faster devices;"


def advice(experiment: Experiment, series: Series, part: str) -> str:
    """Returns what to do about a part that dominates the runs of a series on the most ranks.

    Args:
        experiment: The experiment of the series.
        series: A series with times.
        part: One of quantities.PARTS.
    """
    loader = series.timed[-1].runs[0].loader
    if part in (LOADING, WAITING):
        if loader in SLOW_LOADERS:
            gain = _measured_gain(experiment, series)
            return f"use --loader parallel, which reads every byte once per job; {gain}"
        if loader == "parallel":
            return "use --loader cached if the same files are read again, or more --load_threads."
        return (
            "if the cache is on a shared file system, copy it to a local disk of each node with"
            " --stage_dir."
        )
    if part == COMMUNICATING:
        return (
            "reduce the number or the size of the allreduces with a larger batch (--batch_size,"
            " --batch_scaling), --backward_passes_per_step, --compression fp16, or --deterministic"
            " False, which lets Horovod fuse tensors; or use fewer ranks."
        )
    if part == TRAINING:
        return _about_training(experiment, series)
    if part == UNDIVIDED:
        return (
            "communication was not measured, so it is unknown whether computing or communication"
            " takes the time. Measure it with --communication_log True (on CPUs only), or look at"
            " how the time per epoch grows with the number of ranks."
        )
    if part == STARTUP:
        return (
            "nothing in the benchmark: importing the framework takes as long on any number of"
            " ranks. Its share is smaller in runs with more epochs or more data."
        )
    return "run candle-p1 show and look at the phases preprocess, build and evaluate."


def _about_training(experiment: Experiment, series: Series) -> str:
    if experiment.mode != STRONG:
        return f"{FASTER_TRAINING} more ranks do not shorten an epoch."
    trained = series.timed[-1].runs[0].epochs_per_rank or 0
    for each in published(experiment.benchmark, experiment.mode, "epochs_needed"):
        if each.value and trained < each.value:
            return (
                f"{FASTER_TRAINING} the {trained} epochs per rank are already fewer than the"
                f" {each.value:g} that the paper found necessary, so more ranks would reduce the"
                " quality."
            )
        if each.value:
            return (
                "use more ranks, which shorten the training, as long as each rank trains the"
                f" {each.value:g} epochs that the paper found necessary; here it trains {trained}."
            )
    return "use more ranks, which shorten the training, as long as the quality is sufficient."


def _measured_gain(experiment: Experiment, series: Series) -> str:
    """Returns what the parallel loader gained here, if that was measured."""
    for other in experiment.series:
        without = {name: v for name, v in other.settings.items() if name != "loader"}
        same = {name: v for name, v in series.settings.items() if name != "loader"}
        if without == same and other.settings.get("loader") == "parallel":
            for each in improvements(series, other, TOTAL.of):
                if each.num_ranks == series.timed[-1].num_ranks:
                    change, verb = each.percent, "reduced"
                    if change.value < 0:
                        change, verb = change.map(lambda percent: -percent), "increased"
                    claim = ": a change is not shown" if each.verdict == NOT_SHOWN else ""
                    return (
                        f"here it {verb} the total time by {number(change.value)} %"
                        f" ({interval(change)}{claim})."
                    )
    return "its effect was not measured here."
