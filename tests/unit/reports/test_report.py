"""The report as pages, tables and files, and the commands that write and compare.

test_sections.py has what tables and comparisons show of many kinds of runs.
"""

import csv
import io
import json
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import CandleError, RecordError
from candle_p1.reports.render import ReportTable, Section, Statement, render_page
from candle_p1.reports.statistics import estimate_median
from tests.planted_records import plant, plant_study


def invoke(*words, command="report"):
    return CliRunner().invoke(cli.cli, [command, *(str(word) for word in words)])


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    plant_study(directory, 2, (1, 2))
    plant(directory, "nt3", 2, status="failed", loader="original")
    (directory / "bad").mkdir()
    (directory / "bad/run.json").write_text("[")
    out = tmp_path_factory.mktemp("out")
    return invoke(directory, "-o", out), out


def test_the_command_writes_page_figures_and_tables(written):
    result, out = written
    assert result.exit_code == 0, result.output
    assert "bad/run.json: line 1: not JSON" in result.output
    assert result.output.endswith("index.html: 9 runs, 6 figures\n")
    names = {path.stem.removeprefix("nt3-strong-") for path in (out / "figures").iterdir()}
    assert len(names) == 6
    assert {"energy", "improvement", "quality"} <= names
    for path in (out / "figures").glob("*.svg"):
        root = ET.fromstring(path.read_text())
        assert len(root.findall(".//{http://www.w3.org/2000/svg}text")) > 3
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    first, second, *_ = rows_of(out / "tables/nt3-strong-times.csv")
    assert (first["series"], first["ranks"], first["runs"]) == ("loader original", "1", "2")
    assert float(first["data loading (s)"]) == pytest.approx(9.005)
    assert (first["not finished"], second["not finished"]) == ("0", "1")
    assert "published: Summit, Table 3" in (out / "tables/nt3-strong-loading.csv").read_text()
    assert (out / "runs.parquet").exists() == bool(find_spec("pyarrow"))
    (failed,) = (each for each in rows_of(out / "tables/runs.csv") if each["status"] == "failed")
    assert failed["remark"] == "rank 0 died"
    assert len(rows_of(out / "tables/unreadable.csv")) == 1


def test_the_page_says_what_is_missing(written):
    _, out = written
    text = (out / "index.html").read_text()
    for words in ("9 runs: 1 failed and 8 ok.", "1 record cannot be read", "--batch_scaling"):
        assert words in text, words
    # Nothing that the paper's method gains stands beside another loader.
    assert "67.68 %" not in text


def test_models_are_fitted_where_it_is_asked_and_can_be(tmp_path):
    for name, counts in (("alone", (1,)), ("runs", (1, 2, 4))):
        (tmp_path / name).mkdir()
        for num_ranks in counts:
            plant(tmp_path / name, "nt3", num_ranks)
        assert invoke(tmp_path / name, "-o", tmp_path / name / "out", "--model").exit_code == 0
        made = {path.stem for path in (tmp_path / name / "out").rglob("nt3-strong-*")}
        assert ({"nt3-strong-model", "nt3-strong-what-if"} <= made) == (name == "runs")


def test_failed_runs_alone_make_a_report(tmp_path):
    plant(tmp_path, "p1b1", 2, status="failed")
    result = invoke(tmp_path, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "rank 0 died" in (tmp_path / "out/index.html").read_text()


def test_errors_name_the_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RecordError, match=str(tmp_path)):
        raise invoke(tmp_path, "-o", tmp_path / "out").exception
    plant(tmp_path, "nt3", 1)
    for words in ((tmp_path, "-o", file / "out"), (file / "no", "-o", "x")):
        with pytest.raises(CandleError, match=str(file)):
            raise invoke(*words).exception


def test_two_runs_are_compared(tmp_path):
    a, b = plant(tmp_path, load_s=3.0), plant(tmp_path, load_s=6.0, loader="original")
    output = invoke(a, b, "--json", tmp_path / "out.json", command="compare").output
    for text in ("phase load (s)", "3.00", "6.00", "2.00", "single run", "loader", "original"):
        assert text in output
    written = json.loads((tmp_path / "out.json").read_text())
    (rows,) = [each["quantities"] for each in written["comparisons"]]
    load = next(row for row in rows if row["name"] == "phase_load_s")
    assert (load["ratio"]["value"], load["a"]) == (2, {"median": 3.0, "values": [3.0]})
    found = {"kind": "parameter", "name": "loader", "a": "parallel", "b": "original"}
    assert found in written["differences"]
    assert "1 run in A and also in B" in " ".join(invoke(a, a, command="compare").output.split())
    assert isinstance(invoke(a, "no", command="compare").exception, RecordError)


def test_a_table_is_csv_and_a_table_on_the_screen():
    rows = (("a|b", 1200, 0.5, estimate_median([1.0, 3.0]), None), ("=c", 2, None, None, None))
    table = ReportTable("t", "Title", ("name", "num", "s", "median (s)", "empty"), rows, ("note",))
    table = table.without_empty_columns()
    assert table.headings == ("name", "num", "s", "median (s)")
    assert table.texts == [["a|b", "1,200", "0.500", "2.00 [1.00 to 3.00]"], ["=c", "2", "-", "-"]]
    lines = list(csv.reader(io.StringIO(table.to_csv())))
    assert lines[0][4:] == [f"median (s), {end}" for end in ("low", "high", "confidence", "runs")]
    assert lines[1][1:] == ["1200", "0.5", "2.0", "1.0", "3.0", "0.5", "2"]
    assert lines[2] == ["'=c", "2", "", "", "", "", "", ""]
    shown = table.to_rich()
    assert [column.justify for column in shown.columns] == ["left", "right", "right", "right"]
    assert ReportTable.from_rich(shown).texts == table.texts


def test_a_page_shows_each_thing_once_and_escapes_it():
    table = ReportTable("s", "T", ("a",), [("<i>",)], ["published (X): 1"])
    said = [Statement("what", ["<b>"], "s")]
    inner = Section("s", "T", statements=said, tables=[table], missing=[("curve", "no data")])
    outer = Section("o", "O", notes=["n"], sections=[inner])
    text = render_page(Section("", "P", sections=[outer]))
    for words in ("<h1>P</h1>", 'id="o"', "&lt;b&gt;", "&lt;i&gt;", "Not drawn: curve (no data)."):
        assert text.count(words) == 1, words
    assert '<p class="published">published (X): 1</p>' in text
    assert text.count('id="s"') == 1
