"""Records that are damaged or made to do harm: named and left out, without effect on the others."""

import csv
import io
import json
import os
import random
import re
import shutil
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import CandleError
from candle_p1.records.summary import details
from candle_p1.reports.drawing import Drawing
from candle_p1.reports.frame import read_runs
from tests.planted_records import plant, plant_study, planted_record


def invoke(*words):
    """Runs a command; returns its result. Only errors that name their cause may end it."""
    result = CliRunner().invoke(cli.cli, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, (CandleError, SystemExit)), (
        result.exception
    )
    return result


@pytest.fixture
def valid():
    """Returns the content of a record that has most of what records can have."""
    merits = {"quality": {"accuracy": 0.9, "loss": 0.1}, "naive": {"accuracy": 0.5}}
    merits["trained"] = {"accuracy": 0.9, "val_accuracy": 0.8, "loss": 0.1}
    facts = {"energy_j": 5.0, "exchange": {"HOROVOD_FUSION_THRESHOLD": "0"}}
    record = planted_record(num_ranks=2, epochs=4, **merits, **facts)
    return record.model_dump(mode="json", exclude_unset=True)


def put(content, place, value):
    """Returns a record with another value at a place, such as "phases.load.min_s"."""
    changed = json.loads(json.dumps(content))
    *within, key = place.split(".")
    section = changed
    for name in within:
        section = section[int(name) if isinstance(section, list) else name]
    section[int(key) if isinstance(section, list) else key] = value
    return changed


def nested(depth):
    return "[" * depth + "]" * depth


