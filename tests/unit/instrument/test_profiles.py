import pstats

from candle_p1.instrument import logs
from tools.simulated import SimulatedJob


def called():
    return 1


def test_profiles_of_all_ranks_are_merged_on_the_way_to_rank_0(tmp_path):
    statistics = []
    for num_calls in (1, 2, 3, 4, 5):
        profile = logs.CallProfile(True)
        with profile.running():
            for _ in range(num_calls):
                called()
        statistics.append(profile.statistics())

    def work(comm):
        logs.write_profile(tmp_path, comm.rank, statistics[comm.rank])
        return comm.reduce(statistics[comm.rank], logs.merge_profiles)

    merged, *others = SimulatedJob(5).run(work)
    assert others == [None] * 4
    logs.write_profile_table(tmp_path, merged)
    lines = (tmp_path / "profile/top.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines if "(called)" in line] == ["15"]
    fourth = pstats.Stats(str(tmp_path / "profile/rank-0003.prof")).stats
    assert [counts[0] for name, counts in fourth.items() if name[2] == "called"] == [4]
