from __future__ import annotations

import re

import pytest
from rich.table import Table

from candle_p1.bench import formats, load
from candle_p1.bench.load import Load, choose_methods, loads_to_pay
from candle_p1.errors import ParameterError, SetupError
from candle_p1.records.tables import as_cells


def comparison(methods="original,chunked", **conditions):
    return Load(benchmark="nt3", methods=methods, **conditions)


def test_methods_are_used_once_and_those_that_are_not_installed_are_told(monkeypatch):
    assert choose_methods("chunked, original,chunked") == (["chunked", "original"], [])
    monkeypatch.setattr(load, "installed_readers", lambda: ["original"])
    monkeypatch.setattr(formats, "find_spec", lambda name: name in ("numpy", "zlib"))
    assert choose_methods(None) == (["original"], [])
    text = "parquet,original,polars,npy,parallel-zst,parallel-gz"
    missing = ["parquet", "polars", "parallel-zst"]
    assert choose_methods(text) == (["original", "npy", "parallel-gz"], missing)
    with pytest.raises(ParameterError, match=r"--methods.*'chunkd'.*'chunked'"):
        choose_methods("original,chunkd")
    with pytest.raises(SetupError, match=r"polars, parquet.*\[readers\]"):
        choose_methods("polars,parquet")


def outcome(elapsed_s=1.0, memory=(), **more):
    of_files = {"file_s": {"train": elapsed_s / 2}, "checked": {"train.csv": "a"}}
    counts = {"threads": 2, "matrix_bytes": 100, "bytes_read": 10, "storage_bytes_read": 0}
    return {"elapsed_s": elapsed_s, "memory": list(memory), **of_files, **counts, **more}


def test_what_was_measured_is_combined(compare):
    times = iter([0.5, 1, 2, 3, 4, 5, 6])

    def measure(task, num_ranks):
        elapsed_s = next(times)
        return [outcome(elapsed_s), outcome(elapsed_s / 10)]

    report = compare(comparison("original", num_ranks=2, num_repeats=6), measure)
    (result,) = report["results"]
    assert (result["median_s"], result["ci95_s"]) == (3.5, [1, 6])
    assert result["per_rank_s"][0] == [1, 0.1]
    assert result["per_file_median_s"] == {"train": 1.75}
    assert (result["bytes_read"], result["speedup"]) == (20, {"original": 1})
    assert report["files"]["train"]["file_bytes"] == 4
    assert [each["purpose"] for each in report["jobs"]] == ["memory"] + ["time"] * 6


def test_converting_is_weighed_against_later_loads(compare, monkeypatch, tmp_path, printed):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(formats, "find_spec", lambda name: name != "pyarrow")
    times = {"original": 10.0, "parallel": 1.0, "npy": 0.5, "parallel-gz": 2.0}

    def measure(task, num_ranks):
        if task.converts:
            assert num_ranks == 1
            task.directory.mkdir(parents=True)
            (task.directory / "train").write_bytes(bytes(8))
            return [outcome(3.0)]
        return [outcome(times[task.method])] * num_ranks

    ours = comparison(",".join([*times, "parquet"]), num_ranks=2, num_repeats=1)
    report = compare(ours, measure)
    found = {each["method"]: each for each in report["results"]}
    assert found["original"]["convert_s"] is None
    assert (found["npy"]["convert_s"], found["npy"]["stored_bytes"]) == (3, 8)
    assert found["npy"]["pays_after"] == {"original": 1, "parallel": 7}
    assert found["parallel-gz"]["pays_after"] == {"original": 1, "parallel": None}
    assert not ours.directory.exists()
    shown = printed(ours.render(report))
    assert re.search(r"parquet +. not installed", shown)
    assert "never" in shown


def test_loads_that_take_as_long_as_before_never_pay():
    assert [loads_to_pay(2, 2, after_s) for after_s in (0.5, 1, 2, 3)] == [2, 3, None, None]


@pytest.mark.parametrize(("elapsed_s", "is_ranked"), [(0.004, False), (0.4, True)])
def test_times_of_milliseconds_rank_no_method(compare, elapsed_s, is_ranked):
    ours = comparison(num_repeats=2)
    report = compare(ours, lambda task, num: [outcome(elapsed_s)])
    assert all(result["ci95_s"] is None for result in report["results"])
    assert report["results"][0]["range_s"] == [elapsed_s, elapsed_s]
    _, times, *rest = ours.render(report)
    assert any("speed-up" in each for each in as_cells(times)[0]) == is_ranked
    tables = [as_cells(each) for each in rest if isinstance(each, Table)]
    assert ("this one" in str(tables[1])) == is_ranked
    assert "Summit (published)" in str(tables[1])


def test_the_picture_is_drawn(compare, tmp_path):
    ours = comparison(num_repeats=1, picture=tmp_path / "picture.png")
    report = compare(ours, lambda task, num: [outcome()])
    assert list(ours.draw(report)) == [f"picture: {ours.picture}"]
    assert ours.picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("peak_bytes", [200, None])
def test_memory_is_that_of_the_sampled_job(compare, peak_bytes):
    samples = [[(0.0, 0), (1.0, 200), (2.0, 0)], [(0.5, 0), (2.5, 100)]]

    def measure(task, num_ranks):
        is_sampled = task.samples_memory and peak_bytes is not None
        return [outcome(memory=each * is_sampled, bytes_read=None) for each in samples]

    ours = comparison(num_ranks=2, num_repeats=2)
    report = compare(ours, measure)
    for result in report["results"]:
        assert result["peak_rank_bytes"] == result["peak_bytes"] == peak_bytes
        assert result["bytes_read"] is None  # where the kernel does not count
    _, table, _ = (part for part in ours.render(report) if isinstance(part, Table))
    assert ("not measured" in table.columns[1].cells) == (peak_bytes is None)
