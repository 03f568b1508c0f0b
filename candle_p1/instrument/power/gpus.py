"""The GPUs of a job, which are those that its ranks compute on, as sources of power readings.

A rank computes on one of the GPUs that it sees, chosen by candle_p1.distributed.devices. What
it sees is in its environment, as CUDA and HIP read it: indices, or prefixes of UUIDs, up to the
first that matches no GPU.

AMD SMI is part of ROCm; see its Python reference, amdsmi_get_energy_count and
amdsmi_get_power_info. On some cards the energy counter is wrong (ROCm/amdsmi issue 22), so it is
first compared with the power.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from candle_p1.instrument.power.sampler import PowerSource, SensorError
from candle_p1.records.power_trace import Channel
from candle_p1.records.types import PowerDomain, PowerReading

CUDA = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
Variables = tuple[tuple[str, ...], ...]
"""Each entry selects among the GPUs that the previous one has left; if an entry has several names,
the first that is set counts."""
NVIDIA: Variables = ((CUDA,),)
AMD: Variables = (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", CUDA))
VARIABLES = (ORDER, *dict.fromkeys(name for names in NVIDIA + AMD for name in names))


def visible_here() -> dict[str, str]:
    """Returns what this rank's environment says about GPUs, for `JobGpus`."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@dataclass(frozen=True)
class JobGpus:
    """What the ranks of a node see, by local rank; see `visible_here`.

    `positions` are those of the GPUs to use among them, as given by ``--gpus``; None: all.
    """

    ranks: Sequence[Mapping[str, str]] = ({},)
    positions: Sequence[int] | None = None

    def choose(
        self, uuids: Sequence[str], models: Sequence[str], variables: Variables
    ) -> list[int]:
        """Returns the indices in `uuids` of the GPUs that the ranks compute on.

        These are all GPUs of the node that this user may use, in the order of their buses; "" is
        one that is lost. The variables, NVIDIA or AMD, say what a rank sees.

        Raises:
            SensorError: The environment names a MIG instance, or numbers whose order is unknown.
        """
        found: list[int] = []
        for local_rank, settings in enumerate(self.ranks):
            seen = list(range(len(uuids)))
            for names in variables:
                chosen = next((settings[name] for name in names if name in settings), None)
                if variables is NVIDIA and (chosen is None or chosen.strip()[:1].isdigit()):
                    _check_order(models, settings)
                if chosen is not None:
                    seen = [seen[k] for k in select(chosen, [uuids[k] for k in seen])]
            if self.positions is not None:
                seen = [seen[k] for k in self.positions if k < len(seen)]
            if seen:
                found.append(seen[local_rank % len(seen)])
        return sorted(set(found))


class Gpu(NamedTuple):
    """A GPU as its vendor's library knows it.

    A lost one keeps its place, by which CUDA and HIP number the others; `lost` says why, and its
    UUID and model may be unknown, "".
    """

    handle: Any
    uuid: str
    model: str
    lost: str | None = None


class GpuSource(PowerSource):
    """Reads the GPUs of this job through their vendor's library.

    Raises SensorError if that is not available, or this job uses none of the vendor's GPUs.
    """

    vendor: str
    variables: Variables

    def __init__(self, job: JobGpus) -> None:
        self._open_library()
        try:
            self._find_channels(job)
        except Exception as error:
            self.stop()
            if isinstance(error, SensorError):
                raise
            raise SensorError(f"{self.name}: {error}") from error

    @abstractmethod
    def _open_library(self) -> None:
        """Imports and initializes the library; raises SensorError if that fails."""

    @abstractmethod
    def _list_gpus(self) -> list[Gpu]:
        """Returns all GPUs that this user may use, and those that are lost."""

    @abstractmethod
    def _candidates(self, gpu: Gpu) -> Iterable[Channel]:
        """Returns the channels of a GPU, of which the first that can be read is used."""

    def _check(self, channel: Channel) -> None:
        """Raises an exception if a channel cannot be read, or also measures other jobs."""
        self.read(channel)

    def _find_channels(self, job: JobGpus) -> None:
        found = self._list_gpus()
        models = [gpu.model for gpu in found]
        chosen = job.choose([gpu.uuid for gpu in found], models, self.variables)
        if not chosen:
            raise SensorError(f"this job uses none of this node's {self.vendor} GPUs")
        self._handles: dict[Channel, Any] = {}
        self.channels = channels = list[Channel]()
        self.absent = absent = dict[Channel, str]()
        for k in chosen:
            gpu = found[k]
            if gpu.lost:
                name = gpu.model or f"{self.vendor} GPU {k}"
                absent[Channel(f"gpu:{gpu.uuid or k}", name, "gpu", self.name, "energy")] = gpu.lost
                continue
            for channel in self._candidates(gpu):
                self._handles[channel] = gpu.handle
                try:
                    self._check(channel)
                except Exception as error:
                    reason = str(error)
                else:
                    channels.append(channel)
                    break
            else:
                absent[channel] = reason


