from __future__ import annotations

import sys

import pytest
from rich.table import Table

from candle_p1.bench import file_cache, job, load, show_load
from candle_p1.bench.load import (
    LoadComparison,
    LoadJob,
    LoadOutcome,
    choose_methods,
    published_tables,
)
from candle_p1.bench.tables import digits
from candle_p1.data.reader import FileSet
from candle_p1.distributed import backend
from candle_p1.errors import CandleError, DataError, ParameterError, SetupError
from candle_p1.records.tables import as_cells

BOTH = ["original", "chunked"]


def comparison(methods=BOTH, flags=(), **conditions):
    return LoadComparison(LoadJob("nt3", flags, methods[0]), methods=methods, **conditions)


def test_published_values_are_those_of_tables_3_and_4():
    summit, theta = published_tables("p1b1")
    assert (summit["table"], summit["machine"]) == (3, "Summit")
    assert summit["files"]["train"] == {"file_mb": 771, "original_s": 235.68, "chunked_s": 30.99}
    assert (theta["table"], theta["machine"]) == (4, "Theta")
    assert "KNL" in theta["node"]
    assert theta["files"]["test"]["chunked_s"] == 11.67
    assert published_tables("my_benchmark") == []


@pytest.mark.parametrize(
    ("text", "problem"), [("original,chunkd", "'chunkd'.*'chunked'"), (" , ", "--methods")]
)
def test_unknown_and_missing_methods_are_refused(text, problem):
    with pytest.raises(ParameterError, match=problem):
        choose_methods(text)


def test_methods_are_used_once_unless_a_library_is_missing(monkeypatch):
    assert choose_methods("chunked, original,chunked") == ["chunked", "original"]
    monkeypatch.setattr(load, "installed_readers", lambda: ["original"])
    assert choose_methods(None) == ["original"]
    with pytest.raises(SetupError, match=r"polars.*\[readers\]"):
        choose_methods("original,polars")


def test_rounds_alternate_after_the_jobs_that_are_not_timed():
    jobs = comparison(["original", "cached"], num_repeats=3).schedule()
    assert list(map(str, jobs)) == [
        "cached, preparation",
        "original, memory",
        "cached, memory",
        "original, time 1",
        "cached, time 1",
        "cached, time 2",
        "original, time 2",
        "original, time 3",
        "cached, time 3",
    ]


def outcome(elapsed_s=1.0, digest="a", memory=(), bytes_read=10):
    return LoadOutcome(
        elapsed_s=elapsed_s,
        file_s={"train": elapsed_s / 2},
        threads=2,
        matrix_bytes=100,
        digests={"train": digest},
        memory=list(memory),
        bytes_read=bytes_read,
        storage_bytes_read=0,
    )


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """Compares loading with jobs whose outcomes a function (job) -> list of outcomes returns."""

    def compare(measure, methods=BOTH, **conditions):
        file = tmp_path / "train.csv"
        file.write_text("1,2\n")
        monkeypatch.setattr(load, "run", lambda job, num_ranks: measure(job))
        files = FileSet.of({"train": file})
        return comparison(methods, **conditions).measure(files, lambda *progress: None)

    return compare


def test_a_job_takes_as_long_as_its_slowest_rank(compare):
    times = iter([0.5, 1, 2, 3, 4, 5, 6])

    def measure(job):
        elapsed_s = next(times)
        return [outcome(elapsed_s), outcome(elapsed_s / 10)]

    report = compare(measure, methods=["original"], num_ranks=2, num_repeats=6)
    (result,) = report["results"]
    assert result["repeats_s"] == [1, 2, 3, 4, 5, 6]
    assert (result["median_s"], result["ci95_s"]) == (3.5, [1, 6])
    assert result["per_rank_s"][0] == [1, 0.1]
    assert result["per_file_median_s"] == {"train": 1.75}
    assert result["bytes_read"] == 20
    assert result["speedup"] == {"original": 1}
    assert [each["purpose"] for each in report["jobs"]] == ["memory"] + ["time"] * 6


def test_few_repeats_have_a_range_and_no_interval(compare, tmp_path):
    report = compare(lambda job: [outcome()], num_repeats=2)
    assert all(result["ci95_s"] is None for result in report["results"])
    assert report["results"][0]["range_s"] == [1, 1]
    lines = [part for part in show_load.parts(report) if isinstance(part, str)]
    assert any(line.startswith("2 repeats: ") for line in lines)
    for tables in (report["published"]["tables"], []):
        report["published"]["tables"] = tables
        show_load.picture(report, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("elapsed_s", "is_ranked"), [(0.004, False), (0.4, True)])
def test_times_of_milliseconds_rank_no_method(compare, elapsed_s, is_ranked):
    report = compare(lambda job: [outcome(elapsed_s)], num_repeats=2)
    _, times, told, *_ = show_load.parts(report)
    assert any("speed-up" in each for each in as_cells(times)[0]) == is_ranked
    assert ("too small to rank" in told) != is_ranked


