"""What --set changes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from candle_p1.errors import ParameterError
from candle_p1.modelling.changes import Changes, parse_changes
from candle_p1.modelling.observation import shape_rule
from candle_p1.modelling.phases import COMPUTE, EXPOSED, LOAD, TRANSFER, WAIT
from candle_p1.modelling.samples import TimeSamples
from tests.planted_records import planted_record

RULE = shape_rule([planted_record("nt3", 2, epochs=48, epochs_scaling="strong")])


def samples(**phases_s):
    times = {LOAD: 8.0, EXPOSED: 4.0, TRANSFER: 2.0, COMPUTE: 10.0} | phases_s
    watts = {name: np.full(200, 5.0 if name == LOAD else 10.0) for name in times}
    return TimeSamples(4, {name: np.full(200, each) for name, each in times.items()}, watts, 1.0)


def test_values_are_read():
    found = parse_changes(["file_system=2", "network=0.5", "epochs_per_rank=8", "batch_size=40"])
    assert found == Changes(2.0, 0.5, None, 8, 40)
    assert str(found).startswith("file system 2 times as fast, network 0.5 times as fast, epochs")
    assert str(found).endswith("per rank 8, batch size 40")
    assert str(Changes()) == "as it is"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["netwerk=2"], "did you mean 'network'"),
        (["network"], "network takes a factor"),
        (["network=fast"], "network takes a factor"),
        (["network=0"], "more than 0"),
        (["network=nan"], "more than 0"),
        (["epochs=1.5"], "epochs takes a whole number"),
        (["epochs=-1"], "more than 0"),
        (["epochs=2", "epochs=3"], "given twice"),
        (["epochs=2", "epochs_per_rank=3"], "only one"),
    ],
)
def test_what_is_not_possible_is_refused(words, message):
    with pytest.raises(ParameterError, match=message) as caught:
        parse_changes(words)
    assert "--set" in str(caught.value)


def test_epochs_and_batches_change_the_shape():
    rule = Changes(epochs_per_rank=8).apply_to(RULE)
    assert (rule.at(16).epochs, rule.is_strong, rule.can_run(5)) == (8, False, True)
    assert Changes(epochs=96).apply_to(RULE).at(4).epochs == 24
    halved = Changes(batch_size=10).apply_to(RULE).at(4)
    assert (halved.batch_size, halved.steps_per_epoch) == (10, 20)
    assert halved.samples == RULE.at(4).samples


def test_a_faster_network_shortens_what_ranks_wait_for_each_other():
    found = Changes(network=2).apply_to_times(samples(), None)
    assert found.total_s[0] == pytest.approx(24 - 3)
    # Energy is that of the phases that got shorter.
    assert found.energy_j[0] == pytest.approx(samples().energy_j[0] - 30)


def test_a_faster_file_system_shortens_the_share_that_is_reading():
    found = Changes(file_system=4).apply_to_times(samples(), 0.5)
    assert found.phases_s[LOAD][0] == pytest.approx(4 + 1)
    assert Changes(file_system=4).apply_to_times(samples(**{WAIT: 4.0}), 0.5).phases_s[WAIT][
        0
    ] == pytest.approx(2 + 0.5)
    unknown = Changes(file_system=4).apply_to_times(samples(), None).phases_s[LOAD]
    assert unknown.min() == pytest.approx(2, abs=0.3)  # all of it is reading
    assert unknown.max() == pytest.approx(8, abs=0.3)  # nothing is
