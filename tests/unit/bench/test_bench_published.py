import csv
import io
import json

from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.bench.published import DIFFERS, table_1
from candle_p1.benchmark import find_benchmark
from candle_p1.reports.published import all_published


def shown(*words):
    result = CliRunner().invoke(cli.cli, ["published", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_value_is_shown_with_its_place(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = [set(line.replace(",", "").split()) for line in shown().splitlines()]
    for each in all_published():
        if each.section != "Table 1" or each.source != "paper":  # that is a table of its own
            words = f"{each.says} {each.where}".replace(",", "").split()
            assert any(line.issuperset(words) for line in lines), each
    values = json.loads(shown("--json", "-"))["values"]
    rows = list(csv.DictReader(io.StringIO(shown("--csv"))))
    assert len(values) == len(rows) == len(all_published())
    assert [str(value["value"] or "") for value in values] == [row["value"] for row in rows]


def test_a_change_of_the_defaults_is_seen(monkeypatch):
    benchmark = find_benchmark("p1b2")
    declared, parse = type(benchmark.declaration), benchmark.declaration.parse
    monkeypatch.setattr(declared, "parse", lambda _, argv, file: parse(["--epochs", "9"], file))
    row = table_1(benchmark)["epochs"]
    assert (row["published"], row["here"], row["note"]) == (768, 9, DIFFERS)
