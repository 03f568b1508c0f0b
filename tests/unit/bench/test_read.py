from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from rich.table import Table

from candle_p1.bench import read
from candle_p1.bench.read import Read, part_of, slow_source
from candle_p1.data.cooperative import read_together
from candle_p1.data.loading import Loading
from candle_p1.data.reader import FileSet
from candle_p1.data.table import CsvLayout
from candle_p1.errors import DataError, ParameterError


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


def test_ranks_that_share_nothing_are_compared_with_the_same_time(compare):
    def measure(task, num_ranks):
        reads = [[(0, 1, 5)], *[[]] * (num_ranks - 1)]
        return [outcome(33 - num_ranks - task.independent, each) for each in reads]

    ours = comparison((1, 31), independent=True)
    report = compare(ours, measure)
    one, many = report["results"]
    assert one["independent"] is None
    assert (many["ratio"], many["independent"]["ratio"]) == (2 / 32, 1 / 32)
    assert many["independent"]["repeats"] == 3
    times, ranks = tables(ours, report)
    assert list(times.columns[0].cells) == ["1", "31", "31 independent"]
    assert list(ranks.columns[1].cells)[:2] == ["0.000", "none"]  # for a rank that read nothing
    assert ranks.row_count == read.MAX_SHOWN_RANKS + 1


def test_small_files_have_no_parts():
    with pytest.raises(ParameterError, match="--size full"):
        comparison((1,), independent=True).prepare()


@pytest.mark.parametrize("ends", ["", "\n"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_the_parts_of_a_file_have_all_lines_once_after_the_first(
    tmp_path, monkeypatch, num_ranks, ends
):
    monkeypatch.setattr(read, "LEAST_DIVIDED_BYTES", 10)
    lines = ["name,number", "a,1", "bcdefghijklmnop,2", "", "q,3", "r,4"]
    (tmp_path / "train.csv").write_text("\n".join(lines) + ends)
    (tmp_path / "small.csv").write_text("x,1\n")
    files = FileSet.at({name: tmp_path / f"{name}.csv" for name in ("train", "small")})
    found = []
    for rank in range(num_ranks):
        parts = part_of(files, tmp_path, SimpleNamespace(rank=rank, size=num_ranks))
        assert parts.paths["small"] == files.paths["small"]
        first, *rest = parts.paths["train"].read_text().splitlines()
        assert first == lines[0]
        found += rest
    assert found == lines[1:]
    with pytest.raises(DataError, match=r"cannot write a part of the file to .*nowhere"):
        part_of(files, tmp_path / "nowhere", SimpleNamespace(rank=0, size=2))


def test_every_block_is_delayed_once_however_many_threads_read_it(tmp_path, monkeypatch):
    path, slept = tmp_path / "table.csv", []
    path.write_text("1,2\n" * 100)
    monkeypatch.setattr("time.sleep", slept.append)
    slow = {"open_source": slow_source(0.5)}
    table = read_together(path, CsvLayout(), Loading(num_threads=2, block_bytes=100, **slow))
    assert table.values.tolist() == [[1, 2]] * 100
    assert slept == [0.5] * 2 * 4  # both threads of a block wait at the same time
