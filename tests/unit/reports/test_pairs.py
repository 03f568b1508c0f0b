from __future__ import annotations

from itertools import product

from candle_p1.reports.speed import pairs
from tests.planted_records import experiment_of, planted_record


def test_only_settings_of_the_paper_are_bases_of_improvements():
    loaders = ("original", "chunked", "cached", "parallel")
    records = [
        planted_record("nt3", 1, epochs=8, loader=loader, kernels=kernels, batch_size=size)
        for loader, kernels, size in product(loaders, ("plain", "fast"), (20, 40))
    ]
    experiment = experiment_of(*records)
    found = pairs(experiment)
    for pair in found:
        before, after = pair.base.settings, pair.other.settings
        assert before["batch_size"] == after["batch_size"]
        assert before["loader"] in ("original", "chunked", after["loader"])
        assert after["loader"] != "original" or before["loader"] == "original"
        assert before["kernels"] in ("plain", after["kernels"])
    # 5 pairs of loaders for plain, fast, and plain against fast kernels, and 4 of kernels alone
    assert len(found) == len(set(found)) == 2 * (3 * 5 + 4)
    method = [pair for pair in found if pair.is_method]
    assert method == pairs(experiment, {True})
    loaders = {(pair.base.settings["loader"], pair.other.settings["loader"]) for pair in method}
    assert (loaders, len(method)) == ({("original", "chunked")}, 4)
    assert {*method, *pairs(experiment, {False})} == {*found}
