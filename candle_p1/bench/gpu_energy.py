"""The energy of a node's GPUs while they train, by their counters and by integrated power."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.instrument.power.amd import AmdSource
from candle_p1.instrument.power.gpus import JobGpus, visible_here
from candle_p1.instrument.power.nvml import NvmlSource
from candle_p1.instrument.power.sampler import Sampler
from candle_p1.instrument.power.source import SensorError

if TYPE_CHECKING:
    from typing_extensions import Self

    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.power.source import PowerSource

HZ = 20.0
"""NVML updates its values every 20 to 100 ms."""


class EnergyMeter:
    """Samples the GPUs of this job on rank 0's node; a null object where none can be read.

    Both readings of a card are sampled at the same time, so that they can be compared: where NVML's
    counter and the integral of its power differ, one of them is wrong.

    Args:
        comm: The ranks, all of which must make one; all on one node.
    """

    def __init__(self, comm: Communicator) -> None:
        ranks = comm.local.allgather(visible_here())
        self._absent: str | None = None
        self._sampler: Sampler | None = None
        if comm.rank:
            self._absent = "rank 0 measures it"
            return
        sources, reasons = _open(JobGpus(ranks))
        if sources:
            self._sampler = Sampler(sources, HZ)
        else:
            self._absent = "; ".join(reasons)

    def __enter__(self) -> Self:
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._sampler:
            self._sampler.stop()

    def energies_j(self, begin_s: float, end_s: float) -> tuple[dict[str, float], str | None]:
        """Returns the energy of all GPUs by reading, and why there is none.

        Args:
            begin_s: The begin of the interval, by time.perf_counter.
            end_s: Its end.
        """
        if self._sampler is None:
            return {}, self._absent
        found: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for trace in self._sampler.traces():
            reading, energy = trace.channel.reading, trace.energy(begin_s, end_s)
            if energy.energy_j is None or energy.few_samples:
                reasons[reading] = energy.reason or "too few samples: raise --seconds"
            else:
                found[reading] = found.get(reading, 0.0) + energy.energy_j
        for lacking in reasons:  # a sum without one of the cards would be too small
            found.pop(lacking, None)
        return found, None if found else "; ".join(reasons.values())


def _open(job: JobGpus) -> tuple[list[PowerSource], list[str]]:
    """Returns the sources that can be read, and why others cannot."""
    sources: list[PowerSource] = []
    reasons: list[str] = []
    for make in (
        lambda: NvmlSource(job, ("energy",)),
        lambda: NvmlSource(job, ("power",)),
        lambda: AmdSource(job),
    ):
        try:
            sources.append(make())
        except SensorError as error:
            reasons.append(str(error))
    return sources, list(dict.fromkeys(reasons))
