from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from candle_p1.errors import ParameterError
from candle_p1.instrument.power import amd, choose, gpus, sysfs
from candle_p1.instrument.power.amd import AmdSource
from candle_p1.instrument.power.choose import check_names, open_sources
from candle_p1.instrument.power.cray import CraySource
from candle_p1.instrument.power.gpus import JobGpus, select, visible_here
from candle_p1.instrument.power.nvml import NvmlSource
from candle_p1.instrument.power.rapl import RaplSource, modulus_uj
from candle_p1.instrument.power.source import SensorError

HIGHEST_UJ = 262_143_328_850


def values(source):
    """Returns what a source reads, by device."""
    return dict(zip([c.device for c in source.channels], source.sample(), strict=True))


# --- RAPL -----------------------------------------------------------------------------------------


@pytest.fixture
def powercap(tmp_path):
    """Two packages with memory, and all that must not be added to them."""
    zones = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "uncore",
        "intel-rapl:0:2": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:1:0": "dram",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    for number, (zone, name) in enumerate(zones.items(), start=1):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "energy_uj").write_text(f"{number * 1_000_000}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text(f"{HIGHEST_UJ}\n")
    (tmp_path / "dtpm").mkdir()
    return tmp_path


def test_rapl_reads_packages_and_their_memory_and_nothing_twice(powercap):
    source = RaplSource(powercap)
    assert values(source) == {
        "package-0": 1e6,
        "dram-0": 4e6,
        "package-1": 5e6,
        "dram-1": 6e6,
    }
    assert [channel.domain for channel in source.channels] == ["cpu", "memory", "cpu", "memory"]


def test_rapl_starts_from_0_one_count_after_its_highest_value(powercap):
    count_uj = HIGHEST_UJ / (2**32 - 1)
    channel = RaplSource(powercap).channels[0]
    assert channel.modulus == modulus_uj(HIGHEST_UJ) == round(2**32 * count_uj)


def test_rapl_that_may_not_be_read_says_how_it_could_be(powercap, monkeypatch):
    opened = os.open

    def denied(path, flags):
        if str(path).endswith("energy_uj"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags)

    monkeypatch.setattr(sysfs.os, "open", denied)
    with pytest.raises(SensorError, match=r"may not be read by this user.*chmod a\+r") as raised:
        RaplSource(powercap)
    assert str(raised.value).count("energy_uj") == 2  # once said: one file, one remedy


@pytest.mark.parametrize("tree", [{}, {"intel-rapl:0": "psys"}])
def test_rapl_without_packages_is_absent(tmp_path, tree):
    for zone, name in tree.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(name)
    with pytest.raises(SensorError, match="has no packages"):
        RaplSource(tmp_path)
    with pytest.raises(SensorError, match="the kernel has no powercap"):
        RaplSource(tmp_path / "nowhere")


def test_a_zone_that_disappears_fails_by_itself(powercap):
    source = RaplSource(powercap)
    (powercap / "intel-rapl:0:2/energy_uj").unlink()
    found = values(source)
    assert isinstance(found.pop("dram-0"), SensorError)
    assert found == {"package-0": 1e6, "package-1": 5e6, "dram-1": 6e6}


# --- Cray -----------------------------------------------------------------------------------------

COUNTERS = {
    "power": "412 W 1700000000000000 us",
    "energy": "81234567 J 1700000000000000 us",
    "cpu_power": "120 W 1700000000000000 us",
    "cpu_energy": "21234567 J 1700000000000000 us",
    "cpu_temp": "45 C 1700000000000000 us",
    "memory_power": "35 W 1700000000000000 us",
    "accel0_energy": "31234567 J 1700000000000000 us",
    "accel0_power": "150 W 1700000000000000 us",
    "accel0_power_cap": "0 W",
    "freshness": "4711",
    "raw_scan_hz": "10",
    "generation": "3",
}


@pytest.fixture
def pm_counters(tmp_path):
    for name, text in COUNTERS.items():
        (tmp_path / name).write_text(text + "\n")
    return tmp_path


def test_cray_reads_the_node_and_its_parts(pm_counters):
    source = CraySource(pm_counters)
    found = {c.device: (c.domain, c.reading, c.resolution_s) for c in source.channels}
    assert found == {
        "node": ("node", "energy", 0.1),
        "cpu": ("cpu", "energy", 0.1),
        "memory": ("memory", "power", 0.1),
        "accel0": ("gpu", "energy", 0.1),
    }
    assert values(source) == {
        "node": 81234567,
        "cpu": 21234567,
        "memory": 35,
        "accel0": 31234567,
    }


