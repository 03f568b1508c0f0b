"""Transports: the libraries through which ranks exchange arrays, for `candle-p1 bench comm`.

`Transport` is the interface. A transport is a class in a module of this package, and one entry of
TRANSPORTS.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.errors import ParameterError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.transports.transport import Transport


class TransportKind(NamedTuple):
    """What must be known of a transport before its library is imported.

    Attributes:
        module: The module of this package.
        class_name: The class in it.
        packages: What must be installed.
        what: What it is.
        on_one_node: Whether all ranks must be on one node.
    """

    module: str
    class_name: str
    packages: tuple[str, ...]
    what: str
    on_one_node: bool = False


TRANSPORTS = {
    "mpi": TransportKind(
        "mpi",
        "MpiTransport",
        ("mpi4py",),
        "MPI on buffers, as the data of loading and all small messages go",
    ),
    "shared_memory": TransportKind(
        "shared_memory",
        "SharedMemoryTransport",
        ("mpi4py", "tensorflow"),
        "memory that the ranks of a node share, as gradients are averaged on the CPUs of one node",
        on_one_node=True,
    ),
    "horovod": TransportKind(
        "horovod",
        "HorovodTransport",
        ("mpi4py", "tensorflow", "horovod"),
        "Horovod as a run sets it: no fusion, cycle time 1 ms, unless its variables say otherwise",
    ),
    "horovod_fusion": TransportKind(
        "horovod",
        "FusingHorovod",
        ("mpi4py", "tensorflow", "horovod"),
        "Horovod's own defaults, as with --deterministic False: fusion to 128 MiB, cycle time 1 ms",
    ),
    "horovod_paper": TransportKind(
        "horovod",
        "PapersHorovod",
        ("mpi4py", "tensorflow", "horovod"),
        "Horovod's defaults when the paper was written: fusion to 64 MiB, cycle time 5 ms",
    ),
    "jax": TransportKind(
        "jax",
        "JaxTransport",
        ("mpi4py", "jax"),
        "XLA's collectives within a compiled program: Gloo on CPUs, NCCL or RCCL on GPUs",
    ),
}
"""The transports by name, in the order in which they are measured."""


def missing_packages(name: str) -> list[str]:
    """Returns the packages that a transport needs and that are not installed."""
    return [package for package in TRANSPORTS[name].packages if find_spec(package) is None]


def choose_transports(text: str | None, *, one_process: bool = False) -> list[str]:
    """Returns the transports of a comma-separated list, each once; None: all that are installed.

    Args:
        text: The list.
        one_process: Whether the same process is to measure all of them.

    Raises:
        ParameterError: There is no such transport, it is not installed, or one process cannot
            measure all of them.
    """
    if text is None:
        installed = [name for name in TRANSPORTS if not missing_packages(name)]
        if not installed:
            raise ParameterError(
                "no library of communication is installed: install candle-p1[cpu] or"
                " candle-p1[jax-mpi]"
            )
        return in_one_process(installed) if one_process else installed
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for name in names:
        if name not in TRANSPORTS:
            near = did_you_mean(name, TRANSPORTS)
            raise ParameterError(f"--through: {name!r} is none of {', '.join(TRANSPORTS)}{near}")
        if missing := missing_packages(name):
            raise ParameterError(
                f"--through {name}: not installed in this environment: {', '.join(missing)}"
            )
    if one_process and (more := [name for name in names if name not in in_one_process(names)]):
        raise ParameterError(
            f"--through: {', '.join(more)}: the settings of Horovod cannot be changed within a"
            " process, and a launcher has started this one: measure them with a command each"
        )
    return names


def in_one_process(names: Iterable[str]) -> list[str]:
    """Returns those of some transports that one process can measure, one after the other.

    Horovod 0.28 can be started again, but crashes if its settings are set again
    (horovod::common::ParameterManager), so there is one transport of each module.
    """
    of_modules: dict[str, str] = {}
    for name in names:
        of_modules.setdefault(TRANSPORTS[name].module, name)
    return list(of_modules.values())


def make_transport(name: str, comm: Communicator) -> Transport:
    """Returns a transport, which is to be started before it is used."""
    kind = TRANSPORTS[name]
    made: Transport = getattr(import_module(f"{__name__}.{kind.module}"), kind.class_name)(comm)
    return made


def describe(names: Iterable[str]) -> dict[str, str]:
    """Returns what transports are, by their names."""
    return {name: TRANSPORTS[name].what for name in names}
