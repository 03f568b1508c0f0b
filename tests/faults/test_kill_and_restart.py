"""A few of the kills of `make fault-test KILLS=100`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.kill_and_restart import execute_all, is_too_easy, most_lost, summary
from tests.faults.killed_run import VICTIMS, draw

NUM_KILLS = 4


@pytest.mark.extended
@pytest.mark.parallel
@pytest.mark.horovod
def test_killed_runs_end_as_if_nobody_had_killed_them(
    mpirun, data_directory, tmp_path, monkeypatch
):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(data_directory))
    runs = execute_all(NUM_KILLS, seed=1, num_jobs=2, directory=tmp_path)
    print(*summary(runs, 0.0), sep="\n")
    assert [problem for run in runs for problem in run.all_problems] == []
    kills = [kill for run in runs for kill in run.kills if kill.counts]
    assert len(kills) >= NUM_KILLS
    assert sum(kill.num_good for kill in kills) > 0
    assert {run.command.benchmark for run in runs} == {"nt3", "p1b1"}
    assert not is_too_easy(runs)


def test_a_skipped_checkpoint_costs_an_interval():
    assert most_lost("epoch 1\n") == 2
    assert most_lost("because the one before is still being\nwritten; from now on") == 3


def test_kills_follow_from_the_seed():
    assert draw(100, seed=3) == draw(100, seed=3) != draw(100, seed=4)


@pytest.mark.parametrize(("num_kills", "on_four"), [(1, 0), (6, 0), (7, 0), (10, 1), (100, 10)])
def test_a_tenth_of_the_kills_is_on_four_ranks(num_kills, on_four):
    runs = draw(num_kills, seed=1)
    ranks = Counter(run.command.num_ranks for run in runs for _ in run.kills)
    assert sum(ranks.values()) == num_kills
    assert ranks[4] == on_four


def test_all_kinds_of_kills_are_drawn():
    runs = draw(100, seed=1)
    kills = [kill for run in runs for kill in run.kills]
    assert sum(kill.aim == "writing" for kill in kills) >= 50
    assert {kill.victim for kill in kills} == set(VICTIMS)
    assert len({(run.command.benchmark, run.command.interval) for run in runs}) == 4
    assert {run.starter for run in runs} == {"mpirun", "candle-p1"}
