"""The segments of continued runs: what each did, what was lost, and their sums."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.errors import RecordError
from candle_p1.records.record import (
    continue_record,
    end_record,
    extend_record,
    make_record,
    read_record,
)
from candle_p1.records.segments import (
    ResumePoint,
    earlier_segments,
    is_continued,
    next_segment,
    with_positions,
)
from candle_p1.records.types import Failure, JobEnergy, Position
from tests.planted_records import planted_record
from tests.records import RUNNING

LATER = {"started": "2019-08-05T01:00:00.000+00:00", "num_ranks": 4}
LAST_SIGN = "2019-08-05T00:05:00.000+00:00"
KEPT = ResumePoint(segment=1, steps=20, position=Position(2, 4), checkpoint="ckpts/a")
ABSENT = JobEnergy(kind="absent", reason="no sensor")


def joules(total_j, total_s, kind="measured"):
    return JobEnergy(kind=kind, total_j=total_j, mean_w=total_j / total_s, total_s=total_s)


def died(record, steps, ended="2019-08-05T00:01:00.500+00:00"):
    failure = Failure(reason="rank 1 died", rank=1, steps=steps)
    return extend_record(record, status="failed", ended=ended, failure=failure)


def killed(steps):
    return died(make_record(RUNNING), steps)


def continued(old, kept):
    new = make_record(RUNNING | LATER)
    return extend_record(
        new, segments=[*earlier_segments(old, kept, LAST_SIGN), next_segment(new, kept)]
    )


def totals_of(record, total_s, energy=ABSENT):
    """Returns the totals of a continued run when it ends."""
    ok = planted_record("nt3", record.num_ranks)
    return extend_record(
        make_record({
            name: getattr(record if name in record.model_fields_set else ok, name)
            for name in ok.model_fields_set | record.model_fields_set
        }),
        segments=with_positions(record.segments, None, Position(8, 0), 30),
        status="ok", ended="2019-08-05T01:00:10+00:00", total_s=total_s, energy=energy,
    ).totals  # fmt: skip


AGAIN = died(continued(killed(27), KEPT), 9, ended="2019-08-05T01:00:10+00:00")


@pytest.mark.parametrize(
    ("old", "kept", "lost"),
    [
        (killed(27), KEPT, [7, None]),
        (AGAIN, KEPT, [7, 9, None]),  # the second has no checkpoint of its own
        (AGAIN, replace(KEPT, steps=10, position=Position(1, 0)), [17, 9, None]),  # goes back
        (killed(27), ResumePoint(), [27, None]),  # begins again
        (make_record(RUNNING), KEPT, [None, None]),  # nobody recorded its end
    ],
)
def test_a_segment_has_lost_what_came_after_the_checkpoint(old, kept, lost):
    record = continued(old, kept)
    assert [segment.lost_steps for segment in record.segments] == lost
    *_, last = record.segments
    assert (last.status, last.num_ranks) == ("running", 4)
    assert (last.begin, last.checkpoint) == (kept.position or Position(0, 0), kept.checkpoint)
    assert is_continued(record) == bool(kept.checkpoint)
    assert record.totals is None
    known = [steps for steps in lost[:-1] if steps is not None]
    assert totals_of(record, 12.0).lost_steps == (sum(known) if known else None)


def test_a_segment_ended_when_that_was_recorded_or_it_last_wrote():
    first, second, _ = continued(AGAIN, KEPT).segments
    assert (first.status, first.steps, first.end) == ("failed", 27, Position(2, 4))
    assert (first.total_s, first.time_kind, first.energy.kind) == (60.5, "estimated", "absent")
    assert first.failure.reason == "rank 1 died"
    assert second.end == second.begin == Position(2, 4)
    unrecorded = continued(make_record(RUNNING), KEPT).segments[0]
    assert (unrecorded.status, unrecorded.steps) == ("failed", None)
    assert (unrecorded.ended, unrecorded.total_s) == (LAST_SIGN, 300.0)


INTERRUPTED = extend_record(
    make_record(RUNNING), status="interrupted", ended=LAST_SIGN, total_s=20.0,
    energy=joules(100.0, 20.0), failure=Failure(reason="SIGUSR1", rank=0, steps=20),
)  # fmt: skip
WITH_ENERGY = replace(KEPT, energy=joules(200.0, 40.0))
SO_FAR = extend_record(make_record(RUNNING), energy=joules(600.0, 60.0), known_until_s=60.0)


@pytest.mark.parametrize(
    ("old", "kept", "energy", "expected"),
    [
        (INTERRUPTED, KEPT, joules(60.0, 10.0, "estimated"), (32.0, "measured", "estimated", 160)),
        (killed(27), KEPT, joules(100.0, 20.0), (72.5, "estimated", "absent", None)),
        # Of a killed one, what was known goes on with the mean power.
        (killed(27), WITH_ENERGY, joules(100.0, 20.0), (72.5, "estimated", "estimated", 402.5)),
        (SO_FAR, ResumePoint(), joules(100.0, 20.0), (312.0, "estimated", "estimated", 3100)),
    ],
)
def test_times_and_energies_of_segments_add_up(old, kept, energy, expected):
    totals = totals_of(continued(old, kept), 12.0, energy)
    assert totals.num_segments == 2
    found = (totals.total_s, totals.time_kind, totals.energy.kind, totals.energy.energy_j)
    assert found == expected
    if totals.energy.kind == "absent":
        assert "segment 1" in totals.energy.reason
        assert "100.0 J" in totals.energy.reason
    else:
        assert totals.energy.mean_w == totals.energy.energy_j / totals.total_s


def test_the_watchdog_ends_the_last_segment_too(tmp_path):
    path = tmp_path / "run.json"
    continue_record(path, continued(killed(27), KEPT))
    end_record(path, "interrupted", Failure(reason="SIGTERM", rank=0, steps=3))
    record = read_record(path)
    assert [segment.status for segment in record.segments] == ["failed", "interrupted"]
    assert record.segments[1].steps == 3
    assert record.totals.num_segments == 2
    assert "null" not in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=8))
def test_what_is_lost_is_what_was_begun_but_not_kept(segments):
    """Each segment is killed after some steps, and its newest checkpoint keeps some of them."""
    record = make_record(RUNNING)
    for number, (kept_steps, more) in enumerate(segments, start=1):
        kept = ResumePoint(segment=number, steps=kept_steps, checkpoint=f"c{number}")
        record = continued(died(record, kept_steps + more, LAST_SIGN), kept)
    totals = totals_of(record, 1.0)
    assert totals.lost_steps == sum(more for _, more in segments)
    assert totals.num_segments == len(segments) + 1


SEGMENT = {"status": "running", "started": "x", "num_ranks": 1, "begin": Position(0, 0)}
FAILED = {"status": "failed", "ended": "x", "failure": Failure(reason="x", rank=None)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segments": [SEGMENT] * 2}, "is the last"),
        ({"segments": [SEGMENT]} | FAILED, "status of the last segment"),
        ({"segments": [SEGMENT | {"total_s": 1.0}]}, "if it is not running"),
        ({"segments": [SEGMENT | {"steps": 1, "lost_steps": 2}]}, "lost more"),
    ],
)
def test_segments_that_do_not_fit_the_run_are_refused(change, message):
    with pytest.raises(RecordError, match=message):
        make_record(RUNNING | change)
