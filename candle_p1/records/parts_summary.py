"""The parts and the checkpoints of a run as text and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.records.tables import quantity, table_of
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

    from candle_p1.records.types import PartFacts, PositionFacts, RunRecord, TimeKind

MIB = 2**20


def parts_table(parts: Sequence[PartFacts]) -> Table:
    """Returns a table of what each part did."""

    def energy(part: PartFacts) -> str:
        return quantity(part.energy.energy_j) if part.energy else ""

    return table_of(
        "parts of the run: steps of each rank",
        list(enumerate(parts, start=1)),
        {
            "part": lambda number, part: str(number),
            "status": lambda number, part: part.status,
            "started (UTC)": lambda number, part: part.started[:19].replace("T", " "),
            "ranks": lambda number, part: str(part.num_ranks),
            "from epoch/step": lambda number, part: _place(part.begin),
            "to": lambda number, part: _place(part.end) if part.end else "",
            "steps": lambda number, part: _count(part.steps),
            "lost": lambda number, part: _count(part.lost_steps),
            "time (s)": lambda number, part: _seconds(part.total_s, part.time_kind),
            "energy (J)": lambda number, part: energy(part),
        },
        num_words=3,
    )


def _place(position: PositionFacts) -> str:
    return f"{position.epoch}/{position.step}"


def _count(num: int | None) -> str:
    return "" if num is None else f"{num:,}"


def _seconds(seconds: float | None, kind: TimeKind | None) -> str:
    if seconds is None:
        return ""
    return ("~" if kind == "estimated" else "") + f"{seconds:.2f}"


def whole(record: RunRecord) -> Iterator[str]:
    """Yields what the parts of a continued run add up to."""
    added = record.whole
    if added is None or added.num_parts == 1:
        return
    lost = "an unknown number of steps"
    if added.lost_steps is not None:
        lost = count(added.lost_steps, "step")
    energy = added.energy
    used = "energy not measured"
    if energy.energy_j is not None:
        used = f"{energy.energy_j:,.1f} J ({energy.kind})"
    yield (
        f"continued, {count(added.num_parts, 'part')}: {_seconds(added.total_s, added.time_kind)} s"
        f" in all, {lost} of each rank repeated; {used}"
    )


def checkpoints(record: RunRecord) -> Iterator[str]:
    """Yields how many checkpoints there are, what they cost, and which could not be saved."""
    saved = record.checkpoints
    if saved is None:
        return
    line = f"{count(saved.num_saved, 'checkpoint')}, {saved.saved_bytes / MIB:,.1f} MiB"
    if saved.wait:
        line += f", for which training waited {saved.wait.max_s:.2f} s"
    if saved.num_not_taken:
        line += f"; {saved.num_not_taken} not taken, because the one before was being written"
    yield f"{line}: {saved.directory}"
    yield from (f"checkpoint not saved: {error}" for error in saved.errors)
