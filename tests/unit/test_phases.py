from __future__ import annotations

import itertools

import pytest

from candle_p1.instrument.phases import PhaseTimer, summarize_phases


def test_phases_nest_and_add_up():
    entered = []
    phases = PhaseTimer(on_enter=entered.append, clock=itertools.count().__next__)
    with phases("broadcast"):  # clock 0 to 5
        with phases("wait"):
            pass
        with phases("transfer"):
            pass
    with phases("train"):
        pass
    with phases("train"):
        pass
    assert phases.seconds == {
        ("broadcast", "wait"): 1,
        ("broadcast", "transfer"): 1,
        ("broadcast",): 5,
        ("train",): 2,
    }
    assert entered[:2] == [("broadcast",), ("broadcast", "wait")]


def test_the_phase_an_error_leaves_is_known_and_timed():
    phases = PhaseTimer()
    with pytest.raises(ValueError, match="x"), phases("load"), phases("parse"):
        raise ValueError("x")
    assert phases.failed_in == ("load", "parse")
    assert set(phases.seconds) == {("load",), ("load", "parse")}
    with phases("report"):
        pass
    assert ("report",) in phases.seconds


def test_the_summary_keeps_every_ranks_seconds_and_the_order_in_time():
    first = {("load",): 1.0, ("broadcast", "wait"): 3.0, ("broadcast",): 3.5}
    second = {("load",): 4.0, ("broadcast", "wait"): 0.0, ("broadcast",): 0.5}
    summary = summarize_phases([first, second])
    assert list(summary) == ["load", "broadcast"]
    assert summary["load"]["per_rank_s"] == [1.0, 4.0]
    assert summary["broadcast"]["parts"]["wait"]["max_s"] == 3.0