def test_cray_counters_that_are_no_longer_renewed_are_not_believed(pm_counters):
    now_s = 0.0
    source = CraySource(pm_counters, clock=lambda: now_s)
    now_s = 1.9
    assert values(source)["node"] == 81234567
    now_s = 2.1
    assert all("has stood at 4711" in str(value) for value in values(source).values())
    (pm_counters / "freshness").write_text("4712\n")
    assert values(source)["node"] == 81234567


@pytest.mark.parametrize("text", ["", "12", "abc J 1 us", "81234567 W 1 us"])
def test_cray_counters_of_another_form_are_refused(pm_counters, text):
    source = CraySource(pm_counters)
    (pm_counters / "energy").write_text(text)
    assert isinstance(values(source)["node"], SensorError)


def test_a_machine_of_another_make_has_no_cray_counters(tmp_path):
    with pytest.raises(SensorError, match="no node of a Cray"):
        CraySource(tmp_path / "pm_counters")
    with pytest.raises(SensorError, match="no counters"):
        CraySource(tmp_path)


# --- Which GPUs -----------------------------------------------------------------------------------

UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]
H100 = ["H100"] * 4


@pytest.mark.parametrize(
    ("value", "places"),
    [
        ("0,2", [0, 2]),
        ("3, 1", [3, 1]),
        ("GPU-cc", [2]),
        ("GPU-dd44,0", [3, 0]),
        ("", []),
        ("-1", []),
        ("0,-1,2", [0]),  # up to the first that names none
        ("0,7,2", [0]),
        ("1,GPU-a,2", [1]),  # two begin like this
    ],
)
def test_visible_gpus_are_read_as_cuda_reads_them(value, places):
    assert select(value, UUIDS) == places


@pytest.mark.parametrize(
    ("ranks", "positions", "places"),
    [
        ([{}], None, [0]),
        ([{}, {}, {}], None, [0, 1, 2]),
        ([{}, {}], [3, 1], [1, 3]),
        ([{"CUDA_VISIBLE_DEVICES": str(k)} for k in range(4)], None, [0, 1, 2, 3]),  # jsrun -g1
        ([{"CUDA_VISIBLE_DEVICES": "2,3"}] * 2, None, [2, 3]),
        ([{"CUDA_VISIBLE_DEVICES": "2"}] * 3, None, [2]),  # ranks that share one
        ([{"CUDA_VISIBLE_DEVICES": ""}], None, []),
        ([{}], [], []),
    ],
)
def test_the_gpus_of_a_job_are_those_its_ranks_compute_on(ranks, positions, places):
    job = JobGpus(ranks, positions)
    assert job.choose(UUIDS, H100, gpus.NVIDIA) == places


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, 2),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 3),  # HIP reads it too
    ],
)
def test_hip_chooses_among_what_rocr_has_left(settings, place):
    assert JobGpus([settings]).choose(UUIDS, ["MI300X", "MI210"] * 2, gpus.AMD) == [place]


