"""NVIDIA's GPUs, through NVML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from candle_p1.instrument.power.gpus import NVIDIA, Gpu, GpuSource, JobGpus
from candle_p1.instrument.power.source import SensorError
from candle_p1.records.power_trace import Channel
from candle_p1.records.types import PowerDomain, PowerReading

MILLI = 1e-3
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
                unit=MILLI,
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
