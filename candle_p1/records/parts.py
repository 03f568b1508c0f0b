"""The parts of a run that was continued: what each did, what was lost, and all of them together.

A run that is killed leaves a record, and the same command continues it. The record of the
continued run lists what its parts did; their times and energies add up. What cannot be known about
a part that was killed is absent or estimated, and so is then the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from candle_p1.records.types import (
    EnergyTotal,
    Failure,
    PartFacts,
    PositionFacts,
    RunRecord,
    WholeFacts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.records.types import EnergyFacts, EnergyKind

BEGINNING = PositionFacts(epoch=0, step=0)
KINDS: tuple[EnergyKind, ...] = ("measured", "estimated", "simulated", "absent")
"""From the best to the worst."""
KILLED = "it was killed, and so was the watchdog, which would have recorded how it ended"


@dataclass(frozen=True)
class KeptWork:
    """What a checkpoint keeps of the parts of a run.

    Attributes:
        part: The part that saved it, from 1; 0 if nothing is kept.
        steps: The steps that each rank had begun in that part.
        position: The position of the checkpoint.
        checkpoint: Its directory; None if nothing is kept.
        energy: The energy of that part until then; None if it is not known.
    """

    part: int = 0
    steps: int = 0
    position: PositionFacts = BEGINNING
    checkpoint: str | None = None
    energy: EnergyFacts | None = None


def is_continued(record: RunRecord) -> bool:
    """Whether the last part of a run went on from a checkpoint, so that its times are a part's."""
    return record.parts is not None and record.parts[-1].checkpoint is not None


def earlier_parts(old: RunRecord, kept: KeptWork, last_sign: str) -> list[PartFacts]:
    """Returns the parts of a run that is continued, with what of them is lost.

    Args:
        old: Its record so far.
        kept: What the checkpoint keeps from which it goes on.
        last_sign: When the run last wrote a file, in ISO 8601, in case nobody recorded its end.
    """
    if old.status == "running":
        failure = Failure(reason=KILLED, rank=None)
        facts = _known(old) | {"status": "failed", "ended": last_sign, "failure": failure}
    else:
        facts = _known(old)
    facts["parts"] = facts.get("parts") or [first_part(old)]
    parts: list[PartFacts] = completed(facts)["parts"]
    for number, part in enumerate(parts, start=1):
        if number < kept.part:
            continue
        steps = part.steps
        kept_steps = kept.steps if number == kept.part else 0
        if steps is not None:
            steps = max(steps, kept_steps)
        lost_steps = None if steps is None else steps - kept_steps
        energy = part.energy
        if number == kept.part and kept.energy and energy and energy.kind == "absent":
            energy = _continued_to_its_end(kept.energy, part.total_s or 0.0)
        parts[number - 1] = _changed(part, steps=steps, lost_steps=lost_steps, energy=energy)
    parts[-1] = _changed(parts[-1], end=kept.position)
    return parts


def first_part(record: RunRecord) -> PartFacts:
    """Returns the first part of a run, as it begins."""
    return PartFacts(
        status="running",
        started=record.started,
        num_ranks=record.num_ranks,
        num_nodes=record.num_nodes,
        begin=BEGINNING,
    )


def next_part(new: RunRecord, kept: KeptWork) -> PartFacts:
    """Returns the part of a run that begins, of which `new` is the record."""
    return _changed(first_part(new), begin=kept.position, checkpoint=kept.checkpoint)


def with_positions(
    parts: Sequence[PartFacts], begin: PositionFacts | None, end: PositionFacts | None, steps: int
) -> list[PartFacts]:
    """Returns the parts with what is known of the last one when it ends by itself.

    Args:
        parts: The parts.
        begin: Where its training began; None: where the first record of it says.
        end: Where it ended.
        steps: The training steps that each rank began in it.
    """
    last = _changed(parts[-1], begin=begin or parts[-1].begin, end=end, steps=steps)
    return [*parts[:-1], last]


