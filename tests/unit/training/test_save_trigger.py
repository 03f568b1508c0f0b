"""When the ranks of a simulated job agree, and on what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.training.save_trigger import Agreed, SaveTrigger
from tools.simulated import SimulatedJob


class Clock:
    """A rank's own."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def on_ranks(num_ranks, work, *, every_s=0.0, signalled=None):
    """Runs `work` with the trigger and the clock of each rank; fails if one waits in vain."""

    def on_rank(comm):
        clock = Clock()
        trigger = SaveTrigger(comm, every_s, lambda: comm.rank == signalled, clock)
        return work(trigger, clock, comm.rank)

    return SimulatedJob(num_ranks).run(on_rank)


@given(st.integers(1, 4), st.lists(st.sampled_from([0.001, 0.02, 0.3, 5.0]), max_size=60))
def test_all_ranks_agree_at_the_same_steps(num_ranks, seconds):
    def work(trigger, clock, rank):
        for took_s in seconds:
            clock.now_s += took_s * (1 + 0.1 * rank)
            assert trigger.step() == Agreed(False, False)

    on_ranks(num_ranks, work)


@pytest.mark.parametrize("step_s", [0.01, 0.1, 3.0])
def test_ranks_agree_about_once_a_second(step_s, monkeypatch):
    rounds, comm, clock = [], SerialCommunicator(), Clock()
    monkeypatch.setattr(comm, "allreduce_sum", lambda array: rounds.append(array) or array)
    trigger = SaveTrigger(comm, 0.0, lambda: False, clock)
    for _ in range(round(60 / step_s)):
        clock.now_s += step_s
        trigger.step()
    expected = 60 / max(step_s, 1.0)
    assert expected <= len(rounds) <= expected + 5


def test_rank_0_decides_by_its_clock():
    def work(trigger, clock, rank):
        clock.now_s = 100.0 * (rank > 0)
        due = [trigger.agree().is_due]
        clock.now_s += 10.0
        due += [trigger.agree().is_due, trigger.agree().is_due]  # until something is saved
        trigger.saved()
        return [*due, trigger.agree().is_due]

    assert on_ranks(3, work, every_s=10.0) == 3 * [[False, True, True, False]]


def test_a_signal_to_one_rank_reaches_all():
    agreed = on_ranks(3, lambda trigger, clock, rank: trigger.agree(), signalled=2)
    assert agreed == 3 * [Agreed(False, True)]
