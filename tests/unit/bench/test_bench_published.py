import csv
import io
import json

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.bench.published import DIFFERS, collect, table_1
from candle_p1.benchmark import find_benchmark
from candle_p1.errors import ParameterError
from candle_p1.reports.published import all_published, content


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


@pytest.mark.parametrize(
    ("name", "noted", "candle_epochs"),
    [
        ("nt3", set(), 400),
        ("p1b1", {"elements"}, 100),
        ("p1b2", set(), 1),
        ("p1b3", {"training_mb", "testing_mb", "batch_size", "samples", "elements"}, 1),
    ],
)
def test_table_1_stands_beside_what_is_trained(name, noted, candle_epochs):
    rows = table_1(find_benchmark(name))
    assert {key: row["published"] for key, row in rows.items()} == content()["table_1"][name]
    assert all(row["here"] is not None and row["note"] != DIFFERS for row in rows.values())
    assert {key for key, row in rows.items() if row["note"]} == noted
    assert rows["epochs"]["candle"] == candle_epochs
    assert f"{rows['elements']['here']:,}" in shown(name)


def test_a_change_of_the_defaults_is_seen(monkeypatch):
    benchmark = find_benchmark("p1b2")
    declared, parse = type(benchmark.declaration), benchmark.declaration.parse
    monkeypatch.setattr(declared, "parse", lambda _, argv, file: parse(["--epochs", "9"], file))
    row = table_1(benchmark)["epochs"]
    assert (row["published"], row["here"], row["note"]) == (768, 9, DIFFERS)


def test_a_benchmark_selects_its_values():
    for path, found in (("benchmarks/p1b2", "p1b2"), ("mnist", "mnist")):
        report = collect(path)
        assert {value["benchmark"] for value in report["values"]} == {found}
        assert list(report["table_1"]) == [found] * (found != "mnist")
    with pytest.raises(ParameterError, match="nothing is published about"):
        collect("tests/files/toy")