def completed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sections of a record with the last of the parts, and the whole, brought up to it.

    Args:
        facts: The sections, by name. Status, failure, phases and energy are typed.
    """
    facts = dict(facts)
    parts: list[PartFacts] | None = facts.get("parts")
    facts.pop("whole", None)
    if not parts or facts["status"] == "running":
        return facts
    facts["parts"] = parts = [*parts[:-1], _ended(parts[-1], facts)]
    return facts | {"whole": _whole(parts)}


def seconds_between(started: str, ended: str) -> float:
    """Returns the time between two times of day, in s; 0 if the clock was set back."""
    try:
        between = datetime.fromisoformat(ended) - datetime.fromisoformat(started)
        return max(0.0, round(between.total_seconds(), 3))
    except (ValueError, TypeError):  # a record from elsewhere
        return 0.0


def _ended(part: PartFacts, facts: Mapping[str, Any]) -> PartFacts:
    """Returns a part with how it ended, from the sections of the record."""
    total_s, failure = facts.get("total_s"), facts.get("failure")
    train = (facts.get("phases") or {}).get("train")
    steps = failure.steps if part.steps is None and failure else part.steps
    lasted_s = seconds_between(part.started, facts["ended"]) if total_s is None else total_s
    energy = _energy(facts.get("energy"))
    if energy.kind != "absent" and facts.get("known_until_s") is not None:
        energy = _continued_to_its_end(facts["energy"], lasted_s)
    return _changed(
        part,
        status=facts["status"],
        ended=facts["ended"],
        steps=steps,
        total_s=lasted_s,
        time_kind="estimated" if total_s is None else "measured",
        train_s=train.max_s if train else None,
        energy=energy,
        failure=failure,
    )


def _energy(energy: EnergyFacts | None) -> EnergyTotal:
    if energy is None:
        return EnergyTotal(
            kind="absent", reason="this part did not end by itself, so its readings are lost"
        )
    if energy.kind == "absent":
        return EnergyTotal(kind="absent", reason=energy.reason)
    return EnergyTotal(
        kind=energy.kind,
        energy_j=energy.total_j,
        mean_w=energy.mean_w,
        few_samples=energy.few_samples,
    )


def _continued_to_its_end(known: EnergyFacts, total_s: float) -> EnergyTotal:
    """Returns the energy of a part that was killed after its last checkpoint.

    Args:
        known: Its energy until then; the mean power is taken to have gone on.
        total_s: How long it ran.
    """
    energy_j, mean_w = known.total_j or 0.0, known.mean_w or 0.0
    energy_j += mean_w * max(0.0, total_s - (known.total_s or 0.0))
    return EnergyTotal(
        kind=max((known.kind, "estimated"), key=KINDS.index),
        energy_j=energy_j,
        mean_w=energy_j / total_s if total_s else mean_w,
    )


def _whole(parts: Sequence[PartFacts]) -> WholeFacts:
    lost = [part.lost_steps for part in parts[:-1]]
    known = {} if None in lost else {"lost_steps": sum(steps or 0 for steps in lost)}
    return WholeFacts(
        num_parts=len(parts),
        total_s=sum(part.total_s or 0.0 for part in parts),
        time_kind=max((part.time_kind or "measured" for part in parts), key=KINDS.index),
        energy=_sum(parts),
        **known,
    )


def _sum(parts: Sequence[PartFacts]) -> EnergyTotal:
    """Returns the energy of all parts; absent, with what is known, if that of one is."""
    energies = [part.energy for part in parts if part.energy]
    absent = [number for number, each in enumerate(energies, 1) if each.kind == "absent"]
    known_j = sum(each.energy_j or 0.0 for each in energies)
    if absent:
        reason = energies[absent[0] - 1].reason
        if len(absent) < len(energies):
            numbers = ", ".join(map(str, absent))
            reason = f"part {numbers}: {reason}; the others took {known_j:,.1f} J"
        return EnergyTotal(kind="absent", reason=reason)
    total_s = sum(part.total_s or 0.0 for part in parts)
    return EnergyTotal(
        kind=max((each.kind for each in energies), key=KINDS.index),
        energy_j=known_j,
        mean_w=known_j / total_s if total_s else 0.0,
        few_samples=any(each.few_samples for each in energies),
    )


def _known(record: RunRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.model_fields_set}


def _changed(part: PartFacts, **changes: Any) -> PartFacts:
    """Returns a part with changed fields, validated; without those that become None."""
    facts = {name: getattr(part, name) for name in part.model_fields_set} | changes
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return PartFacts.model_validate(known)
