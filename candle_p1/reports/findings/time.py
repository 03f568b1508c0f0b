"""What takes the time, at which scale, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.reports.findings.phrases import (
    MAX_SENTENCES,
    at_scale,
    gained,
    names,
    on_ranks,
    significant,
)
from candle_p1.reports.gains import improvements
from candle_p1.reports.missing import MissingDataError
from candle_p1.reports.points import STRONG
from candle_p1.reports.published import published_epochs
from candle_p1.reports.quantities import (
    COMMUNICATING,
    LOADING,
    STARTUP,
    TOTAL,
    TRAINING,
    UNDIVIDED,
    WAITING,
    parts_s,
    share_of,
)
from candle_p1.reports.statistics import estimate_ratio
from candle_p1.reports.words import interval, number, percent
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from candle_p1.reports.points import Experiment, Point, Series
    from candle_p1.reports.runs import RecordedRun

SLOW_LOADERS = ("original", "chunked", "chunked_rows", "dask", "arrow", "polars")
"""With these, every rank reads the whole file."""

FASTER_TRAINING = "use a larger batch, faster kernels or faster devices;"


def _dominating_part(point: Point) -> tuple[str, float] | None:
    """Returns the part that takes the most time in every run, with its median share.

    None where that is not the same part in all runs.
    """
    parts = {max(times, key=lambda name: times[name]) for times in map(parts_s, point.runs)}
    if len(parts) > 1:
        return None
    (part,) = parts
    share = point.estimate(share_of(part))
    return (part, share.value) if share else None


def dominates(experiment: Experiment) -> Iterator[str]:
    """Says what takes the most time, at which scale; series that agree share a sentence.

    Raises:
        MissingDataError: Runs of a point disagree.
    """
    mixed: list[str] = []
    alike: dict[tuple[tuple[str, tuple[int, ...]], ...], list[Series]] = {}
    for series in experiment.series:
        scales: dict[str, list[int]] = {}
        for point in series.timed:
            found = _dominating_part(point)
            if found:
                scales.setdefault(found[0], []).append(point.num_ranks)
            else:
                mixed.append(f"{series.name} {on_ranks([point.num_ranks])}")
        if scales:
            key = tuple((part, tuple(counts)) for part, counts in scales.items())
            alike.setdefault(key, []).append(series)
    for scales_of, members in alike.items():
        parts = [_part_words(part, counts, members) for part, counts in scales_of]
        yield f"{names(members)}: the largest part of the time is {', '.join(parts)}."
    if mixed:
        raise MissingDataError(
            f"the largest part differs between runs: {'; '.join(mixed[:MAX_SENTENCES])}"
        )


def what_to_change(experiment: Experiment) -> list[str]:
    """Says what would shorten the runs on the most ranks."""
    seen: dict[str, list[Series]] = {}
    for series in experiment.series:
        found = _dominating_part(series.timed[-1]) if series.timed else None
        if found:
            seen.setdefault(_advice(experiment, series, found[0]), []).append(series)
    return [
        f"{names(members)}, {on_ranks(sorted({each.timed[-1].num_ranks for each in members}))}:"
        f" {text}"
        for text, members in seen.items()
    ]


def _advice(experiment: Experiment, series: Series, part: str) -> str:
    """Returns what to do about a part that dominates the runs of a series on the most ranks."""
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
    return "run candle-p1 show --full and look at the phases preprocess, build and evaluate."


def _about_training(experiment: Experiment, series: Series) -> str:
    if experiment.mode != STRONG:
        return f"{FASTER_TRAINING} more ranks do not shorten an epoch."
    last = series.timed[-1]
    if all(_uses_all_cores(run) for run in last.runs):
        return f"{FASTER_TRAINING} the ranks already use all cores of the node."
    times = [times for point in series.timed if (times := point.positive(TOTAL.of))]
    if len(times) < 2:
        return f"{FASTER_TRAINING} whether more ranks shorten the training was not measured here."
    gain = estimate_ratio(times[-2], times[-1])
    if gain.low <= 1:
        return (
            f"{FASTER_TRAINING} the last increase of the ranks gained a factor of"
            f" {number(gain.value)} ({interval(gain)}), which is no reason to use more."
        )
    run = last.runs[0]
    trained, needed = run.epochs_per_rank or 0, published_epochs(experiment)
    if not needed or run.settings.get("data_parallel") == "batch_step":  # all train all epochs
        return "use more ranks, which shorten the training, as long as the quality is sufficient."
    if trained < needed:
        return (
            f"{FASTER_TRAINING} the {trained} epochs per rank are already fewer than the"
            f" {needed} that the paper found necessary, so more ranks would reduce the quality."
        )
    return (
        "use more ranks, which shorten the training, as long as each rank trains the"
        f" {needed} epochs that the paper found necessary; here it trains {trained}."
    )


def _uses_all_cores(run: RecordedRun) -> bool:
    """Returns whether a run had one node, computed on CPUs, and had a thread for each core."""
    if run.machine is None or run.machine.devices != ("cpu",) or len(run.hosts) > 1:
        return False
    return sum(rank.threads for rank in run.record.ranks or ()) >= run.machine.num_cores


def _measured_gain(experiment: Experiment, series: Series) -> str:
    """Returns what the parallel loader gained here, if that was measured."""
    settings = {**series.settings, "loader": "parallel"}
    for other in experiment.series:
        if other.settings == settings:
            sure = significant(improvements(series, other, TOTAL.of))
            for each in sure:
                if each.num_ranks in (series.timed[-1].num_ranks, None):
                    return f"here the total time {gained(each)} {at_scale(each)}."
            return "its effect here is not significant, or was measured in too few runs."
    return "its effect was not measured here."


def _part_words(part: str, counts: tuple[int, ...], members: list[Series]) -> str:
    """Returns "data loading on 2 and 4 ranks (51 to 60 % of the total time, 6 runs)"."""
    points = [point for each in members for num in counts if (point := each.at(num))]
    shares = [found[1] for point in points if (found := _dominating_part(point))]
    num_runs = sum(len(point.runs) for point in points)
    low, high = percent(min(shares)), percent(max(shares))
    span = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f"{part} {on_ranks(counts)} ({span} of the total time, {count(num_runs, 'run')})"
