"""The published values, against a list of the numbers that the paper and two reports state."""

from __future__ import annotations

from collections import defaultdict

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
STATED = {
    ("paper", "abstract"): [78.25, 78, 79.5, 77.11, 45.22, 41.78],
    ("paper", "section 2.1.1"): [700, 60_483, 56],
    ("paper", "section 2.1.2"): [27],
    ("paper", "section 2.1.3"): [5, 45],
    ("paper", "section 2.1.4"): [9_001],
    ("paper", "Table 1"): [
        *(597, 150, 384, 20, 0.001, "sgd", 1_120, 60_483),
        *(771, 258, 384, 100, "none", "adam", 2_700, 60_484),
        *(162, 55, 768, 60, 0.001, "rmsprop", 2_700, 28_204),
        *(318, 103, 1, 100, 0.001, "sgd", 900_100, 1_000),
    ],
    ("paper", "section 2.3.2"): [6, 64],
    ("paper", "section 3"): [
        *(200, 4_600, 2, 6, 25, 512, 96, 1.6, 250, 2.5, 16, 300, 190, 2_200, 1),
        *(12, 64, 215, 32, 1, 16, 192, 128, 10, 210, 2),
    ],
    ("paper", "section 4.1"): [42, 6, 7],
    ("paper", "section 4.2.1"): [20, 40, 1, 1, 8, 4, 50, 10, 22, 153, 43],
    ("paper", "section 4.2.2"): [100, 110, 4],
    ("paper", "section 4.2.3"): [60, 100, 16, 8],
    ("paper", "section 4.2.4"): [19_200, 38_400, 363, 0.6579],
    ("paper", "section 5"): [16, 2_000_000, 5, 4, 7, 5, 28_000],
    ("paper", "Table 3"): [
        *(81.72, 14.30, 22.25, 5.25, 235.68, 30.99, 80.77, 14.47),
        *(40.98, 11.03, 15.95, 5.33, 5.41, 5.34, 3.20, 2.52),
    ],
    ("paper", "Table 4"): [
        *(52.91, 13.84, 13.93, 3.62, 139.71, 27.43, 48.38, 11.67),
        *(25.07, 9.53, 9.56, 4.40, 4.74, 4.53, 2.79, 2.49),
    ],
    ("paper", "section 5.1"): [
        *(5, 67.68, 68.77, 55.93, 43.72, 4.65, 89.36),
        *(6, 38.46, 32.21, 4, 695, 965),
    ],
    ("paper", "section 5.2"): [78.25, 78, 7, 45.22, 41.78, 4],
    ("paper", "section 5.3"): [55.45, 55.44, 3, 40.72, 40.95, 5],
    ("paper", "section 5.4"): [6.50, 5],
    ("paper", "section 6"): [8, 8],
    ("paper", "section 6.1"): [
        *(5, 34.23, 52.44, 37.65, 5.3, 85.92, 1_536, 10.30, 3, 22.31, 28.59),
    ],
    ("paper", "section 6.2"): [75.24, 79.50, 69.70, 77.11, 48.63, 56.62, 45.86, 53.91],
    ("paper", "section 7"): [3, 4, "2.3.7"],
    ("servantez", "Table 1"): [99.04, 98.99, 98.88, 97.76, 97.16, 93.10],
    ("zhang", "section 2.1"): [64],
}
NUM_WITHOUT_NUMBER = 8
"""Statements about which part dominates, what is better, and the like."""


def test_every_stated_number_is_held_once():
    held = defaultdict(list)
    for each in all_published():
        numbers = [number for number in (each.value, each.to) if number is not None]
        held[each.source, each.section] += numbers
    assert held.keys() == STATED.keys()
    for place, numbers in STATED.items():
        assert sorted(held[place], key=str) == sorted(numbers, key=str), place
    assert sum(each.value is None for each in all_published()) == NUM_WITHOUT_NUMBER


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
