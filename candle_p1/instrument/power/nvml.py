"""NVIDIA's GPUs, through NVML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.instrument.power import gpus
from candle_p1.instrument.power.source import PowerSource, SensorError
from candle_p1.records.power_trace import Channel, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

BETTER_FIRST: tuple[Reading, ...] = ("energy", "power")
MILLI = 1e-3
LIMIT_W = 20_000.0
"""Mean power that no card reaches."""
COUNTER_RESOLUTION_S = 0.1
"""The counter is renewed every 20 to 100 ms."""
POWER_RESOLUTION_S = 1.0
"""From Ampere on, but for the A100, the power is the mean of the last second (NVML's reference,
nvmlDeviceGetPowerUsage)."""


class NvmlSource(PowerSource):
    """Reads the GPUs of this job: the energy counter, or the power of cards that have none.

    A card divided by MIG is absent: its sensors are the whole card's, which others share.

    Args:
        job: The GPUs of this job.
        readings: What to read of each GPU; None is the better of what it has.

    Raises:
        SensorError: NVML or its Python package is missing, or this job uses no GPU.
    """

    name = "nvml"

    def __init__(self, job: gpus.JobGpus, readings: Sequence[Reading] | None = None) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise SensorError(
                "the Python package nvidia-ml-py is not installed, which reads NVIDIA's GPUs:"
                " install candle-p1[gpu], or nvidia-ml-py"
            ) from error
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise SensorError(f"NVML cannot be used, so there is no NVIDIA GPU: {error}") from error
        try:
            self._open(job, readings)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise SensorError(f"NVML: {error}") from error
        except SensorError:
            pynvml.nvmlShutdown()
            raise

    def read(self, channel: Channel) -> float:
        """Returns millijoules or milliwatts."""
        handle = self._handles[channel]
        try:
            if channel.reading == "energy":
                return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
            return int(self._nvml.nvmlDeviceGetPowerUsage(handle))
        except self._nvml.NVMLError as error:
            raise SensorError(f"NVML: {error}") from error

    def stop(self) -> None:
        """Closes NVML."""
        self._nvml.nvmlShutdown()

    def _open(self, job: gpus.JobGpus, readings: Sequence[Reading] | None) -> None:
        nvml = self._nvml
        handles = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
            except nvml.NVMLError_NoPermission:  # a card of another job, which CUDA does not see
                continue
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        models = [nvml.nvmlDeviceGetName(handle) for handle in handles]
        chosen = job.choose(uuids, models, gpus.NVIDIA)
        if not chosen:
            raise SensorError("this job uses none of this node's NVIDIA GPUs")
        self._handles: dict[Channel, Any] = {}
        self.absent = absent = dict[Channel, str]()
        self.channels = channels = list[Channel]()
        for k in chosen:
            shared = self._why_shared(handles[k])
            tried: dict[Channel, str | None] = {}
            for reading in readings or BETTER_FIRST:
                channel = _channel(uuids[k], models[k], reading)
                self._handles[channel] = handles[k]
                tried[channel] = shared or self._why_unreadable(channel)
            readable = [channel for channel, reason in tried.items() if reason is None]
            channels += readable if readings else readable[:1]
            if not readable:
                channel, reason = tried.popitem()
                absent[channel] = str(reason)

    def _why_unreadable(self, channel: Channel) -> str | None:
        try:
            self.read(channel)
        except SensorError as error:
            return str(error)
        return None

    def _why_shared(self, handle: Any) -> str | None:
        try:
            mode, _ = self._nvml.nvmlDeviceGetMigMode(handle)
        except self._nvml.NVMLError:  # a card without MIG
            return None
        if mode == self._nvml.NVML_DEVICE_MIG_DISABLE:
            return None
        return (
            "the card is divided by MIG: its sensors do not tell its instances apart, and others"
            " may use them"
        )


def _channel(uuid: str, model: str, reading: Reading) -> Channel:
    resolution_s = COUNTER_RESOLUTION_S if reading == "energy" else POWER_RESOLUTION_S
    return Channel(
        f"gpu:{uuid}", model, "gpu", NvmlSource.name, reading, MILLI, None, LIMIT_W, resolution_s
    )
