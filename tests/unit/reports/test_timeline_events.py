"""Reading a timeline, whole and cut.

data/horovod_timeline.json is Horovod 0.28.1's, of NT3 (small) on two ranks with
HOROVOD_FUSION_THRESHOLD=134217728 and HOROVOD_CYCLE_TIME=5, two epochs of 80 samples; MPI_ABORT
ended the run, so the file lacks the last events, though its array is closed.
"""

from __future__ import annotations

import gzip
import json
import os
from itertools import accumulate
from pathlib import Path

import pytest

from candle_p1.errors import DataError
from candle_p1.reports.timeline import events
from candle_p1.reports.timeline.events import EventReader

REAL = Path(__file__).parents[2] / "files/horovod_timeline.json"

UNUSUAL = [
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "Größe/µ/😀"}},
    {"ph": "B", "name": 'a "quoted" \\ n\u0000ame},{', "ts": 1, "pid": 1},
    {"ph": "E", "args": {"nested": [{"a": 1}, {"b": "]"}]}, "ts": 2, "pid": 1},
    {"ph": "i", "name": "CYCLE_START", "ts": 3, "s": "g"},
]


def read(path):
    reader = EventReader(path)
    found = list(reader)
    assert reader.num_events == len(found)
    return found, reader.cut


def write(path, data):
    path.write_bytes(data)
    return path


def test_a_real_timeline_is_read_like_json():
    found, cut = read(REAL)
    assert found == json.loads(REAL.read_text())
    assert not cut
    assert len(found) == 565


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_a_timeline_cut_at_any_byte_is_read_to_its_last_complete_event(tmp_path, ensure_ascii):
    expected = UNUSUAL + json.loads(REAL.read_text())[:30]
    pieces = [json.dumps(event, ensure_ascii=ensure_ascii).encode() for event in expected]
    data = b"[" + b",\n".join(pieces) + b"]"
    ends = list(accumulate((len(piece) + 2 for piece in pieces), initial=-1))[1:]
    path = write(tmp_path / "cut.json", data)
    for length in range(len(data), -1, -1):
        os.truncate(path, length)  # quick, unlike writing it again
        found, cut = read(path)
        num = sum(end <= length for end in ends)
        assert found == expected[:num], length
        assert cut == (length < len(data))


def test_a_gzipped_timeline_cut_at_any_byte_is_read_as_far_as_possible(tmp_path):
    expected = json.loads(REAL.read_text())
    data = gzip.compress(REAL.read_bytes())
    assert read(write(tmp_path / "whole.json.gz", data)) == (expected, False)
    nums = []
    path = write(tmp_path / "cut.json.gz", data)
    for length in range(3, len(data), 41)[::-1]:
        os.truncate(path, length)
        found, cut = read(path)
        assert cut or found == expected
        assert found == expected[: len(found)]
        nums.append(len(found))
    assert nums == sorted(nums, reverse=True)
    assert nums[0] > len(expected) * 0.9


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000])
def test_the_size_of_chunks_does_not_matter(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(events, "CHUNK_BYTES", chunk_bytes)
    assert read(REAL)[0] == json.loads(REAL.read_text())
    data = json.dumps(UNUSUAL, ensure_ascii=False, indent=chunk_bytes % 2 or None).encode()
    assert read(write(tmp_path / "unusual.json", data)) == (UNUSUAL, False)


@pytest.mark.parametrize("end", [",", ",\n", "]", "]\n\n", ",]", "\0\0\0"])
def test_a_timeline_may_end_in_several_ways(tmp_path, end):
    data = '[\n{"ph": "E", "ts": 5, "pid": 1}' + end
    found, cut = read(write(tmp_path / "t.json", data.encode()))
    assert found == [{"ph": "E", "ts": 5, "pid": 1}]
    assert cut == ("]" not in end)


EVENT = '{"ph": "E", "ts": 5, "pid": 1}'


@pytest.mark.parametrize(
    ("content", "num_events"),
    [
        ("epoch,loss\n1,0.5\n", 0),
        ('{"traceEvents": []}', 0),
        ("[1, 2]", 0),
        ("[[]]", 0),
        ('[{"name": "x"}]', 0),
        ('[{"ph": "B", "pid": 1, "ts": 1}]', 0),
        ('[{"ph": "B", "name": "x", "ts": 1.5, "pid": 1}]', 0),
        ('[{"ph": "B", "name": "x", "ts": NaN, "pid": 1}]', 0),
        ('[{"ph": "B", "name": "x", "ts": 1}]', 0),
        (f"[\n{EVENT},\n{EVENT} nonsense {EVENT},\n{EVENT}]", 2),
        (f"[\n{EVENT},\nnonsense,{EVENT},{EVENT}]", 1),
        (f"[\n{EVENT}]\n[{EVENT}]", 1),
        ("[" + " x" * 2**20, 0),
        ('[{"ph": "E", "ts": 5, "pid": ' + "[" * 100_000, 0),
        ('[{"ph": "E", "ts": 1%s, "pid": 1}]' % ("0" * 400), 0),
        ('[{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": ["x"]}}]', 0),
    ],
)
def test_files_that_are_not_timelines_are_refused(tmp_path, content, num_events):
    path = write(tmp_path / "t.json", content.encode())
    with pytest.raises(DataError, match=f"{num_events} events") as caught:
        read(path)
    assert caught.value.path == str(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "pipe.json"):
        with pytest.raises(DataError, match=str(path)):
            read(path)
    damaged = gzip.compress(REAL.read_bytes())
    damaged = damaged[:200] + b"\xff" * 50 + damaged[250:]
    with pytest.raises(DataError, match=r"damaged\.json\.gz"):
        read(write(tmp_path / "damaged.json.gz", damaged))
