from __future__ import annotations

import json
import os

import pytest

from candle_p1.errors import RecordError
from candle_p1.files import write_atomically
from candle_p1.records.record import over_ranks, read_record, write_record

RUNNING = {
    "schema_version": 1,
    "status": "running",
    "benchmark": "nt3",
    "started": "2019-08-05T00:00:00+00:00",
    "num_ranks": 2,
    "parameters": {"epochs": {"value": 8, "origin": "flag"}},
}
FAILURE = {"reason": "rank 1 died", "rank": 1}


def test_a_record_is_read_as_it_was_written(tmp_path):
    write_record(tmp_path / "run.json", RUNNING)
    assert read_record(tmp_path / "run.json") == RUNNING


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"status": "done"}, r"\$\.status"),
        ({"num_ranks": 0}, r"\$\.num_ranks"),
        ({"schema_version": 2}, "schema_version 2 is not the 1"),
        ({"elapsed": 1.0}, "elapsed"),
        ({"status": "ok"}, "required"),
        ({"status": "failed"}, "required"),
    ],
)
def test_an_unfit_record_is_neither_written_nor_read(tmp_path, change, complaint):
    path = tmp_path / "run.json"
    with pytest.raises(RecordError, match=complaint):
        write_record(path, RUNNING | change)
    assert not path.exists()
    path.write_text(json.dumps(RUNNING | change))
    with pytest.raises(RecordError, match=complaint):
        read_record(path)


def test_a_failed_record_says_why(tmp_path):
    path = tmp_path / "run.json"
    write_record(path, RUNNING | {"status": "failed", "ended": "…", "failure": FAILURE})
    assert read_record(path)["failure"]["rank"] == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": 1}', "\xff"])
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(RecordError, match=r"run\.json"):
        read_record(tmp_path / "run.json")


def test_a_missing_record_is_named(tmp_path):
    with pytest.raises(RecordError, match="cannot read the record"):
        read_record(tmp_path / "run.json")


def test_an_interrupted_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_over_ranks_keeps_raw_values():
    assert over_ranks([1.0, 3.0], "s") == {
        "min_s": 1.0,
        "mean_s": 2.0,
        "max_s": 3.0,
        "per_rank_s": [1.0, 3.0],
    }
