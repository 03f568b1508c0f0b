"""Which of a node's GPUs belong to the job: those its ranks compute on.

A rank computes on one GPU of those it sees, as candle_p1.distributed.devices chooses it. What it
sees is in the environment, as CUDA and HIP read it: numbers, or beginnings of UUIDs, up to the
first that names no GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from candle_p1.instrument.power.source import SensorError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CUDA = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
Variables = tuple[tuple[str, ...], ...]
"""One after the other chooses among what the one before it has left; of several names for the same,
the first that is set."""
NVIDIA: Variables = ((CUDA,),)
AMD: Variables = (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", CUDA))
VARIABLES = (ORDER, *dict.fromkeys(name for names in NVIDIA + AMD for name in names))


def visible_here() -> dict[str, str]:
    """Returns what the environment of this rank says of GPUs, for `JobGpus`."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


@dataclass(frozen=True)
class JobGpus:
    """What is known of the GPUs of a job's ranks on one node.

    Attributes:
        ranks: `visible_here` of each rank of the node, by local rank.
        positions: The GPUs to use among those that a rank sees, as ``--gpus`` gives them; None is
            all.
    """

    ranks: Sequence[Mapping[str, str]] = ({},)
    positions: Sequence[int] | None = None

    def choose(
        self, uuids: Sequence[str], models: Sequence[str], variables: Variables
    ) -> list[int]:
        """Returns the GPUs that the ranks compute on, by their place in `uuids`, each once.

        Args:
            uuids: Of all GPUs of the node that this user may use, in the order of their buses.
            models: Their names.
            variables: NVIDIA or AMD: that say which of them a rank sees.

        Raises:
            SensorError: The environment names an instance of MIG, or numbers whose order is open.
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


def select(names: str, uuids: Sequence[str]) -> list[int]:
    """Returns the GPUs that a value of CUDA_VISIBLE_DEVICES names, by their place in `uuids`.

    Raises:
        SensorError: It names an instance of MIG.
    """
    found: list[int] = []
    for name in (name.strip() for name in names.split(",")):
        if name.startswith("MIG-"):
            raise SensorError(
                f"this job computes on {name}, an instance of MIG: the card's sensors do not tell"
                " its instances apart, and others may use them"
            )
        if name.isdigit():
            places = [int(name)] if int(name) < len(uuids) else []
        else:
            places = [place for place, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(places) != 1:
            break
        found.append(places[0])
    return found


def _check_order(models: Sequence[str], settings: Mapping[str, str]) -> None:
    if len(set(models)) > 1 and settings.get(ORDER) != "PCI_BUS_ID":
        raise SensorError(
            "this node has GPUs of different models, which CUDA numbers by their speed: set"
            f" {ORDER}=PCI_BUS_ID, or name the GPUs by UUID in {CUDA}"
        )
