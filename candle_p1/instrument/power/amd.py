"""AMD's GPUs, through the Python interface of AMD SMI, which is part of ROCm.

Sources: AMD SMI's Python reference, amdsmi_get_energy_count and amdsmi_get_power_info. On some
cards the energy counter is wrong (ROCm/amdsmi issue 22), so it is first compared with the power.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from candle_p1.instrument.power.gpus import AMD, Gpu, GpuSource
from candle_p1.instrument.power.source import SensorError
from candle_p1.records.power_trace import Channel

MICROJOULE = 1e-6
LIMIT_W = 20_000.0
"""A mean power that no card reaches."""
TRIAL_S = 0.25
"""How long a counter is compared with the power."""
TRIAL_FACTOR = 2.0
"""The factor by which counter and power may differ during this time."""
POWER_NAMES = ("socket_power", "current_socket_power", "average_socket_power")
"""The names of the power, in W, in different versions of AMD SMI."""


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
        for name in POWER_NAMES:
            value = found.get(name)
            if isinstance(value, (int, float)) and 0 < value < LIMIT_W:
                return float(value)
        raise SensorError("the card reports no power, like the second half of a dual card")
