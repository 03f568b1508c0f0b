"""candle-p1 compare; test_sections.py has what is compared of many kinds of runs."""

from __future__ import annotations

import json

from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import RecordError
from tests.planted_records import plant


def invoke(*words):
    return CliRunner().invoke(cli.cli, ["compare", *(str(word) for word in words)])


def test_the_command_prints_and_writes_json(tmp_path):
    a, b = plant(tmp_path, load_s=3.0), plant(tmp_path, load_s=6.0, loader="original")
    path = tmp_path / "out.json"
    result = invoke(a, b, "--json", path)
    assert result.exit_code == 0, result.output
    for text in ("phase load (s)", "3.00", "6.00", "2.00", "single run", "loader", "original"):
        assert text in result.output
    written = json.loads(path.read_text())
    (rows,) = [each["quantities"] for each in written["comparisons"]]
    load = next(row for row in rows if row["name"] == "phase_load_s")
    assert load["ratio"]["value"] == 2
    assert load["a"] == {"median": 3.0, "values": [3.0]}

    found = {"kind": "parameter", "name": "loader", "a": "parallel", "b": "original"}
    assert found in written["differences"]
    assert "1 run in A and also in B" in " ".join(invoke(a, a).output.split())
    assert isinstance(invoke(a, "no").exception, RecordError)
