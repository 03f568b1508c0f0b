"""Writing and reading records; of those that do harm, see reports/test_hostile_records.py."""

import errno
import io
import json
import os

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import RecordError
from candle_p1.files import write_atomically
from candle_p1.records import schema
from candle_p1.records.rank_stats import Bytes, Seconds
from candle_p1.records.record import (
    PER_RANK_NAME,
    begin_record,
    end_record,
    extend_record,
    make_record,
    read_per_rank,
    read_record,
    read_so_far,
    write_record,
    write_so_far,
)
from candle_p1.records.summary import summary
from candle_p1.records.types import Failure, PhaseTimes
from tests.planted_records import planted_record
from tests.records import RUNNING
from tests.unit.checkpoints.conftest import failing

DIED = Failure(reason="rank 1 died", rank=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.json"


@pytest.mark.parametrize("record", [make_record(RUNNING), planted_record("p1b1", 3, energy_j=5.0)])
def test_a_record_is_read_as_it_was_written(path, record):
    write_record(path, record)
    content = record.model_dump(exclude_unset=True)
    assert read_record(path).model_dump(exclude_unset=True) == content
    assert json.loads(path.read_text()) == content


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"num_ranks": "2"}, "num_ranks"),
        ({"total_s": float("nan")}, "total_s"),
        ({"elapsed": 1.0}, "elapsed"),
        ({"status": "ok"}, "phases"),
        ({"status": "failed", "ended": "…"}, "failure"),
        ({"energy": {"kind": "measured"}}, "energy"),
        ({"energy": {"kind": "absent"}}, "energy"),
    ],
)
def test_an_invalid_record_is_neither_made_nor_read(path, change, place):
    with pytest.raises(RecordError, match=place):
        make_record(RUNNING | change)
    path.write_text(json.dumps(RUNNING | change))
    with pytest.raises(RecordError, match=rf"run\.json: .*{place}"):
        read_record(path)


@pytest.mark.parametrize("version", [2, "3"])
def test_a_record_of_another_schema_is_refused_with_both_versions(path, version):
    path.write_text(json.dumps(RUNNING | {"schema_version": version}))
    with pytest.raises(RecordError, match=rf"schema_version is {version!r}.* 3\b"):
        read_record(path)


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_file_that_is_not_a_record_is_refused(path, text):
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecordError, match=r"run\.json"):
        read_record(path)


def test_arguments_that_are_not_unicode_are_recorded(path):
    write_record(path, make_record(RUNNING | {"command": ["é😀", "a\udcffb"]}))
    assert read_record(path).command == ["é😀", "a?b"]


def test_only_a_running_record_is_ended(path):
    write_record(path, make_record(RUNNING))
    end_record(path, "failed", DIED)
    failed = read_record(path)
    assert (failed.status, failed.failure) == ("failed", DIED)
    assert failed.ended > failed.started
    end_record(path, "interrupted", Failure(reason="too late", rank=None))
    assert read_record(path) == failed


def test_a_record_that_is_lost_is_ended_if_it_is_known(path):
    with pytest.raises(RecordError):
        end_record(path, "failed", DIED)
    ended = end_record(path, "failed", DIED, make_record(RUNNING), quality={})
    assert read_record(path) == ended
    assert ended.failure == DIED


def test_a_run_that_ends_early_leaves_what_it_had_measured(path):
    epoch = {"epoch": 1, "metrics": {"loss": 0.5}, "train": Seconds.over([2.0])}
    record = make_record(RUNNING)
    write_record(path, record)
    write_so_far(path, extend_record(record, training={"epochs": [epoch]}, known_until_s=3.0))
    assert read_record(path) == record
    end_record(path, "failed", DIED)
    failed = read_record(path)
    assert (failed.status, failed.training.epochs[0].metrics) == ("failed", {"loss": 0.5})
    assert list(path.parent.iterdir()) == [path]
    assert "epoch 1: loss 0.5" in "".join(summary(failed))
    write_record(path, record)
    path.with_name(f".{path.name}.so-far").touch()  # a node was lost before it was on the disk
    assert read_so_far(path) == record
    with pytest.raises(RecordError, match="known to its end"):
        extend_record(planted_record("p1b1", 3), known_until_s=1.0)


