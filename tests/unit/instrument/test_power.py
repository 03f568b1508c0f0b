import os
import threading
import time
from dataclasses import replace
from itertools import pairwise
from math import inf, nan

import numpy as np
import pytest

from candle_p1.errors import DataError
from candle_p1.instrument.power import sampler as sampler_module
from candle_p1.instrument.power.account import (
    DeviceEnergy,
    NodeEnergy,
    combine,
    measure_node,
    measure_so_far,
)
from candle_p1.instrument.power.choose import open_sources
from candle_p1.instrument.power.gpus import JobGpus
from candle_p1.instrument.power.sampler import Sampler, SensorError
from candle_p1.records.power_trace import COLUMNS, Channel, Energy, Trace, read_traces, write_traces
from candle_p1.records.types import AbsentSource
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


def test_a_pause_of_the_process_makes_an_energy_an_estimate():
    clock = Clock()
    sampler = sample(Sampler([gauge(clock)], 10.0, clock), clock, 50)
    clock.now_s += 4.9
    end_s = sample(sampler, clock, 50) and clock.now_s - 0.1
    found = energies_of(sampler, 100, end_s)[GAUGE]
    assert found.energy_j == pytest.approx(300 * (end_s - 100), rel=1e-3)
    assert found.kind == "estimated"


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


PACKAGE = Channel("package-0", "package 0", "cpu", "rapl", "energy", resolution_s=0.001)
DRAM = Channel("dram-0", "memory of package 0", "memory", "rapl", "energy", resolution_s=0.001)
GPU = Channel("gpu:GPU-1", "H100", "gpu", "nvml", "energy", resolution_s=0.1)
GPU_POWER = replace(GPU, reading="power")
OTHER_GPU = replace(GPU, device="gpu:GPU-2")
NODE = Channel("node", "node", "node", "cray", "energy", resolution_s=0.1)
CRAY_CPU = Channel("cpu", "processors", "cpu", "cray", "energy", resolution_s=0.1)
CRAY_GPU = Channel("accel0", "accelerator 0", "gpu", "cray", "energy", resolution_s=0.1)

LOST = Energy("absent", 10.0, reason="from 3.000 s on: gone")


def node(devices, number=0, boot="a", **facts):
    """Returns a node whose devices have a constant power in W, or the energy given."""
    measured = []
    for channel, power in devices.items():
        total, load, train = power, LOST, LOST
        if not isinstance(power, Energy):
            total, load, train = (Energy("measured", s, s * power, 10 * s + 1) for s in (10, 4, 6))
        phases = {"load": load, "train": train}
        measured.append(DeviceEnergy(channel, total, phases, number, boot))
    return NodeEnergy(number, f"host{number}", boot, measured, power_hz=10.0, **facts)


def counted(section):
    """Returns the nodes and the powers in W of the devices that count, by their label."""
    groups = [group for group in section.devices if group.counted]
    assert all(group.num_devices == len(group.energy.values) for group in groups)
    return {group.label: (group.nodes, group.power.values.tolist()) for group in groups}


def test_devices_of_all_nodes_add_up():
    first = node({PACKAGE: 100, DRAM: 20, GPU: 300})
    section = combine([first, node({PACKAGE: 110, DRAM: 20, GPU: 310}, 1, "b")])
    assert section.kind == section.phases["load"].kind == "measured"
    assert section.mean_w == section.phases["load"].mean_w == pytest.approx(860)
    assert section.covers == ["cpu", "gpu", "memory"]
    assert section.total_j == pytest.approx(8600)
    assert [phase.energy_j for phase in section.phases.values()] == pytest.approx([3440, 5160])
    assert counted(section) == {
        "package 0": ((0, 1), [100, 110]),
        "memory of package 0": ((0, 1), [20, 20]),
        "H100": ((0, 1), [300, 310]),
    }


MODULE = replace(GPU, device="module:GPU-1", label="module of GH200", domain="module")
PARTS_OF_MODULE = {MODULE: 600, CRAY_CPU: 250, CRAY_GPU: 600}


@pytest.mark.parametrize(
    ("devices", "labels", "total_w"),
    [
        ({PACKAGE: 100, GPU: 300, NODE: 700, CRAY_CPU: 105}, ["node"], 700),
        ({PACKAGE: 100, GPU: 300, CRAY_CPU: 105, CRAY_GPU: 310}, ["package 0", "H100"], 400),
        ({PACKAGE: 100, replace(CRAY_CPU, source="replay:cray"): 105}, ["package 0"], 100),
        ({CRAY_CPU: 105, CRAY_GPU: 310}, ["processors", "accelerator 0"], 415),
        (PARTS_OF_MODULE, ["module of GH200"], 600),
        (PARTS_OF_MODULE | {NODE: 700}, ["node"], 700),
        ({GPU_POWER: 290, GPU: 300}, ["H100"], 300),  # the counter
        ({GPU_POWER: 290, GPU: LOST}, ["H100"], 290),
    ],
)
def test_every_part_of_a_node_is_counted_once(devices, labels, total_w):
    section = combine([node(devices)])
    assert list(counted(section)) == labels
    assert section.mean_w == pytest.approx(total_w)
    assert section.covers == sorted({g.domain for g in section.devices if g.counted})
    assert len(section.devices) == len(devices), "also those that do not count are shown"