def test_numbers_of_unlike_gpus_are_ambiguous():
    unlike = ["H100", "T4", "T4", "T4"]
    for settings in ({"CUDA_VISIBLE_DEVICES": "1"}, {}):
        with pytest.raises(SensorError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
            JobGpus([settings]).choose(UUIDS, unlike, gpus.NVIDIA)
    for settings in (
        {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {"CUDA_VISIBLE_DEVICES": "GPU-ab22"},
    ):
        assert JobGpus([settings]).choose(UUIDS, unlike, gpus.NVIDIA) == [1]


def test_a_rank_tells_what_its_environment_says(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_here()["CUDA_VISIBLE_DEVICES"] == "1"


# --- NVML -----------------------------------------------------------------------------------------


class FakeNvml(ModuleType):
    """NVML's Python package with some cards: a dictionary of what each has, by UUID.

    The function of a value that a card lacks raises "Not Supported"; an error is raised.
    """

    NVML_DEVICE_MIG_DISABLE = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818
        pass

    def __init__(self, cards):
        super().__init__("pynvml")
        self.cards, self.num_open = cards, 0

    def nvmlInit(self):  # noqa: N802
        self.num_open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.num_open -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        card = list(self.cards)[index]
        self._get(card, "handle")
        return card

    def nvmlDeviceGetUUID(self, card):  # noqa: N802
        return card

    def nvmlDeviceGetName(self, card):  # noqa: N802
        return "NVIDIA H100"

    def nvmlDeviceGetTotalEnergyConsumption(self, card):  # noqa: N802
        return self._get(card, "energy")

    def nvmlDeviceGetPowerUsage(self, card):  # noqa: N802
        return self._get(card, "power")

    def nvmlDeviceGetMigMode(self, card):  # noqa: N802
        return self._get(card, "mig")

    def _get(self, card, name):
        value = self.cards[card].get(name, self.NVMLError("Not Supported"))
        if name == "handle" and name not in self.cards[card]:
            return None
        if isinstance(value, Exception):
            raise value
        return value


@pytest.fixture
def install_nvml(monkeypatch):
    """Installs an NVML with cards, numbered by their UUIDs."""

    def install(*cards):
        nvml = FakeNvml(dict(zip(UUIDS, cards, strict=False)))
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return install


H100_CARD = {"energy": 5_000_000, "power": 310_000, "mig": (0, 0)}


def test_nvml_reads_the_energy_counter_or_else_the_power(install_nvml):
    nvml = install_nvml(H100_CARD, {"power": 250_000})
    source = NvmlSource(JobGpus([{}, {}]))
    assert [(c.device, c.reading) for c in source.channels] == [
        ("gpu:GPU-aa11", "energy"),
        ("gpu:GPU-ab22", "power"),
    ]
    assert values(source) == {"gpu:GPU-aa11": 5_000_000, "gpu:GPU-ab22": 250_000}
    assert {channel.unit for channel in source.channels} == {1e-3}
    source.stop()
    assert nvml.num_open == 0


def test_nvml_reads_both_where_both_are_asked_for(install_nvml):
    install_nvml(H100_CARD)
    source = NvmlSource(JobGpus(), ("energy", "power"))
    assert [channel.reading for channel in source.channels] == ["energy", "power"]


def test_nvml_reads_the_gpus_of_this_job_only(install_nvml):
    install_nvml(H100_CARD, H100_CARD, H100_CARD)
    source = NvmlSource(JobGpus([{"CUDA_VISIBLE_DEVICES": "2"}]))
    assert [channel.device for channel in source.channels] == ["gpu:GPU-cc33"]


def test_nvml_passes_over_cards_it_may_not_open_as_cuda_does(install_nvml):
    nvml = install_nvml({}, H100_CARD)
    nvml.cards["GPU-aa11"]["handle"] = nvml.NVMLError_NoPermission("Insufficient Permissions")
    source = NvmlSource(JobGpus([{"CUDA_VISIBLE_DEVICES": "0"}]))
    assert [channel.device for channel in source.channels] == ["gpu:GPU-ab22"]


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        (H100_CARD | {"mig": (1, 1)}, "divided by MIG"),
        ({"energy": FakeNvml.NVMLError_NoPermission("Insufficient Permissions")}, "Not Supported"),
        ({"mig": (0, 0)}, "Not Supported"),
    ],
)
def test_a_card_that_tells_nothing_of_this_job_is_absent(install_nvml, card, reason):
    install_nvml(card)
    source = NvmlSource(JobGpus())
    assert not source.channels
    ((channel, told),) = source.absent.items()
    assert channel.device == "gpu:GPU-aa11"
    assert reason in told


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"CUDA_VISIBLE_DEVICES": "MIG-6f1a"}, "an instance of MIG"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "uses none of this node's NVIDIA GPUs"),
    ],
)
def test_nvml_is_closed_where_there_is_nothing_to_read(install_nvml, settings, reason):
    nvml = install_nvml(H100_CARD)
    with pytest.raises(SensorError, match=reason):
        NvmlSource(JobGpus([settings]))
    assert nvml.num_open == 0


def test_nvml_that_is_missing_is_absent(monkeypatch, install_nvml):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(SensorError, match="nvidia-ml-py is not installed"):
        NvmlSource(JobGpus())
    nvml = install_nvml()
    monkeypatch.setattr(nvml, "nvmlInit", lambda: nvml._get("", ""), raising=False)
    nvml.cards = {"": {}}
    with pytest.raises(SensorError, match="there is no NVIDIA GPU: Not Supported"):
        NvmlSource(JobGpus())


def test_a_card_that_is_lost_while_it_is_read_fails(install_nvml):
    nvml = install_nvml(dict(H100_CARD))
    source = NvmlSource(JobGpus())
    nvml.cards["GPU-aa11"]["energy"] = nvml.NVMLError("GPU is lost")
    assert "GPU is lost" in str(values(source)["gpu:GPU-aa11"])


# --- AMD ------------------------------------------------------------------------------------------


