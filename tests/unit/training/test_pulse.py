"""When the ranks of a simulated job agree, and on what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.training.pulse import Agreed, Pulse


class Job:
    """Ranks with clocks of their own, which go through the same steps."""

    def __init__(self, num_ranks, every_s=0.0):
        self.now, self.num_rounds = [0.0] * num_ranks, 0
        self.signals = [False] * num_ranks
        self.pulses = [
            Pulse(Rank(rank), every_s, lambda rank=rank: self.signals[rank], self.clock(rank))
            for rank in range(num_ranks)
        ]

    def clock(self, rank):
        return lambda: self.now[rank]

    def round(self, call):
        """Calls a method of all ranks, whose collectives take place together."""
        asked = []
        Rank.sums = None
        Rank.asked = asked
        for pulse in self.pulses:
            state = dict(vars(pulse))
            getattr(pulse, call)()
            vars(pulse).update(state)
        assert len(asked) in (0, len(self.pulses)), "only some ranks take part"
        Rank.sums = np.sum(asked, axis=0) if asked else None
        self.num_rounds += bool(asked)
        results = {getattr(pulse, call)() for pulse in self.pulses}
        assert len(results) == 1
        return results.pop()


class Rank:
    asked, sums = None, None

    def __init__(self, rank):
        self.rank = rank

    def allreduce_sum(self, array):
        if Rank.sums is None:
            Rank.asked.append(array)
            return array
        return Rank.sums


@given(st.integers(1, 4), st.lists(st.sampled_from([0.001, 0.02, 0.3, 5.0]), max_size=60))
def test_all_ranks_agree_at_the_same_steps(num_ranks, seconds):
    job = Job(num_ranks)
    for took_s in seconds:
        for rank in range(num_ranks):
            job.now[rank] += took_s * (1 + 0.1 * rank)
        assert job.round("step") == Agreed(False, False)


@pytest.mark.parametrize("step_s", [0.01, 0.1, 3.0])
def test_a_pulse_comes_about_once_a_second(step_s):
    job = Job(2)
    for _ in range(round(60 / step_s)):
        job.now = [now + step_s for now in job.now]
        job.round("step")
    expected = 60 / max(step_s, 1.0)
    assert expected <= job.num_rounds <= expected + 5


def test_rank_0_decides_by_its_clock():
    job = Job(3, every_s=10.0)
    job.now[1:] = [100.0, 100.0]
    assert not job.round("agree").is_due
    job.now[0] = 10.0
    assert job.round("agree").is_due
    assert job.round("agree").is_due  # until something is saved
    for pulse in job.pulses:
        pulse.saved()
    assert not job.round("agree").is_due


def test_a_signal_to_one_rank_reaches_all():
    job = Job(3)
    job.signals[2] = True
    assert job.round("agree") == Agreed(False, True)
