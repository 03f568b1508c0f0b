"""The GPUs that a job asked for, and why a rank finds none.

A job script says how many GPUs it asked for on each node, ``--gpus`` names them, and Slurm counts
those that it has allocated. TensorFlow and JAX train on CPUs where they find none, which can take
a hundred times as long; such a job has to end before it loads anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from candle_p1.distributed.installation import tensorflow_has_gpu_support
from candle_p1.distributed.launch_environment import read_number
from candle_p1.errors import SetupError
from candle_p1.instrument.power.gpus import AMD, NVIDIA
from candle_p1.records.environment import package_versions
from candle_p1.text import name_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.distributed.comm import Communicator

GPUS_VARIABLE = "CANDLE_P1_GPUS_PER_NODE"
"""Set by job scripts: how many GPUs the job asked for on each node. With 0, none are needed."""
SLURM_VARIABLE = "SLURM_GPUS_ON_NODE"
"""Set by Slurm, where a job or step has GPUs: their number on this node."""
DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd")
"""What the drivers of NVIDIA (on Linux, and in the Windows Subsystem for Linux) and AMD make."""
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX"}
"""What Keras's backends are called."""
NO_DEVICES = "NoDevFiles"
"""Slurm's word for none."""
USE_CPUS = f"to train on CPUs, set {GPUS_VARIABLE}=0"


@dataclass(frozen=True)
class GpuRequest:
    """The GPUs that a job asked for.

    Attributes:
        num: Their number on each node.
        origin: What says so: a flag or an environment variable, with its value.
        instead: What a user does who wants to train on CPUs.
    """

    num: int
    origin: str
    instead: str = USE_CPUS


class Lack(NamedTuple):
    """Why a rank finds no GPU, and what to do about it."""

    why: str
    fix: str


def requested_gpus(
    indices: Sequence[int] | None = None, environ: Mapping[str, str] | None = None
) -> GpuRequest | None:
    """Returns the GPUs that the job asked for; None if it asked for none.

    Args:
        indices: Those that ``--gpus`` names.
        environ: The environment; None means this process's own.

    Raises:
        SetupError: CANDLE_P1_GPUS_PER_NODE is not a number.
    """
    environ = os.environ if environ is None else environ
    if indices:
        named = " ".join(map(str, indices))
        return GpuRequest(max(indices) + 1, f"--gpus {named}", "to train on CPUs, leave out --gpus")
    allocated = environ.get(SLURM_VARIABLE, "").strip()
    default = int(allocated) if allocated.isdecimal() else 0
    give = "the number of GPUs on each node, such as 4, or 0 for none"
    num = read_number(GPUS_VARIABLE, default, give, environ=environ)
    name = GPUS_VARIABLE if environ.get(GPUS_VARIABLE) else SLURM_VARIABLE
    return GpuRequest(num, f"{name}={num}") if num else None


def why_none(backend: str, environ: Mapping[str, str] | None = None) -> Lack:
    """Returns why a rank that found no GPU found none, as far as can be known from here.

    Args:
        backend: Keras's backend: "tensorflow" or "jax".
        environ: The environment; None means this process's own.
    """
    environ = os.environ if environ is None else environ
    unsupported = {"tensorflow": _tensorflow_lacks, "jax": _jax_lacks}.get(backend)
    lack = unsupported(environ) if unsupported else None
    if lack is not None:
        return lack
    for name in dict.fromkeys(name for names in (*NVIDIA, *AMD) for name in names):
        value = environ.get(name)
        if value is not None and not _is_gpu(value):
            return Lack(f"{name}={value!r} hides all GPUs", f"unset {name}, or name GPUs in it")
    if not any(path for pattern in DEVICE_FILES for path in Path("/dev").glob(pattern)):
        return Lack(
            "the system shows no GPU of NVIDIA or AMD there (no /dev/nvidia0, no /dev/kfd)",
            "request GPUs from the scheduler and the launcher, give a container access to them"
            " (apptainer --nv or --rocm, docker --gpus all), or exclude these nodes",
        )
    return Lack(
        f"{BACKENDS.get(backend, backend)} cannot use those that the system shows there",
        "start one process with TF_CPP_MIN_LOG_LEVEL=0, which shows what is missing, and check"
        " nvidia-smi or rocm-smi",
    )


