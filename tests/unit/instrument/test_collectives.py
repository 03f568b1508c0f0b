from dataclasses import replace

import numpy as np
import pytest

from candle_p1.instrument import collectives
from candle_p1.instrument.collectives import (
    CommunicationLog,
    collective,
    note_collective,
    summarize_communication,
)
from candle_p1.instrument.epochs import Epoch, summarize_epoch
from candle_p1.instrument.phases import PhaseTimer
from candle_p1.instrument.phases import active as timer_active


def test_calls_are_added_up_by_name_and_by_size():
    one, other = CommunicationLog(), CommunicationLog()
    one.add("mpi", "barrier", 0, 0.5)
    one.add("horovod", "allreduce a", 1024, 2.0, num_calls=4)
    one.add("horovod", "allreduce b", 2047, 1.0)
    other.add("horovod", "allreduce a", 1024, 6.0, num_calls=4)
    facts = summarize_communication([one, other])
    named = {each.name: each for each in facts.collectives}
    assert list(named) == ["barrier", "allreduce a", "allreduce b"]
    first = named["allreduce a"]
    assert (first.num_calls, first.num_bytes) == (8, 8192)
    assert first.time.values.tolist() == [2.0, 6.0]
    (sizes,) = facts.message_sizes  # a barrier carries nothing
    assert (sizes.from_bytes, sizes.below_bytes, sizes.num_calls) == (1024, 2048, 9)
    assert sizes.bytes_per_s == pytest.approx((8 * 1024 + 2047) / 9.0)


def test_a_collective_is_added_to_log_and_phase_even_if_it_fails():
    log, timer = CommunicationLog(), PhaseTimer()
    with collective("mpi", "unheard", lambda: pytest.fail("nobody asked")):
        pass
    with collectives.active(log), timer_active(timer), timer("load"):
        note_collective("horovod", "broadcast", 8, 0.25)
        with pytest.raises(ValueError, match="x"), collective("mpi", "broadcast", lambda: 3):
            raise ValueError("x")
    assert log.by_name["mpi", "broadcast"].num_bytes == 3
    waited_s = log.by_name["mpi", "broadcast"].seconds
    assert timer.phases["load",].communication_s == pytest.approx(0.25 + waited_s)


def test_an_epoch_separates_its_first_step_and_shows_a_slow_rank():
    fast = Epoch(1.0, 1.0, [0.4, 0.1, 0.2, 0.3], exposed_s=0.36, allreduce_s=0.4)
    slow = Epoch(1.0, 1.0, [0.5, 0.2, 0.2, 0.1], exposed_s=0.2, allreduce_s=0.3)
    ranks = [replace(each, first_step=0).summarize() for each in (fast, slow)]
    facts = summarize_epoch(1, ranks, {})
    assert facts.steps.num == 4
    assert facts.steps.first.values.tolist() == [0.4, 0.5]
    assert facts.steps.median.values.tolist() == pytest.approx([0.2, 0.2])
    assert facts.efficiency.load_balance == pytest.approx(0.9)
    assert facts.efficiency.communication_efficiency == pytest.approx(0.8)
    assert facts.efficiency.parallel_efficiency == pytest.approx(0.72)
    assert facts.hidden_share == pytest.approx(1 - 0.56 / 0.7)
    later = summarize_epoch(2, [fast.summarize(0.5), slow.summarize(0.75)], {})
    assert later.steps.first is None
    assert later.steps.median.values.tolist() == pytest.approx([0.25, 0.2])
    p99_s = np.percentile([fast.steps_s, slow.steps_s], 99, axis=1)
    assert later.steps.p99.values.tolist() == p99_s.tolist()
    assert later.validation.values.tolist() == [0.5, 0.75]


def test_an_epoch_of_two_segments_of_a_run_is_as_long_as_both():
    earlier = Epoch(7.0, 0.5, [0.2, 0.3], 0.1, 0.2)
    rest = Epoch(1.0, 1.2, [0.9, 0.1, 0.2], 0.2, None, 0)
    whole = rest.after(earlier)
    assert whole == Epoch(1.0, 1.7, [0.9, 0.1, 0.2], pytest.approx(0.3), None, 0, num_earlier=2)
    facts = summarize_epoch(3, [whole.summarize()], {}, segment=2)
    assert (facts.segment, facts.steps.num) == (2, 5)
    assert facts.steps.first.values.tolist() == [0.9]  # the first step of a process compiles
    assert facts.steps.median.values.tolist() == pytest.approx([0.15])  # of the later segment's


def test_what_is_not_measured_of_an_epoch_is_absent():
    facts = summarize_epoch(1, [Epoch(0.0, 1.0, [1.0], None, None, 0).summarize()], {})
    assert facts.model_fields_set == {"epoch", "metrics", "begin", "train", "steps"}
    assert facts.steps.model_fields_set == {"num", "first"}
    alone = summarize_epoch(2, [Epoch(0.0, 1.0, [0.5, 0.5]).summarize()], {})
    assert alone.efficiency.parallel_efficiency == 1.0
    assert alone.hidden_share is None
