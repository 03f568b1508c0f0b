"""The published values: where they are from, and beside which runs they stand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from candle_p1.parameters.parameter import Origin
from candle_p1.parameters.parameter_file import read_any, read_entries
from candle_p1.reports.published import all_published, content, number_words, published
from tests.candle import CANDLE

BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")


def test_values_are_in_what_is_said():
    for each in all_published():
        assert "{" not in each.says
        assert each.value is None or number_words(each.value) in each.says


@pytest.mark.parametrize(
    ("loaders", "values"),
    [
        ((), []),
        (("parallel", "chunked"), [4.65]),
        (("original",), [43.72]),
        (("original", "parallel", "chunked"), [43.72, 4.65, 89.36]),
    ],
)
def test_values_stand_beside_runs_with_the_same_loaders(loaders, values):
    quantities = "broadcast_overhead_s", "improvement_broadcast_overhead_s"
    runs = SimpleNamespace(benchmark="nt3", mode="strong", loaders=frozenset(loaders))
    found = published(runs, *quantities)
    assert [each.value for each in found] == values


@pytest.mark.parametrize(
    "path",
    sorted(CANDLE.glob("*/*_default_model.txt")),
    ids=lambda path: f"{path.parent.name} {path.stem}",
)
def test_what_is_held_of_candles_files_is_what_they_say(path):
    origin = Origin("config file", file=str(path))
    held = content()["candle"][path.name.split("_")[0]]
    entries = {name: text for name, text, _ in read_entries(path, origin)}
    said = {name: read_any(entries[name]) for name in held}
    assert held == said | {"learning_rate": said["learning_rate"] or "none"}
