from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from rich.table import Table

from candle_p1.bench import file_cache, read, read_worker, show_read
from candle_p1.bench.read import ReadComparison, ReadJob, ReadOutcome, choose_ranks
from candle_p1.bench.read_worker import part_of, slow_source
from candle_p1.data.cooperative import read_together
from candle_p1.data.reader import FileSet
from candle_p1.data.table import CsvLayout
from candle_p1.errors import DataError, ParameterError, SetupError


def test_numbers_of_ranks_are_used_once():
    assert choose_ranks("1, 4,2,4") == [1, 4, 2]


@pytest.mark.parametrize("text", ["", "1,", "0", "-1", "1.5", "four", "\u00b2", "100000"])
def test_other_numbers_of_ranks_are_refused(text):
    with pytest.raises(ParameterError, match="--np"):
        choose_ranks(text)


def outcome(elapsed_s, reads, digest="a"):
    return ReadOutcome(
        elapsed_s, {"train": np.array(reads, float).reshape(-1, 3)}, {"train": digest}
    )


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Compares jobs whose outcomes a function (number of ranks) -> list of outcomes returns."""

    def compare(measure, ranks=(1, 2), num_blocks=8, **conditions):
        file = tmp_path / "train.csv"
        file.write_text("1,2\n")
        kinds = {True: {"apart": True}, False: {}}
        monkeypatch.setattr(read, "run", lambda job, num: measure(num, **kinds[job.apart]))
        job = ReadJob("nt3", [], 0.2, num_blocks)
        comparison = ReadComparison(job, max(ranks), ranks, **conditions)
        return comparison.measure(FileSet.of({"train": file}), lambda *progress: None)

    return compare


def test_times_are_compared_with_those_of_the_first_number_of_ranks(compare):
    def measure(num_ranks):
        if num_ranks == 1:
            return [outcome(2.0, [(0, 1, 5), (1, 2, 5)])]
        return [outcome(0.9, [(0, 0.9, 5)]), outcome(1.0, [(0.1, 1, 5)])]

    report = compare(measure, num_repeats=2)
    one, two = report["results"]
    assert (one["median_s"], one["ratio"], one["mean_ranks"]) == (2, 1, 1)
    assert (two["median_s"], two["ratio"], two["repeats"]) == (1, 0.5, 2)
    assert two["mean_ranks"] == pytest.approx(1.8)
    assert two["per_rank"]["train"] == {
        "begin_s": [0, 0.1],
        "end_s": [0.9, 1],
        "busy_s": [0.9, 0.9],
        "num_bytes": [5, 5],
    }
    assert two["reading"]["train"]["union_s"] == pytest.approx(1)
    json.dumps(report, allow_nan=False)
    tables = [part for part in show_read.parts(report) if isinstance(part, Table)]
    assert [list(table.columns[0].cells) for table in tables] == [["1", "2"], ["0", "1"]]


def test_ranks_that_share_nothing_are_compared_with_the_same_time(compare, monkeypatch):
    monkeypatch.setattr(read, "LEAST_DIVIDED_BYTES", 1)

    def measure(num_ranks, apart=False):
        digests = "pqr" if apart else "aaa"  # of parts, which are others
        return [outcome(5.0 - num_ranks - apart, [(0, 1, 5)], each) for each in digests[:num_ranks]]

    report = compare(measure, ranks=(1, 3), apart=True)
    one, three = report["results"]
    assert one["apart"] is None
    assert (three["ratio"], three["apart"]["ratio"]) == (0.5, 0.25)
    assert three["apart"]["repeats"] == 3
    json.dumps(report, allow_nan=False)
    table = next(part for part in show_read.parts(report) if isinstance(part, Table))
    assert list(table.columns[0].cells) == ["1", "3", "3 apart"]
    assert any("apart: each rank" in str(part) for part in show_read.parts(report))


def test_small_files_have_no_parts(compare):
    with pytest.raises(ParameterError, match="--size full"):
        compare(lambda num_ranks: [outcome(1, [])] * num_ranks, apart=True)


@pytest.mark.parametrize("ends", ["", "\n"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_the_parts_of_a_file_have_all_lines_once_after_the_first(
    tmp_path, monkeypatch, num_ranks, ends
):
    monkeypatch.setattr(read, "LEAST_DIVIDED_BYTES", 10)
    monkeypatch.setattr(read_worker, "COPIED_BYTES", 5)
    lines = ["name,number", "a,1", "bcdefghijklmnop,2", "", "q,3", "r,4"]
    (tmp_path / "train.csv").write_text("\n".join(lines) + ends)
    (tmp_path / "small.csv").write_text("x,1\n")
    files = FileSet.of({name: tmp_path / f"{name}.csv" for name in ("train", "small")})
    found = []
    for rank in range(num_ranks):
        ranks = SimpleNamespace(rank=rank, size=num_ranks)
        parts = part_of(files, tmp_path, ranks)
        assert parts.paths["small"] == files.paths["small"]
        first, *rest = parts.paths["train"].read_text().splitlines()
        assert first == lines[0]
        found += rest
    assert found == lines[1:]


def test_a_part_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "LEAST_DIVIDED_BYTES", 1)
    (tmp_path / "train.csv").write_text("1,2\n")
    files = FileSet.of({"train": tmp_path / "train.csv"})
    with pytest.raises(DataError, match=r"cannot write a part of the file to .*nowhere"):
        part_of(files, tmp_path / "nowhere", SimpleNamespace(rank=0, size=2))


@pytest.mark.parametrize(
    ("num_blocks", "blocks"), [(8, "in blocks of 1/8 of the largest file"), (0, "as in a run")]
)
def test_it_is_said_how_large_the_blocks_were(compare, num_blocks, blocks):
    report = compare(lambda num: [outcome(1, [])] * num, num_blocks=num_blocks)
    assert blocks in next(show_read.parts(report))


def test_ranks_that_read_nothing_are_shown(compare):
    report = compare(lambda n: [outcome(1, [(0, 1, 5)]), *[outcome(1, [])] * (n - 1)], ranks=(30,))
    json.dumps(report, allow_nan=False)
    table = [part for part in show_read.parts(report) if isinstance(part, Table)][-1]
    assert list(table.columns[1].cells)[:2] == ["0.000", "none"]
    assert table.row_count == show_read.MAX_SHOWN_RANKS + 1


def test_ranks_that_read_other_values_are_not_compared(compare):
    def measure(num_ranks):
        return [outcome(1, [(0, 1, 5)], digest) for digest in "ab"[:num_ranks]]

    with pytest.raises(DataError, match=r"train.csv: rank 1 of 2"):
        compare(measure)


def test_files_that_cannot_be_dropped_from_the_cache_are_not_cold(compare, monkeypatch):
    monkeypatch.setattr(file_cache, "resident_share", lambda path: 0.5)
    with pytest.raises(SetupError, match=r"train.csv: 50%"):
        compare(lambda num_ranks: [outcome(1, [])], file_cache="cold")


def test_every_block_is_delayed_once_however_many_threads_read_it(tmp_path, monkeypatch):
    path, slept = tmp_path / "table.csv", []
    path.write_text("1,2\n" * 100)
    monkeypatch.setattr("time.sleep", slept.append)
    table = read_together(
        path, CsvLayout(), num_threads=2, block_bytes=100, open_source=slow_source(0.5)
    )
    assert table.values.tolist() == [[1, 2]] * 100
    assert slept == [0.5] * 2 * 4  # both threads of a block wait at the same time
