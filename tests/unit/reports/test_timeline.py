"""What a timeline says, against timelines made up so that the answer is known, and a real one.

files/horovod_timeline.json is Horovod 0.28.1's, of NT3 (small) on two ranks with
HOROVOD_FUSION_THRESHOLD=134217728 and HOROVOD_CYCLE_TIME=5, two epochs of 80 samples; MPI_ABORT
ended the run, so the file lacks the last events, though its array is closed.
"""

import gzip
import json
import os
import re
import tracemalloc
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import DataError
from candle_p1.reports.horovod_timeline import NUM_PIECES, CoverageUnion, summarize
from candle_p1.reports.timeline_events import EventReader
from tests.expected import check_expected

REAL = Path(__file__).parents[2] / "files/horovod_timeline.json"
EVENT = '{"ph": "E", "ts": 5, "pid": 1}'
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


def test_a_timeline_cut_at_any_byte_is_read_to_its_last_complete_event(tmp_path):
    expected = UNUSUAL + json.loads(REAL.read_text())[:30]
    pieces = [json.dumps(event, ensure_ascii=False).encode() for event in expected]
    data = b"[" + b",\n".join(pieces) + b"]"
    ends = list(accumulate((len(piece) + 2 for piece in pieces), initial=-1))[1:]
    path = write(tmp_path / "cut.json", data)
    for length in range(len(data), -1, -1):
        os.truncate(path, length)  # quick, unlike writing it again
        num = sum(end <= length for end in ends)
        assert read(path) == (expected[:num], length < len(data)), length


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


@pytest.mark.parametrize("end", [",\n", "]\n\n", ",]", "\0\0\0"])
def test_a_timeline_may_end_in_several_ways(tmp_path, end):
    path = write(tmp_path / "t.json", f"[\n{EVENT}{end}".encode())
    assert read(path) == ([json.loads(EVENT)], "]" not in end)