def select(names: str, uuids: Sequence[str]) -> list[int]:
    """Returns the indices in `uuids` of the GPUs that a value of CUDA_VISIBLE_DEVICES names.

    Raises SensorError if it names a MIG instance.
    """
    found: list[int] = []
    for name in (name.strip() for name in names.split(",")):
        if name.startswith("MIG-"):
            raise SensorError(
                f"this job computes on {name}, a MIG instance, and a card's sensors show all of its"
                " instances together, some of which others may use"
            )
        if name.isdigit():
            indices = [int(name)] if int(name) < len(uuids) else []
        else:
            indices = [k for k, uuid in enumerate(uuids) if name and uuid.startswith(name)]
            if not indices and name.startswith("GPU-"):  # the one whose UUID is not known
                indices = [k for k, uuid in enumerate(uuids) if not uuid]
        if len(indices) != 1:
            break
        found.append(indices[0])
    return found


def _check_order(models: Sequence[str], settings: Mapping[str, str]) -> None:
    if len(set(models) - {""}) > 1 and settings.get(ORDER) != "PCI_BUS_ID":
        raise SensorError(
            "this node has GPUs of different models, which CUDA numbers by speed: set"
            f" {ORDER}=PCI_BUS_ID, or name the GPUs by UUID in {CUDA}"
        )


LIMIT_W = 20_000.0
"""A mean power that no card reaches."""
RESOLUTION_S: dict[PowerReading, float] = {"energy": 0.1, "power": 1.0}
"""The counter is updated every 20 to 100 ms. From Ampere on, except on the A100, the power is the
mean over the last second (NVML's reference, nvmlDeviceGetPowerUsage)."""


