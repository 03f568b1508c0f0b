"""What the sections of a report show of planted records: their series, tables, notes and findings.

tests/files/reports/sections.toml has the record sets, and sections.txt what is shown of each: whole
tables, and of sentences the numbers, flags and verdicts, whatever their other words.
"""

import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

from candle_p1.errors import ParameterError
from candle_p1.reports.compare import Side, compare
from candle_p1.reports.experiments import group
from candle_p1.reports.export import extrap_files, tidy, to_csv
from candle_p1.reports.frame import Run
from candle_p1.reports.report import notes_on, topic_table
from candle_p1.reports.rules import find
from candle_p1.reports.statistics import contents
from candle_p1.toml_file import read_toml
from tests.conftest import ROOT
from tests.expected import check_expected, rounded
from tests.planted_records import records_of

SETS = read_toml(ROOT / "tests/files/reports/sections.toml")
FILE = ROOT / "tests/files/reports/sections.txt"
FACT = re.compile(
    r"--\w+|[-+]?\d[\d.,]*\d|[-+]?\d|\b(?:improved|worsened|faster|slower|falls?|rises?|not|published"
    r"|contrary|inconclusive|best|shortest|diverged|simulated|failed|running|traced|none|True|False"
    r"|original|chunked|parallel|dask|cached|linear|sqrt|cbrt|horovod|jax|synthetic"
    r"|training|data loading|waiting|communication|start-up|lower|higher|single|few|nothing|no"
    r"|more|fewer|all|already)\b"
)


def facts_of(sentence):
    return " ".join(FACT.findall(sentence))


def series_of(experiment):
    """Yields the numbers of runs that are timed, of those that are perturbed, and of the rest."""
    for series in experiment.series:
        for point in series.points:
            timed, unfinished = len(point.runs), point.num_unfinished
            perturbed = len(point.all_runs) - timed - unfinished
            counts = f"{timed} + {perturbed} + {unfinished}"
            yield f"{series.name}, {point.num_ranks} ranks: {counts}"


def findings_on(experiment):
    kinds = ("sentences", "inconclusive", "published", "missing")
    for finding, kind in product(find(experiment), kinds):
        texts = getattr(finding, kind)
        for text in filter(None, [texts] if kind == "missing" else texts):
            yield f"{finding.title}, {kind}: {facts_of(text)}"


def table_of(experiment, slug):
    (topic,) = [each for each in contents()["topics"] if each["slug"] == slug]
    table = topic_table(experiment, topic)
    if table is None:
        return ["nothing"]
    return [*rounded(table.to_csv()).splitlines(), *filter(None, map(facts_of, table.notes))]


def compared(*sides):
    """Yields the quantities of both sides, what differs, and the warnings."""
    try:
        comparison = compare(*(Side(name, runs) for name, runs in zip("ab", sides, strict=True)))
    except ParameterError as error:
        yield f"refused: {facts_of(str(error))}"
        return
    for settings, rows in comparison.pairings.items():
        for row in rows:
            change = row.change and [row.change.value, row.change.low, row.change.high]
            ends = " to ".join(f"{end:.5g}" for end in change or ())
            values = [", ".join(f"{value:.5g}" for value in side) for side in (row.a, row.b)]
            name = f"{settings} {row.quantity.name}"
            yield f"{name}: {' against '.join(values)}; {ends}; {facts_of(row.verdict)}"
    yield from map(str, comparison.differences)
    yield from (warning.partition(": ")[2] or facts_of(warning) for warning in comparison.warnings)


def runs_of(groups, name=""):
    records = [record for each in groups for record in records_of(each)]
    return tuple(Run(Path(f"{name}{i}"), record) for i, record in enumerate(records))


def shown(name):
    """Returns the text of a set in the file of facts."""
    lines, runs = [], runs_of(SETS[name]["records"])
    if other := SETS[name].get("other"):
        return "\n".join(compared(runs, runs_of(other, "other")))
    if SETS[name]["sections"] == "extrap":
        return "\n".join(f"{file}:\n{text}" for file, text in extrap_files(group(runs)).items())
    if SETS[name]["sections"] == "runs":
        table = tidy(runs).drop(columns=["started", "ended"], errors="ignore")
        return "\n".join(
            [rounded(to_csv(table)), *(f"{name}: {kind}" for name, kind in table.dtypes.items())]
        )
    for each in group(runs):
        lines += ["", "# " + ", ".join([each.benchmark, each.mode, *map(str, each.limits)])]
        for section in SETS[name]["sections"].split():
            if section == "series":
                lines += series_of(each)
            elif section == "notes":
                lines += [f"note: {facts_of(note)}" for note in notes_on(each)]
            elif section == "findings":
                lines += findings_on(each)
            else:
                lines += [f"{section}: {line}" for line in table_of(each, section)]
    return "\n".join(lines)


@pytest.mark.parametrize("name", SETS)
def test_sections_show_what_was_planted(name):
    check_expected(FILE, name, shown(name), SETS)


@pytest.mark.formats
@pytest.mark.skipif(find_spec("extrap") is None, reason="Extra-P is not installed")
@pytest.mark.filterwarnings("ignore")  # its own
def test_extrap_reads_its_files(tmp_path):
    from extrap.fileio.file_reader.jsonlines_file_reader import read_jsonlines_file

    runs = runs_of(SETS["Extra-P: all repeats of a strong series"]["records"])
    path = tmp_path / "series.jsonl"
    path.write_text(extrap_files(group(runs))["nt3-strong-all-runs.jsonl"])
    experiment = read_jsonlines_file(str(path))
    assert [parameter.name for parameter in experiment.parameters] == ["processes"]
    paths = {"total", "total->load", "total->broadcast", "total->train"}
    assert {path.name for path in experiment.callpaths} == paths
    for measurements in experiment.measurements.values():
        assert [float(each.coordinate[0]) for each in measurements] == [1, 2, 4, 8, 16]
        assert all(each.repetitions == 3 for each in measurements)
