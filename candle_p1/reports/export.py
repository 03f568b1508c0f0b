"""The files that a report writes for other programs: a table of all runs, and Extra-P's input.

The table has a row per run and a column per quantity, named with its unit. It contains every run
that could be read, including those that failed or were traced (see the columns `status` and
`perturbed_by`). Unknown values are empty.

Extra-P models how times scale with the number of processes. The format is Extra-P 4's JSON Lines: a
measurement point per line, with all of its repeats. See
https://github.com/extra-p/extrap/blob/master/docs/file-formats.md.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from candle_p1.reports.experiments import Experiment, Series
from candle_p1.reports.frame import STRONG, WEAK, Run
from candle_p1.reports.render import ReportTable
from candle_p1.reports.statistics import contents, csv_text, file_name

TYPES = {
    "boolean": "boolean",
    "integer": "Int64",
    "floating": "Float64",
    "mixed-integer-float": "Float64",
}
"""The type of a column by the kind of its values; those of other or several kinds are text."""

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


def tidy(runs: Iterable[Run]) -> pd.DataFrame:
    """Returns the table. Columns are in a fixed order, and within a group by name."""
    runs = list(runs)
    facts = [each for run in runs for each in run.facts.items()]
    known = {name for name, value in facts if value is not None or name.startswith("parameter_")}
    columns = contents()["runs_csv"]
    names = [*columns["facts"], *columns["quantities"]]
    names += (n for group in columns["groups"] for n in sorted(known) if n.startswith(group))
    rows = [{name: _words(run[name]) for name in names} for run in runs]
    table = pd.DataFrame(rows, columns=names, dtype=object)
    kinds = {name: pd.api.types.infer_dtype(table[name], skipna=True) for name in names}
    types = {name: TYPES.get(kind, "string") for name, kind in kinds.items()}
    return table.astype(types | dict.fromkeys(columns["quantities"], "Float64"))


def to_csv(table: pd.DataFrame) -> str:
    """Returns a table as CSV, in which no text is a formula."""
    words = [str(name) for name, kind in table.dtypes.items() if kind == "string"]
    return table.assign(**{n: table[n].map(csv_text, "ignore") for n in words}).to_csv(index=False)


def _words(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, list) else value


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