@pytest.mark.parametrize("num_files", [1, 2, 9])
def test_the_picture_names_the_sizes_and_says_whether_data_are_synthetic(
    compare, monkeypatch, tmp_path, num_files
):
    report = compare(lambda job: [outcome()], num_repeats=1)
    (file,) = report["files"].values()
    report["files"] = {f"role{i}": file | {"file_bytes": 1_500_000} for i in range(num_files)}
    report["results"][0]["file_bytes"] = num_files * 1_500_000
    titles = {}
    monkeypatch.setattr(show_load, "compared_times", lambda *args, **named: titles.update(named))
    for synthetic in (True, False):
        report["synthetic"] = synthetic
        show_load.picture(report, tmp_path / "picture.png")
        assert f"{digits(1.5 * num_files)} MB" in titles["title"]
        assert ("synthetic" in titles["title"]) == synthetic
        assert ("role1 1.5" in titles["title"]) == (num_files == 2)
        assert ("9 files" in titles["title"]) == (num_files == 9)
        assert "597 + 150 MB" in titles["published_title"]


def test_the_files_of_a_directory_are_counted(monkeypatch, tmp_path):
    for name in ("a.npy", "b.npy"):
        (tmp_path / name).write_bytes(b"12345")
    monkeypatch.setattr(load, "run", lambda job, num_ranks: [outcome()])
    files = FileSet.of({"train": tmp_path})
    report = comparison(["original"], num_repeats=1).measure(files, lambda *progress: None)
    assert report["files"]["train"]["file_bytes"] == 10


def test_memory_is_that_of_the_sampled_job(compare):
    def measure(job):
        early = [(0.0, 50), (1.0, 250), (2.0, 50)]
        late = [(0.5, 50), (2.5, 150)]
        return [outcome(memory=each * (job.purpose == "memory")) for each in (early, late)]

    for result in compare(measure, num_ranks=2, num_repeats=2)["results"]:
        assert (result["peak_rank_bytes"], result["peak_bytes"]) == (200, 200)
        assert result["matrix_bytes"] == 100


def test_what_the_kernel_does_not_count_is_not_measured(compare):
    report = compare(lambda job: [outcome(bytes_read=None)], num_repeats=1)
    result = report["results"][0]
    assert result["peak_bytes"] is result["peak_rank_bytes"] is result["bytes_read"] is None
    _, table, _ = (part for part in show_load.parts(report) if isinstance(part, Table))
    assert list(table.columns[1].cells) == ["not measured"] * 2


@pytest.mark.parametrize(
    "wrong", [[outcome(digest="b"), outcome()], [outcome(), outcome(digest="b")]]
)
def test_methods_that_read_other_values_are_not_compared(compare, wrong):
    def measure(job):
        return wrong if job.method == "chunked" else [outcome(), outcome()]

    with pytest.raises(DataError, match=r"train.csv: chunked .* original"):
        compare(measure, num_ranks=2, num_repeats=1)


def test_files_that_cannot_be_dropped_from_the_cache_are_not_cold(compare, monkeypatch):
    monkeypatch.setattr(file_cache, "resident_share", lambda path: 0.5)
    with pytest.raises(SetupError, match=r"train.csv: 50%"):
        compare(lambda job: [outcome()], file_cache="cold")


def test_a_file_that_cannot_be_read_is_named(compare, monkeypatch):
    def fail(paths):
        raise PermissionError(13, "Permission denied", "train.csv")

    monkeypatch.setitem(file_cache.PREPARATIONS, "warm", fail)
    with pytest.raises(DataError, match=r"train.csv: .*Permission denied"):
        compare(lambda job: [outcome()])


def test_a_measurement_refuses_flags_of_its_own_and_a_launcher(monkeypatch):
    with pytest.raises(ParameterError, match=r"--loader .*--methods"):
        comparison(flags=["--loader", "original"]).locate_files()
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ParameterError, match="launcher"):
        comparison().locate_files()


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (
            "print('noise'); print('error: no such file'); raise SystemExit(2)",
            CandleError,
            "chunked: no such file",
        ),
        ("import os; os.kill(os.getpid(), 9)", SetupError, "chunked: "),
        ("1 / 0", RuntimeError, "ZeroDivisionError"),
    ],
)
def test_a_job_that_fails_ends_the_comparison(monkeypatch, program, error, text):
    command = job.on_this_machine(1, [sys.executable, "-c", program])
    monkeypatch.setattr(job, "launch", lambda worker, num_ranks, directory: command)
    with pytest.raises(error, match=text) as raised:
        job.run(LoadJob("nt3", [], "chunked"), 1)
    assert type(raised.value) is error


def test_ranks_are_told_which_backend_is_installed(monkeypatch):
    monkeypatch.setattr(backend, "find_spec", lambda name: name if name == "jax" else None)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "")
    program = "import os; print('error:', os.environ['KERAS_BACKEND']); raise SystemExit(2)"
    command = job.on_this_machine(1, [sys.executable, "-c", program])
    monkeypatch.setattr(job, "launch", lambda worker, num_ranks, directory: command)
    with pytest.raises(CandleError, match="chunked: jax"):
        job.run(LoadJob("nt3", [], "chunked"), 1)