def _tensorflow_lacks(environ: Mapping[str, str]) -> Lack | None:
    if tensorflow_has_gpu_support():
        return None
    versions = package_versions()
    name = "tensorflow-cpu" if "tensorflow-cpu" in versions else "tensorflow"
    return Lack(
        f"TensorFlow is installed without support for GPUs ({name} {versions.get(name, '')})",
        "install candle-p1[gpu] (make setup GPU=1), or AMD's TensorFlow on AMD's GPUs",
    )


def _jax_lacks(environ: Mapping[str, str]) -> Lack | None:
    platforms = environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return Lack(f"JAX_PLATFORMS={platforms} excludes GPUs", "unset JAX_PLATFORMS")
    if find_spec("jax_plugins") is not None or entry_points(group="jax_plugins"):
        return None
    return Lack(
        f"JAX {package_versions().get('jax', '')} is installed without a plug-in for GPUs",
        "install candle-p1[jax-gpu] (make setup ENGINE=jax GPU=1), or AMD's plug-in",
    )


def num_visible(environ: Mapping[str, str] | None = None) -> int:
    """Returns how many GPUs JAX may use in this process, without JAX looking for them.

    Args:
        environ: The environment; None means this process's own.
    """
    environ = os.environ if environ is None else environ
    if _jax_lacks(environ) is not None:
        return 0
    nvidia = len(list(Path("/dev").glob("nvidia[0-9]*")))
    for names, there in ((NVIDIA, nvidia), (AMD, 0 if nvidia else _num_amd())):
        for entry in names:
            told = next((environ[name] for name in entry if name in environ), None)
            if told is not None:
                there = min(there, len(list(takewhile(_is_gpu, told.split(",")))))
        if there:
            return there
    return 0


def _is_gpu(named: str) -> bool:
    """Returns whether CUDA and HIP take this for a GPU; they ignore everything from another on."""
    return named.strip()[:1].isalnum() and named != NO_DEVICES


def _num_amd() -> int:
    """Returns the number of GPUs that AMD's driver shows."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(node.read_text().strip() not in ("", "0") for node in nodes)


def check_gpus(
    comm: Communicator, has_gpu: bool, request: GpuRequest | None, backend: str, node: str
) -> None:
    """Checks that all ranks compute on GPUs, if the job asked for GPUs or some rank has one.

    Collective, and costs three small numbers if all is well.

    Args:
        comm: The ranks.
        has_gpu: Whether this rank computes on a GPU.
        request: What the job asked for.
        backend: Keras's backend.
        node: The name of this rank's node.

    Raises:
        SetupError: Some ranks found no GPU. The error names their nodes and is the same on all
            ranks.
    """
    num = request.num if request else 0
    mine = np.array([has_gpu, not has_gpu, num])
    some_have, some_lack, wanted = map(int, comm.allreduce_max(mine))
    if not some_lack or not (some_have or wanted):
        return
    # Rank 0 alone hears from all ranks that lack one, and tells the others.
    gathered = comm.gather(None if has_gpu else (node, why_none(backend)))
    requests = comm.gather(request) or []
    message = ""
    if gathered is not None:
        asked = next((each for each in requests if each), None)
        message = _explain([each for each in gathered if each], asked)
    raise SetupError(comm.broadcast(message)).on_all_ranks()


def _explain(found: Sequence[tuple[str, Lack]], asked: GpuRequest | None) -> str:
    lacks: dict[Lack, list[str]] = {}
    for node, lack in found:
        lacks.setdefault(lack, []).append(node)
    where = "; ".join(f"{name_nodes(nodes)}: {lack.why}" for lack, nodes in lacks.items())
    fixes = "; ".join(dict.fromkeys(lack.fix for lack in lacks))
    if asked:
        return (
            f"the job asked for GPUs ({asked.origin}), and ranks find none on {where}. Fix:"
            f" {fixes}; {asked.instead}"
        )
    return (
        f"some ranks compute on GPUs, but others find none on {where}. Fix: {fixes}; to train on"
        " CPUs everywhere, set CUDA_VISIBLE_DEVICES=-1"
    )
