import os
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

from candle_p1.errors import ParameterError
from candle_p1.instrument.power import choose, gpus
from candle_p1.instrument.power.choose import check_names, open_sources
from candle_p1.instrument.power.counters import CraySource, RaplSource
from candle_p1.instrument.power.gpus import AmdSource, JobGpus, NvmlSource, visible_here
from candle_p1.instrument.power.sampler import SensorError

HIGHEST_UJ = 262_143_328_850


def values(source):
    """Returns what a source reads, by device."""
    return dict(zip([c.device for c in source.channels], source.sample(), strict=True))


@pytest.fixture
def powercap(tmp_path):
    """Two packages with memory, and all that must not be added to them."""
    names = {"0": "package-0", "0:0": "core", "0:1": "uncore", "0:2": "dram", "1": "package-1"}
    names |= {"1:0": "dram", "2": "psys"}
    zones = {f"intel-rapl:{zone}": name for zone, name in names.items()}
    zones["intel-rapl-mmio:0"] = "package-0"
    for number, (zone, name) in enumerate(zones.items(), start=1):
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "energy_uj").write_text(f"{number * 1_000_000}\n")
        (tmp_path / zone / "max_energy_range_uj").write_text(f"{HIGHEST_UJ}\n")
    (tmp_path / "dtpm").mkdir()
    return tmp_path


def test_rapl_reads_packages_and_their_memory_once(powercap):
    source = RaplSource(powercap)
    found = {"package-0": 1e6, "dram-0": 4e6, "package-1": 5e6, "dram-1": 6e6}
    assert values(source) == found
    assert [channel.domain for channel in source.channels] == ["cpu", "memory", "cpu", "memory"]
    count_uj = HIGHEST_UJ / (2**32 - 1)
    assert {channel.modulus for channel in source.channels} == {round(2**32 * count_uj)}
    (powercap / "intel-rapl:0:2/energy_uj").unlink()
    assert isinstance(values(source)["dram-0"], SensorError)
    assert values(source) | {"dram-0": 4e6} == found


def test_dies_that_show_the_counter_of_their_package_are_counted_once(powercap):
    """As on AMD's first Zen; on Intel's Cascade Lake AP, each die has its own."""
    for zone, value in (("0", 9), ("1", 9), ("2", 5)):
        (powercap / f"intel-rapl:{zone}/name").write_text(f"package-0-die-{zone}")
        (powercap / f"intel-rapl:{zone}/energy_uj").write_text(f"{value}")
    packages = {c.device: c for c in RaplSource(powercap).channels if c.domain == "cpu"}
    assert list(packages) == ["package-0-die-0", "package-0-die-2"]


def test_rapl_without_permission_says_how_to_allow_it(powercap, monkeypatch):
    opened = os.open

    def denied(path, flags):
        if str(path).endswith("energy_uj"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(SensorError, match=rf"chmod a\+r {powercap}/intel-rapl"):
        RaplSource(powercap)


@pytest.mark.parametrize("source", [RaplSource, CraySource])
@pytest.mark.parametrize("root", ["psys", "nowhere"])
def test_other_machines_have_no_counters(tmp_path, source, root):
    (tmp_path / "psys/intel-rapl:0").mkdir(parents=True)
    (tmp_path / "psys/intel-rapl:0/name").write_text("psys")
    with pytest.raises(SensorError, match=str(tmp_path)):
        source(tmp_path / root)


COUNTERS = {
    "power": "412 W 1700000000000000 us",
    "energy": "81234567 J 1700000000000000 us",
    "cpu_energy": "21234567 J 1700000000000000 us",
    "cpu_power": "120 W 1700000000000000 us",
    "cpu_temp": "45 C 1700000000000000 us",
    "memory_power": "35 W 1700000000000000 us",
    "accel0_energy": "31234567 J 1700000000000000 us",
    "accel0_power_cap": "0 W",
    "freshness": "4711",
}


@pytest.fixture
def pm_counters(tmp_path):
    for name, text in COUNTERS.items():
        (tmp_path / name).write_text(text + "\n")
    return tmp_path


def test_cray_reads_the_node_and_its_parts_while_they_are_updated(pm_counters):
    now_s = 0.0
    source = CraySource(pm_counters, clock=lambda: now_s)
    found = {c.device: (c.domain, c.reading, c.resolution_s) for c in source.channels}
    assert found == {
        "node": ("node", "energy", 0.1),
        "cpu": ("cpu", "energy", 0.1),
        "memory": ("memory", "power", 0.1),
        "accel0": ("gpu", "energy", 0.1),
    }
    counted = {"node": 81234567, "cpu": 21234567, "memory": 35, "accel0": 31234567}
    now_s = 1.9
    assert values(source) == counted
    now_s = 2.1
    assert all(isinstance(value, SensorError) for value in values(source).values())
    (pm_counters / "freshness").write_text("4712\n")
    assert values(source) == counted
    for malformed in ("", "12", "abc J 1 us", "81234567 W 1 us"):
        (pm_counters / "energy").write_text(malformed)
        assert isinstance(values(source)["node"], SensorError)


UUIDS = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]


