"""What ranks receive in large jobs, counted in every phase of a simulated run."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
from click.testing import CliRunner

from candle_p1.bench.scale import FIRST, LEADER, OTHER, count_traffic, kinds_of_ranks
from candle_p1.bench.simulated_run import NUM_COLUMNS, NUM_ROWS, PHASES
from candle_p1.cli.bench import command
from candle_p1.errors import ParameterError

RANKS_PER_NODE = 8
FEW = 16
BYTES_PER_DOUBLING = 130
"""A phase may need this much more with every doubling of the number of ranks. A sum over all ranks
of the metrics of an epoch is the most that grows so."""
MOST_BYTES = 3000
"""What a rank may receive in a phase from 16 ranks: the parameters are the most of it."""
MOST_BYTES_OF_EACH = {"a checkpoint": 2500, "end": 8000, "end after a signal": 8000}
"""What rank 0 may receive in a phase from each rank, if it is more than some bytes."""
ROWS_BYTES = 4 * NUM_ROWS * NUM_COLUMNS


@functools.cache
def received(num_ranks):
    """Returns the largest number of bytes by phase and kind of ranks."""
    job = count_traffic(num_ranks, RANKS_PER_NODE)
    kinds = kinds_of_ranks(num_ranks, RANKS_PER_NODE)
    return {
        (phase, kind): max(job.received(phase)[rank].num_bytes for rank in ranks)
        for phase in PHASES
        for kind, ranks in kinds.items()
    }


def check(num_ranks):
    few, many = received(FEW), received(num_ranks)
    allowed = MOST_BYTES + np.log2(num_ranks / FEW) * BYTES_PER_DOUBLING
    for phase in PHASES:
        of_rows = ROWS_BYTES if phase.startswith("load") else 0
        growth = np.log2(num_ranks / FEW) * BYTES_PER_DOUBLING + 40
        assert many[phase, OTHER] <= few[phase, OTHER] + growth, phase
        assert many[phase, OTHER] <= allowed, phase
        # The nodes tell each other how many rows each has.
        of_nodes = 8 * num_ranks / RANKS_PER_NODE if of_rows else 0
        assert many[phase, LEADER] <= allowed + of_rows + of_nodes, phase
        most = MOST_BYTES_OF_EACH.get(phase, 200)
        assert many[phase, FIRST] <= most * num_ranks + allowed + of_rows, phase


def test_what_a_rank_receives_grows_at_most_as_the_logarithm_of_their_number():
    check(128)
    by_rank_0 = sum(num for (_, kind), num in received(128).items() if kind == FIRST)
    assert by_rank_0 / 128 < 16_000, "a few kB per rank in all, with three loads and two ends"


@pytest.mark.extended
@pytest.mark.parametrize("num_ranks", [64, 512, 4096])
def test_the_same_holds_at_thousands(num_ranks):
    check(num_ranks)


def test_the_command_shows_and_writes_what_was_counted(tmp_path):
    file = tmp_path / "scale.json"
    flags = ["scale", "--ranks", "4,16", "--ranks_per_node", "4", "--json", str(file)]
    result = CliRunner().invoke(command, flags)
    assert result.exit_code == 0, result.output
    for shown in (*PHASES, FIRST, LEADER, OTHER, "Horovod"):
        assert shown in result.output
    report = json.loads(file.read_text())
    assert report["simulated"] is True
    found = {(each["num_ranks"], each["variant"], each["ranks"]) for each in report["results"]}
    assert {phase for _, phase, _ in found} == {*PHASES, "all phases"}
    assert {kind for number, _, kind in found if number == 4} == {FIRST, OTHER}, "one node"
    assert {kind for number, _, kind in found if number == 16} == {FIRST, LEADER, OTHER}


@pytest.mark.parametrize("ranks", ["0", "64,x", "100000"])
def test_numbers_of_ranks_that_cannot_be_counted_are_refused(ranks):
    result = CliRunner().invoke(command, ["scale", "--ranks", ranks])
    assert isinstance(result.exception, ParameterError)
    assert "--ranks" in str(result.exception)
