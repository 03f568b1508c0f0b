"""Pieces of a timeline, held to the trace-event format more strictly than viewers are."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import DataError, ParameterError, RecordError
from candle_p1.instrument.clock import ClockAnchor, read_anchor
from candle_p1.records.power_file import write_traces
from candle_p1.records.power_trace import Channel, Trace
from candle_p1.records.record import make_record, write_record
from candle_p1.records.spread import Bytes, Seconds
from candle_p1.records.types import PhaseTimes
from candle_p1.reports.frame import Run
from candle_p1.reports.timeline.events import ORIGIN_KEY, read_origin_epoch_us
from candle_p1.reports.timeline.slice import cut
from candle_p1.reports.timeline.summary import summarize
from candle_p1.reports.timeline.tracks import (
    Span,
    Track,
    origin_s,
    phase_track,
    power_track,
    reading_tracks,
)
from tests import records

REAL = Path(__file__).parents[2] / "files/horovod_timeline.json"

REQUIRED = {
    "B": {"name": str, "ts": int},
    "E": {"ts": int},
    "X": {"name": str, "ts": int, "dur": int},
    "i": {"name": str, "ts": int, "s": str},
    "C": {"name": str, "ts": int, "args": dict},
    "M": {"name": str, "args": dict},
}
METADATA = {"process_name": ("name", str), "process_sort_index": ("sort_index", int)}


def refuse(constant):
    raise AssertionError(f"{constant} is not JSON")


def check_trace(path):
    """Checks a file against the trace-event format; returns its events."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        events = json.load(file, parse_constant=refuse)
    assert isinstance(events, list)
    named, used = set(), set()
    last_us = defaultdict(lambda: -math.inf)
    stacks, complete = defaultdict(list), defaultdict(list)
    for event in events:
        phase = event["ph"]
        for key, kind in ({"pid": int, "tid": int} | REQUIRED[phase]).items():
            assert type(event[key]) is kind, event
        thread = event["pid"], event["tid"]
        if phase == "M":
            key, kind = METADATA[event["name"]]
            assert type(event["args"][key]) is kind, event
            if event["name"] == "process_name":
                assert event["pid"] not in named, "named twice"
                named.add(event["pid"])
            continue
        assert event["ts"] >= 0
        used.add(event["pid"])
        if phase in "BE":
            assert event["ts"] >= last_us[thread], "times go back"
            last_us[thread] = event["ts"]
        if phase == "B":
            stacks[thread].append(event)
        elif phase == "E":
            assert stacks[thread], "an end without a begin"
            stacks[thread].pop()
        elif phase == "X":
            assert event["dur"] >= 0
            complete[thread].append((event["ts"], event["ts"] + event["dur"]))
        elif phase == "C":
            series = (*thread, event["name"])
            assert event["ts"] >= last_us[series]
            last_us[series] = event["ts"]
            assert event["args"]
            for value in event["args"].values():
                assert type(value) in (int, float)
                assert math.isfinite(value)
        elif phase == "i":
            assert event["s"] in ("g", "p", "t")
    assert not any(stacks.values()), "a begin without an end"
    assert used <= named
    for spans in complete.values():
        for begin, end in spans:
            assert not any(begin < b < end < e for b, e in spans), "spans that cross"
    return events


def of_process(events, name):
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    return [e for e in events if e["ph"] != "M" and names[e["pid"]] == name]


def intervals(events, last_us):
    """The process, name, begin and end of everything that was begun, in order."""
    found, stacks = [], defaultdict(list)
    for event in events:
        if event["ph"] == "B":
            stacks[event["pid"]].append(event)
        elif event["ph"] == "E":
            start = stacks[event["pid"]].pop()
            found.append((start["pid"], start["name"], start["ts"], event["ts"]))
    unfinished = [event for stack in stacks.values() for event in stack]
    return sorted(found + [(e["pid"], e["name"], e["ts"], last_us) for e in unfinished])


def test_a_piece_equals_the_clipped_timeline(tmp_path):
    out, events = tmp_path / "piece.json", json.loads(REAL.read_text())
    last_us = max(event["ts"] for event in events if "ts" in event)
    middle = [1_150_000, 1_200_000, 2_330_000, 2_343_500, 2_424_500]
    for begin_us, end_us in product((0, 220_000, *middle), (*middle, last_us)):
        if begin_us < end_us:
            piece = cut(REAL, out, begin_us / 1e6, end_us / 1e6)
            found = check_trace(out)
            assert piece.num_events == sum(event["ph"] != "M" for event in found)
            assert intervals(found, None) == [
                (pid, name, max(start_us, begin_us), min(stop_us, end_us))
                for pid, name, start_us, stop_us in intervals(events, last_us)
                if start_us <= end_us and stop_us >= begin_us
            ]