BAD = {  # what is replaced in the text of a good record, and by what
    "deep": ('"small"', nested(100_000)),
    "deep in a value": ('"small"', nested(900)),
    "5,000 digits": ('"num_ranks": 2', f'"num_ranks": 1{"0" * 5000}'),
    "huge parameter": ('"value": 2019', f'"value": 1{"0" * 30}'),
    "too many ranks": ('"num_ranks": 2', '"num_ranks": 3'),
    "lone surrogate": ('"nt3"', r'"\ud800"'),
    "surrogate as key": ('"accuracy"', r'"\udc80"'),
    "NaN parameter": ('"value": 2019', '"value": NaN'),
    "not UTF-8": ("nt3", "\udcff"),
    "long version": (": 3,", f': "{"x" * 10_000}",'),
    "long key": ('"ended"', f'"{"x" * 10_000}"'),
}
PLACES = {
    "link to itself": lambda path: path.symlink_to(path.name),
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def damaged(tmp_path, valid):
    """Returns the directory of two good records and, in a/KIND, a bad one of each kind."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        plant(tmp_path / name, num_ranks=2)
    text = json.dumps(valid)
    for kind in (*BAD, *PLACES):
        path = tmp_path / "a" / kind / "run.json"
        path.parent.mkdir()
        if kind in PLACES:
            PLACES[kind](path)
        else:
            assert BAD[kind][0] in text
            path.write_bytes(text.replace(*BAD[kind]).encode(errors="surrogateescape"))
    return tmp_path


def test_bad_records_are_named_and_left_out(damaged):
    runs = read_runs([damaged])
    assert len(runs.runs) == 2
    assert sorted(path.parent.name for path in runs.problems) == sorted([*BAD, *PLACES])
    assert all(0 < len(reason) < 300 for reason in runs.problems.values()), runs.problems
    result = invoke("report", damaged, "-o", damaged / "out")
    assert (result.exit_code, "2 runs" in result.output) == (0, True)
    rows = (damaged / "out/tables/unreadable.csv").read_text().splitlines()[1:]
    assert len(rows) == len(runs.problems)


HOSTILE = ("../../x", "/x", "..", ".", "", "a/b", "x" * 300, "\0x", "a\nb", "-rf", "~", "runs")


def test_names_in_records_do_not_choose_where_files_go(tmp_path, monkeypatch, valid):
    """Whatever a benchmark, a figure of merit or a file of data is called."""
    out = tmp_path / "in/here/out"
    for i, name in enumerate(HOSTILE):
        content = put(valid, "benchmark", name)
        content["quality"] = {name: {"value": 0.5}}
        content["energy"]["traces"] = [name]
        content["num_nodes"] = 1
        (tmp_path / f"in/here/run{i}").mkdir(parents=True)
        (tmp_path / f"in/here/run{i}/run.json").write_text(json.dumps(content))
    before = set(tmp_path.rglob("*"))

    def draw_one(experiment):
        return [Drawing(experiment.slug, "title", "caption", "<svg></svg>", b"", 1.0)], []

    monkeypatch.setattr("candle_p1.reports.report.draw_figures", draw_one)
    assert invoke("report", tmp_path / "in", "-o", out).exit_code == 0
    new = set(tmp_path.rglob("*")) - before
    assert all(path == out.parent or path.is_relative_to(out) for path in new)
    names = [path.name for path in (out / "figures").iterdir()]
    assert len(names) == 2 * len(HOSTILE)
    assert all(re.fullmatch(r"[\w.-]{1,200}", path.name) for path in new)


CHOICES = (".status", ".energy.kind", ".energy.covers")


def with_text(value, text, place=""):
    """Returns a record in which all text that may be anything is `text`, and keys have it too."""
    if isinstance(value, dict):
        free = place.endswith(("parameters", "quality", "metrics", "packages", "files", "settings"))
        return {
            (f"{key}{text}" if free else key): with_text(each, text, f"{place}.{key}")
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [with_text(each, text, place) for each in value]
    if not isinstance(value, str) or place in CHOICES:
        return value
    return f"{text}{value}"


@pytest.mark.extended
def test_text_of_records_is_only_text(tmp_path, valid):
    text = "=1+1<script>alert('x')</script>&\x1b[31m\x9b2J|[a](javascript:b)$\\frac{$_é字😀[/red]"
    plain = "=1+1<script>alert('x')</script>&|[a](javascript:b)$\\frac{$_é字😀[/red]"
    for i in range(2):
        content = put(with_text(valid, text), "total_s", 100.0 + i)
        path = tmp_path / f"run{i}/run.json"
        path.parent.mkdir()
        path.write_text(json.dumps(content))
    out = tmp_path / "out"
    assert invoke("report", tmp_path, "-o", out).exit_code == 0
    assert invoke("show", path, "--html", out / "run.html").exit_code == 0
    pages = [page.read_text() for page in (*out.glob("*.html"), *out.rglob("*.svg"))]
    assert len(pages) > 4
    assert sum("=1+1&lt;script" in page for page in pages) > 2
    for page in pages:
        assert "<script" not in page
        ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    texts = (table.read_text() for table in out.rglob("*.csv"))
    cells = [cell for text in texts for row in csv.reader(io.StringIO(text)) for cell in row]
    assert any(plain in cell for cell in cells)
    assert not any(re.match(r"[=+@]|-[^\d]", cell) for cell in cells)
    for words in (["show", path], ["compare", path, tmp_path / "run0"]):
        output = invoke(*words).output
        assert "alert" in output
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", output)


def leaves(value, place=""):
    """Yields the places of a record, of sections as well as of values."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield f"{place}{key}"
        if isinstance(each, (dict, list)):
            yield from leaves(each, f"{place}{key}.")


WRONG = (
    None, float("nan"), float("inf"), 10**30, 2**63 - 1, -1, 0, 1, -1.5, 5e-324, 1e99, "", "x",
    "\ud800", "$\\frac{", True, [], {}, [1, ["a"]], {"a": {"b": [1]}}, json.loads(nested(150)),
)  # fmt: skip


@pytest.mark.extended
def test_a_record_with_anything_wrong_is_reported_or_left_out(tmp_path, valid):
    """Any value at any place: those that pass are in a report with good records, and are drawn."""
    plant_study(tmp_path, 1, (1, 2))
    chosen = random.Random(0)
    places = list(leaves(valid))
    accepted = 0
    for i in range(300):
        content = put(valid, chosen.choice(places), chosen.choice(WRONG))
        path = tmp_path / f"changed{i}/run.json"
        path.parent.mkdir()
        path.write_text(json.dumps(content))
        runs = read_runs([path])
        for run in runs.runs:
            accepted += 1
            list(details(run.record))
            invoke("compare", path, tmp_path / "run000")
            if accepted % 20 == 0:
                invoke("show", path, "--html", tmp_path / "run.html")
        for reason in runs.problems.values():
            assert 0 < len(reason) < 500
            shutil.rmtree(path.parent)
    assert 30 < accepted < 200
    result = invoke("report", tmp_path, "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert f"{4 + accepted} runs" in result.output