def test_a_device_that_two_nodes_of_one_machine_see_is_counted_once():
    section = combine([node({PACKAGE: 100, GPU: 300}), node({PACKAGE: 100, OTHER_GPU: 290}, 1)])
    assert counted(section) == {"package 0": ((0, 0), [100]), "H100": ((0, 1), [300, 290])}
    assert section.total_j == pytest.approx(6900)


def test_a_total_is_absent_if_a_part_is():
    section = combine([node({PACKAGE: 100, GPU: 300}), node({PACKAGE: 110, GPU: LOST}, 1, "b")])
    assert section.kind == section.phases["train"].kind == "absent"
    assert section.reason == section.phases["train"].reason == f"gpu:GPU-1 of node 1: {LOST.reason}"
    assert section.total_j is section.phases["train"].energy_j is None
    packages, gpus = section.devices
    assert (packages.kind, gpus.kind, gpus.reasons) == ("measured", "absent", [LOST.reason])
    assert gpus.energy.values == pytest.approx([3000, float("nan")], nan_ok=True)


def test_a_phase_may_be_complete_though_the_run_is_not():
    lost = node({GPU: LOST})
    lost.devices[0].phases["load"] = Energy("measured", 4.0, 1200.0, 41)
    section = combine([lost])
    assert section.phases["load"].energy_j == 1200
    assert section.phases["train"].kind == section.kind == "absent"


def test_nodes_that_measure_different_things_have_no_total():
    second = node({GPU: 300}, 1, "b", absent={"rapl": "denied"})
    section = combine([node({PACKAGE: 100, GPU: 300}), second])
    assert section.kind == "absent"
    assert section.reason.startswith("node 1 (host1)")
    assert section.absent == [AbsentSource(source="rapl", reason="denied", nodes=[1])]


def test_a_sum_has_the_worst_kind_of_its_parts():
    estimate = Energy("estimated", 10.0, 500.0, 2, few_samples=True)
    section = combine([node({PACKAGE: 100, GPU: estimate})])
    assert section.kind == "estimated"
    assert [group.few_samples for group in section.devices] == [False, True]
    replayed = Energy("simulated", 10.0, 500.0, 100)
    assert combine([node({PACKAGE: 100, GPU: replayed})]).kind == "simulated"


def test_a_reason_that_several_nodes_share_is_given_once():
    absent = {"nvml": "not installed", "rapl": "no powercap"}
    section = combine([node({}, 0, "a", absent=absent), node({}, 1, "b", absent=absent)])
    assert (section.kind, section.reason) == ("absent", "nvml: not installed; rapl: no powercap")
    assert [each.nodes for each in section.absent] == [[0, 1], [0, 1]]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sampler(tmp_path, clock):
    """A sampler of a recording of 10 s."""
    times_s = np.arange(101) / 10
    traces = [
        Trace(PACKAGE, times_s, 100 * times_s, 0.1),
        Trace(GPU_POWER, times_s, 200 + 10 * times_s, 0.1),
    ]
    write_traces(tmp_path / "power.csv", traces, node=0, start_s=0.0)
    return replaying(tmp_path / "power.csv", clock, hz=50.0)


def test_energies_of_a_replay_add_up_from_the_first_sample_on(sampler, clock):
    def section_of(*bounds_s):
        names = zip(("startup", "load", "train", "load"), pairwise(bounds_s), strict=False)
        phases = [(name, 100 + begin, 100 + end) for name, (begin, end) in names]
        return combine([measure_node(sampler, phases, node=0, absent={}, trace="power.csv")])

    sample(sampler, clock, 26).stop()
    section = section_of(0, 0.1, 0.25, 0.4, 0.5)
    assert (section.kind, section.traces) == ("simulated", ["power.csv"])
    assert list(section.phases) == ["startup", "load", "train"]
    assert section.total_j == pytest.approx(0.5 * (100 + 202.5), rel=1e-3)
    added_j = sum(phase.energy_j for phase in section.phases.values())
    assert added_j == pytest.approx(section.total_j, rel=1e-3)
    section = section_of(-5, 0.1, 0.4)
    assert section.phases["startup"].kind == "absent"
    assert section.total_s == pytest.approx(0.4)
    assert section.total_j == pytest.approx(0.4 * (100 + 202), rel=1e-3)


def test_the_energy_so_far_is_known_while_sampling_goes_on(sampler, clock):
    for total_s in (0.3, 0.6):
        sample(sampler, clock, 16 if total_s == 0.3 else 15)
        section = combine([measure_so_far(sampler, 100.0, 0)])
        assert (section.kind, section.total_s) == ("simulated", pytest.approx(total_s))
        assert section.mean_w == pytest.approx(100 + 200 + 5 * total_s, rel=1e-3)
    with sampler._lock:  # as while a sensor does not answer
        assert measure_so_far(sampler, 100.0, 0) is None


def test_a_run_that_measures_nothing_is_absent():
    absent = open_sources("none", JobGpus()).absent
    with Sampler([], 50) as sampler:
        intervals = [("load", sampler.start_s, sampler.start_s + 1)]
    section = combine([measure_node(sampler, intervals, node=0, absent=absent, trace="x")])
    assert section.kind == "absent"
    assert [each.source for each in section.absent] == ["none"]
    assert (section.devices, section.phases, section.traces) == ([], {}, [])