@pytest.mark.parametrize(
    ("content", "num_events"),
    [
        ('{"traceEvents": []}', 0),
        ("[1, 2]", 0),
        ('[{"name": "x"}]', 0),
        ('[{"ph": "B", "pid": 1, "ts": 1}]', 0),
        ('[{"ph": "B", "name": "x", "ts": 1.5, "pid": 1}]', 0),
        ('[{"ph": "B", "name": "x", "ts": NaN, "pid": 1}]', 0),
        ('[{"ph": "B", "name": "x", "ts": 1}]', 0),
        (f"[\n{EVENT},\n{EVENT} nonsense {EVENT},\n{EVENT}]", 2),
        (f"[\n{EVENT}]\n[{EVENT}]", 1),
        ("[" + " x" * 2**20, 0),
        ('[{"ph": "E", "ts": 5, "pid": ' + "[" * 100_000, 0),
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
    damaged = gzip.compress(REAL.read_bytes())
    write(tmp_path / "damaged.json.gz", damaged[:200] + b"\xff" * 50 + damaged[250:])
    for name in ("absent.json", "pipe.json", "damaged.json.gz"):
        with pytest.raises(DataError, match=str(tmp_path / name)):
            read(tmp_path / name)


LAST_US = 60
intervals = st.lists(
    st.tuples(st.integers(0, LAST_US), st.integers(0, LAST_US)).map(sorted).map(tuple), max_size=12
)


@given(intervals)
def test_a_union_has_the_length_of_a_bitmap(several):
    covered = np.zeros(LAST_US, dtype=bool)
    union = CoverageUnion(piece_us=10)
    marks = [mark for begin, end in several for mark in ((begin, False), (end, True))]
    for us, is_end in sorted(marks, key=lambda mark: mark[0]):
        union.end(us) if is_end else union.begin(us)
    for begin, end in several:
        covered[begin:end] = True
    assert union.total_us == covered.sum()
    assert union.covered_us[:6] == covered.reshape(6, 10).sum(axis=1).tolist()
    assert (union.num_intervals, union.num_open) == (len(several), 0)


def test_pieces_grow_with_the_timeline():
    union = CoverageUnion()
    union.begin(500)
    union.end_all(2250)
    assert (union.total_us, union.covered_us[:4]) == (1750, [500, 1000, 250, 0])
    union.begin(5_000_000)
    union.end(9_000_000)
    assert (union.piece_us, union.total_us, sum(union.covered_us)) == (16_000, *[4_001_750] * 2)
    assert (len(union.covered_us), union.shares.max()) == (NUM_PIECES, 1)


FUSED = (
    (0, "B NEGOTIATE_ALLREDUCE"), (40, "E"), (40, "B ALLREDUCE"), (41, "B MEMCPY_IN_FUSION_BUFFER"),
    (45, "E"), (45, "B MPI_ALLREDUCE"), (95, "E"), (100, "E*"),
)  # fmt: skip
"""A step of 100 us: 40 of negotiation, 50 of transfer in one message."""


def events_of(lines):
    """Yields the events of lines such as "10 B ALLREDUCE a b"."""
    pids = {}
    for us, phase, *words in map(str.split, lines):
        named = phase in "BX"
        steps = FUSED if phase == "fused" else [(0, " ".join([phase, *words[:named]]))]
        for (after_us, step), tensor in product(steps, words[named:]):
            kind, _, name = step.partition(" ")
            if tensor not in pids:
                pids[tensor] = len(pids) + 1
                facts = {"pid": pids[tensor], "args": {"name": tensor}}
                yield {"name": "process_name", "ph": "M"} | facts
            sized = {"args": {"dtype": "float32", "shape": "[10]"}} if kind == "E*" else {}
            sized |= {"name": name} if name else {}
            yield {"ph": kind[0], "ts": int(us) + after_us, "pid": pids[tensor]} | sized


SCRIPTS, SUMMARIES = (REAL.with_name(name) for name in ("timelines.txt", "timeline_summaries.txt"))
BY_NAME = {
    each.partition("\n")[0]: each.strip().splitlines()[1:]
    for each in SCRIPTS.read_text().split("\n## ")[1:]
}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_timeline_has_the_summary_of_its_events(name, tmp_path):
    path = write(tmp_path / "t.json", json.dumps(list(events_of(BY_NAME[name]))).encode())
    found = {key: value for key, value in summarize(path).to_dict().items() if key != "path"}
    found = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.9f}"))
    text = "\n".join(f"{key}: {json.dumps(value)}" for key, value in found.items())
    check_expected(SUMMARIES, name, text, BY_NAME)


def test_a_real_timeline():
    """Counted by hand, by grep, in the file."""
    text, summary = REAL.read_text(), summarize(REAL)
    assert summary.origin_epoch_us == int(re.search(r"in_micros\":(\d+)", text)[1])
    for name in ("NEGOTIATE_ALLREDUCE", "MPI_ALLREDUCE", "MPI_BCAST", "MEMCPY_IN_FUSION_BUFFER"):
        assert summary.activities[name]["num"] == text.count(f'"{name}"')
    assert summary.num_steps == 2 + 4  # of the self-test, of training
    assert summary.steps["num_tensors"] == [1, 1, 10, 10, 10, 10]
    assert summarize(REAL, gradients="bias").steps["num_tensors"][-1] < 10
    num_parameters = 20 * 128 + 128 + 10 * 128 * 128 + 128 + 384 * 200 + 200 + 200 * 20 + 20 + 42
    assert summary.steps["bytes"][2:5] == [4 * num_parameters] * 3
    assert summary.broadcast.num_tensors == 12
    assert [row["activity"] for row in summary.unfinished] == ["ALLREDUCE"]


@pytest.mark.extended
def test_memory_does_not_grow_with_the_file(tmp_path):
    """Only a row for each step is kept."""
    lines = (f"{1000 * step} fused gradient.0.a gradient.1.b" for step in range(4000))
    path = write(tmp_path / "long.json", json.dumps(list(events_of(lines))).encode())
    tracemalloc.start()
    summary = summarize(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert summary.num_steps == 4000
    assert peak_bytes < path.stat().st_size
