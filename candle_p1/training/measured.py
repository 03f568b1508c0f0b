"""What each rank measured, and what the record says about it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.instrument import efficiency
from candle_p1.instrument.phases import summarize_phases
from candle_p1.records.spread import Bytes, Seconds
from candle_p1.records.types import CheckpointFacts, Efficiency, LaunchFacts, RankFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.checkpoints.statistics import CheckpointStatistics
    from candle_p1.distributed.comm import Communicator
    from candle_p1.instrument.collectives import CommunicationLog
    from candle_p1.instrument.phases import Phase, PhasePath


class Measured(NamedTuple):
    """What a rank measured, for the record."""

    facts: RankFacts
    peak_rss_bytes: int
    phases: dict[PhasePath, Phase]
    communication: CommunicationLog
    start: float
    end: float
    checkpoint_wait_s: float | None
    process_s: float | None
    mpi_s: float


def describe_checkpoints(
    saved: CheckpointStatistics, waits_s: Sequence[float | None]
) -> CheckpointFacts:
    """Returns what the record says about checkpoints.

    Args:
        saved: What rank 0 knows of them.
        waits_s: How long each rank waited for them.
    """
    written = saved.written
    return CheckpointFacts(
        directory=str(saved.directory),
        num_saved=len(written),
        saved_bytes=sum(save.num_bytes for save in written),
        wait=Seconds.over(waits_s),
        write_s=sum(save.written_s or 0.0 for save in written),
        num_not_taken=saved.num_not_taken,
        num_failed=len(saved.errors),
        errors=list(dict.fromkeys(saved.errors)),
        newest=written[-1].name if written else None,
        num_writers=written[-1].num_writers if written else None,
    )


def describe_ranks(of_ranks: Sequence[Measured]) -> dict[str, Any]:
    """Returns the sections of the record that follow from what all ranks measured alone."""
    return {
        "ranks": [rank.facts for rank in of_ranks],
        "launch": describe_launch(of_ranks),
        "phases": summarize_phases(
            [rank.phases for rank in of_ranks], [rank.start for rank in of_ranks]
        ),
        "peak_rss": Bytes.over([rank.peak_rss_bytes for rank in of_ranks]),
        "efficiency": overall_efficiency(of_ranks),
    }


def describe_launch(of_ranks: Sequence[Measured]) -> LaunchFacts | None:
    """Returns what the ranks' processes did before the run; None if that is not known of all."""
    process_s = [rank.process_s for rank in of_ranks]
    if None in process_s:
        return None
    return LaunchFacts(
        process=Seconds.over(process_s), mpi=Seconds.over([rank.mpi_s for rank in of_ranks])
    )


def overall_efficiency(of_ranks: Sequence[Measured]) -> Efficiency:
    """Returns how well the ranks worked together over the whole run."""
    waited_s = [
        sum(phase.communication_s for path, phase in rank.phases.items() if len(path) == 1)
        for rank in of_ranks
    ]
    took_s = [rank.end - rank.start for rank in of_ranks]
    useful_s = [took - waited for took, waited in zip(took_s, waited_s, strict=True)]
    return efficiency.efficiencies(useful_s, max(took_s), definition=efficiency.DEFINITION)


def describe_rank(comm: Communicator, *, threads: int, device: str, num_cores: int) -> RankFacts:
    """Returns what the record says about this rank."""
    return RankFacts(
        rank=comm.rank,
        host=socket.gethostname(),
        node=comm.node,
        local_rank=comm.local_rank,
        num_cores=num_cores,
        threads=threads,
        device=device,
    )
