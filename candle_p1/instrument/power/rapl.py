"""RAPL, the energy counters of x86 processors, Intel's and AMD's, as Linux's powercap shows them.

A package contains its cores and what lies around them ("core", "uncore"), so these are not read;
its memory ("dram") is apart from it. "psys" would contain all of them, and is not read either. See
the kernel's Documentation/power/powercap/powercap.rst.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.instrument.power.source import PowerSource, SensorError
from candle_p1.instrument.power.sysfs import read_line
from candle_p1.records.power_trace import Channel

if TYPE_CHECKING:
    from candle_p1.records.power_trace import Domain

ROOT = Path("/sys/class/powercap")
ZONE = re.compile(r"intel-rapl:(\d+)(?::\d+)?")
"""A zone, and its parent's number. The zones "intel-rapl-mmio" show the same packages again."""
MICROJOULE = 1e-6
LIMIT_W = 2000.0
"""Mean power that no package and no package's memory reaches."""
RESOLUTION_S = 1e-3


class RaplSource(PowerSource):
    """Reads packages and their memory.

    Args:
        root: The tree of powercap.

    Raises:
        SensorError: There are none, or they are not for this user.
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
                " machine or another processor"
            )
        self.channels = list(self._files)
        for channel, file in self._files.items():
            try:
                self.read(channel)
            except SensorError as error:
                if not isinstance(error.__cause__, PermissionError):
                    raise
                raise SensorError(
                    f"{file} may not be read by this user, as Linux has it since 5.10. An"
                    f" administrator can allow it until the next boot: chmod a+r {root}/intel-rapl:"
                    "*/energy_uj"
                ) from error

    def read(self, channel: Channel) -> float:
        """Returns microjoules."""
        return int(read_line(self._files[channel]))

    def _add(self, path: Path, device: str, domain: Domain, label: str) -> None:
        self._files[
            Channel(
                device,
                label,
                domain,
                self.name,
                "energy",
                unit=MICROJOULE,
                modulus=modulus_uj(int(read_line(path / "max_energy_range_uj"))),
                limit_w=LIMIT_W,
                resolution_s=RESOLUTION_S,
            )
        ] = str(path / "energy_uj")


def modulus_uj(highest_uj: int) -> int:
    """Returns where a counter of powercap starts from 0 again, from the highest value it shows.

    The registers have 32 bits, and one count of them is some 60 microjoules, so 0 comes one count
    after the highest value.
    """
    return highest_uj + max(1, round(highest_uj / (2**32 - 1)))


def _zones(root: Path) -> list[Path]:
    try:
        found = [path for path in root.iterdir() if ZONE.fullmatch(path.name)]
    except OSError as error:
        raise SensorError(
            f"{root} cannot be read ({error.strerror}): the kernel has no powercap, as in virtual"
            " machines and containers"
        ) from error
    return sorted(found, key=lambda path: [int(number) for number in path.name.split(":")[1:]])
