"""What ranks receive in large jobs, counted in every phase of a simulated run."""

import numpy as np
import pytest
from click.testing import CliRunner

from tools import record, scale
from tools.scale import FIRST, KINDS, LEADER, OTHER
from tools.simulated_run import NUM_COLUMNS, NUM_ROWS, PHASES

RANKS_PER_NODE = 8
FEW = 16
BYTES_PER_DOUBLING = 130
"""A phase may need this much more with every doubling of the number of ranks. A sum over all ranks
of the metrics of an epoch is the most that grows so."""
MOST_BYTES = 3000
"""What a rank may receive in a phase from 16 ranks: the parameters are the most of it."""
MOST_BYTES_OF_EACH = {"a checkpoint": 2500, "end": 8000, "end after a signal": 8000}
MOST_BYTES_OF_EACH |= {"an error of all ranks": 250}
"""What rank 0 may receive in a phase from each rank, if it is more than some bytes."""
ROWS_BYTES = 4 * NUM_ROWS * NUM_COLUMNS


def num_bytes(num_ranks):
    """Returns the largest number of bytes by phase and kind of ranks."""
    counted = scale.count(num_ranks, RANKS_PER_NODE)
    return counted.set_index(["phase", "ranks"])["bytes"].to_dict()


@pytest.mark.parametrize("num_ranks", [128, pytest.param(512, marks=pytest.mark.extended)])
def test_what_a_rank_receives_grows_at_most_as_the_logarithm_of_their_number(num_ranks):
    few, many = num_bytes(FEW), num_bytes(num_ranks)
    growth = np.log2(num_ranks / FEW) * BYTES_PER_DOUBLING
    allowed = MOST_BYTES + growth
    for phase in PHASES:
        of_rows = ROWS_BYTES if phase.startswith("load") else 0
        assert many[phase, OTHER] <= few[phase, OTHER] + growth + 40, phase
        assert many[phase, OTHER] <= allowed, phase
        # The nodes tell each other how many rows each has.
        of_nodes = 8 * num_ranks / RANKS_PER_NODE if of_rows else 0
        assert many[phase, LEADER] <= allowed + of_rows + of_nodes, phase
        most = MOST_BYTES_OF_EACH.get(phase, 200)
        assert many[phase, FIRST] <= most * num_ranks + allowed + of_rows, phase
    assert many["all phases", FIRST] / num_ranks < 16_000, "with three loads and two ends"


def test_the_programs_show_and_write_what_was_counted(tmp_path):
    file = tmp_path / "scale.csv"
    flags = ["--ranks", 4, "--ranks", 16, "--ranks_per_node", 4, "--csv", file]
    result = CliRunner().invoke(scale.main, list(map(str, flags)))
    assert result.exit_code == 0, result.output
    for shown in (*PHASES, *KINDS):
        assert shown in result.output
    assert file.read_text().count(f"\n{LEADER},") == len(PHASES) + 1  # not of 4 ranks: one node
    result = CliRunner().invoke(record.main, ["--ranks", "12"])
    assert result.exit_code == 0, result.output
    assert "run.json: 0." in result.output
    assert "report: " in result.output