def cuda(visible):
    return {"CUDA_VISIBLE_DEVICES": str(visible)}


ALIKE, MIXED = ["H100"] * 4, ["H100", *["T4"] * 3]


@pytest.mark.parametrize(
    ("names", "ranks", "positions", "indices"),
    [
        (ALIKE, [{}] * 3, None, [0, 1, 2]),
        (ALIKE, [{}] * 2, [3, 1], [1, 3]),
        (ALIKE, [{}], [], []),
        (ALIKE, [cuda(k) for k in range(4)], None, [0, 1, 2, 3]),  # jsrun -g1
        (ALIKE, [cuda("2,3")] * 3, None, [2, 3]),  # ranks that share one
        (ALIKE, [cuda("3, 1")], None, [3]),
        (ALIKE, [cuda("GPU-dd44,0,GPU-cc")] * 3, None, [0, 2, 3]),
        (ALIKE, [cuda("")], None, []),
        (ALIKE, [cuda("0,-1,2")] * 2, None, [0]),  # up to the first that matches none
        (ALIKE, [cuda("0,7,2")] * 2, None, [0]),
        (ALIKE, [cuda("1,GPU-a,2")] * 2, None, [1]),  # two UUIDs begin like this
        # Numbers of different GPUs are ambiguous.
        (MIXED, [{}], None, None),
        (MIXED, [cuda(1)], None, None),
        (MIXED, [cuda(1) | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}], None, [1]),
        (MIXED, [cuda("GPU-ab22")], None, [1]),
    ],
)
def test_the_gpus_of_a_job_are_those_its_ranks_compute_on(names, ranks, positions, indices):
    is_clear = indices is not None
    with nullcontext() if is_clear else pytest.raises(SensorError, match="=PCI_BUS_ID"):
        assert JobGpus(ranks, positions).choose(UUIDS, names, gpus.NVIDIA) == indices


@pytest.mark.parametrize(
    ("settings", "index"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"} | cuda(0), 1),
        (cuda(3), 3),  # HIP reads it too
    ],
)
def test_hip_selects_among_what_rocr_has_left(monkeypatch, settings, index):
    monkeypatch.setattr(gpus, "os", SimpleNamespace(environ=settings))
    job = JobGpus([visible_here()])
    assert job.choose(UUIDS, ["MI300X", "MI210"] * 2, gpus.AMD) == [index]


class NVMLError(Exception):
    pass


class NVMLError_NoPermission(NVMLError):  # noqa: N801, N818
    pass


class Nvml(SimpleNamespace):
    """NVML with cards: dictionaries of what each supports."""

    NVMLError, NVMLError_NoPermission = NVMLError, NVMLError_NoPermission
    NVML_DEVICE_MIG_DISABLE = 0
    NVML_FI_DEV_POWER_AVERAGE, NVML_POWER_SCOPE_MODULE = 185, 1
    OF_A_CARD = {  # noqa: RUF012
        **{"UUID": "uuid", "Name": "name", "TotalEnergyConsumption": "energy"},
        **{"PowerUsage": "power", "MigMode": "mig"},
    }

    def __init__(self, *cards):
        usual = {"handle": "", "name": "NVIDIA H100"}
        pairs = zip(UUIDS, cards, strict=False)
        super().__init__(
            cards={uuid: usual | {"uuid": uuid} | card for uuid, card in pairs},
            num_open=0,
            nvmlInit=lambda: self.count_open(1),
            nvmlShutdown=lambda: self.count_open(-1),
            nvmlDeviceGetHandleByIndex=self.handle,
            nvmlDeviceGetFieldValues=self.fields,
            nvmlDeviceGetCount=lambda: len(cards),
            **{f"nvmlDeviceGet{f}": partial(self.get, name=n) for f, n in self.OF_A_CARD.items()},
        )

    def get(self, card, name):
        value = self.cards[card].get(name, NVMLError("Not Supported"))
        if isinstance(value, Exception):
            raise value
        return value

    def count_open(self, change):
        self.num_open += change

    def handle(self, index):
        card = list(self.cards)[index]
        self.get(card, "handle")
        return card

    def fields(self, card, fields):
        found = [SimpleNamespace(uiVal=self.get(card, field)) for field in fields]
        return [SimpleNamespace(nvmlReturn=0, value=value) for value in found]


