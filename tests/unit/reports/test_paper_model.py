"""Published values, and the model of the paper's runs: from some, it predicts the printed gains."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from candle_p1.modelling.forecast import Changes, forecast
from candle_p1.modelling.paper import paper_source
from candle_p1.parameters.declaration import read_any, read_entries
from candle_p1.parameters.parameter import Origin
from candle_p1.reports.forecasts import gains_to_check, inputs_used, paper_inputs
from candle_p1.reports.published import all_published, content, number_words, published
from tests.candle import CANDLE


def gain_of(benchmark, mode, num_ranks):
    sources = {
        loader: paper_source(paper_inputs(benchmark), mode, loader, Changes())
        for loader in ("original", "chunked")
    }
    return forecast(sources, [num_ranks], "original")[1]["gain_percent"]


@pytest.mark.parametrize(
    ("benchmark", "mode", "num_ranks", "printed", "found"),
    [
        ("nt3", "weak", 3072, 34.23, 33.79),
        ("nt3", "strong", 384, 67.68, 66.86),
        ("p1b1", "strong", 96, 78.25, 80.87),
        ("p1b2", "strong", 384, 55.45, 58.04),
    ],
)
def test_the_printed_gains_follow_from_the_other_numbers(
    benchmark, mode, num_ranks, printed, found
):
    gain = gain_of(benchmark, mode, num_ranks)
    assert gain["value"] == pytest.approx(found, abs=0.01)
    assert gain["low"] <= printed <= gain["high"]  # within the span of all readings
    assert gain["high"] - gain["low"] < 16
    checks = gains_to_check(benchmark, mode)
    assert (num_ranks, printed) in {(each["ranks"], each["printed_percent"]) for each in checks}


def test_what_is_predicted_is_not_an_input():
    # The gains that are checked may be anything: no prediction changes with them.
    assert not any("67.68" in each for each in inputs_used("nt3"))
    printed = paper_inputs("nt3")
    changed, plain = (
        paper_source(inputs, "weak", "chunked", Changes()).samples(3072).total_s
        for inputs in (replace(printed, weak_gains=(1.0, 52.44)), printed)
    )
    assert changed == pytest.approx(plain)


def test_values_are_in_what_is_said():
    for each in all_published():
        assert "{" not in each.says
        assert each.value is None or number_words(each.value) in each.says


@pytest.mark.parametrize(
    ("loaders", "values"),
    [
        ((), []),
        (("parallel", "chunked"), [4.65]),
        (("original",), [43.72]),
        (("original", "parallel", "chunked"), [43.72, 4.65, 89.36]),
    ],
)
def test_values_stand_beside_runs_with_the_same_loaders(loaders, values):
    quantities = "broadcast_overhead_s", "improvement_broadcast_overhead_s"
    runs = SimpleNamespace(benchmark="nt3", mode="strong", loaders=frozenset(loaders))
    found = published(runs, *quantities)
    assert [each.value for each in found] == values


@pytest.mark.parametrize(
    "path",
    sorted(CANDLE.glob("*/*_default_model.txt")),
    ids=lambda path: f"{path.parent.name} {path.stem}",
)
def test_what_is_held_of_candles_files_is_what_they_say(path):
    origin = Origin("config file", file=str(path))
    held = content()["candle"][path.name.split("_")[0]]
    entries = {name: text for name, text, _ in read_entries(path, origin)}
    said = {name: read_any(entries[name]) for name in held}
    assert held == said | {"learning_rate": said["learning_rate"] or "none"}
