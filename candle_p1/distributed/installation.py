"""Which MPI, Horovod and GPUs are installed, for the doctor; nothing is initialized."""

from __future__ import annotations

import os
from typing import Any

from candle_p1.distributed.mpi_library import describe_version
from candle_p1.errors import SetupError

JAX_VARIABLE = "JAX_PLATFORMS"
"""Tells JAX on what it may compute."""


def mpi_library() -> str:
    """Returns the name and version of the MPI library that mpi4py loads.

    Raises:
        ImportError: mpi4py is not installed.
        RuntimeError: mpi4py does not find an MPI library.
    """
    import mpi4py

    mpi4py.rc.initialize = False  # asking for the version must not start MPI
    from mpi4py import MPI

    return describe_version(MPI.Get_library_version())


def horovod_build() -> dict[str, bool]:
    """Returns whether Horovod was built with mpi, gloo, nccl, cuda and rocm.

    Raises:
        ImportError: Horovod or TensorFlow is missing, or Horovod was built without TensorFlow.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd

    return {
        name: bool(getattr(hvd, f"{name}_built")())
        for name in ("mpi", "gloo", "nccl", "cuda", "rocm")
    }


def tensorflow_has_gpu_support() -> bool:
    """Returns whether TensorFlow was built for GPUs.

    Raises:
        ImportError: TensorFlow is not installed.
    """
    import tensorflow as tf

    return bool(tf.test.is_built_with_gpu_support())


def visible_gpus(backend: str = "tensorflow") -> list[str]:
    """Returns the names of the GPUs that Keras's backend sees.

    Args:
        backend: Its name: "tensorflow" or "jax".

    Raises:
        ImportError: It is not installed.
        SetupError: JAX was told to use GPUs, and there are none.
    """
    if backend == "jax":
        return [str(each.device_kind) for each in jax_gpus()]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    def name(device: Any) -> str:
        details = tf.config.experimental.get_device_details(device)
        return str(details.get("device_name", device.name))

    return [name(device) for device in tf.config.list_physical_devices("GPU")]


def jax_gpus() -> list[Any]:
    """Returns the GPUs that JAX sees in this process.

    Raises:
        ImportError: It is not installed.
        SetupError: It was told to use GPUs, and there are none.
    """
    import jax

    try:
        return [each for each in jax.local_devices() if each.platform != "cpu"]
    except RuntimeError as error:
        told = os.environ.get(JAX_VARIABLE)
        raise SetupError(
            f"JAX finds no device that it may use ({JAX_VARIABLE}={told}: {error}): unset"
            f" {JAX_VARIABLE}, or start this where there are GPUs"
        ) from error
