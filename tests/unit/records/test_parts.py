"""The parts of continued runs: what each did, what was lost, and their sums."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import RecordError
from candle_p1.records.parts import (
    KeptWork,
    earlier_parts,
    is_continued,
    next_part,
    with_positions,
)
from candle_p1.records.record import (
    continue_record,
    end_record,
    extend_record,
    make_record,
    read_record,
)
from candle_p1.records.types import EnergyFacts, Failure, PartFacts, PositionFacts
from tests.planted_records import planted_record
from tests.records import RUNNING

LATER = {"started": "2019-08-05T01:00:00.000+00:00", "num_ranks": 4}
LAST_SIGN = "2019-08-05T00:05:00.000+00:00"
ABSENT = EnergyFacts(kind="absent", reason="no sensor")


def position(epoch, step):
    return PositionFacts(epoch=epoch, step=step)


def killed(steps, **facts):
    failure = Failure(reason="rank 1 died", rank=1, steps=steps)
    ended = "2019-08-05T00:01:00.500+00:00"
    return make_record(RUNNING | facts | {"status": "failed", "ended": ended, "failure": failure})


def continued(old, kept, **facts):
    new = make_record(RUNNING | LATER | facts)
    return extend_record(new, parts=[*earlier_parts(old, kept, LAST_SIGN), next_part(new, kept)])


def finished(record, total_s, energy=ABSENT, **positions):
    """Returns the record of a run, of which only the parts and the whole matter, as it ends."""
    parts = with_positions(record.parts, positions.get("begin"), positions.get("end"), 30)
    known = {name: getattr(record, name) for name in record.model_fields_set}
    whole_run = planted_record("nt3", record.num_ranks)
    sections = {name: getattr(whole_run, name) for name in whole_run.model_fields_set}
    sections |= known | {"parts": parts}
    return extend_record(
        make_record({name: each for name, each in sections.items() if name != "status"} | {
            "status": "running"
        }),
        status="ok", ended="2019-08-05T01:00:10+00:00", total_s=total_s, energy=energy,
    )  # fmt: skip


def test_a_killed_part_has_lost_what_came_after_the_checkpoint():
    kept = KeptWork(part=1, steps=20, position=position(2, 4), checkpoint="ckpts/a")
    record = continued(killed(27), kept)
    first, second = record.parts
    assert (first.status, first.steps, first.lost_steps) == ("failed", 27, 7)
    assert (first.begin, first.end) == (position(0, 0), position(2, 4))
    assert (first.total_s, first.time_kind) == (60.5, "estimated")
    assert first.energy.kind == "absent"
    assert first.failure.reason == "rank 1 died"
    assert (second.status, second.begin, second.num_ranks) == ("running", position(2, 4), 4)
    assert is_continued(record)
    assert record.whole is None


def test_times_and_energies_of_parts_that_ended_by_themselves_add_up():
    measured = EnergyFacts(kind="measured", total_j=100.0, mean_w=5.0, total_s=20.0)
    estimated = EnergyFacts(kind="estimated", total_j=60.0, mean_w=6.0, total_s=10.0)
    reason = Failure(reason="interrupted by SIGUSR1", rank=0, steps=20)
    old = make_record(RUNNING | {
        "status": "interrupted", "ended": LAST_SIGN, "failure": reason,
        "total_s": 20.0, "energy": measured,
    })  # fmt: skip
    kept = KeptWork(part=1, steps=20, position=position(2, 0), checkpoint="ckpts/a")
    whole = finished(continued(old, kept), 12.0, estimated, end=position(8, 0)).whole
    assert (whole.num_parts, whole.total_s, whole.time_kind) == (2, 32.0, "measured")
    assert whole.lost_steps == 0
    assert (whole.energy.kind, whole.energy.energy_j) == ("estimated", 160.0)
    assert whole.energy.mean_w == 5.0


def test_the_energy_of_the_whole_is_absent_if_a_part_was_killed_and_says_what_is_known():
    kept = KeptWork(part=1, steps=20, position=position(2, 4), checkpoint="ckpts/a")
    measured = EnergyFacts(kind="measured", total_j=100.0, mean_w=5.0, total_s=20.0)
    whole = finished(continued(killed(27), kept), 12.0, measured).whole
    assert whole.energy.kind == "absent"
    assert "part 1" in whole.energy.reason
    assert "100.0 J" in whole.energy.reason
    assert (whole.total_s, whole.time_kind, whole.lost_steps) == (72.5, "estimated", 7)


def test_a_killed_part_has_the_energy_of_its_checkpoint_and_then_the_mean_power():
    energy = EnergyFacts(kind="measured", total_j=200.0, mean_w=5.0, total_s=40.0)
    kept = KeptWork(part=1, steps=20, position=position(2, 4), checkpoint="c", energy=energy)
    record = continued(killed(27), kept)
    known = record.parts[0].energy
    assert (known.kind, known.energy_j) == ("estimated", 200.0 + 5.0 * 20.5)
    measured = EnergyFacts(kind="measured", total_j=100.0, mean_w=5.0, total_s=20.0)
    whole = finished(record, 12.0, measured).whole
    assert (whole.energy.kind, whole.energy.energy_j) == ("estimated", 402.5)


def test_a_part_without_a_checkpoint_of_its_own_is_lost_as_a_whole():
    first = KeptWork(part=1, steps=20, position=position(2, 4), checkpoint="ckpts/a")
    known = continued(killed(27), first)
    again = extend_record(
        known, status="failed", ended="2019-08-05T01:00:10+00:00",
        failure=Failure(reason="rank 0 died", rank=0, steps=9),
    )  # fmt: skip
    record = continued(again, first)
    assert [part.lost_steps for part in record.parts] == [7, 9, None]
    assert record.parts[1].end == record.parts[1].begin == position(2, 4)
    # Going back further loses more of the first part.
    back = KeptWork(part=1, steps=10, position=position(1, 0), checkpoint="ckpts/b")
    assert [part.lost_steps for part in continued(again, back).parts] == [17, 9, None]


def test_a_run_that_begins_again_has_lost_all_steps():
    record = continued(killed(27), KeptWork())
    assert record.parts[0].lost_steps == 27
    assert record.parts[1].checkpoint is None
    assert not is_continued(record)


def test_a_part_whose_end_nobody_recorded_ended_when_it_last_wrote():
    kept = KeptWork(part=1, steps=20, position=position(2, 4), checkpoint="ckpts/a")
    part = continued(make_record(RUNNING), kept).parts[0]
    assert (part.status, part.ended, part.total_s) == ("failed", LAST_SIGN, 300.0)
    assert (part.steps, part.lost_steps) == (None, None)
    whole = finished(continued(make_record(RUNNING), kept), 12.0).whole
    assert whole.lost_steps is None


def test_the_energy_that_a_killed_part_had_measured_is_taken_to_go_on():
    energy = EnergyFacts(kind="measured", total_j=600.0, total_s=60.0, mean_w=10.0)
    old = extend_record(make_record(RUNNING), energy=energy, known_until_s=60.0)
    part = continued(old, KeptWork()).parts[0]
    assert (part.energy.kind, part.energy.energy_j) == ("estimated", 3000.0)


def test_the_watchdog_ends_the_last_part_too(tmp_path):
    path = tmp_path / "run.json"
    kept = KeptWork(part=1, steps=20, position=position(2, 4), checkpoint="ckpts/a")
    continue_record(path, continued(killed(27), kept))
    end_record(path, "interrupted", Failure(reason="SIGTERM", rank=0, steps=3))
    record = read_record(path)
    assert [part.status for part in record.parts] == ["failed", "interrupted"]
    assert record.parts[1].steps == 3
    assert record.whole.num_parts == 2
    assert "null" not in json.dumps(json.loads(path.read_text())["parts"]).replace(
        '"rank": null', ""
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.json"]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8))
def test_what_is_lost_is_what_was_begun_but_not_kept(parts):
    """Each part is killed after some steps, and its newest checkpoint keeps some of them."""
    record, expected = None, 0
    for number, (kept_steps, more) in enumerate(parts, start=1):
        steps = kept_steps + more
        failure = Failure(reason="killed", rank=0, steps=steps)
        if record is None:
            old = killed(steps)
        else:
            old = extend_record(record, status="failed", ended=LAST_SIGN, failure=failure)
        kept = KeptWork(part=number, steps=kept_steps, checkpoint=f"c{number}")
        record = continued(old, kept)
        expected += more
    whole = finished(record, 1.0).whole
    assert whole.lost_steps == expected
    assert whole.num_parts == len(parts) + 1


RUNNING_PART = {"status": "running", "started": "x", "num_ranks": 1, "begin": position(0, 0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": []}, "parts"),
        ({"parts": [PartFacts(**RUNNING_PART)] * 2}, "is the last"),
        ({"parts": [PartFacts(**RUNNING_PART)], "status": "failed", "ended": "x",
          "failure": Failure(reason="x", rank=None)}, "status of the last part"),
        ({"parts": [RUNNING_PART | {"total_s": 1.0}]}, "if it is not running"),
        ({"parts": [RUNNING_PART | {"steps": 1, "lost_steps": 2}]}, "lost more"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_the_run_are_refused(change, message):
    with pytest.raises(RecordError, match=message):
        make_record(RUNNING | change)