class FakeAmdSmi(ModuleType):
    """AMD SMI's Python package with cards of one kind."""

    class AmdSmiException(Exception):  # noqa: N818
        pass

    def __init__(self, num_cards, power, counts_of_a_joule, key="energy_accumulator"):
        super().__init__("amdsmi")
        self.num_cards, self.power, self.num_open = num_cards, power, 0
        self.counts_of_a_joule, self.key = counts_of_a_joule, key
        self.now_s = 0.0

    def amdsmi_init(self):
        self.num_open += 1

    def amdsmi_shut_down(self):
        self.num_open -= 1

    def amdsmi_get_processor_handles(self):
        return list(range(self.num_cards))

    def amdsmi_get_gpu_device_uuid(self, handle):
        return f"uuid-{handle}"

    def amdsmi_get_gpu_asic_info(self, handle):
        return {"market_name": "MI300X"}

    def amdsmi_get_power_info(self, handle):
        if isinstance(self.power, Exception):
            raise self.power
        return self.power

    def amdsmi_get_energy_count(self, handle):
        count = int(self.now_s * 300 * self.counts_of_a_joule)  # at 300 W
        return {self.key: count, "counter_resolution": 15.259, "timestamp": 0}


@pytest.fixture
def install_amd(monkeypatch):
    """Installs an AMD SMI whose cards take 300 W."""

    def install(*arguments, **options):
        smi = FakeAmdSmi(*arguments, **options)

        def sleep(seconds):
            smi.now_s += seconds

        monkeypatch.setitem(sys.modules, "amdsmi", smi)
        monkeypatch.setattr(amd.time, "sleep", sleep)
        monkeypatch.setattr(amd.time, "perf_counter", lambda: smi.now_s)
        return smi

    return install


@pytest.mark.parametrize("key", ["energy_accumulator", "power"])
def test_amd_reads_the_counter_in_its_own_unit(install_amd, key):
    smi = install_amd(2, {"average_socket_power": 290}, 1 / 15.259e-6, key)
    source = AmdSource(JobGpus([{"ROCR_VISIBLE_DEVICES": "1"}]))
    (channel,) = source.channels
    assert (channel.device, channel.reading) == ("gpu:uuid-1", "energy")
    (count,) = source.sample()
    assert count * channel.unit == pytest.approx(300 * amd.TRIAL_S, rel=1e-3)
    source.stop()
    assert smi.num_open == 0


@pytest.mark.parametrize("wrong_by", [0.0, 0.1, 16])
def test_amd_does_not_believe_a_counter_that_is_not_the_power(install_amd, wrong_by):
    install_amd(1, {"current_socket_power": "N/A", "average_socket_power": 290}, wrong_by * 65536)
    source = AmdSource(JobGpus())
    (channel,) = source.channels
    assert (channel.reading, channel.unit) == ("power", 1.0)
    assert list(source.sample()) == [290]


def test_amd_cards_that_tell_no_power_are_absent(install_amd):
    install_amd(1, {"current_socket_power": "N/A", "average_socket_power": 0}, 0)
    source = AmdSource(JobGpus())
    assert not source.channels
    assert "tells no power" in next(iter(source.absent.values()))


def test_amd_smi_that_is_missing_or_finds_no_card_is_absent(monkeypatch, install_amd):
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(SensorError, match="amdsmi is not installed"):
        AmdSource(JobGpus())
    smi = install_amd(0, {}, 0)
    with pytest.raises(SensorError, match="uses none of this node's AMD GPUs"):
        AmdSource(JobGpus())
    assert smi.num_open == 0


# --- Names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("nvlm", r"'nvlm' is none of auto, none, nvml, rapl, .*did you mean 'nvml'"),
        ("rapl,auto", "'auto' goes with no other source"),
        ("rapl,rapl", "twice"),
        ("replay:", "is none of"),
        ("", "is none of"),
    ],
)
def test_names_that_are_wrong_are_refused(names, message):
    with pytest.raises(ParameterError, match=message):
        check_names(names)


def test_auto_takes_what_is_there_and_tells_why_the_rest_is_not(powercap, monkeypatch):
    monkeypatch.setitem(choose.SENSORS, "rapl", lambda job: RaplSource(powercap))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    opened = open_sources("auto")
    assert [type(source) for source in opened.sources] == [RaplSource]
    assert list(opened.absent) == ["nvml", "cray", "amd"]


def test_a_source_asked_for_by_name_must_be_there(powercap, monkeypatch, tmp_path):
    stopped = []
    monkeypatch.setitem(choose.SENSORS, "rapl", lambda job: RaplSource(powercap))
    monkeypatch.setattr(RaplSource, "stop", lambda source: stopped.append(source))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ParameterError, match=r"power nvml: .*nvidia-ml-py is not installed"):
        open_sources("rapl,nvml")
    assert len(stopped) == 1
    with pytest.raises(ParameterError, match=r"power replay:.*nowhere\.csv: cannot be read"):
        open_sources(f"replay:{tmp_path}/nowhere.csv")


def test_none_reads_nothing_and_says_that_it_was_not_asked_for():
    opened = open_sources("none")
    assert [list(source.sample()) for source in opened.sources] == [[]]
    assert opened.absent == {"none": "--power none: it was not asked for"}
