"""Cray's pm_counters: the node controller's measurements of the whole node and of its parts.

Every file has one line such as "123 J 1700000000000000 us", updated about ten times a second. The
paper read them through PoLiMEr. The node's energy includes that of its processors, memory and
accelerators.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import repeat
from math import nan
from pathlib import Path
from typing import Any

from candle_p1.instrument.power.source import PowerSource, SensorError, read_line
from candle_p1.records.power_trace import Channel
from candle_p1.records.types import PowerDomain, PowerReading

ROOT = Path("/sys/cray/pm_counters")
LIMIT_W = 50_000.0
"""A mean power that no node reaches."""
USUAL_SCAN_HZ = 10.0
STALE_S = 2.0
"""How old the controller's last scan may be."""


class CraySource(PowerSource):
    """Reads the energy counters of the node and its parts, or the power of parts without one.

    Raises:
        SensorError: There are no counters, or this user may not read them.
    """

    name = "cray"

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.perf_counter) -> None:
        if not root.is_dir():
            raise SensorError(f"{root} does not exist: this is not a Cray node")
        self._freshness_file, self._clock = str(root / "freshness"), clock
        self._scan, self._scan_s = self._freshness(), clock()
        try:
            scan_hz = float(read_line(root / "raw_scan_hz").split()[0])
        except (SensorError, ValueError, IndexError):
            scan_hz = USUAL_SCAN_HZ
        parts: list[tuple[str, str, PowerDomain]] = [
            ("node", "node", "node"),
            ("cpu", "processors", "cpu"),
            ("memory", "memory", "memory"),
        ]
        for file in sorted(root.glob("accel*_energy")):
            part = file.name.removesuffix("_energy")
            parts.append((part, f"accelerator {part.removeprefix('accel')}", "gpu"))
        self._files: dict[Channel, str] = {}
        readings: tuple[PowerReading, ...] = ("energy", "power")
        facts: dict[str, Any] = {"limit_w": LIMIT_W, "resolution_s": 1 / scan_hz}
        for device, label, domain in parts:
            prefix = "" if device == "node" else f"{device}_"
            reading = next((r for r in readings if (root / f"{prefix}{r}").exists()), None)
            if reading is not None:
                channel = Channel(device, label, domain, self.name, reading, **facts)
                self._files[channel] = str(root / f"{prefix}{reading}")
        if not self._files:
            raise SensorError(f"{root} has no energy or power counters")
        for channel in self._files:
            self.read(channel)
        self.channels = list(self._files)

    def sample(self) -> Iterator[float | SensorError]:
        """Reads all channels, unless the controller no longer updates them."""
        stale = self._why_stale()
        return super().sample() if stale is None else repeat(stale, len(self.channels))

    def read(self, channel: Channel) -> float:
        """Returns J or W."""
        file = self._files[channel]
        text = read_line(file)
        fields = text.split()
        unit = "J" if channel.reading == "energy" else "W"
        try:
            value, found_unit = float(fields[0]), fields[1]
        except (IndexError, ValueError):
            value, found_unit = nan, ""
        if found_unit != unit:
            raise SensorError(f"{file}: {text!r} is not a number of {unit}")
        return value

    def _freshness(self) -> str | None:
        try:
            return read_line(self._freshness_file)
        except SensorError:
            return None

    def _why_stale(self) -> SensorError | None:
        scan, now_s = self._freshness(), self._clock()
        if scan is None or scan != self._scan:
            self._scan, self._scan_s = scan, now_s
        age_s = now_s - self._scan_s
        if age_s <= STALE_S:
            return None
        return SensorError(
            f"{self._freshness_file} has been {scan} for {age_s:.1f} s: the node controller no"
            " longer updates the counters"
        )
