"""The GPUs that a job asked for, and why a rank finds none.

A job script says how many GPUs it asked for on each node, ``--gpus`` names them, and Slurm counts
those that it has allocated. TensorFlow and JAX train on CPUs where they find none, which can take
a hundred times as long; such a job has to end before it loads anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from candle_p1.distributed.comm import Communicator
from candle_p1.distributed.launch_environment import read_number
from candle_p1.errors import SetupError
from candle_p1.instrument.power.gpus import AMD, NVIDIA, JobGpus, NvmlSource, visible_here
from candle_p1.instrument.power.sampler import SensorError
from candle_p1.records.environment import package_versions
from candle_p1.text import name_nodes

JAX_VARIABLE = "JAX_PLATFORMS"
"""Tells JAX on what it may compute."""
GPUS_VARIABLE = "CANDLE_P1_GPUS_PER_NODE"
"""Set by job scripts: how many GPUs the job asked for on each node. With 0, none are needed."""
SLURM_VARIABLE = "SLURM_GPUS_ON_NODE"
"""Set by Slurm, where a job or step has GPUs: their number on this node."""
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX"}
"""What Keras's backends are called."""
USE_CPUS = f"to train on CPUs, set {GPUS_VARIABLE}=0"


class GpuRequest(NamedTuple):
    """How many GPUs a job asked for on each node."""

    num: int
    origin: str  # the flag or variable that says so
    instead: str = USE_CPUS  # what to do to train on CPUs


class Lack(NamedTuple):
    """Why a rank finds no GPU, and what to do about it."""

    why: str
    fix: str


def requested_gpus(
    indices: Sequence[int] | None = None, environ: Mapping[str, str] | None = None
) -> GpuRequest | None:
    """Returns the GPUs that the job asked for, also by ``--gpus``; None if it asked for none.

    Raises SetupError if CANDLE_P1_GPUS_PER_NODE is not a number.
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
    """Returns why a rank that found no GPU found none, as far as can be known from here."""
    environ = os.environ if environ is None else environ
    lack = _jax_lacks(environ) if backend == "jax" else _tensorflow_lacks()
    if lack is not None:
        return lack
    for name in chain(*NVIDIA, *AMD):
        value = environ.get(name)
        if value is not None and not _is_gpu(value):
            return Lack(f"{name}={value!r} hides all GPUs", f"unset {name}, or name GPUs in it")
    # What the drivers of NVIDIA (on Linux, and in its Windows Subsystem) and AMD make.
    if not any(chain(*map(Path("/dev").glob, ("nvidia[0-9]*", "dxg", "kfd")))):
        return Lack(
            "the system shows no GPU of NVIDIA or AMD there (no /dev/nvidia0, no /dev/kfd)",
            "request GPUs from the scheduler and the launcher, give a container access to them"
            " (apptainer --nv or --rocm, docker --gpus all), or exclude these nodes",
        )
    return Lack(
        f"{BACKENDS[backend]} cannot use those that the system shows there",
        "start one process with TF_CPP_MIN_LOG_LEVEL=0, which shows what is missing, and check"
        " nvidia-smi or rocm-smi",
    )


def _tensorflow_lacks() -> Lack | None:
    import tensorflow as tf

    if tf.test.is_built_with_gpu_support():
        return None
    versions = package_versions()
    name = "tensorflow-cpu" if "tensorflow-cpu" in versions else "tensorflow"
    return Lack(
        f"TensorFlow is installed without support for GPUs ({name} {versions.get(name, '')})",
        "install candle-p1[gpu] (make setup GPU=1), or AMD's TensorFlow on AMD's GPUs",
    )


def _jax_lacks(environ: Mapping[str, str]) -> Lack | None:
    platforms = environ.get(JAX_VARIABLE, "")
    if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
        return Lack(f"{JAX_VARIABLE}={platforms} excludes GPUs", f"unset {JAX_VARIABLE}")
    if find_spec("jax_plugins") is not None or entry_points(group="jax_plugins"):
        return None
    return Lack(
        f"JAX {package_versions().get('jax', '')} is installed without a plug-in for GPUs",
        "install candle-p1[jax-gpu], or for CUDA 13 candle-p1[jax-gpu13] (make setup ENGINE=jax"
        " GPU=1), or AMD's plug-in",
    )


def num_visible(environ: Mapping[str, str] | None = None) -> int:
    """Returns how many GPUs JAX may use in this process, without JAX looking for them."""
    environ = os.environ if environ is None else environ
    if _jax_lacks(environ) is not None:
        return 0
    variables, there = NVIDIA, len(list(Path("/dev").glob("nvidia[0-9]*")))
    if not there:
        nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
        variables, there = AMD, sum(node.read_text().strip() not in ("", "0") for node in nodes)
    for names in variables:
        told = next((environ[name] for name in names if name in environ), None)
        if told is not None:
            there = min(there, len(list(takewhile(_is_gpu, told.split(",")))))
    return there


def _is_gpu(named: str) -> bool:
    """Returns whether CUDA and HIP take this for a GPU; they ignore everything from another on."""
    return named.strip()[:1].isalnum() and named != "NoDevFiles"  # Slurm's word for none


def card_here(gpus: Sequence[int] | None = None) -> str | None:
    """Returns what distinguishes the only NVIDIA card that this rank may use from others.

    `gpus` are the indices to use of those that it sees. None: NVML does not know, or is not there.
    """
    try:
        source = NvmlSource(JobGpus([visible_here()], gpus))
    except SensorError:
        return None
    source.stop()
    devices = {channel.device for channel in (*source.channels, *source.absent)}
    return devices.pop() if len(devices) == 1 else None


def check_gpus(
    comm: Communicator, has_gpu: bool, request: GpuRequest | None, backend: str, node: str
) -> None:
    """Checks that all ranks compute on GPUs, if the job asked for GPUs or some rank has one.

    Collective, and costs three small numbers if all is well. `node` is the name of this rank's.

    Raises:
        SetupError: Some ranks found no GPU. The error names their nodes; the same on all ranks.
    """
    num = request.num if request else 0
    mine = np.array([has_gpu, not has_gpu, num])
    some_have, some_lack, wanted = map(int, comm.allreduce_max(mine))
    if not some_lack or not (some_have or wanted):
        return
    # Rank 0 alone hears from all ranks that lack one, and tells the others.
    gathered = comm.gather((None if has_gpu else (node, why_none(backend)), request))
    message = ""
    if gathered is not None:
        asked = next((each for _, each in gathered if each), None)
        message = _explain([each for each, _ in gathered if each], asked)
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


def visible_gpus(backend: str = "tensorflow") -> list[str]:
    """Returns the names of the GPUs that Keras's backend, "tensorflow" or "jax", sees.

    Raises:
        ImportError: It is not installed.
        SetupError: JAX was told to use GPUs, and there are none.
    """
    if backend == "jax":
        import jax

        try:
            devices = jax.local_devices()
        except RuntimeError as error:
            told = os.environ.get(JAX_VARIABLE)
            raise SetupError(
                f"JAX finds no device that it may use ({JAX_VARIABLE}={told}: {error}): unset"
                f" {JAX_VARIABLE}, or start this where there are GPUs"
            ) from error
        return [str(device.device_kind) for device in devices if device.platform != "cpu"]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    return list(map(device_name, tf.config.list_physical_devices("GPU")))


def device_name(gpu: Any) -> str:
    """Returns the name of one of TensorFlow's GPUs."""
    import tensorflow as tf

    return str(tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name))
