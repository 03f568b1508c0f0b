"""The published values: where they are from, and beside which runs they stand."""

from __future__ import annotations

import pytest

from candle_p1.parameters.parameter import Origin
from candle_p1.parameters.parameter_file import read_any, read_entries
from candle_p1.reports.published import (
    GAINS,
    METHOD_LOADER,
    ORIGINAL_LOADER,
    all_published,
    content,
    number_words,
    published,
    published_loading,
)
from tests.candle import CANDLE

BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")


def test_values_name_their_place_and_show_their_numbers():
    for each in all_published():
        assert each.source in content()["sources"]
        assert each.benchmark in ("", *BENCHMARKS) or each.source != "paper"
        assert each.mode in ("strong", "weak", "batch", "any")
        assert each.machine in (*content()["machines"], "") or each.source != "paper"
        assert str(each).startswith(f"published ({each.machine}" if each.machine else "published (")
        assert "{" not in each.says
        if each.value is not None:
            assert number_words(each.value) in each.says
        is_gain = each.quantity.startswith(GAINS)
        assert (each.loaders == (ORIGINAL_LOADER, METHOD_LOADER)) == is_gain


class Runs:
    """What `published` asks of an experiment."""

    def __init__(self, benchmark, mode, *loaders):
        self.benchmark, self.mode, self.loaders = benchmark, mode, frozenset(loaders)


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
    found = published(Runs("nt3", "strong", *loaders), *quantities)
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


def test_tables_are_whole():
    for benchmark in BENCHMARKS:
        table_1, rows = content()["table_1"][benchmark], content()["table_1_rows"]
        assert table_1.keys() == rows.keys() > content()["candle"][benchmark].keys()
        cells = {(each.table, each.role, each.loader) for each in published_loading(benchmark)}
        assert len(cells) == 8
        sizes = {(each.role, each.file_mb) for each in published_loading(benchmark)}
        assert sizes == {("train", table_1["training_mb"]), ("test", table_1["testing_mb"])}
