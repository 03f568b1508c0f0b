"""Times against the number of processes, for Extra-P, which models how they scale.

The format is Extra-P 4's JSON Lines: a measurement point per line, with all of its repeats. See
https://github.com/extra-p/extrap/blob/master/docs/file-formats.md.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator

from candle_p1.reports.experiments import Experiment, Series
from candle_p1.reports.frame import STRONG, WEAK
from candle_p1.reports.render import ReportTable
from candle_p1.reports.words import file_name

MODES = (STRONG, WEAK)
"""Where the batch size also grows with the ranks, a model of one parameter would not hold."""

MIN_POINTS = 2
CALL_PATHS = {
    "total": "total_s",
    "total->load": "phase_load_s",
    "total->broadcast": "phase_broadcast_s",
    "total->train": "phase_train_s",
}
"""The columns of the table of runs, by Extra-P's names."""

INDEX_NAME = "files.csv"


def extrap_files(experiments: Iterable[Experiment]) -> dict[str, str]:
    """Returns the files by name, one for each series with at least MIN_POINTS numbers of ranks.

    INDEX_NAME lists the series of all files; without any series there is no such file.
    """
    files: dict[str, str] = {}
    index = []
    for experiment in experiments:
        for series in experiment.series:
            if experiment.mode not in MODES or len(series.timed) < MIN_POINTS:
                continue
            parts = file_name(experiment.benchmark), experiment.mode, file_name(series.name)
            ends = ("", *(f"-{i}" for i in range(1, len(files) + 1)))
            names = (f"{'-'.join(parts)}{end}.jsonl" for end in ends)
            name = next(each for each in names if each not in files)
            files[name] = "".join(f"{line}\n" for line in _lines(series))
            of = (experiment.benchmark, experiment.mode, str(experiment.machine), series.name)
            index.append((name, *of, str(len(series.timed))))
    if index:
        headings = ("file", "benchmark", "mode", "machine", "series", "points")
        files[INDEX_NAME] = ReportTable("", "", headings, index).to_csv()
    return files


def _lines(series: Series) -> Iterator[str]:
    for (path, column), point in itertools.product(CALL_PATHS.items(), series.timed):
        if all(each.values(column) for each in series.timed):  # Extra-P needs all of them
            line = {
                "params": {"processes": point.num_ranks},
                "callpath": path,
                "metric": "time_s",
                "value": point.values(column),
            }
            yield json.dumps(line, allow_nan=False)
