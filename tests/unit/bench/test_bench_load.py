from __future__ import annotations

import re
import sys
from dataclasses import asdict

import pytest
from rich.table import Table

from candle_p1.bench import file_cache, job, load, show
from candle_p1.bench.load import Comparison, Step, choose_methods, published_tables, schedule
from candle_p1.bench.load_job import LoadJob, LoadOutcome
from candle_p1.data.reader import FileSet
from candle_p1.errors import CandleError, DataError, ParameterError, SetupError


def test_published_values_are_those_of_tables_3_and_4():
    summit, theta = published_tables("p1b1")
    assert (summit["table"], summit["machine"]) == (3, "Summit")
    assert summit["files"]["train"] == {"file_mb": 771, "original_s": 235.68, "chunked_s": 30.99}
    assert (theta["table"], theta["machine"]) == (4, "Theta")
    assert "KNL" in theta["node"]
    assert theta["files"]["test"]["chunked_s"] == 11.67
    assert published_tables("my_benchmark") == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("original,chunkd", r"no method 'chunkd' \(did you mean 'chunked'\?\): choose among .*"),
        ("", "--methods names none"),
        (" , ", "--methods names none"),
    ],
)
def test_methods_that_are_not_there(text, problem):
    with pytest.raises(ParameterError, match=problem):
        choose_methods(text)


def test_a_method_whose_library_is_missing(monkeypatch):
    monkeypatch.setattr(load, "installed_readers", lambda: ["original"])
    assert choose_methods(None) == ["original"]
    with pytest.raises(SetupError, match=r"polars, which is not installed: .*\[readers\]"):
        choose_methods("original,polars")


def test_methods_are_taken_once_in_the_order_they_are_named():
    assert choose_methods("chunked, original,chunked") == ["chunked", "original"]
    assert {"original", "chunked"} <= set(choose_methods(None))


def test_rounds_alternate_and_what_is_not_timed_comes_first():
    assert list(map(str, schedule(["original", "cached"], 3))) == [
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
    """Compares loading of a file with jobs that measure what a function (job) says."""

    def compare(measure, methods=("original", "chunked"), **conditions):
        file = tmp_path / "train.csv"
        file.write_text("1,2\n")
        monkeypatch.setattr(
            load, "run", lambda job, num_ranks: [asdict(one) for one in measure(job)]
        )
        files_read = FileSet.of({"train": file})
        return Comparison("nt3", [], methods=list(methods), **conditions).measure(files_read)

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


def test_few_repeats_have_a_range_and_no_interval(compare):
    report = compare(lambda job: [outcome()], num_repeats=2)
    assert all(result["ci95_s"] is None for result in report["results"])
    assert report["results"][0]["range_s"] == [1, 1]
    assert any("fewer than 6" in part for part in show.parts(report) if isinstance(part, str))


def test_memory_is_that_of_the_sampled_job(compare):
    def measure(job):
        assert job.samples_memory == (len(asked) < 2)
        asked.append(job.method)
        early = [(0.0, 50), (1.0, 250), (2.0, 50)]
        late = [(0.5, 50), (2.5, 150)]
        return [outcome(memory=samples * job.samples_memory) for samples in (early, late)]

    asked = []
    for result in compare(measure, num_ranks=2, num_repeats=2)["results"]:
        assert (result["peak_rank_bytes"], result["peak_bytes"]) == (200, 200)
        assert result["matrix_bytes"] == 100


def test_what_the_kernel_does_not_tell_is_not_measured(compare):
    report = compare(lambda job: [outcome(bytes_read=None)], num_repeats=1)
    result = report["results"][0]
    assert result["peak_bytes"] is result["peak_rank_bytes"] is result["bytes_read"] is None
    _, table, _ = (part for part in show.parts(report) if isinstance(part, Table))
    assert list(table.columns[1].cells) == ["not measured"] * 2


@pytest.mark.parametrize(
    "wrong", [[outcome(digest="b"), outcome()], [outcome(), outcome(digest="b")]]
)
def test_the_speed_of_a_wrong_result_is_not_shown(compare, wrong):
    def measure(job):
        return wrong if job.method == "chunked" else [outcome(), outcome()]

    with pytest.raises(DataError, match=r"train.csv: chunked .* other values than original"):
        compare(measure, num_ranks=2, num_repeats=1)


def test_files_that_cannot_be_dropped_from_the_cache_are_not_called_cold(compare, monkeypatch):
    monkeypatch.setattr(file_cache, "resident_share", lambda path: 0.5)
    with pytest.raises(SetupError, match=r"train.csv: 50% of it cannot be dropped"):
        compare(lambda job: [outcome()], file_cache="cold")


def test_a_file_that_cannot_be_read_is_named(compare, monkeypatch):
    def fail(paths):
        raise PermissionError(13, "Permission denied", "train.csv")

    monkeypatch.setitem(file_cache.PREPARATIONS, "warm", fail)
    with pytest.raises(DataError, match=r"train.csv: cannot read the file: Permission denied"):
        compare(lambda job: [outcome()])


def test_a_comparison_names_its_loaders_by_methods():
    with pytest.raises(ParameterError, match="--loader is not for a comparison: use --methods"):
        Comparison("nt3", ["--loader", "original"], methods=["chunked"]).locate_files()


def test_a_comparison_is_not_started_by_a_launcher(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ParameterError, match="without a launcher"):
        Comparison("nt3", [], methods=["chunked"]).locate_files()


@pytest.fixture
def fail(monkeypatch):
    """Runs a job whose process is another program; returns the error it ends with."""

    def fail(program):
        monkeypatch.setattr(
            job,
            "launch",
            lambda worker, num_ranks, directory: job.Launch([sys.executable, "-c", program]),
        )
        with pytest.raises(Exception, match=r".") as caught:
            job.run(LoadJob("nt3", [], "chunked", 0, samples_memory=False), 1)
        return caught.value

    return fail


def test_the_error_of_a_job_is_the_error_of_the_comparison(fail):
    error = fail("print('noise'); print('error: no such file'); raise SystemExit(2)")
    assert isinstance(error, CandleError)
    assert str(error) == "chunked: no such file"


def test_a_killed_job_is_said_to_be_killed(fail):
    error = fail("import os; os.kill(os.getpid(), 9)")
    assert isinstance(error, SetupError)
    assert "chunked: the job was killed" in str(error)


def test_a_bug_in_a_job_keeps_its_traceback(fail):
    error = fail("1 / 0")
    assert isinstance(error, RuntimeError)
    assert re.search(r"(?s)ended with code 1:.*ZeroDivisionError", str(error))


def test_the_picture_is_drawn(compare, tmp_path):
    report = compare(lambda job: [outcome()], num_repeats=2)
    for tables in (report["published"]["tables"], []):
        report["published"]["tables"] = tables
        show.picture(report, tmp_path / "picture.png")
        assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_says_what_it_is():
    assert str(Step("chunked", "time", 2)) == "chunked, time 2"
