from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from candle_p1.instrument.power.account import (
    DeviceEnergy,
    NodeEnergy,
    combine,
    measure_node,
    measure_so_far,
)
from candle_p1.instrument.power.choose import open_sources
from candle_p1.instrument.power.gpus import JobGpus
from candle_p1.instrument.power.sampler import Sampler
from candle_p1.records.power_trace import Channel, Energy, Trace, write_traces
from candle_p1.records.types import AbsentSource
from tests.unit.instrument.conftest import Clock, replaying, sample

PACKAGE = Channel("package-0", "package 0", "cpu", "rapl", "energy", resolution_s=0.001)
DRAM = Channel("dram-0", "memory of package 0", "memory", "rapl", "energy", resolution_s=0.001)
GPU = Channel("gpu:GPU-1", "H100", "gpu", "nvml", "energy", resolution_s=0.1)
GPU_POWER = replace(GPU, reading="power")
OTHER_GPU = replace(GPU, device="gpu:GPU-2")
NODE = Channel("node", "node", "node", "cray", "energy", resolution_s=0.1)
CRAY_CPU = Channel("cpu", "processors", "cpu", "cray", "energy", resolution_s=0.1)
CRAY_GPU = Channel("accel0", "accelerator 0", "gpu", "cray", "energy", resolution_s=0.1)

GONE = Energy("absent", 10.0, reason="from 3.000 s on: gone")


def node(devices, number=0, boot="a", **facts):
    """Returns a node whose devices have a constant power in W, or the energy given."""
    measured = []
    for channel, power in devices.items():
        total, load, train = power, GONE, GONE
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
        ({GPU_POWER: 290, GPU: GONE}, ["H100"], 290),
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
    section = combine([node({PACKAGE: 100, GPU: 300}), node({PACKAGE: 110, GPU: GONE}, 1, "b")])
    assert section.kind == section.phases["train"].kind == "absent"
    assert section.reason == section.phases["train"].reason == f"gpu:GPU-1 of node 1: {GONE.reason}"
    assert section.total_j is section.phases["train"].energy_j is None
    packages, gpus = section.devices
    assert (packages.kind, gpus.kind, gpus.reasons) == ("measured", "absent", [GONE.reason])
    assert gpus.energy.values == pytest.approx([3000, float("nan")], nan_ok=True)


def test_a_phase_may_be_complete_though_the_run_is_not():
    lost = node({GPU: GONE})
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
