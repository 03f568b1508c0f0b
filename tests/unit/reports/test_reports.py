"""What the commands about runs show and write: tests/files/reports; and pages and tables alone.

test_sections.py has what tables and comparisons show of many kinds of runs.
"""

import csv
import io
import itertools
import xml.etree.ElementTree as ET

import pytest

from candle_p1.reports.render import ReportTable, Section, Statement, render_page
from candle_p1.reports.statistics import estimate_median
from candle_p1.toml_file import tomllib
from tests import planted_records
from tests.conftest import ROOT
from tests.transcripts import Transcripts

COMMANDS = Transcripts(ROOT / "tests/files/reports")


@pytest.mark.parametrize("name", COMMANDS.cases)
def test_commands_about_runs(name, tmp_path, monkeypatch):
    def plant(line):
        planted_records.plant_group(tmp_path / "runs", tomllib.loads(f"group = {line}")["group"])

    monkeypatch.setattr(planted_records, "_started", itertools.count())
    COMMANDS.check(name, tmp_path, monkeypatch, plant)
    for path in tmp_path.rglob("*.svg"):
        texts = ET.fromstring(path.read_text()).findall(".//{http://www.w3.org/2000/svg}text")
        assert len(texts) > 3
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


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