@pytest.fixture
def install_nvml(monkeypatch):
    def install(*cards):
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(*cards))
        return sys.modules["pynvml"]

    return install


LOST = NVMLError("GPU is lost")
DENIED = NVMLError_NoPermission("Insufficient Permissions")
H100 = {"energy": 5_000_000, "power": 310_000, "mig": (0, 0)}
GH200 = H100 | {"name": "NVIDIA GH200 480GB", (185, 1): 600_000}
AA, AB, CC = ("gpu:GPU-aa11", "gpu:GPU-ab22", "gpu:GPU-cc33")
MODULE, BOTH = "module:GPU-aa11", {AA: 5_000_000, CC: 5_000_000}


@pytest.mark.parametrize(
    ("cards", "visible", "reads", "absent"),
    [
        ([H100, {"power": 250_000}], "0,1", {AA: 5_000_000, AB: 250_000}, {}),
        # One that is lost hides and renumbers no other.
        *[
            ([H100, {name: LOST}, H100], "0,1,2", BOTH, {device: "GPU is lost"})
            for name, device in (("handle", "gpu:1"), ("uuid", "gpu:1"), ("name", AB))
        ],
        ([H100, {"handle": LOST}, H100], "0,2", BOTH, {}),
        ([H100, {"handle": LOST}, H100], "GPU-ab22,GPU-cc33", {CC: 5_000_000}, {"gpu:1": "lost"}),
        ([H100] * 3, "2", {CC: 5_000_000}, {}),  # the only one of this job
        ([H100, {"handle": DENIED}, H100], "0,1", BOTH, {}),  # another job's, hidden from CUDA
        ([GH200], "0", {MODULE: 5_000_000}, {}),  # its counter is that of its module
        ([GH200 | {"energy": DENIED}], "0", {MODULE: 600_000}, {}),
        ([GH200 | {"energy": DENIED, (185, 1): 0}], "0", {}, {MODULE: "power of the module"}),
        ([H100 | {"mig": (1, 1)}], "0", {}, {AA: "MIG"}),
        ([{"energy": DENIED}], "0", {}, {AA: "Not Supported"}),
    ],
)
def test_nvml_reads_the_counter_or_else_the_power_of_a_jobs_cards(
    install_nvml, cards, visible, reads, absent
):
    nvml = install_nvml(*cards)
    source = NvmlSource(JobGpus([cuda(visible)] * len(visible.split(","))))
    assert values(source) == reads
    assert {channel.unit for channel in source.channels} <= {1e-3}
    told = {channel.device: reason for channel, reason in source.absent.items()}
    assert told.keys() == absent.keys()
    assert all(reason in told[device] for device, reason in absent.items())
    for channel in (*source.channels, *source.absent):
        assert channel.device.startswith(f"{channel.domain}:")
    source.stop()
    assert nvml.num_open == 0
    power = NvmlSource(JobGpus([cuda("0")]), ("power",))  # on request
    assert {channel.reading for channel in power.channels} <= {"power"}


@pytest.mark.parametrize(
    ("visible", "broken", "problem"),
    [
        ("MIG-6f1a", None, "MIG-6f1a"),
        ("", None, "NVIDIA"),
        ("0", "nvmlDeviceGetCount", "Not Supported"),
        ("0", "nvmlInit", "Not Supported"),
    ],
)
def test_nvml_is_closed_if_there_is_nothing_to_read(install_nvml, visible, broken, problem):
    nvml = install_nvml({})
    if broken:
        setattr(nvml, broken, lambda: nvml.get(UUIDS[0], "power"))
    with pytest.raises(SensorError, match=problem):
        NvmlSource(JobGpus([cuda(visible)]))
    assert nvml.num_open == 0


