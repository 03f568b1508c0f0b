"""RAPL, the energy counters of Intel's and AMD's processors, as shown by Linux's powercap.

A package includes its "core" and "uncore", so these are not read; it does not include its memory,
"dram". Nor is "psys" read, which includes all of them. See the kernel's
Documentation/power/powercap/powercap.rst. Where a package has several dies, each has a zone. Those
of Intel's Cascade Lake AP have counters of their own; those of AMD's first Zen all show the
package's (mlco2/codecarbon issue 1274).
"""

from __future__ import annotations

import re
from pathlib import Path

from candle_p1.instrument.power.source import PowerSource, SensorError, read_line
from candle_p1.records.power_trace import Channel
from candle_p1.records.types import PowerDomain

ROOT = Path("/sys/class/powercap")
ZONE = re.compile(r"intel-rapl:(\d+)(?::\d+)?")
"""The names of zones. The "intel-rapl-mmio" zones show the same packages again."""
MICROJOULE = 1e-6
LIMIT_W = 2000.0
"""A mean power that no package, and no memory of a package, reaches."""
RESOLUTION_S = 1e-3


class RaplSource(PowerSource):
    """Reads packages and their memory.

    Raises:
        SensorError: There are no packages, or this user may not read them.
    """

    name = "rapl"

    def __init__(self, root: Path = ROOT) -> None:
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
        modulus = _modulus_uj(int(read_line(path / "max_energy_range_uj")))
        channel = Channel(
            device, label, domain, self.name, "energy", MICROJOULE, modulus, LIMIT_W, RESOLUTION_S
        )
        self._files[channel] = str(path / "energy_uj")


def _modulus_uj(highest_uj: int) -> int:
    """Returns the value at which a powercap counter wraps around, from the highest that it shows.

    The registers have 32 bits and count in units of about 60 microjoules, so the counter wraps
    around one count after the highest value.
    """
    return highest_uj + max(1, round(highest_uj / (2**32 - 1)))


def _zones(root: Path) -> list[Path]:
    try:
        found = [path for path in root.iterdir() if ZONE.fullmatch(path.name)]
    except OSError as error:
        raise SensorError(
            f"{root} cannot be read ({error.strerror}): the kernel has no powercap, as is common in"
            " virtual machines and containers"
        ) from error
    return sorted(found, key=lambda path: [int(number) for number in path.name.split(":")[1:]])
