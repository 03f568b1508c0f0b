"""A few of the kills of `make fault-test KILLS=100`."""

from __future__ import annotations

import pytest

from tests.faults.kill_and_restart import VICTIMS, draw, execute_all, is_too_easy, kills_of, summary

NUM_KILLS = 4


@pytest.mark.extended
@pytest.mark.parallel
@pytest.mark.horovod
def test_killed_runs_end_as_if_nobody_had_killed_them(
    mpirun, data_directory, tmp_path, monkeypatch
):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(data_directory))
    runs = execute_all(NUM_KILLS, seed=1, num_jobs=2, directory=tmp_path)
    print(summary(runs))
    assert [problem for run in runs for problem in run.problems] == []
    kills = kills_of(runs)
    assert len(kills) >= NUM_KILLS
    assert sum(kill.num_good for kill in kills) > 0
    assert {run.command.benchmark for run in runs} == {"nt3", "p1b1"}
    assert not is_too_easy(runs)


def test_all_kinds_of_kills_are_drawn_and_follow_from_the_seed():
    runs = draw(100, seed=1)
    assert runs == draw(100, seed=1) != draw(100, seed=2)
    kills = [kill for run in runs for kill in run.kills]
    assert len(kills) == 100
    assert sum(len(run.kills) for run in runs if run.command.num_ranks == 4) == 10
    assert sum(kill.aim == "writing" for kill in kills) >= 50
    assert {kill.victim for kill in kills} == set(VICTIMS)
    assert len({(run.command.benchmark, run.command.interval) for run in runs}) == 4