class NvmlSource(GpuSource):
    """Reads the energy counters of NVIDIA's GPUs, or the power of cards that have no counter.

    A card divided by MIG counts as absent, because its sensors show the whole card. Of the
    readings, a card's first that can be read is used.
    """

    name = "nvml"
    vendor = "NVIDIA"
    variables = NVIDIA

    def __init__(
        self, job: JobGpus, readings: Sequence[PowerReading] = tuple(RESOLUTION_S)
    ) -> None:
        self._readings = readings
        super().__init__(job)

    def read(self, channel: Channel) -> float:
        """Returns millijoules or milliwatts."""
        handle = self._handles[channel]
        if channel.reading == "energy":
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        if channel.domain == "module":
            field = self._nvml.NVML_FI_DEV_POWER_AVERAGE, self._nvml.NVML_POWER_SCOPE_MODULE
            (found,) = self._nvml.nvmlDeviceGetFieldValues(handle, [field])
            if found.nvmlReturn or not found.value.uiVal:
                raise SensorError("NVML does not report the power of the module")
            return int(found.value.uiVal)
        return int(self._nvml.nvmlDeviceGetPowerUsage(handle))

    def stop(self) -> None:
        """Closes NVML."""
        self._nvml.nvmlShutdown()

    def _open_library(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise SensorError(
                "the Python package nvidia-ml-py, which reads NVIDIA's GPUs, is not installed:"
                " install candle-p1[gpu], or nvidia-ml-py"
            ) from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise SensorError(f"NVML cannot be used, so there is no NVIDIA GPU: {error}") from error
        self._nvml = pynvml

    def _list_gpus(self) -> list[Gpu]:
        nvml, found = self._nvml, []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle, uuid, model, lost = None, "", "", None
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(handle)
                model = nvml.nvmlDeviceGetName(handle)
            except nvml.NVMLError_NoPermission:  # a card of another job, which CUDA does not see
                continue
            except nvml.NVMLError as error:
                lost = str(error)
            found.append(Gpu(handle, uuid, model, lost))
        return found

    def _candidates(self, gpu: Gpu) -> Iterator[Channel]:
        # A Grace Hopper's counter is of the whole module (ml-energy/zeus pull request 172).
        domain: PowerDomain = "module" if "GH200" in gpu.model else "gpu"
        for reading in self._readings:
            yield Channel(
                f"{domain}:{gpu.uuid}",
                f"module of {gpu.model}" if domain == "module" else gpu.model,
                domain,
                self.name,
                reading,
                unit=1e-3,
                limit_w=LIMIT_W,
                resolution_s=RESOLUTION_S[reading],
            )

    def _check(self, channel: Channel) -> None:
        try:
            mode, _ = self._nvml.nvmlDeviceGetMigMode(self._handles[channel])
        except self._nvml.NVMLError:  # a card without MIG
            mode = self._nvml.NVML_DEVICE_MIG_DISABLE
        if mode != self._nvml.NVML_DEVICE_MIG_DISABLE:
            raise SensorError(
                "the card is divided by MIG, and its sensors show all of its instances together,"
                " some of which others may use"
            )
        super()._check(channel)


MICROJOULE = 1e-6
TRIAL_S = 0.25
"""How long a counter is compared with the power."""
TRIAL_FACTOR = 2.0
"""The factor by which counter and power may differ during this time."""


class AmdSource(GpuSource):
    """Reads the energy counters of AMD's GPUs, or the power where a counter cannot be trusted."""

    name = "amd"
    vendor = "AMD"
    variables = AMD

    def read(self, channel: Channel) -> float:
        """Returns energy counts, or W."""
        handle = self._handles[channel]
        return self._count(handle)[0] if channel.reading == "energy" else self._watts(handle)

    def stop(self) -> None:
        """Closes AMD SMI."""
        self._smi.amdsmi_shut_down()

    def _open_library(self) -> None:
        try:
            import amdsmi
        except ImportError as error:
            raise SensorError(
                "the Python package amdsmi, which reads AMD's GPUs, is not installed: it is in"
                " share/amd_smi of ROCm"
            ) from error
        except Exception as error:  # whose type depends on the version
            raise SensorError(f"AMD SMI lacks its library or driver: {error}") from error
        try:
            amdsmi.amdsmi_init()
        except Exception as error:
            raise SensorError(f"AMD SMI cannot be used, so there is no AMD GPU: {error}") from error
        self._smi = amdsmi

    def _list_gpus(self) -> list[Gpu]:
        smi, found = self._smi, []
        for handle in smi.amdsmi_get_processor_handles():
            uuid, model, lost = "", "", None
            try:
                uuid = str(smi.amdsmi_get_gpu_device_uuid(handle))
                model = str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])
            except smi.AmdSmiException as error:
                lost = str(error)
            found.append(Gpu(handle, uuid, model, lost))
        return found

    def _candidates(self, gpu: Gpu) -> Iterator[Channel]:
        resolution_uj = self._trusted_resolution_uj(gpu.handle)
        yield Channel(
            f"gpu:{gpu.uuid}",
            gpu.model,
            "gpu",
            self.name,
            "energy" if resolution_uj else "power",
            unit=resolution_uj * MICROJOULE if resolution_uj else 1.0,
            limit_w=LIMIT_W,
        )

    def _trusted_resolution_uj(self, handle: Any) -> float | None:
        """Returns microjoules per count; None if the counter does not follow the power."""
        try:
            begin_s, (begin, resolution_uj) = time.perf_counter(), self._count(handle)
            before_w = self._watts(handle)
            time.sleep(TRIAL_S)
            end_s, (end, _) = time.perf_counter(), self._count(handle)
            after_w = self._watts(handle)
        except Exception:  # also a value "N/A", or none: its power is tried next
            return None
        counted_w = (end - begin) * resolution_uj * MICROJOULE / (end_s - begin_s)
        low_w, high_w = min(before_w, after_w), max(before_w, after_w)
        follows = low_w / TRIAL_FACTOR < counted_w < high_w * TRIAL_FACTOR
        return resolution_uj if follows else None

    def _count(self, handle: Any) -> tuple[int, float]:
        """Returns the counter's value, and the number of microjoules per count."""
        found = self._smi.amdsmi_get_energy_count(handle)
        count = found.get("energy_accumulator", found.get("power"))  # from and before AMD SMI 6.2
        return int(count), float(found["counter_resolution"])

    def _watts(self, handle: Any) -> float:
        found = self._smi.amdsmi_get_power_info(handle)
        for name in ("socket_power", "current_socket_power", "average_socket_power"):  # of versions
            value = found.get(name)
            if isinstance(value, (int, float)) and 0 < value < LIMIT_W:
                return float(value)
        raise SensorError("the card reports no power, like the second half of a dual card")