def test_a_copy_of_the_whole_has_the_same_summary(tmp_path):
    out = tmp_path / "piece.json"
    piece = cut(REAL, out)
    assert len(piece.pids) == 23
    cut(REAL, tmp_path / "piece.json.gz")
    assert check_trace(tmp_path / "piece.json.gz") == check_trace(out)
    whole, again = summarize(REAL), summarize(out)
    assert again.kinds == whole.kinds
    for name, messages in whole.messages.items():
        assert again.messages[name]["sizes"] == messages["sizes"]
    for column in ("begin_s", "end_s", "negotiate_s", "num_tensors", "bytes"):
        assert again.steps[column] == whole.steps[column]
    assert again.broadcast == whole.broadcast
    assert again.origin_epoch_us == whole.origin_epoch_us
    assert not again.unfinished


def test_a_piece_of_a_truncated_timeline_is_valid(tmp_path):
    data = REAL.read_bytes()
    path, out = tmp_path / "cut.json", tmp_path / "piece.json"
    for length in range(4000, len(data), 997):
        path.write_bytes(data[:length])
        cut(path, out)
        check_trace(out)


NAMES = (
    *("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "MPI_ALLREDUCE", "QUEUE", "x"),
    *("NEGOTIATE_BROADCAST", "BROADCAST", "MPI_BCAST"),
)
SIZES = ({}, {"dtype": "float32", "shape": "[2]"}, {"dtype": 3, "shape": []})
PLACE = {"ts": st.integers(0, 50), "pid": st.integers(1, 3)}
any_event = st.one_of(
    st.fixed_dictionaries(PLACE | {"ph": st.just("B"), "name": st.sampled_from(NAMES)}),
    st.fixed_dictionaries(PLACE | {"ph": st.just("E"), "args": st.sampled_from(SIZES)}),
    st.fixed_dictionaries(
        PLACE | {"ph": st.just("X"), "name": st.sampled_from("01x"), "dur": st.just(0)}
    ),
)


@given(st.lists(any_event, max_size=40), st.integers(0, 40), st.integers(1, 20))
def test_a_piece_of_any_sequence_of_events_is_valid(tmp_path_factory, events, begin_us, us):
    """Not that Horovod writes this: every state must take every event."""
    path = tmp_path_factory.getbasetemp() / "any.json"
    out = path.with_name("piece.json")
    names = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"gradient.{pid}.w"}}
        for pid in (1, 2, 3)
    ]
    ordered = sorted(events, key=lambda event: event["ts"])
    path.write_text(json.dumps([*names, *ordered]))
    summary = summarize(path)
    span_s = summary.end_s - summary.begin_s
    for rows in (summary.kinds, summary.activities, summary.libraries):
        assert all(0 <= row["union_s"] <= span_s + 1e-9 for row in rows.values())
    json.dumps(summary.to_dict(), allow_nan=False)
    if ordered and ordered[-1]["ts"] >= begin_us:
        cut(path, out, begin_us / 1e6, (begin_us + us) / 1e6)
        check_trace(out)
        path.write_text(json.dumps([*names, *events]))  # as they come, also back in time
        summarize(path)


def test_only_tensors_that_appear_are_named(tmp_path):
    out = tmp_path / "piece.json"
    piece = cut(REAL, out, 1.13, 1.24)
    events = check_trace(out)
    names = [e["args"]["name"] for e in events if e.get("name") == "process_name"]
    assert len(piece.pids) == 12
    assert all(name.startswith("HorovodBroadcast") for name in names[1:])
    assert events[0]["args"][ORIGIN_KEY] == read_origin_epoch_us(REAL)


def test_events_after_the_piece_are_not_read(tmp_path):
    path, out = tmp_path / "t.json", tmp_path / "piece.json"
    path.write_bytes(REAL.read_bytes()[:-1] + b", nonsense {}]")
    cut(path, out, 0.0, 2.0)
    check_trace(out)
    out.unlink()
    with pytest.raises(DataError):
        cut(path, out)
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_cycle_marks_are_kept(tmp_path):
    path, out = tmp_path / "t.json", tmp_path / "piece.json"
    origin = {"name": "process_name", "ph": "M", "pid": 0, "args": {ORIGIN_KEY: 5}}
    mark = {"ph": "i", "name": "CYCLE_START", "ts": 7, "s": "g"}
    path.write_text(json.dumps([origin, mark]))
    cut(path, out)
    assert check_trace(out)[1] == mark | {"pid": 0, "tid": 0}


