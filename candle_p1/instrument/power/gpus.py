"""The GPUs of a job, which are those that its ranks compute on, as sources of power readings.

A rank computes on one of the GPUs that it sees, chosen by candle_p1.distributed.devices. What
it sees is in its environment, as CUDA and HIP read it: indices, or prefixes of UUIDs, up to the
first that matches no GPU.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from candle_p1.instrument.power.source import PowerSource, SensorError
from candle_p1.records.power_trace import Channel

CUDA = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
Variables = tuple[tuple[str, ...], ...]
"""Each entry selects among the GPUs that the previous one has left; if an entry has several names,
the first that is set counts."""
NVIDIA: Variables = ((CUDA,),)
AMD: Variables = (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", CUDA))
VARIABLES = (ORDER, *dict.fromkeys(name for names in NVIDIA + AMD for name in names))


def visible_here() -> dict[str, str]:
    """Returns what this rank's environment says about GPUs, for `JobGpus`."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@dataclass(frozen=True)
class JobGpus:
    """What the ranks of a node see, by local rank; see `visible_here`.

    `positions` are those of the GPUs to use among them, as given by ``--gpus``; None: all.
    """

    ranks: Sequence[Mapping[str, str]] = ({},)
    positions: Sequence[int] | None = None

    def choose(
        self, uuids: Sequence[str], models: Sequence[str], variables: Variables
    ) -> list[int]:
        """Returns the indices in `uuids` of the GPUs that the ranks compute on.

        These are all GPUs of the node that this user may use, in the order of their buses; "" is
        one that is lost. The variables, NVIDIA or AMD, say what a rank sees.

        Raises:
            SensorError: The environment names a MIG instance, or numbers whose order is unknown.
        """
        found: list[int] = []
        for local_rank, settings in enumerate(self.ranks):
            seen = list(range(len(uuids)))
            for names in variables:
                chosen = next((settings[name] for name in names if name in settings), None)
                if variables is NVIDIA and (chosen is None or chosen.strip()[:1].isdigit()):
                    _check_order(models, settings)
                if chosen is not None:
                    seen = [seen[k] for k in select(chosen, [uuids[k] for k in seen])]
            if self.positions is not None:
                seen = [seen[k] for k in self.positions if k < len(seen)]
            if seen:
                found.append(seen[local_rank % len(seen)])
        return sorted(set(found))


class Gpu(NamedTuple):
    """A GPU as its vendor's library knows it.

    A lost one keeps its place, by which CUDA and HIP number the others; `lost` says why, and its
    UUID and model may be unknown, "".
    """

    handle: Any
    uuid: str
    model: str
    lost: str | None = None


class GpuSource(PowerSource):
    """Reads the GPUs of this job through their vendor's library.

    Raises:
        SensorError: The library is not available, or this job uses none of the vendor's GPUs.
    """

    vendor: str
    variables: Variables

    def __init__(self, job: JobGpus) -> None:
        self._open_library()
        try:
            self._find_channels(job)
        except Exception as error:
            self.stop()
            if isinstance(error, SensorError):
                raise
            raise SensorError(f"{self.name}: {error}") from error

    @abstractmethod
    def _open_library(self) -> None:
        """Imports and initializes the library; raises SensorError if that fails."""

    @abstractmethod
    def _list_gpus(self) -> list[Gpu]:
        """Returns all GPUs that this user may use, and those that are lost."""

    @abstractmethod
    def _candidates(self, gpu: Gpu) -> Iterable[Channel]:
        """Returns the channels of a GPU, of which the first that can be read is used."""

    def _check(self, channel: Channel) -> None:
        """Raises an exception if a channel cannot be read, or also measures other jobs."""
        self.read(channel)

    def _find_channels(self, job: JobGpus) -> None:
        found = self._list_gpus()
        models = [gpu.model for gpu in found]
        chosen = job.choose([gpu.uuid for gpu in found], models, self.variables)
        if not chosen:
            raise SensorError(f"this job uses none of this node's {self.vendor} GPUs")
        self._handles: dict[Channel, Any] = {}
        self.channels = channels = list[Channel]()
        self.absent = absent = dict[Channel, str]()
        for k in chosen:
            gpu = found[k]
            if gpu.lost:
                name = gpu.model or f"{self.vendor} GPU {k}"
                absent[Channel(f"gpu:{gpu.uuid or k}", name, "gpu", self.name, "energy")] = gpu.lost
                continue
            for channel in self._candidates(gpu):
                self._handles[channel] = gpu.handle
                try:
                    self._check(channel)
                except Exception as error:
                    reason = str(error)
                else:
                    channels.append(channel)
                    break
            else:
                absent[channel] = reason


def select(names: str, uuids: Sequence[str]) -> list[int]:
    """Returns the indices in `uuids` of the GPUs that a value of CUDA_VISIBLE_DEVICES names.

    Raises:
        SensorError: It names a MIG instance.
    """
    found: list[int] = []
    for name in (name.strip() for name in names.split(",")):
        if name.startswith("MIG-"):
            raise SensorError(
                f"this job computes on {name}, a MIG instance, and a card's sensors show all of its"
                " instances together, some of which others may use"
            )
        if name.isdigit():
            indices = [int(name)] if int(name) < len(uuids) else []
        else:
            indices = [k for k, uuid in enumerate(uuids) if name and uuid.startswith(name)]
            if not indices and name.startswith("GPU-"):  # the one whose UUID is not known
                indices = [k for k, uuid in enumerate(uuids) if not uuid]
        if len(indices) != 1:
            break
        found.append(indices[0])
    return found


def _check_order(models: Sequence[str], settings: Mapping[str, str]) -> None:
    if len(set(models) - {""}) > 1 and settings.get(ORDER) != "PCI_BUS_ID":
        raise SensorError(
            "this node has GPUs of different models, which CUDA numbers by speed: set"
            f" {ORDER}=PCI_BUS_ID, or name the GPUs by UUID in {CUDA}"
        )
