import os
import threading
import time
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import pytest

from candle_p1.errors import DataError
from candle_p1.instrument.power import sampler as sampler_module
from candle_p1.instrument.power.sampler import Sampler, SensorError
from candle_p1.records.power_trace import COLUMNS, Channel, read_traces, write_traces
from tests.unit.instrument.conftest import Clock, Source, replaying, sample

COUNTER = Channel("package-0", "package 0", "cpu", "rapl", "energy", limit_w=2000.0)
GAUGE = Channel("gpu:GPU-1", "NVIDIA H100, 80 GB", "gpu", "nvml", "power", 1e-3, resolution_s=0.1)
OTHER = replace(GAUGE, device="gpu:GPU-2")


def gauge(clock, channel=GAUGE):
    return Source({channel: lambda t: 300_000}, clock)


def energies_of(sampler, begin_s, end_s):
    return {trace.channel: trace.energy(begin_s, end_s) for trace in sampler.traces()}


GONE = SensorError("energy_uj: No such file or directory")


@pytest.mark.parametrize(
    ("channel", "values", "energies_j"),
    [
        (COUNTER, [*range(20), GONE, GONE, *range(22, 26), GONE, *range(27, 50)], [19, 49, 19]),
        (COUNTER, [*range(20), GONE, GONE, GONE, *range(23, 50)], [19, None, None]),
        (COUNTER, [*range(900, 920), *range(30)], [19, None, None]),  # it was reset
        *[
            (GAUGE, [300_000.0] * 20 + [value] * 30, [570, None, None])
            for value in (-1.0, nan, inf, ZeroDivisionError("bug"))
        ],
    ],
)
def test_a_sensor_that_fails_repeatedly_ends_its_trace_and_nothing_else(
    channel, values, energies_j
):
    clock = Clock()
    sources = [Source({channel: values[:]}), gauge(clock, OTHER)]
    sampler = sample(Sampler(sources, 10.0, clock), clock, 50)
    bounds_s = ((100, 101.9), (100, 104.9), (103, 104.9))
    found = [energies_of(sampler, *each) for each in bounds_s]
    assert [each[channel].energy_j for each in found] == pytest.approx(energies_j)
    assert found[1][OTHER].energy_j == pytest.approx(300 * 4.9)
    reason = found[1][channel].reason
    assert reason is None if energies_j[1] else "2.000 s" in reason
    assert reason is None or GONE not in values or str(GONE) in reason


@pytest.mark.parametrize("step_s", [-0.5, -1000.0, 5.0])
def test_a_step_of_the_clock_does_not_give_a_wrong_energy(step_s):
    clock = Clock()
    sampler = sample(Sampler([gauge(clock)], 10.0, clock), clock, 50)
    clock.now_s += step_s - 0.1
    sample(sampler, clock, 50)
    end_s = clock.now_s - 0.1
    found = energies_of(sampler, 100, end_s)[GAUGE]
    expected_j = None if step_s == -1000 else pytest.approx(300 * (end_s - 100), rel=1e-3)
    assert found.energy_j == expected_j
    assert (found.kind == "estimated") == (step_s > 0)
    assert bool(sampler.notes) == (step_s < 0)


def test_what_cannot_be_read_is_absent_for_a_reason(monkeypatch):
    source = gauge(Clock())
    source.absent = {COUNTER: "the card is divided by MIG"}
    monkeypatch.setattr(source, "start", lambda: 1 / 0)
    with Sampler([source], 100) as sampler:
        pass
    found = {trace.channel: trace for trace in sampler.traces()}
    assert "division by zero" in found[GAUGE].ended
    assert not len(found[GAUGE].times_s)
    energy = found[COUNTER].energy(100, 101)
    assert (energy.kind, energy.reason) == ("absent", "the card is divided by MIG")


def test_the_thread_samples_from_start_to_stop_at_its_rate():
    begin_s = time.perf_counter()
    with Sampler([gauge(time.perf_counter)], 200) as sampler:
        time.sleep(0.3)
    end_s = time.perf_counter()
    (trace,) = sampler.traces()
    assert len(trace.times_s) > 3
    assert begin_s <= trace.times_s[0] <= trace.times_s[-1] <= end_s
    assert trace.times_s[-1] - trace.times_s[0] >= 0.3
    sampler.stop()
    assert len(sampler.traces()[0].times_s) == len(trace.times_s)
    assert "power sampler" not in {thread.name for thread in threading.enumerate()}


