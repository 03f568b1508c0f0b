from __future__ import annotations

import pytest
from rich.table import Table

from candle_p1.bench import load
from candle_p1.bench.load import Load, choose_methods
from candle_p1.errors import ParameterError, SetupError
from candle_p1.records.tables import as_cells


def comparison(methods="original,chunked", **conditions):
    return Load(benchmark="nt3", methods=methods, **conditions)


@pytest.mark.parametrize(
    ("text", "error", "problem"),
    [
        ("original,chunkd", ParameterError, "--methods.*'chunkd'.*'chunked'"),
        ("original,polars", SetupError, r"polars.*\[readers\]"),
    ],
)
def test_methods_are_installed_ones_and_used_once(monkeypatch, text, error, problem):
    assert choose_methods("chunked, original,chunked") == ["chunked", "original"]
    monkeypatch.setattr(load, "installed_readers", lambda: ["original"])
    assert choose_methods(None) == ["original"]
    with pytest.raises(error, match=problem):
        choose_methods(text)


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
