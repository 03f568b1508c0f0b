"""The segments of a run that was continued: what each did, what was lost, and their totals.

A run that is killed leaves a record, and the same command continues it. The record of the
continued run lists its segments; their times and energies add up. What cannot be known about a
segment that was killed is absent or estimated, and so is then the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from candle_p1.records.types import (
    EnergyTotal,
    Failure,
    JobEnergy,
    Position,
    RunRecord,
    RunTotals,
    Segment,
    worst,
)

BEGINNING = Position(epoch=0, step=0)
KILLED = "it was killed, and so was the watchdog, which would have recorded how it ended"


@dataclass(frozen=True)
class ResumePoint:
    """What a checkpoint keeps of the segments of a run."""

    segment: int = 0  # that saved it, from 1; 0 if nothing is kept
    steps: int = 0  # that each rank had begun in that segment
    position: Position = BEGINNING
    checkpoint: str | None = None  # its directory
    energy: JobEnergy | None = None  # of that segment until then, if it is known


def known_sections(record: RunRecord) -> dict[str, Any]:
    """Returns the sections that a record has, by name."""
    return {name: getattr(record, name) for name in record.model_fields_set}


def is_continued(record: RunRecord) -> bool:
    """Whether a run's last segment began from a checkpoint, so that its times are a segment's."""
    return record.segments is not None and record.segments[-1].checkpoint is not None


def earlier_segments(old: RunRecord, kept: ResumePoint, last_sign: str) -> list[Segment]:
    """Returns the segments of a run that is continued, with what of them is lost.

    `old` is its record so far; `last_sign` is when it last wrote a file, in ISO 8601, in case
    nobody recorded its end.
    """
    sections = known_sections(old)
    if old.status == "running":
        failure = Failure(reason=KILLED, rank=None)
        sections |= {"status": "failed", "ended": last_sign, "failure": failure}
    sections["segments"] = sections.get("segments") or [next_segment(old, ResumePoint())]
    segments: list[Segment] = completed(sections)["segments"]
    for number, segment in enumerate(segments, start=1):
        if number < kept.segment:
            continue
        steps, kept_steps, energy = segment.steps, 0, segment.energy
        if number == kept.segment:
            kept_steps = kept.steps
            if kept.energy and energy and energy.kind == "absent":
                energy = _extrapolated(kept.energy, segment.total_s or 0.0)
        lost_steps = None
        if steps is not None:
            steps = max(steps, kept_steps)
            lost_steps = steps - kept_steps
        segments[number - 1] = _changed(segment, steps=steps, lost_steps=lost_steps, energy=energy)
    segments[-1] = _changed(segments[-1], end=kept.position)
    return segments


def next_segment(record: RunRecord, kept: ResumePoint) -> Segment:
    """Returns the segment of a run that begins with this record, from what a checkpoint keeps."""
    return _known(
        status="running",
        started=record.started,
        num_ranks=record.num_ranks,
        num_nodes=record.num_nodes,
        begin=kept.position,
        checkpoint=kept.checkpoint,
    )


def with_positions(
    segments: Sequence[Segment], begin: Position | None, end: Position | None, steps: int
) -> list[Segment]:
    """Returns the segments with what is known of the last one when it ends by itself.

    Its training began at `begin`, or None: where the first record of it says. `steps` are those
    that each rank began in it.
    """
    last = _changed(segments[-1], begin=begin or segments[-1].begin, end=end, steps=steps)
    return [*segments[:-1], last]


def completed(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a record with its last segment and its totals brought up to it.

    Status, failure and energy are typed.
    """
    sections = dict(sections)
    segments: list[Segment] | None = sections.get("segments")
    sections.pop("totals", None)
    if not segments or sections["status"] == "running":
        return sections
    segments = [*segments[:-1], _ended(segments[-1], sections)]
    return sections | {"segments": segments, "totals": _totals(segments)}