def test_tracks_are_drawn_beside_it(tmp_path):
    out = tmp_path / "piece.json"
    spans = [
        Span("wait", 900_000, 1_150_000),
        Span("broadcast", 900_000, 1_250_000),
        Span("train", 1_250_000, 3_000_000),
        Span("load", 100_000, 900_000),
    ]
    readings = [
        Span("gpu", 500_000, 1_050_000, 90.0, "W"),
        Span("gpu", 1_050_000, 1_150_000, 100.0, "W"),
        Span("gpu", 1_150_000, 1_450_000, 250.0, "W"),
        Span("gpu", 1_450_000, 1_500_000, 50.0, "W"),
        Span("cpu", 800_000, 2_000_000, 30.0, "W"),
    ]
    tracks = [Track("power", readings), Track("rank 0: phases", spans)]
    piece = cut(REAL, out, 1.1, 1.3, tracks)
    events = check_trace(out)
    phases = [(e["name"], e["ts"], e["dur"]) for e in of_process(events, "rank 0: phases")]
    assert phases == [
        ("broadcast", 1_100_000, 150_000),
        ("wait", 1_100_000, 50_000),
        ("train", 1_250_000, 50_000),
    ]
    power = [(e["name"], e["ts"], e["args"]["W"]) for e in of_process(events, "power")]
    assert power == [
        ("cpu", 1_100_000, 30.0),
        ("gpu", 1_100_000, 100.0),
        ("gpu", 1_150_000, 250.0),
    ]
    assert piece.num_track_events == 6
    order = {
        e["pid"]: e["args"]["sort_index"] for e in events if e.get("name") == "process_sort_index"
    }
    assert sorted(order.values())[:2] == [-2, -1]


def test_crossing_spans_are_drawn_on_separate_rows(tmp_path):
    out = tmp_path / "piece.json"
    crossing = [Span("read", 100, 600), Span("parse", 200, 700), Span("scale", 650, 800)]
    cut(REAL, out, 0.0, 1.0, [Track("parts", [Span("load", 100, 900), *crossing])])
    drawn = of_process(check_trace(out), "parts")
    rows = {event["name"]: event["tid"] for event in drawn}
    assert rows["load"] == rows["read"] == rows["scale"] != rows["parse"]


RUNNING = records.RUNNING | {"started": "2026-01-01T00:00:00.000+00:00"}


def test_the_ranks_that_read_are_drawn_over_time(tmp_path):
    read = {
        "begin": Seconds.over([11.0, 12.0]),
        "end": Seconds.over([13.0, 13.0]),
        "busy": Seconds.over([2.0, 1.0]),
        "read": Bytes.over([2e6, 1e6]),
        "union_s": 2.0,
        "mean_ranks": 1.5,
        "interval_s": 1.0,
        "num_ranks": [1.0, 2.0],
        "bytes_per_s": [1e6, 2e6],
    }
    files = {
        "train": {"path": "a.csv", "file_bytes": 3_000_000, "reading": read},
        "test": {"path": "b.csv", "file_bytes": 3},
    }
    data = {"synthetic": True, "loader": "parallel", "files": files}
    run = Run(tmp_path / "run.json", make_record(RUNNING | {"data": data}))
    (track,) = reading_tracks(run, origin_s=10.0)
    assert track.name == "reading train"
    drawn = {}
    for span in track.spans:
        drawn.setdefault(span.unit, []).append((span.begin_us, span.end_us, span.value))
    steps = [(1_000_000, 2_000_000), (2_000_000, 3_000_000), (3_000_000, 4_000_000)]
    assert drawn == {
        "ranks": [(*step, value) for step, value in zip(steps, (1, 2, 0), strict=True)],
        "MB/s": [(*step, value) for step, value in zip(steps, (1, 2, 0), strict=True)],
    }


def test_phases_come_from_the_raw_values(tmp_path):
    def phase(begins, seconds, **facts):
        return PhaseTimes.over(seconds, begin=Seconds.over(begins), **facts)

    phases = {
        "load": phase([10.0, 9.0], [2.0, 3.0]),
        "broadcast": phase(
            [12.0, 12.0], [1.5, 0.5], parts={"wait": phase([12.25, 12.0], [1.0, 0.0])}
        ),
        "evaluate": phase([None, 20.0], [0.0, 1.0]),
        "report": PhaseTimes.over([1.0, 1.0]),
    }
    epochs = [
        {
            "epoch": 1,
            "metrics": {},
            "begin": Seconds.over([14.0] * 2),
            "train": Seconds.over([3] * 2),
        },
        {"epoch": 2, "metrics": {}, "train": Seconds.over([3] * 2)},
    ]
    record = make_record(RUNNING | {"phases": phases, "training": {"epochs": epochs}})
    path = tmp_path / "run.json"
    write_record(path, record)
    assert phase_track(Run(path, record), origin_s=10.5).spans == [
        Span("load", -500_000, 1_500_000),
        Span("broadcast", 1_500_000, 3_000_000),
        Span("wait", 1_750_000, 2_750_000),
        Span("epoch 1", 3_500_000, 6_500_000),
    ]
    (tmp_path / "per_rank.npz").unlink()
    assert phase_track(Run(path, record), 0.0).spans == []


