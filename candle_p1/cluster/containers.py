"""Containers: functions that turn an image into the command line that runs a command in it.

The image has Python and this package (see containers/). A machine's file says which runtime the
site offers. The directories that a job reads and writes keep their paths in the container.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError
from candle_p1.files import expand_user

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from candle_p1.cluster.job_request import JobRequest
    from candle_p1.cluster.machine import Machine

PASSED_ON = (
    *("CANDLE_*", "CUDA_*", "FI_*", "HOROVOD_*", "KERAS_*", "KMP_*", "MPICH_*", "NCCL_*", "OMP_*"),
    *("OMPI_*", "PALS_*", "PMI*", "SLURM*", "TF_*"),
)
"""Variables that ranks need, for a runtime that passes on only what it is told to."""
OF_DIRECTORIES = ("output_dir", "data_dir", "ckpt_directory", "stage_dir")
"""Parameters that name directories."""


def apptainer(image: str, options: Sequence[str], directories: Sequence[str]) -> list[str]:
    """Apptainer and Singularity, which pass on the environment and the home directory."""
    binds = [word for directory in directories for word in ("--bind", directory)]
    return ["exec", *options, *binds, image]


def podman_hpc(image: str, options: Sequence[str], directories: Sequence[str]) -> list[str]:
    """NERSC's Podman for several nodes."""
    argv = ["run", "--rm", *options, "--workdir", "$PWD"]
    for directory in ("$HOME", *directories):
        argv += ["--volume", f"{directory}:{directory}"]
    return [*argv, *(word for name in PASSED_ON for word in ("--env", name)), image]


def shifter(image: str, options: Sequence[str], directories: Sequence[str]) -> list[str]:
    """NERSC's Shifter, which passes on the environment and the site's file systems."""
    return [f"--image={image}", *options]


RUNTIMES: dict[str, Callable[[str, Sequence[str], Sequence[str]], list[str]]] = {
    "apptainer": apptainer,
    "singularity": apptainer,
    "podman-hpc": podman_hpc,
    "shifter": shifter,
}
"""The arguments of a runtime before the command that it runs in a container, by its name.

The functions take the image, options of the machine, and directories. Bash expands "$" in them.
"""
OF_FILES = ("apptainer", "singularity")
"""The runtimes whose images are files, unless their names are URIs."""


def find_image(machine: Machine, image: str) -> str:
    """Returns an image as the machine's runtime takes it: a file by its absolute path.

    Raises:
        ParameterError: There is no such file, or no such runtime.
    """
    runtime = machine.container.runtime
    if runtime not in RUNTIMES:
        raise ParameterError(
            f"{machine.name}: container.runtime {runtime!r}: choose one of {', '.join(RUNTIMES)}"
        )
    if runtime not in OF_FILES or "://" in image:
        return image
    path = expand_user(image).absolute()
    if not path.exists():
        raise ParameterError(
            f"--container {image}: {runtime}, which {machine.name} uses, finds no such image; name"
            " a file, or a URI such as docker://NAME"
        )
    return str(path)


def container_argv(job: JobRequest) -> list[str]:
    """Returns the command line that runs a job's commands in its container."""
    assert job.container is not None
    container = job.machine.container
    directories = ["$PWD", "${CANDLE_DATA_DIR:-$PWD}", str(Path(job.program).parent)]
    for name, value in zip(job.flags, job.flags[1:], strict=False):
        if name.removeprefix("--") in OF_DIRECTORIES and value.startswith("/"):
            directories.append(value)
    directories = [path for path in dict.fromkeys(directories) if path != "."]
    arguments = RUNTIMES[container.runtime](job.container, container.options, directories)
    return [container.runtime, *arguments]