def seconds_between(started: str, ended: str) -> float:
    """Returns the time between two times of day, in s; 0 if the clock was set back."""
    try:
        between = datetime.fromisoformat(ended) - datetime.fromisoformat(started)
        return max(0.0, round(between.total_seconds(), 3))
    except (ValueError, TypeError):  # a record from elsewhere
        return 0.0


def _ended(segment: Segment, sections: Mapping[str, Any]) -> Segment:
    """Returns a segment with how it ended, from the sections of the record."""
    total_s, failure = sections.get("total_s"), sections.get("failure")
    lasted_s = seconds_between(segment.started, sections["ended"]) if total_s is None else total_s
    energy = _energy(sections.get("energy"))
    if energy.kind != "absent" and sections.get("known_until_s") is not None:
        energy = _extrapolated(sections["energy"], lasted_s)
    return _changed(
        segment,
        status=sections["status"],
        ended=sections["ended"],
        steps=failure.steps if segment.steps is None and failure else segment.steps,
        total_s=lasted_s,
        time_kind="estimated" if total_s is None else "measured",
        energy=energy,
        failure=failure,
    )


def _energy(energy: JobEnergy | None) -> EnergyTotal:
    if energy is None:
        return EnergyTotal(
            kind="absent", reason="this segment did not end by itself, so its readings are lost"
        )
    if energy.kind == "absent":
        return EnergyTotal(kind="absent", reason=energy.reason)
    return EnergyTotal(
        kind=energy.kind,
        energy_j=energy.total_j,
        mean_w=energy.mean_w,
        few_samples=energy.few_samples,
    )


def _extrapolated(known: JobEnergy, total_s: float) -> EnergyTotal:
    """Returns the energy of a segment that was killed, of which `known` is the beginning.

    The mean power is taken to have continued until its end, after `total_s`.
    """
    energy_j, mean_w = known.total_j or 0.0, known.mean_w or 0.0
    energy_j += mean_w * max(0.0, total_s - (known.total_s or 0.0))
    return EnergyTotal(
        kind=worst([known.kind, "estimated"]),
        energy_j=energy_j,
        mean_w=energy_j / total_s if total_s else mean_w,
    )


def _totals(segments: Sequence[Segment]) -> RunTotals:
    lost = [segment.lost_steps for segment in segments[:-1]]
    known = {} if None in lost else {"lost_steps": sum(steps or 0 for steps in lost)}
    estimated = any(segment.time_kind == "estimated" for segment in segments)
    return RunTotals(
        num_segments=len(segments),
        total_s=sum(segment.total_s or 0.0 for segment in segments),
        time_kind="estimated" if estimated else "measured",
        energy=_sum(segments),
        **known,
    )


def _sum(segments: Sequence[Segment]) -> EnergyTotal:
    """Returns the energy of all segments; absent, with what is known, if that of one is."""
    energies = [segment.energy for segment in segments if segment.energy]
    absent = [number for number, each in enumerate(energies, 1) if each.kind == "absent"]
    known_j = sum(each.energy_j or 0.0 for each in energies)
    if absent:
        reason = energies[absent[0] - 1].reason
        if len(absent) < len(energies):
            numbers = ", ".join(map(str, absent))
            reason = f"segment {numbers}: {reason}; the others took {known_j:,.1f} J"
        return EnergyTotal(kind="absent", reason=reason)
    total_s = sum(segment.total_s or 0.0 for segment in segments)
    return EnergyTotal(
        kind=worst(each.kind for each in energies),
        energy_j=known_j,
        mean_w=known_j / total_s if total_s else 0.0,
        few_samples=any(each.few_samples for each in energies),
    )


def _changed(segment: Segment, **changes: Any) -> Segment:
    """Returns a segment with changed fields, validated; without those that become None."""
    return _known(**{name: getattr(segment, name) for name in segment.model_fields_set} | changes)


def _known(**fields: Any) -> Segment:
    """Returns a segment with those fields that are not None."""
    return Segment.model_validate({k: each for k, each in fields.items() if each is not None})
