"""AMD's GPUs, through the Python interface of AMD SMI, which ROCm brings.

Sources: AMD SMI's Python reference, amdsmi_get_energy_count and amdsmi_get_power_info. On some
cards the energy counter is wrong (ROCm/amdsmi issue 22), so it is compared with the power first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from candle_p1.instrument.power import gpus
from candle_p1.instrument.power.source import PowerSource, SensorError
from candle_p1.records.power_trace import Channel

if TYPE_CHECKING:
    from candle_p1.records.power_trace import Reading

MICROJOULE = 1e-6
LIMIT_W = 20_000.0
"""Mean power that no card reaches."""
TRIAL_S = 0.25
"""How long a counter is compared with the power."""
TRIAL_FACTOR = 2.0
"""By which the counter may differ from the power then, whose changes it follows otherwise."""
POWER_NAMES = ("socket_power", "current_socket_power", "average_socket_power")
"""Of the power, in W, in one version of AMD SMI or another."""


class AmdSource(PowerSource):
    """Reads the GPUs of this job: the energy counter, or the power where that cannot be trusted.

    Args:
        job: The GPUs of this job.

    Raises:
        SensorError: AMD SMI is missing, or this job uses no GPU.
    """

    name = "amd"

    def __init__(self, job: gpus.JobGpus) -> None:
        try:
            import amdsmi
        except ImportError as error:
            raise SensorError(
                "the Python package amdsmi is not installed, which reads AMD's GPUs and comes with"
                " ROCm, in share/amd_smi"
            ) from error
        except (
            Exception
        ) as error:  # its library or driver is missing, as one version or another says
            raise SensorError(f"AMD SMI cannot be used: {error}") from error
        self._smi = amdsmi
        try:
            amdsmi.amdsmi_init()
        except Exception as error:
            raise SensorError(f"AMD SMI cannot be used, so there is no AMD GPU: {error}") from error
        try:
            self._open(job)
        except Exception as error:
            amdsmi.amdsmi_shut_down()
            if isinstance(error, SensorError):
                raise
            raise SensorError(f"AMD SMI: {error}") from error

    def read(self, channel: Channel) -> float:
        """Returns counts of energy or W."""
        handle = self._handles[channel]
        try:
            return self._count(handle)[0] if channel.reading == "energy" else self._watts(handle)
        except self._smi.AmdSmiException as error:
            raise SensorError(f"AMD SMI: {error}") from error

    def stop(self) -> None:
        """Closes AMD SMI."""
        self._smi.amdsmi_shut_down()

    def _open(self, job: gpus.JobGpus) -> None:
        smi = self._smi
        handles = smi.amdsmi_get_processor_handles()
        uuids = [str(smi.amdsmi_get_gpu_device_uuid(handle)) for handle in handles]
        models = [str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]) for handle in handles]
        chosen = job.choose(uuids, models, gpus.AMD)
        if not chosen:
            raise SensorError("this job uses none of this node's AMD GPUs")
        self._handles: dict[Channel, Any] = {}
        self.absent = absent = dict[Channel, str]()
        for k in chosen:
            trusted = self._trusted(handles[k])
            reading: Reading = "energy" if trusted else "power"
            channel = Channel(
                f"gpu:{uuids[k]}",
                models[k],
                "gpu",
                self.name,
                reading,
                unit=trusted * MICROJOULE if trusted else 1.0,
                limit_w=LIMIT_W,
            )
            self._handles[channel] = handles[k]
            try:
                self.read(channel)
            except SensorError as error:
                absent[channel] = str(error)
                del self._handles[channel]
        self.channels = list(self._handles)

    def _trusted(self, handle: Any) -> float | None:
        """Returns microjoules per count; None of a counter that does not follow the power."""
        try:
            begin_s, (begin, resolution_uj) = time.perf_counter(), self._count(handle)
            before_w = self._watts(handle)
            time.sleep(TRIAL_S)
            end_s, (end, _) = time.perf_counter(), self._count(handle)
            after_w = self._watts(handle)
        except (self._smi.AmdSmiException, SensorError):
            return None
        counted_w = (end - begin) * resolution_uj * MICROJOULE / (end_s - begin_s)
        low_w, high_w = min(before_w, after_w), max(before_w, after_w)
        follows = low_w / TRIAL_FACTOR < counted_w < high_w * TRIAL_FACTOR
        return resolution_uj if follows else None

    def _count(self, handle: Any) -> tuple[int, float]:
        """Returns the counter and how many microjoules a count is."""
        found = self._smi.amdsmi_get_energy_count(handle)
        count = found.get("energy_accumulator", found.get("power"))  # before and since AMD SMI 6.2
        return int(count), float(found["counter_resolution"])

    def _watts(self, handle: Any) -> float:
        found = self._smi.amdsmi_get_power_info(handle)
        for name in POWER_NAMES:
            value = found.get(name)
            if isinstance(value, (int, float)) and 0 < value < LIMIT_W:
                return float(value)
        raise SensorError("the card tells no power, as the second half of a card of two does")
