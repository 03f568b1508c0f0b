"""Energy counters in files of the kernel: RAPL, and pm_counters of Cray.

RAPL is that of processors of Intel and AMD, as shown by Linux's powercap. A package includes its
"core" and "uncore", so these are not read; it does not include its memory, "dram". Nor is "psys"
read, which includes all of them. See the kernel's Documentation/power/powercap/powercap.rst. Where
a package has several dies, each has a zone. Those of Intel's Cascade Lake AP have counters of their
own; those of AMD's first Zen all show the package's (mlco2/codecarbon issue 1274).

pm_counters are measurements of the whole node and of its parts by its controller. Every file has
one line such as "123 J 1700000000000000 us", updated about ten times a second. The paper read them
through PoLiMEr. The node's energy includes that of its processors, memory and accelerators.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from math import nan
from pathlib import Path
from typing import Any

from candle_p1.instrument.power.sampler import PowerSource, SensorError, read_line
from candle_p1.records.power_trace import Channel
from candle_p1.records.types import PowerDomain, PowerReading

POWERCAP = Path("/sys/class/powercap")
ZONE = re.compile(r"intel-rapl:(\d+)(?::\d+)?")
"""The names of zones. The "intel-rapl-mmio" zones show the same packages again."""
MICROJOULE = 1e-6
PACKAGE_W = 2000.0
"""A mean power that no package, and no memory of a package, reaches."""
RESOLUTION_S = 1e-3


class RaplSource(PowerSource):
    """Reads packages and their memory; SensorError if there are none that this user may read."""

    name = "rapl"

    def __init__(self, root: Path = POWERCAP) -> None:
        zones = {path: read_line(path / "name") for path in _zones(root)}
        packages = {
            path.name: name.removeprefix("package-")
            for path, name in zones.items()
            if name.startswith("package-")
        }
        self._files: dict[Channel, str] = {}
        for path, name in zones.items():
            parent = path.name.rpartition(":")[0]
            if path.name in packages:
                self._add(path, name, "cpu", f"package {packages[path.name]}")
            elif name == "dram" and parent in packages:
                number = packages[parent]
                self._add(path, f"dram-{number}", "memory", f"memory of package {number}")
        if not self._files:
            raise SensorError(
                f"{root} has no packages: the kernel lacks intel_rapl_common, or this is a virtual"
                " machine, or a processor without RAPL"
            )
        self.channels = channels = list[Channel]()
        for channel, file in self._files.items():
            package = channel.device.partition("-die-")[0]
            dies = [each for each in channels if each.device.partition("-die-")[0] == package]
            try:
                self.read(channel)
                if not any(self._mirrors(die, channel) for die in dies):
                    channels.append(channel)
            except SensorError as error:
                if not isinstance(error.__cause__, PermissionError):
                    raise
                raise SensorError(
                    f"this user may not read {file}: since Linux 5.10, only root may. To allow it"
                    f" until the next boot, as root: chmod a+r {root}/intel-rapl:*/energy_uj"
                ) from error

    def read(self, channel: Channel) -> float:
        """Returns microjoules."""
        return int(read_line(self._files[channel]))

    def _mirrors(self, first: Channel, second: Channel) -> bool:
        """Whether channels show one counter; tried thrice, because it may just wrap around."""
        return any(self.read(first) <= self.read(second) <= self.read(first) for _ in range(3))

    def _add(self, path: Path, device: str, domain: PowerDomain, label: str) -> None:
        # The registers have 32 bits and count in units of about 60 microjoules, so the counter
        # wraps around one count after the highest value that it shows.
        highest_uj = int(read_line(path / "max_energy_range_uj"))
        modulus = highest_uj + max(1, round(highest_uj / (2**32 - 1)))
        channel = Channel(
            device, label, domain, self.name, "energy", MICROJOULE, modulus, PACKAGE_W, RESOLUTION_S
        )
        self._files[channel] = str(path / "energy_uj")


def _zones(root: Path) -> list[Path]:
    try:
        found = [path for path in root.iterdir() if ZONE.fullmatch(path.name)]
    except OSError as error:
        raise SensorError(
            f"{root} cannot be read ({error.strerror}): the kernel has no powercap, as is common in"
            " virtual machines and containers"
        ) from error
    return sorted(found, key=lambda path: [int(number) for number in path.name.split(":")[1:]])


COUNTERS = Path("/sys/cray/pm_counters")
NODE_W = 50_000.0
"""A mean power that no node reaches."""
STALE_S = 2.0
"""How old the controller's last scan may be."""


class CraySource(PowerSource):
    """Reads the energy counters of the node and its parts, or the power of parts without one.

    Raises SensorError if there are none that this user may read.
    """

    name = "cray"

    def __init__(
        self, root: Path = COUNTERS, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not root.is_dir():
            raise SensorError(f"{root} does not exist: this is not a Cray node")
        self._freshness_file, self._clock = str(root / "freshness"), clock
        self._scan, self._scan_s = self._freshness(), clock()
        try:
            scan_hz = float(read_line(root / "raw_scan_hz").split()[0])
        except (SensorError, ValueError, IndexError):
            scan_hz = 10.0  # as is usual
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
        facts: dict[str, Any] = {"limit_w": NODE_W, "resolution_s": 1 / scan_hz}
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
