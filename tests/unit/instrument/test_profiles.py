from __future__ import annotations

import pstats

from candle_p1.instrument.profiles import (
    CallProfile,
    merge_profiles,
    write_profile,
    write_profile_table,
)
from tools.simulated import SimulatedJob


def called():
    return 1


def test_profiles_of_all_ranks_are_merged_on_the_way_to_rank_0(tmp_path):
    statistics = []
    for num_calls in (1, 2, 3, 4, 5):
        profile = CallProfile(True)
        with profile.running():
            for _ in range(num_calls):
                called()
        statistics.append(profile.statistics())

    def work(comm):
        write_profile(tmp_path, comm.rank, statistics[comm.rank])
        return comm.reduce(statistics[comm.rank], merge_profiles)

    merged, *others = SimulatedJob(5).run(work)
    assert others == [None] * 4
    write_profile_table(tmp_path, merged)
    (line,) = [
        line
        for line in (tmp_path / "profile/top.txt").read_text().splitlines()
        if "(called)" in line
    ]
    assert line.split()[0] == "15"
    fourth = pstats.Stats(str(tmp_path / "profile/rank-0003.prof")).stats
    assert [counts[0] for name, counts in fourth.items() if name[2] == "called"] == [4]


def test_a_run_that_is_not_profiled_has_no_statistics():
    profile = CallProfile(False)
    with profile.running():
        called()
    assert profile.statistics() is None