def test_a_sensor_that_does_not_answer_does_not_delay_the_run(monkeypatch):
    monkeypatch.setattr(sampler_module, "END_S", 0.05)
    hang, asked = threading.Event(), threading.Event()

    def read(time_s):
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            hang.wait(10)
        return 1.0

    sampler = Sampler([Source({GAUGE: read}, time.perf_counter)], 100)
    sampler.start()
    asked.wait()
    sampler.stop()
    assert "0.05 s" in sampler.traces()[0].ended
    hang.set()


@pytest.fixture
def recording(tmp_path):
    """A file of 60 s: a package at 100 W and a GPU that rises to 300 W."""
    clock = Clock()
    functions = {COUNTER: lambda t: 100 * t, GAUGE: lambda t: 1e3 * min(300, 5 * (t - 100))}
    sampler = sample(Sampler([Source(functions, clock)], 10.0, clock), clock, 601)
    path = tmp_path / "power-0000.csv"
    write_traces(path, sampler.traces(), node=0, start_s=100.0)
    for found, written in zip(read_traces(path), sampler.traces(), strict=True):
        unwritten = {"unit": 1.0, "limit_w": inf}
        assert found.channel == replace(written.channel, **unwritten)
        assert found.times_s.tolist() == (written.times_s - 100.0).tolist()
        assert found.values.tolist() == written.values.tolist()
    return path


@pytest.mark.parametrize("hz", [10.0, 3.7, 25.0])
def test_a_replay_has_the_energies_of_the_recording(recording, hz):
    clock = Clock(5000.0)
    sampler = sample(replaying(recording, clock, hz), clock, int(59.5 * hz))
    counter, gauge = (trace.channel for trace in sampler.traces())
    bounds_s = [5000, 5000.3, 5017.77, 5020, 5055.1]
    assert counter.source == "replay:rapl"
    total = energies_of(sampler, bounds_s[0], bounds_s[-1])
    parts = [energies_of(sampler, *pair) for pair in pairwise(bounds_s)]
    for channel, exact_j in ((counter, 5510), (gauge, 5 * 55.1**2 / 2)):
        assert total[channel].kind == "simulated"
        assert total[channel].energy_j == pytest.approx(exact_j, rel=1e-3)
        added_j = sum(part[channel].energy_j for part in parts)
        assert added_j == pytest.approx(total[channel].energy_j, rel=1e-6)


def test_energy_is_absent_after_the_end_of_a_replay(recording):
    clock = Clock()
    sampler = sample(replaying(recording, clock), clock, 700)
    for energy in energies_of(sampler, 100, 165).values():
        assert (energy.kind, energy.energy_j) == ("absent", None)
        assert "60.000 s" in energy.reason
    assert all(energy.energy_j for energy in energies_of(sampler, 100, 159).values())


HEADER = ",".join(COLUMNS) + "\n"
LINE = "0.0,0,node,node,node,cray,energy,0.1,5.0\n"


def test_a_recording_is_a_regular_file_without_control_sequences(tmp_path):
    path = tmp_path / "power.csv"
    path.write_text(HEADER + LINE.replace("0,node,node", "0,a\x1b[2J,b\x1b[31m"))
    (trace,) = read_traces(path)
    assert (trace.channel.device, trace.channel.label) == ("a", "b")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="pipe"):
        read_traces(path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("", None),
        (HEADER, None),
        (HEADER + LINE.replace("5.0", "x"), 2),
        (HEADER + LINE.replace("5.0", "nan"), 2),
        (HEADER + LINE.replace("0.1", "-1"), 2),
        (HEADER + LINE.replace("energy", "joule"), 2),
        (HEADER + LINE.replace("node,cray", "rack,cray"), 2),
        (HEADER + "0.0,0,node\n", 2),
        (HEADER + LINE + LINE, 3),
        (HEADER + LINE + LINE.replace("0.0,0", "0.1,1"), None),
        ("\xff\xfe", None),
    ],
)
def test_files_that_are_not_recordings_are_refused(tmp_path, content, line):
    path = tmp_path / "power.csv"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError) as raised:
        read_traces(path)
    assert (raised.value.path, raised.value.line) == (str(path), line)
