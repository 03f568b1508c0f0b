"""What a timeline says, against timelines made up so that the answer is known, and a real one.

files/horovod_timeline.json is Horovod 0.28.1's, of NT3 (small) on two ranks with
HOROVOD_FUSION_THRESHOLD=134217728 and HOROVOD_CYCLE_TIME=5, two epochs of 80 samples; MPI_ABORT
ended the run, so the file lacks the last events, though its array is closed.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import DataError
from candle_p1.reports.timeline import events
from candle_p1.reports.timeline.events import EventReader, classify
from candle_p1.reports.timeline.steps import NUM_PIECES, CoverageUnion
from candle_p1.reports.timeline.summary import summarize, tensor_bytes

REAL = Path(__file__).parents[2] / "files/horovod_timeline.json"
GRADIENTS = ("StatefulPartitionedCall/gradient.0.a/kernel", "gradient.1.a/bias")
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


def test_a_real_timeline_is_read_like_json():
    assert read(REAL) == (json.loads(REAL.read_text()), False)


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_a_timeline_cut_at_any_byte_is_read_to_its_last_complete_event(tmp_path, ensure_ascii):
    expected = UNUSUAL + json.loads(REAL.read_text())[:30]
    pieces = [json.dumps(event, ensure_ascii=ensure_ascii).encode() for event in expected]
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


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000])
def test_the_size_of_chunks_does_not_matter(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(events, "CHUNK_BYTES", chunk_bytes)
    assert read(REAL)[0] == json.loads(REAL.read_text())
    data = json.dumps(UNUSUAL, ensure_ascii=False, indent=chunk_bytes % 2 or None).encode()
    assert read(write(tmp_path / "unusual.json", data)) == (UNUSUAL, False)


@pytest.mark.parametrize("end", [",", ",\n", "]", "]\n\n", ",]", "\0\0\0"])
def test_a_timeline_may_end_in_several_ways(tmp_path, end):
    path = write(tmp_path / "t.json", f"[\n{EVENT}{end}".encode())
    assert read(path) == ([json.loads(EVENT)], "]" not in end)


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
    damaged = gzip.compress(REAL.read_bytes())
    write(tmp_path / "damaged.json.gz", damaged[:200] + b"\xff" * 50 + damaged[250:])
    for name in ("absent.json", "", "pipe.json", "damaged.json.gz"):
        with pytest.raises(DataError, match=str(tmp_path / name)):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "kind", "operation", "library"),
    [
        ("NEGOTIATE_ALLREDUCE", "negotiate", "allreduce", None),
        ("BROADCAST", "broadcast", "broadcast", None),
        ("QUEUE", "queue", None, None),
        ("WAIT_FOR_OTHER_TENSOR_DATA", "wait", None, None),
        ("MEMCPY_IN_FUSION_BUFFER", "memcpy", None, None),
        ("COPY_ALLGATHER_OUTPUT", "memcpy", None, None),
        ("INIT_NCCL", "setup", None, None),
        ("ALLOCATE_SHARED_BUFFER", "setup", None, None),
        ("NCCL_BCAST", "transfer", "broadcast", "NCCL"),
        ("MPI_CROSS_ALLGATHER", "transfer", "allgather", "MPI"),
        ("MPI_ADASUM_ALLREDUCE", "transfer", "allreduce", "MPI"),
        ("SOMETHING_NEW", "other", None, None),
    ],
)
def test_names_of_activities_are_classified(name, kind, operation, library):
    assert classify(name) == (name, kind, operation, library)


def test_sizes_of_tensors_follow_from_type_and_shape():
    assert tensor_bytes("float32", "[20, 1, 128]") == 10240
    assert [tensor_bytes("bfloat16", "[3]"), tensor_bytes("float64", "[]")] == [6, 8]
    assert [tensor_bytes("bool", "[7]"), tensor_bytes("int8", "[0, 5]")] == [7, 0]


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
    if several:
        assert union.first_us == min(begin for begin, _ in several)
        assert union.last_us == max(end for _, end in several)


def test_open_intervals_end_with_the_timeline_and_pieces_grow_with_it():
    union = CoverageUnion()
    union.begin(500)
    union.begin(700)
    union.end(900)
    assert union.total_us == 0
    union.end_all(2250)
    union.end(3000)  # nothing is open
    assert (union.total_us, union.last_us) == (1750, 2250)
    assert union.covered_us[:4] == [500, 1000, 250, 0]
    union.begin(5_000_000)
    union.end(9_000_000)
    assert (union.piece_us, len(union.covered_us)) == (16_000, NUM_PIECES)
    assert (sum(union.covered_us), union.total_us) == (4_001_750, 4_001_750)
    assert union.covered_us[:2] == [1750, 0]
    assert union.shares.max() == 1
    union.begin(2**62)
    union.end(2**62)
    assert (len(union.covered_us), sum(union.covered_us)) == (NUM_PIECES, 4_001_750)


class Timeline:
    """Writes a timeline event by event."""

    def __init__(self, path):
        self.path, self.events, self.pids = path, [], {}

    def pid(self, tensor):
        if tensor not in self.pids:
            pid = self.pids[tensor] = len(self.pids) + 1
            args = {"name": tensor}
            self.events.append({"name": "process_name", "ph": "M", "pid": pid, "args": args})
        return self.pids[tensor]

    def begin(self, us, name, *tensors):
        for tensor in tensors:
            self.events.append({"ph": "B", "name": name, "ts": us, "pid": self.pid(tensor)})

    def end(self, us, *tensors, **args):
        for tensor in tensors:
            event = {"ph": "E", "ts": us, "pid": self.pid(tensor)}
            self.events.append(event | ({"args": args} if args else {}))

    def operation(self, name, tensor, begin_us, ready_us, end_us):
        self.begin(begin_us, f"NEGOTIATE_{name}", tensor)
        self.end(ready_us, tensor)
        self.begin(ready_us, name, tensor)
        self.end(end_us, tensor)

    def fused(self, us, *tensors):
        """A step of 100 µs: 40 of negotiation, 50 of transfer in one message."""
        self.begin(us, "NEGOTIATE_ALLREDUCE", *tensors)
        self.end(us + 40, *tensors)
        self.begin(us + 40, "ALLREDUCE", *tensors)
        self.begin(us + 41, "MEMCPY_IN_FUSION_BUFFER", *tensors)
        self.end(us + 45, *tensors)
        self.begin(us + 45, "MPI_ALLREDUCE", *tensors)
        self.end(us + 95, *tensors)
        self.end(us + 100, *tensors, dtype="float32", shape="[10]")

    def summarize(self, **options):
        self.path.write_text(json.dumps(self.events))
        return summarize(self.path, **options)


@pytest.fixture
def timeline(tmp_path):
    return Timeline(tmp_path / "timeline.json")


def test_fused_tensors_count_once(timeline):
    timeline.fused(1000, *GRADIENTS)
    timeline.fused(2000, *GRADIENTS)
    summary = timeline.summarize()
    unions_us = {kind: round(row["union_s"] * 1e6) for kind, row in summary.kinds.items()}
    assert unions_us == {"negotiate": 80, "allreduce": 120, "transfer": 100, "memcpy": 8}
    assert summary.kinds["transfer"]["num"] == 4
    assert summary.libraries == {"MPI": summary.kinds["transfer"]}
    assert summary.activities["MPI_ALLREDUCE"]["union_s"] == 100e-6
    assert (summary.begin_s, summary.end_s, summary.broadcast) == (0.001, 0.0021, None)
    both = {"num": 2, "bytes": 160, "duration_s": 100e-6}
    sizes = [both | {"from_bytes": 64, "below_bytes": 128, "bytes_per_s": 1.6e6}]
    whole = both | {"num_tensors": 4, "num_unsized": 0, "sizes": sizes}
    assert summary.messages["MPI_ALLREDUCE"] == whole
    times_s = {"allreduce_s": 120e-6, "memcpy_s": 8e-6, "negotiate_s": 80e-6, "transfer_s": 1e-4}
    assert summary.tensors[0] == {"name": GRADIENTS[0], "num": 2, "bytes": 40} | times_s


def test_messages_of_several_streams_are_distinguished(timeline):
    a, b, c = (f"gradient.{i}.x" for i in range(3))
    timeline.begin(0, "ALLREDUCE", a, b, c)
    timeline.begin(10, "NCCL_ALLREDUCE", a, b)
    timeline.end(20, a)
    timeline.begin(21, "NCCL_ALLREDUCE", c)  # before b has ended: another stream's
    timeline.end(25, b)
    timeline.end(30, c)
    timeline.end(31, a, b, c, dtype="float32", shape="[4]")
    messages = timeline.summarize().messages["NCCL_ALLREDUCE"]
    assert [(row["from_bytes"], row["num"]) for row in messages["sizes"]] == [(16, 1), (32, 1)]
    assert messages["duration_s"] == 20e-6


def test_sizes_that_are_not_logged_are_not_zero(timeline):
    timeline.begin(0, "BROADCAST", "weight")
    timeline.begin(1, "MPI_BCAST", "weight")
    timeline.end(9, "weight")
    timeline.end(10, "weight")
    summary = timeline.summarize()
    assert summary.tensors[0]["bytes"] is None
    assert summary.messages["MPI_BCAST"]["num_unsized"] == 1
    assert summary.messages["MPI_BCAST"]["sizes"] == []


def test_a_step_is_a_round_of_gradients(timeline):
    timeline.fused(0, "gradient.0.test/kernel")
    timeline.fused(1000, "gradient.0.test/kernel")
    timeline.operation("BROADCAST", "weight", 2000, 2010, 2020)
    timeline.fused(3000, GRADIENTS[0])
    timeline.fused(3200, GRADIENTS[1])
    timeline.fused(3500, "a metric")
    timeline.fused(4000, *GRADIENTS)
    summary = timeline.summarize()
    assert summary.num_steps == 4
    assert summary.steps == {
        "begin_s": [0.0, 0.001, 0.003, 0.004],
        "end_s": [0.0001, 0.0011, 0.0033, 0.0041],
        "communication_s": [100e-6, 100e-6, 200e-6, 100e-6],
        "negotiate_s": [40e-6, 40e-6, 80e-6, 40e-6],
        "allreduce_s": [60e-6, 60e-6, 120e-6, 60e-6],
        "num_tensors": [1, 1, 2, 2],
        "num_messages": [1, 1, 2, 1],
        "bytes": [40, 40, 80, 80],
    }
    assert timeline.summarize(gradients="metric").num_steps == 1


def test_a_gradient_that_ends_late_belongs_to_its_own_step(timeline):
    a, b = GRADIENTS
    timeline.begin(0, "NEGOTIATE_ALLREDUCE", a, b)
    timeline.end(10, a, b)
    timeline.begin(10, "ALLREDUCE", a, b)
    timeline.end(20, a, dtype="float32", shape="[10]")
    timeline.begin(25, "NEGOTIATE_ALLREDUCE", a)  # another rank is through with b already
    timeline.end(30, b, dtype="float32", shape="[10]")
    timeline.end(35, a)
    timeline.begin(35, "ALLREDUCE", a)
    timeline.end(45, a, dtype="float32", shape="[10]")
    found = timeline.summarize().steps
    assert found["end_s"] == [30e-6, 45e-6]
    assert found["communication_s"] == [30e-6, 20e-6]
    assert found["bytes"] == [80, 40]


def test_the_broadcast_overhead_extends_from_the_first_negotiation_to_the_last_end(timeline):
    timeline.operation("BROADCAST", "earlier", 0, 10, 20)
    timeline.fused(100, "gradient.0.test/kernel")
    timeline.begin(1000, "NEGOTIATE_BROADCAST", "a")
    timeline.begin(1100, "NEGOTIATE_BROADCAST", "b")
    for us, tensor in ((3000, "a"), (3020, "b")):
        timeline.end(us, tensor)
        timeline.begin(us, "BROADCAST", tensor)
        timeline.begin(us + 1, "MPI_BCAST", tensor)
        timeline.end(us + 9, tensor)
        timeline.end(us + 10, tensor)
    timeline.fused(4000, *GRADIENTS)
    timeline.begin(9000, "NEGOTIATE_BROADCAST", "later")
    timeline.end(9500, "later")
    broadcast = timeline.summarize().broadcast
    assert (broadcast.begin_s, broadcast.end_s) == (0.001, 0.00303)
    assert broadcast.overhead_s == pytest.approx(2030e-6)
    assert broadcast.broadcast_s == pytest.approx(20e-6)
    assert broadcast.transfer_s == pytest.approx(16e-6)
    assert broadcast.waiting_s == pytest.approx(2010e-6)
    assert (broadcast.num_tensors, broadcast.whole) == (2, True)


def test_the_last_rank_of_each_negotiation_is_counted(timeline):
    for us, delay in ((0, 30), (1000, 10)):
        timeline.begin(us, "NEGOTIATE_ALLREDUCE", "a")
        for rank in (0, 1):
            ready = {"ph": "X", "name": str(rank), "dur": 0, "pid": timeline.pid("a")}
            timeline.events.append(ready | {"ts": us + delay * rank})
        timeline.end(us + delay, "a")
    assert timeline.summarize().ranks == {
        0: {"num": 2, "num_last": 0, "mean_after_s": 0.0},
        1: {"num": 2, "num_last": 2, "mean_after_s": 20e-6},
    }


def test_a_hung_run_shows_what_it_waited_for(timeline):
    timeline.end(0, "a")  # without a begin, which is counted
    timeline.fused(0, *GRADIENTS)
    timeline.begin(500, "NEGOTIATE_ALLREDUCE", GRADIENTS[0])
    timeline.begin(900, "NEGOTIATE_ALLREDUCE", GRADIENTS[1])
    summary = timeline.summarize()
    assert summary.unfinished == [
        {"tensor": GRADIENTS[0], "activity": "NEGOTIATE_ALLREDUCE", "begin_s": 500e-6},
        {"tensor": GRADIENTS[1], "activity": "NEGOTIATE_ALLREDUCE", "begin_s": 900e-6},
    ]
    assert summary.kinds["negotiate"]["union_s"] == 440e-6
    assert summary.steps["num_tensors"] == [2, 2]
    assert summary.num_unmatched == 1


def test_an_empty_timeline_has_an_empty_summary(tmp_path):
    summary = summarize(write(tmp_path / "t.json", b""))
    assert (summary.cut, summary.num_events, summary.kinds) == (True, 0, {})


def test_a_real_timeline():
    """Counted by hand, by grep, in the file."""
    text, summary = REAL.read_text(), summarize(REAL)
    assert summary.origin_epoch_us == int(re.search(r"in_micros\":(\d+)", text)[1])
    for name in ("NEGOTIATE_ALLREDUCE", "MPI_ALLREDUCE", "MPI_BCAST", "MEMCPY_IN_FUSION_BUFFER"):
        assert summary.activities[name]["num"] == text.count(f'"{name}"')
    assert summary.num_steps == 2 + 4  # of the self-test, of training
    assert summary.steps["num_tensors"] == [1, 1, 10, 10, 10, 10]
    num_parameters = 20 * 128 + 128 + 10 * 128 * 128 + 128 + 384 * 200 + 200 + 200 * 20 + 20 + 42
    assert summary.steps["bytes"][2:5] == [4 * num_parameters] * 3
    assert summary.broadcast.num_tensors == 12
    assert [row["activity"] for row in summary.unfinished] == ["ALLREDUCE"]
    assert json.loads(json.dumps(summary.to_dict()))["num_steps"] == 6
    for row, union in summary.rows.items():
        name = {
            "negotiate": f"NEGOTIATE_{row.operation.upper()}",
            "transfer": f"{row.library}_{row.operation.upper()}".replace("BROADCAST", "BCAST"),
        }.get(row.kind, row.operation.upper())
        assert union.total_us / 1e6 == pytest.approx(summary.activities[name]["union_s"]), name
        assert sum(union.covered_us) == union.total_us


@pytest.mark.extended
def test_memory_does_not_grow_with_the_file(timeline):
    """Only a row for each step is kept."""
    for step in range(4000):
        timeline.fused(1000 * step, *GRADIENTS)
    timeline.path.write_text(json.dumps(timeline.events))
    del timeline.events
    tracemalloc.start()
    summary = summarize(timeline.path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert summary.num_steps == 4000
    assert peak_bytes < timeline.path.stat().st_size
