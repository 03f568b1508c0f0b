"""Times against the number of processes, for Extra-P, which models how they scale.

The format is Extra-P 4's JSON Lines: a measurement point per line, with all of its repeats. See
https://github.com/extra-p/extrap/blob/master/docs/file-formats.md.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

from candle_p1.reports.columns import LOAD, TOTAL, TRAIN, phase_time
from candle_p1.reports.frame import STRONG, WEAK
from candle_p1.reports.render import ReportTable
from candle_p1.reports.words import file_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from candle_p1.reports.experiments import Experiment, Series

PARAMETER = "processes"
METRIC = "time_s"
MODES = (STRONG, WEAK)
"""Where the batch size also grows with the ranks, a model of one parameter would not hold."""

MIN_POINTS = 2
CALL_PATHS = {
    "total": TOTAL,
    "total->load": LOAD,
    "total->broadcast": phase_time("broadcast"),
    "total->train": TRAIN,
}

INDEX_NAME = "files.csv"
INDEX_HEADINGS = ("file", "benchmark", "mode", "machine", "series", "points")


def extrap_files(experiments: Iterable[Experiment]) -> dict[str, str]:
    """Returns the files by name, one for each series with at least MIN_POINTS numbers of ranks.

    INDEX_NAME lists the series of all files; without any series there is no such file.
    """
    files: dict[str, str] = {}
    index: list[tuple[str, ...]] = []
    for experiment in experiments:
        for series in experiment.series if experiment.mode in MODES else ():
            text = "".join(f"{line}\n" for line in _lines(series))
            if not text:
                continue
            name = _name(experiment, series, files)
            files[name] = text
            of = (experiment.benchmark, experiment.mode, str(experiment.machine), series.name)
            index.append((name, *of, str(len(series.timed))))
    if index:
        files[INDEX_NAME] = ReportTable("", "", INDEX_HEADINGS, tuple(index)).to_csv()
    return files


def _lines(series: Series) -> Iterator[str]:
    if len(series.timed) < MIN_POINTS:
        return
    for path, quantity in CALL_PATHS.items():
        values = {point.num_ranks: point.values(quantity) for point in series.timed}
        if not all(values.values()):
            continue  # Extra-P needs all points of a call path
        for num_ranks, seconds in values.items():
            line = {
                "params": {PARAMETER: num_ranks},
                "callpath": path,
                "metric": METRIC,
                "value": seconds,
            }
            yield json.dumps(line, allow_nan=False)


def _name(experiment: Experiment, series: Series, taken: Collection[str]) -> str:
    """Returns a file name that describes the series and is not taken."""
    stem = f"{file_name(experiment.benchmark)}-{experiment.mode}-{file_name(series.name)}"
    names = (f"{stem}{f'-{i}' if i else ''}.jsonl" for i in itertools.count())
    return next(name for name in names if name not in taken)