@pytest.fixture
def install_amd(monkeypatch):
    """Installs an AMD SMI with cards that use 300 W."""

    def install(num_cards, power, counts_per_joule, key="energy_accumulator"):
        def count_open(change):
            smi.num_open += change

        def counted():
            count = int(smi.now_s * 300 * counts_per_joule)
            return {key: count, "counter_resolution": 15.259}

        def sleep(seconds):
            smi.now_s += seconds

        smi = SimpleNamespace(
            num_open=0,
            now_s=0.0,
            AmdSmiException=RuntimeError,
            amdsmi_init=lambda: count_open(1),
            amdsmi_shut_down=lambda: count_open(-1),
            amdsmi_get_processor_handles=lambda: list(range(num_cards)),
            amdsmi_get_gpu_device_uuid=lambda handle: f"uuid-{handle}",
            amdsmi_get_gpu_asic_info=lambda handle: {"market_name": "MI300X"},
            amdsmi_get_power_info=lambda handle: power,
            amdsmi_get_energy_count=lambda handle: counted(),
        )
        monkeypatch.setitem(sys.modules, "amdsmi", smi)
        clock = SimpleNamespace(sleep=sleep, perf_counter=lambda: smi.now_s)
        monkeypatch.setattr(gpus, "time", clock)
        return smi

    return install


@pytest.mark.parametrize("key", ["energy_accumulator", "power"])
@pytest.mark.parametrize("wrong_by", [1.0, 0.0, 0.1, 16])
@pytest.mark.parametrize("power_w", [290, 0])
def test_amd_does_not_trust_a_counter_that_contradicts_the_power(
    install_amd, key, wrong_by, power_w
):
    power = {"current_socket_power": "N/A", "average_socket_power": power_w}
    smi = install_amd(2, power, wrong_by / 15.259e-6, key)
    source = AmdSource(JobGpus([{"ROCR_VISIBLE_DEVICES": "1"}]))
    (channel,) = (*source.channels, *source.absent)
    assert channel.device == "gpu:uuid-1"
    if wrong_by == 1 and power_w:
        assert channel.reading == "energy"
        (count,) = source.sample()
        assert count * channel.unit == pytest.approx(300 * gpus.TRIAL_S, rel=1e-3)
    else:
        assert (channel.reading, channel.unit) == ("power", 1.0)
        assert list(source.sample()) == ([290] if power_w else [])
    source.stop()
    assert smi.num_open == 0


@pytest.mark.parametrize("lost", ["amdsmi_get_gpu_device_uuid", "amdsmi_get_gpu_asic_info"])
def test_a_lost_amd_card_hides_and_renumbers_no_other(install_amd, lost):
    smi = install_amd(3, {"average_socket_power": 290}, 0)
    known = getattr(smi, lost)
    found = {0: known(0), 2: known(2)}
    setattr(smi, lost, found.__getitem__)
    smi.AmdSmiException = KeyError
    source = AmdSource(JobGpus([{"ROCR_VISIBLE_DEVICES": "1,2"}] * 2))
    assert [channel.device for channel in source.channels] == ["gpu:uuid-2"]
    assert list(source.absent.values()) == ["1"]


@pytest.mark.parametrize("names", ["nvlm", "rapl,auto", "rapl,rapl", "replay:", ""])
def test_wrong_names_are_refused(names):
    with pytest.raises(ParameterError, match="power: "):
        check_names(names)


@pytest.fixture
def only_rapl(powercap, monkeypatch):
    monkeypatch.setitem(choose.SENSORS, "rapl", lambda job: RaplSource(powercap))
    for package in ("pynvml", "amdsmi"):
        monkeypatch.setitem(sys.modules, package, None)


def test_auto_opens_what_is_available(only_rapl):
    opened = open_sources("auto", JobGpus())
    assert [type(source) for source in opened.sources] == [RaplSource]
    assert list(opened.absent) == ["nvml", "cray", "amd"]
    assert "nvidia-ml-py" in opened.absent["nvml"]


def test_a_source_requested_by_name_must_be_available(only_rapl, monkeypatch, tmp_path):
    stopped = []
    monkeypatch.setattr(RaplSource, "stop", lambda source: stopped.append(source))
    with pytest.raises(ParameterError, match=r"power nvml: "):
        open_sources("rapl,nvml", JobGpus())
    assert len(stopped) == 1
    with pytest.raises(ParameterError, match=r"power replay:.*nowhere\.csv"):
        open_sources(f"replay:{tmp_path}/nowhere.csv", JobGpus())
