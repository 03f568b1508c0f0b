"""The power of a job's nodes during a run: one rank per node samples it; rank 0 adds it up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Self

from candle_p1.distributed.comm import Communicator, agree
from candle_p1.instrument.power.account import (
    Interval,
    NodeEnergy,
    combine,
    measure_node,
    measure_so_far,
)
from candle_p1.instrument.power.choose import open_sources
from candle_p1.instrument.power.gpus import JobGpus, visible_here
from candle_p1.instrument.power.sampler import Sampler
from candle_p1.records.power_file import write_traces
from candle_p1.records.types import JobEnergy


class PowerMeter:
    """Samples while the body of ``with`` runs; the constructor is collective.

    Args:
        comm: The ranks.
        names: The sources; see candle_p1.instrument.power.choose.
        hz: Samples per second.
        gpus: The indices of the GPUs to use on each node; None: all.

    Raises:
        ParameterError: A source requested by name is not available; the same on every rank.
    """

    def __init__(
        self, comm: Communicator, names: str, hz: float, gpus: Sequence[int] | None = None
    ) -> None:
        self._comm = comm
        job = JobGpus(comm.local.allgather(visible_here()), gpus)
        leads = comm.local_rank == 0
        opened = agree(comm, lambda: open_sources(names, job) if leads else None)
        self._absent = opened.absent if opened else {}
        self._sampler = Sampler(opened.sources, hz) if opened else None
        self._measures = comm.any(bool(opened and opened.sources))

    def __enter__(self) -> Self:
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._sampler:
            self._sampler.stop()

    def measure(
        self, intervals: Sequence[Interval], directory: Path, start_s: float
    ) -> JobEnergy | None:
        """Ends sampling; returns the record's section "energy" on rank 0, else None; collective.

        Each node's readings are written to a file in the run's directory.

        Args:
            intervals: This rank's phases, by time.perf_counter.
            directory: The run's directory.
            start_s: When the run began, by the same clock.
        """
        own = self._measure_node(intervals, directory, start_s) if self._sampler else None
        gathered = self._comm.gather(own)
        return None if gathered is None else combine(_in_order(gathered))

    def so_far(self, start_s: float) -> JobEnergy | None:
        """Returns the energy of all nodes until now on rank 0; collective if there are several.

        None if it is not known, and on all ranks but rank 0.
        """
        if not self._measures:
            return None
        own = measure_so_far(self._sampler, start_s, self._comm.node) if self._sampler else None
        gathered = self._comm.gather(own) if self._comm.num_nodes > 1 else [own]
        nodes = _in_order(gathered or [])
        if len(nodes) < self._comm.num_nodes:  # not rank 0, or a node does not answer
            return None
        energy = combine(nodes)
        return None if energy.kind == "absent" else energy

    def _measure_node(
        self, intervals: Sequence[Interval], directory: Path, start_s: float
    ) -> NodeEnergy:
        assert self._sampler is not None
        self._sampler.stop()
        file = directory / f"power-{self._comm.node:04d}.csv"
        node = self._comm.node
        measured = measure_node(
            self._sampler, intervals, node=node, absent=self._absent, trace=file.name
        )
        if measured.trace:
            write_traces(file, self._sampler.traces(), node, start_s)
        return measured


def _in_order(nodes: Sequence[NodeEnergy | None]) -> list[NodeEnergy]:
    return sorted((node for node in nodes if node), key=lambda node: node.node)
