"""What the sections of a report show of planted records: their series, tables, notes and findings.

tests/files/report_sections.toml has the record sets, and report_sections.txt what is shown of each:
whole tables, and of sentences the numbers, flags and verdicts, whatever their other words.
"""

import csv
import io
import re
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from candle_p1.errors import ParameterError
from candle_p1.records.rank_stats import Joules, Watts
from candle_p1.reports.compare import Side, compare
from candle_p1.reports.experiments import group
from candle_p1.reports.export import extrap_files, tidy, to_csv
from candle_p1.reports.frame import Run
from candle_p1.reports.report import notes_on, topic_table
from candle_p1.reports.rules import find
from candle_p1.reports.statistics import contents
from candle_p1.toml_file import read_toml
from tests.conftest import ROOT
from tests.expected import check_expected
from tests.planted_records import REMOVED, changed, experiment_of, planted_record

SETS = read_toml(ROOT / "tests/files/report_sections.toml")
FILE = ROOT / "tests/files/report_sections.txt"
FACT = re.compile(
    r"--\w+|[-+]?\d[\d.,]*\d|[-+]?\d|\b(?:improved|worsened|faster|slower|falls?|rises?|not|published"
    r"|contrary|inconclusive|best|shortest|diverged|simulated|failed|running|traced|none|True|False"
    r"|original|chunked|parallel|dask|cached|linear|sqrt|cbrt|horovod|jax|synthetic"
    r"|training|data loading|waiting|communication|start-up|lower|higher|single|few|nothing|no"
    r"|more|fewer|all|already)\b"
)
LOAD_S = {"original": 20.0, "chunked": 10.0, "parallel": 1.0}
STUDY = {"counts": [1, 2, 4], "seeds": 3, "epochs": 32}
WEAK = {"counts": [1, 2], "seeds": 3, "epochs_scaling": "weak"}


def plain(value):
    """Returns a value of the file of sets as Python has it."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return {"null": None, "removed": REMOVED}.get(value, value) if isinstance(value, str) else value


def records_of(group):
    """Yields the records of a group, as the file of sets describes it."""
    facts = plain(group)
    facts = (STUDY if facts.pop("study", 0) else WEAK if facts.pop("weak", 0) else {}) | facts
    benchmark, counts = facts.pop("benchmark", "nt3"), facts.pop("counts", [2])
    seeds, loads_s = facts.pop("seeds", 1), facts.pop("loads_s", [])
    variants, changes = facts.pop("variants", [{}]), facts.pop("changes", {})
    if cores := facts.pop("cores", None):
        changes = changes | {"environment.node_cores": cores}
    for num_ranks, variant in product(counts, map(plain, variants)):
        if isinstance(variant, str):
            variant = {"loader": variant, "load_s": LOAD_S[variant]}
        for seed in range(len(loads_s) or seeds):
            more = {"rng_seed": seed} | facts | variant
            more |= {"load_s": loads_s[seed]} if loads_s else {}
            record = planted_record(benchmark, num_ranks, **more)
            yield changed(record, changes) if changes else record


def rounded(text):
    return re.sub(r"\d+\.\d{5,}", lambda found: f"{float(found[0]):.5g}", text)


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


NUM_GPUS, NUM_NODES = 12, 2


def gpus(power_w, total_s, **facts):
    """Returns a group of 12 GPUs whose powers average to power_w, from 11 W below to 11 W above."""
    watts = power_w + np.arange(-11.0, 12.0, 2.0)
    found = {"kind": "measured", "num_samples": 10, "power": Watts.over(watts).model_dump()}
    found |= {"energy": Joules.over(watts * total_s).model_dump(), "phases": {}}
    found |= {"label": "Tesla V100", "domain": "gpu", "source": "nvml", "reading": "energy"}
    found |= {"resolution_s": 0.1, "counted": True}
    return found | {"num_devices": NUM_GPUS, "nodes": (0, NUM_NODES - 1)} | facts


def measured(record, power_w, **facts):
    """Returns a record of 12 GPUs on two nodes, of which each has this mean power."""
    total_s, watts = record.total_s, NUM_GPUS * power_w
    energy = {"total_j": watts * total_s, "mean_w": watts, "power_hz": 1.0}
    energy["devices"] = [gpus(power_w, total_s, **facts)]
    places = {f"energy.{name}": value for name, value in energy.items()}
    return changed(record, places | {"num_nodes": NUM_NODES})


def rows_of(experiment, slug):
    (topic,) = [each for each in contents()["topics"] if each["slug"] == slug]
    table = topic_table(experiment, topic)
    return table, list(csv.DictReader(io.StringIO(table.to_csv())))


@pytest.fixture
def experiment():
    """The paper's method halves the time and raises the power of a GPU from 60 to 90 W."""
    records = (
        measured(planted_record("nt3", NUM_GPUS, loader=name, load_s=load_s, energy_j=1.0), power_w)
        for name, load_s, power_w in (("original", 21.5, 60.0), ("chunked", 2.0, 90.0))
    )
    return experiment_of(*records)


def test_power_and_energy_are_per_gpu_and_per_node_and_the_rate_is_named(experiment):
    table, rows = rows_of(experiment, "power")
    for row, power_w in zip(rows, (60.0, 90.0), strict=True):
        total_s = float(row["energy per GPU (J)"]) / power_w
        assert float(row["mean power per GPU (W)"]) == power_w
        assert float(row["mean power per node, gpu (W)"]) == 6 * power_w
        assert float(row["energy per node, gpu (J)"]) == pytest.approx(6 * power_w * total_s)
    assert not {"energy (J)", "mean power (W)"} & {*table.headings}
    assert "at 1 Hz" in " ".join(table.notes)


def test_the_change_of_power_stands_beside_that_of_energy(experiment):
    _, rows = rows_of(experiment, "improvement")
    (over_all, alone) = (row for row in rows if row["quantity"] == "energy per GPU")
    assert float(over_all["change of mean power per GPU (%)"]) == pytest.approx(50)
    assert over_all["improvement (%)"] == alone["improvement (%)"]
    others = [row for row in rows if row["quantity"] != "energy per GPU"]
    assert {row["change of mean power per GPU (%)"] for row in others} == {""}


@pytest.mark.parametrize(
    ("facts", "gpu_w"),
    [
        ({}, 60.0),
        ({"counted": False}, 60.0),  # in a node's own sensor
        ({"kind": "absent", "reasons": ["it was lost"]}, None),
        ({"domain": "cpu"}, None),
    ],
)
def test_a_mean_over_gpus_needs_all_of_them(facts, gpu_w):
    run = Run(None, measured(planted_record("nt3", 12, energy_j=1.0), 60.0, **facts))
    assert run["power_per_gpu_w"] == gpu_w
    assert run["power_per_node_w"] == 360.0
    assert Run(None, planted_record("nt3", 12))["energy_per_node_j"] is None


def test_a_superchips_module_has_no_power_per_gpu():
    record = measured(planted_record("nt3", 12, energy_j=1.0), 600.0, domain="module")
    groups = [*record.energy.devices, gpus(600.0, record.total_s, source="cray", counted=False)]
    assert Run(None, changed(record, {"energy.devices": groups}))["power_per_gpu_w"] is None