def test_a_record_begins_only_with_space_for_its_end(path, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr("candle_p1.records.record.reserve", failing(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            begin_record(path, make_record(RUNNING))
    assert not list(path.parent.iterdir())
    begin_record(path, make_record(RUNNING))
    with pytest.raises(FileExistsError):
        begin_record(path, make_record(RUNNING))
    # On a full disk there is no other space than what was kept.
    monkeypatch.setattr("candle_p1.files.tempfile.mkstemp", failing(errno.ENOSPC))
    end_record(path, "failed", DIED)
    assert read_record(path).status == "failed"
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_write_leaves_the_old_file_and_no_other(path, monkeypatch):
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


@given(st.lists(st.floats(0, 1e6) | st.none(), min_size=1).filter(any))
def test_statistics_summarise_what_was_measured(per_rank):
    stats = Seconds.over(per_rank)
    known = [value for value in per_rank if value is not None]
    assert stats.min_s <= stats.p10_s <= stats.p50_s <= stats.p90_s <= stats.max_s
    assert (stats.min_s, stats.max_s) == pytest.approx((min(known), max(known)), abs=1e-9)
    assert stats.mean_s == pytest.approx(np.mean(known), abs=1e-9)
    assert per_rank[stats.min_rank] == min(known)
    assert per_rank[stats.max_rank] == max(known)


def test_bytes_stay_whole_numbers():
    stats = Bytes.over([2**53 - 1, 3])
    assert (stats.min_bytes, stats.max_bytes) == (3, 2**53 - 1)


def test_raw_values_are_beside_the_record_under_their_place(path):
    wait = PhaseTimes.over([0.0, 3.5], begin=Seconds.over([None, 1.0]))
    phases = {"load": PhaseTimes.over([1 / 3, 2.0], regions={"wait": wait})}
    record = extend_record(make_record(RUNNING), phases=phases)
    assert read_per_rank(path, record) is None
    write_record(path, record)
    assert "0.3333333333333333" not in path.read_text()
    raw = read_per_rank(path, record)
    assert raw.get("phases.load").tolist() == [1 / 3, 2.0]
    assert raw.get("phases.load.regions.wait").tolist() == [0.0, 3.5]
    np.testing.assert_array_equal(raw.get("phases.load.regions.wait.begin"), [np.nan, 1.0])
    assert raw.get("phases.train") is None


def npz(save=np.savez, names=("phases.load",), ends=(2,), values=(1.0, 2.0)):
    """Returns a file of raw values, as a function of its parts."""
    content, text = io.BytesIO(), json.dumps(names).encode()
    parts = {"names": np.frombuffer(text, np.uint8), "ends": np.array(ends)}
    save(content, **parts, values=np.array(values))
    return content.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        npz()[:100],
        npz(names=["x"]),
        npz(ends=(3,)),
        npz(ends=(3, 2), names=["phases.load", "x"]),
        npz(ends=(2.0,)),
        npz(ends=2),
        npz(values=(1.0, 3.0)),
        npz(values=(1.0, 2.0, 3.0), ends=(3,)),
        npz(names=["phases.load", "phases.load.begin"], ends=(2, 4), values=(1, 2, 0, np.inf)),
        npz(values=np.array([1.0, {}], dtype=object)),
        npz(np.savez_compressed),
    ],
)
def test_raw_values_that_are_damaged_or_of_another_run_are_refused(path, content):
    record = extend_record(make_record(RUNNING), phases={"load": PhaseTimes.over([1.0, 2.0])})
    file = path.with_name(PER_RANK_NAME)
    file.write_bytes(npz())
    assert read_per_rank(path, record).get("phases.load").tolist() == [1.0, 2.0]
    file.write_bytes(content)
    with pytest.raises(RecordError, match=PER_RANK_NAME):
        read_per_rank(path, record)


def test_raw_values_are_read_from_regular_files_only(path):
    os.mkfifo(path.with_name(PER_RANK_NAME))
    with pytest.raises(RecordError, match=PER_RANK_NAME):
        read_per_rank(path, make_record(RUNNING))


def test_the_published_schema_is_that_of_the_types():
    # `python -m candle_p1.records.schema` writes it.
    assert schema.SCHEMA_PATH.read_text(encoding="utf-8") == schema.generate()


def test_programs_can_validate_a_record_by_the_schema(path):
    write_record(path, planted_record(num_ranks=2, energy_j=5.0, quality={"accuracy": None}))
    validator = jsonschema.Draft202012Validator(json.loads(schema.SCHEMA_PATH.read_text()))
    record = json.loads(path.read_text())
    validator.validate(record)
    assert not validator.is_valid(record | {"elapsed": 1.0})
    assert not validator.is_valid(record | {"status": "done"})