def test_the_origin_of_the_timeline_on_the_clock_of_the_run():
    epoch_us = 1_767_225_600_000_000
    run = Run(None, make_record(RUNNING))
    assert origin_s(run, epoch_us + 4_500_000) == pytest.approx(4.5, abs=1e-6)
    assert origin_s(run, None) is None
    never = Run(Path("run.json"), make_record(RUNNING | {"started": "yesterday"}))
    with pytest.raises(RecordError, match=r"run\.json"):
        origin_s(never, epoch_us)
    anchor = {"file": "t.json", "anchor_epoch_us": epoch_us - 1_000_000, "anchor_s": 3.25}
    traced = Run(None, make_record(RUNNING | {"timeline": anchor}))
    assert origin_s(traced, epoch_us) == 4.25
    anchor = ClockAnchor(epoch_us=1_000_000, perf_counter_s=50.0, uncertainty_us=1.0)
    assert anchor.to_perf_counter_s(3_500_000) == 52.5
    assert read_anchor().uncertainty_us >= 0


def test_energy_is_drawn_as_mean_power(tmp_path):
    counter = Channel("cpu0", "a processor", "cpu", "rapl", "energy", resolution_s=None)
    gauge = Channel("gpu0", "an accelerator", "gpu", "nvml", "power", resolution_s=None)
    traces = [
        Trace(counter, np.array([30.0, 30.5, 32.0]), np.array([1000.0, 1050.0, 1170.0]), 0.5),
        Trace(gauge, np.array([30.0, 31.0]), np.array([70.5, 250.0]), 0.5),
    ]
    path = tmp_path / "power-0003.csv"
    write_traces(path, traces, node=3, start_s=20.0)
    track = power_track(path, origin_s=9.0)
    assert track.name == "node 3: power"
    assert track.spans == [
        Span("a processor (cpu0, rapl)", 1_000_000, 1_500_000, 100.0, "W"),
        Span("a processor (cpu0, rapl)", 1_500_000, 3_000_000, 80.0, "W"),
        Span("an accelerator (gpu0, nvml)", 1_000_000, 2_000_000, 70.5, "W"),
        Span("an accelerator (gpu0, nvml)", 2_000_000, 3_000_000, 250.0, "W"),
    ]


@pytest.mark.parametrize(
    ("path", "out", "times_s", "error", "named"),
    [
        (REAL, "piece.json", (2, 1), ParameterError, "2 s to 1 s"),
        (REAL, "piece.json", (99,), ParameterError, r"2\.426\d* s"),
        (REAL, "absent/piece.json", (), ParameterError, "absent/piece.json"),
        ("copy.json", "copy.json", (), ParameterError, "copy.json"),
        ("absent.json", "piece.json", (), DataError, "absent.json"),
        ("absent.json", "copy.json", (), DataError, "absent.json"),
        ("empty.json", "piece.json", (), DataError, "empty.json"),
    ],
)
def test_pieces_that_cannot_be_cut(tmp_path, path, out, times_s, error, named):
    (tmp_path / "copy.json").write_bytes(REAL.read_bytes())
    (tmp_path / "empty.json").write_text("")
    with pytest.raises(error, match=named):
        cut(tmp_path / path, tmp_path / out, *times_s)
    assert (tmp_path / "copy.json").read_bytes() == REAL.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"copy.json", "empty.json"}


def test_a_piece_without_events_has_its_tracks(tmp_path):
    """Between the self-test and the broadcast, while data are loaded, Horovod has nothing to do."""
    out = tmp_path / "piece.json"
    load = Track("rank 0: phases", [Span("load", 300_000, 1_000_000)])
    piece = cut(REAL, out, 0.5, 0.6, [load])
    assert (piece.num_events, len(piece.pids), piece.num_track_events) == (0, 0, 1)
    assert of_process(check_trace(out), "rank 0: phases")[0]["dur"] == 100_000
