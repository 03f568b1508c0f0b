from __future__ import annotations

import numpy as np
import pytest
from rich.table import Table

from candle_p1.bench import read
from candle_p1.bench.read import Read, slow_source
from candle_p1.data.cooperative import read_together
from candle_p1.data.loading import Loading
from candle_p1.data.table import CsvLayout


def outcome(elapsed_s, reads):
    return {"elapsed_s": elapsed_s, "reads": {"train": np.array(reads, float).reshape(-1, 3)}}


def comparison(ranks=(1, 2), **conditions):
    return Read(benchmark="nt3", num_ranks=ranks, num_blocks=8, **conditions)


def tables(ours, report):
    return [part for part in ours.render(report) if isinstance(part, Table)]


def test_times_are_compared_with_those_of_the_first_number_of_ranks(compare):
    def measure(task, num_ranks):
        if num_ranks == 1:
            return [outcome(2.0, [(0, 1, 5), (1, 2, 5)])]
        return [outcome(0.9, [(0, 0.9, 5)]), outcome(1.0, [(0.1, 1, 5)])]

    ours = comparison(num_repeats=2)
    report = compare(ours, measure)
    one, two = report["results"]
    assert (one["median_s"], one["ratio"], one["mean_ranks"]) == (2, 1, 1)
    assert (two["median_s"], two["ratio"], two["repeats"]) == (1, 0.5, 2)
    assert two["mean_ranks"] == pytest.approx(1.8)
    of_ranks = {"begin_s": [0, 0.1], "end_s": [0.9, 1], "busy_s": [0.9, 0.9], "num_bytes": [5, 5]}
    assert two["per_rank"]["train"] == of_ranks
    assert two["reading"]["train"]["union_s"] == pytest.approx(1)
    cells = [list(each.columns[0].cells) for each in tables(ours, report)]
    assert cells == [["1", "2"], ["0", "1"]]


def test_a_rank_that_read_nothing_is_shown_and_of_many_ranks_the_first(compare):
    def measure(task, num_ranks):
        return [outcome(1, reads) for reads in [[(0, 1, 5)], *[[]] * (num_ranks - 1)]]

    ours = comparison((1, 31))
    _, ranks = tables(ours, compare(ours, measure))
    assert list(ranks.columns[1].cells)[:2] == ["0.000", "none"]
    assert ranks.row_count == read.MAX_SHOWN_RANKS + 1


def test_every_block_is_delayed_once_however_many_threads_read_it(tmp_path, monkeypatch):
    path, slept = tmp_path / "table.csv", []
    path.write_text("1,2\n" * 100)
    monkeypatch.setattr("time.sleep", slept.append)
    slow = {"open_source": slow_source(0.5)}
    table = read_together(path, CsvLayout(), Loading(num_threads=2, block_bytes=100, **slow))
    assert table.values.tolist() == [[1, 2]] * 100
    assert slept == [0.5] * 2 * 4  # both threads of a block wait at the same time
