"""candle-p1 model and predict: their page, files and messages, from planted records."""

from __future__ import annotations

import csv
import itertools
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import CandleError, ModelError
from candle_p1.modelling.changes import Changes
from candle_p1.reports.experiments import group
from candle_p1.reports.frame import read_runs
from candle_p1.reports.modelled import fitted_words, model_experiment
from candle_p1.reports.prediction import predict_runs
from tests.planted_records import plant

LOADERS = {"original": 24.0, "parallel": 4.0}
COMM = {"operation": "allreduce", "num_ranks": 2, "latency_s": 1e-3, "bandwidth_bytes_per_s": 1e9}


def plant_lawful(
    directory,
    counts=(1, 2, 4),
    repeats=3,
    loaders=LOADERS,
    seed=0,
    wait_s=0.0,
    cores=8,
    **kwargs,
):
    """Writes strong-scaling runs: loading that ranks repeat or share, and 48 shared epochs."""
    random = np.random.default_rng(seed)
    for num, repeat, loader in itertools.product(counts, range(repeats), loaders):
        scatter = 1 + 0.02 * random.standard_normal(4)
        load_s = LOADERS[loader] / (num if loader == "parallel" else 1)
        plant(
            directory,
            "nt3",
            num,
            loader=loader,
            load_s=load_s * scatter[0],
            epoch_s=1.0 * scatter[1],
            wait_s=wait_s,
            startup_s=3 * scatter[2],
            first_step_s=0.1,
            communication_s=0.2 * scatter[3] if num > 1 else 0.0,
            rng_seed=repeat,
            environment={"node_cores": cores},
            **{"epochs": 48} | kwargs,
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    plant_lawful(directory, energy_j=5000.0)
    return directory


@pytest.fixture(scope="module")
def modelled(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("model")
    return invoke("model", runs, "-o", out, "--json", out / "given.json"), out


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def invoke(*words):
    return CliRunner().invoke(cli.cli, [str(word) for word in words])


def test_the_page_has_figures_with_what_was_fitted_and_what_cannot_be_known(modelled):
    result, out = modelled
    assert result.exit_code == 0, result.output
    assert result.output.endswith("index.html: 18 runs, 2 modelled series\n")
    page = (out / "index.html").read_text()
    captions = page.split("<figcaption>")[1:]
    assert len(captions) == 2
    for caption in captions:
        text = caption.split("</figcaption>")[0]
        assert "Fitted phase by phase to 9 runs on 1, 2 and 4 ranks." in text
        assert "Beyond 4 ranks nothing was measured" in text
        assert "the model cannot know" in text
    assert "<script" not in page
    assert 'href="http' not in page
    for name in ("nt3-strong-model", "nt3-strong-model-shares"):
        root = ET.fromstring((out / f"figures/{name}.svg").read_text())
        assert len(root.findall(".//{http://www.w3.org/2000/svg}text")) > 5


def test_the_tables_hold_what_was_planted(modelled):
    _, out = modelled
    rows = rows_of(out / "tables/nt3-strong-model-sizes.csv")
    at = {(row["series"], row["ranks"]): row for row in rows}
    four = at["loader original", "4"]
    assert float(four["measured (s)"]) == pytest.approx(24 + 3 + 12 + 0.1, rel=0.05)
    assert abs(float(four["model is off by (%)"])) < 5
    assert float(at["loader original", "16"]["extrapolation factor"]) == 4
    assert at["loader original", "16"]["measured (s)"] == ""
    parameters = {
        (row["series"], row["parameter"]): row
        for row in rows_of(out / "tables/nt3-strong-model-parameters.csv")
    }
    rate = parameters["loader original", "rate at which a rank reads and parses"]
    assert float(rate["value"]) == pytest.approx(5e6 / 24, rel=0.03)
    assert float(rate["low"]) < 5e6 / 24 < float(rate["high"])
    shared = parameters["loader parallel", "rate at which one thread parses its share of a file"]
    assert float(shared["value"]) == pytest.approx(5e6 / 4, rel=0.05)
    what_if = rows_of(out / "tables/nt3-strong-what-if.csv")
    assert {row["what if"] for row in what_if} >= {"as it is", "network twice as fast"}


def test_the_json_has_all_parameters_with_intervals_and_residuals(modelled):
    _, out = modelled
    content = json.loads((out / "model.json").read_text())
    assert content == json.loads((out / "given.json").read_text())
    (section,) = content["sections"]
    first = section["series"][0]
    assert (first["runs"], first["ranks"]) == (9, [1, 2, 4])
    assert all(each["confidence"] == 0.95 for each in first["parameters"])
    assert all(len(each["residuals"]) == 9 for each in first["phases"])


def test_a_report_shows_the_models_too(runs, tmp_path):
    result = invoke("report", runs, "-o", tmp_path)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "index.html").read_text()
    assert "Model: total time against ranks" in page
    assert "Fitted phase by phase to 9 runs" in page
    assert (tmp_path / "tables/nt3-strong-what-if.csv").exists()


def test_a_measurement_of_communication_is_used(runs, tmp_path):
    comm = tmp_path / "comm.json"
    comm.write_text(json.dumps({"fits": [COMM]}))
    result = invoke("model", runs, "--comm", comm)
    assert result.exit_code == 0, result.output
    assert "share of the measured allreduce that is exposed" in result.output
    assert "Measured: allreduce on 2 ranks: latency 0.001 s" in result.output


def test_series_that_differ_in_epochs_only_share_a_model(tmp_path):
    for epochs in (16, 48):
        plant_lawful(tmp_path, (1, 2), 2, ("original",), epochs=epochs)
    (experiment,) = group(read_runs([tmp_path]).runs)
    (first, second), _ = model_experiment(experiment)
    assert first.model is second.model
    assert len(first.model.observations) == 8
    assert (first.rule.at(2).epochs, second.rule.at(2).epochs) == (8, 24)


def test_predictions_from_runs_have_gains_and_the_best_scale(runs, tmp_path):
    path = tmp_path / "predicted.json"
    result = invoke("predict", "nt3", "--from", runs, "--ranks", "8,16", "--json", path)
    assert result.exit_code == 0, result.output
    (prediction,) = json.loads(path.read_text())
    points = {(each["series"], each["ranks"]): each for each in prediction["points"]}
    original, parallel = (points[f"loader {name}", 8] for name in LOADERS)
    assert original["time_s"]["value"] == pytest.approx(24 + 3 + 6 + 0.1, rel=0.06)
    assert original["extrapolation"] == 2
    assert original["gain_percent"] is None
    assert parallel["gain_percent"]["value"] > 50
    assert original["energy_j"]["low"] < original["energy_j"]["high"]
    assert {each["series"] for each in prediction["best"]} == {f"loader {name}" for name in LOADERS}
    assert "Fitted phase by phase to 9 runs" in prediction["notes"][0]


def test_runs_with_more_threads_than_cores_are_left_out(tmp_path):
    plant_lawful(tmp_path, (1, 2), 2, cores=2)
    plant_lawful(tmp_path, (4,), 2, cores=2, wait_s=200.0)
    words = "4 runs on 4 ranks of 1 thread (4 on a node of 2 cores)"
    result = invoke("model", tmp_path, "--hold-out", "4", "-o", tmp_path / "model")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"Left out of the model, which takes at most one thread for each core: {words}." in said
    assert "Held out were" not in said
    rows = rows_of(tmp_path / "model/tables/nt3-strong-model-sizes.csv")
    assert {row["measured (s)"] for row in rows if row["ranks"] == "4"} == {""}
    (prediction,) = predict_runs(read_runs([tmp_path]), "nt3", ["strong"], [4], Changes())
    assert words in prediction.notes[0]
    assert "predicted on further nodes of its kind" in prediction.notes[0]
    assert prediction.found.points[0].time_s.high < 60


def test_a_loader_whose_runs_are_all_left_out_is_named_beside_predictions(tmp_path):
    plant_lawful(tmp_path, (1, 2), 2, ("parallel",))
    plant_lawful(tmp_path, (1, 2), 2, ("original",), threads=16)
    (prediction,) = predict_runs(read_runs([tmp_path]), "nt3", ["strong"], [4], Changes())
    assert "2 runs on 1 rank of 16 threads (1 on a node of 8 cores)" in prediction.notes[1]


@pytest.mark.parametrize("words", [("model", "RUNS"), ("predict", "nt3", "--ranks", "8")])
@pytest.mark.parametrize("counts", [(4, 8), (1, 4)])
def test_without_runs_that_have_cores_enough_there_is_no_model(words, counts, tmp_path):
    plant_lawful(tmp_path, counts, 2, ("original",), cores=2, threads=1)
    given = words if "RUNS" in words else (*words, "--from", "RUNS")
    result = invoke(*(tmp_path if word == "RUNS" else word for word in given))
    assert result.exception.exit_code == 2
    assert "2 runs on 4 ranks of 1 thread (4 on a node of 2 cores)" in str(result.exception)


def test_what_if_stands_beside_what_is(runs):
    result = invoke("predict", "nt3", "--from", runs, "--ranks", "8", "--set", "network=4")
    assert result.exit_code == 0, result.output
    assert "as it is" in result.output
    assert "network 4 times as fast" in result.output


def test_two_sizes_predict_a_third(tmp_path):
    """Of ten series, at least eight have their runs on 4 ranks in the interval from 1 and 2."""
    inside, widths = [], []
    for case in range(5):
        known, held = tmp_path / f"known{case}", tmp_path / f"held{case}"
        for i, (directory, counts) in enumerate(((known, (1, 2)), (held, (4,)))):
            directory.mkdir()
            plant_lawful(directory, counts, seed=2 * case + i)
        (prediction,) = predict_runs(read_runs([known]), "nt3", ["strong"], [4], Changes())
        for point in prediction.found.points:
            loader = point.series.removeprefix("loader ")
            totals = [r.total_s for r in read_runs([held]).runs if r.loader == loader]
            inside.append(point.time_s.low <= np.median(totals) <= point.time_s.high)
            widths.append((point.time_s.high - point.time_s.low) / 2 / point.time_s.value)
    assert sum(inside) >= 8
    assert max(widths) <= 0.25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict", "nt3", "--ranks", "8"), "--machine summit"),
        (("predict", "nt3", "--ranks", "8", "--machine", "theta"), "--machine theta"),
        (("predict", "p1b3", "--ranks", "8", "--machine", "summit"), "too little about p1b3"),
        (("predict", "nt3", "--ranks", "8", "--machine", "summit", "--mode", "batch"), "--mode"),
        (("predict", "nt3", "--ranks", "0", "--machine", "summit"), "--ranks 0"),
        (("predict", "nt3", "--ranks", "8", "--machine", "summit", "--set", "x=1"), "--set x=1"),
        (("predict", "nt3", "--ranks", "8", "--machine", "summit", "--comm", "c.json"), "--comm"),
        (("predict", "p1b2", "--ranks", "8", "--from", "RUNS"), "no finished run of p1b2"),
        (("predict", "nt3", "--ranks", "8", "--from", "RUNS", "--machine", "nowhere"), "nowhere"),
        (("model", "RUNS", "--comm", "missing.json"), "--comm missing.json"),
        (("model", "missing"), "missing"),
    ],
)
def test_what_cannot_be_done_is_one_message(words, message, runs):
    result = invoke(*(runs if word == "RUNS" else word for word in words))
    assert isinstance(result.exception, CandleError)
    assert message in str(result.exception)
    assert result.exception.exit_code == 2


def test_runs_that_are_held_out_are_compared_and_not_used(tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    plant_lawful(runs)
    result = invoke("model", runs, "--hold-out", "4", "-o", tmp_path)
    assert result.exit_code == 0, result.output
    assert (
        "Held out were 6 runs on 4 ranks; of these, 6 are in the 90 % prediction" in result.output
    )
    assert "Fitted phase by phase to 6 runs on 1 and 2 ranks" in result.output
    rows = rows_of(tmp_path / "tables/nt3-strong-model-sizes.csv")
    at = {(row["series"], row["ranks"]): row for row in rows}
    four = at["loader original", "4"]
    assert four["note"] == "held out"
    assert float(four["extrapolation factor"]) == 2
    assert float(four["measured (s)"]) == pytest.approx(39, rel=0.05)
    rows = rows_of(tmp_path / "tables/nt3-strong-model-held-out.csv")
    of_original = {row["phase"]: row for row in rows if row["series"] == "loader original"}
    assert {row["ranks"] for row in rows} == {"4"}
    assert of_original["whole run"]["measured (s)"] == four["measured (s)"]
    loading = of_original["loading"]
    assert float(loading["measured (s)"]) == pytest.approx(24, rel=0.05)
    assert (loading["runs"], loading["of these, in the interval"]) == ("3", "3")
    assert float(loading["low (s)"]) < float(loading["measured (s)"]) < float(loading["high (s)"])


def test_of_runs_that_are_held_out_the_phase_is_named_that_follows_another_law(tmp_path):
    plant_lawful(tmp_path, (1, 2), loaders=("original",))
    plant_lawful(tmp_path, (4,), loaders=("original",), wait_s=200.0)
    result = invoke("model", tmp_path, "--hold-out", "4", "--json", tmp_path / "model.json")
    assert "of these, 0 are in the 90 %" in result.output
    (section,) = json.loads((tmp_path / "model.json").read_text())["sections"]
    inside = {each["phase"]: each["inside"] for each in section["held_out"]}
    assert (inside["whole run"], inside["loading"]) == (0, 3)
    (waiting,) = (each for each in section["held_out"] if "waiting" in each["phase"])
    assert waiting["inside"] == 0
    assert waiting["measured_s"] == pytest.approx([200.0] * 3)
    assert waiting["predicted_s"]["high"] < 20


def test_a_series_whose_runs_are_all_held_out_is_named_beside_others_of_its_model(tmp_path):
    plant_lawful(tmp_path, (1, 2, 4), 2, ("original",), epochs=16)
    plant_lawful(tmp_path, (4,), 2, ("original",), epochs=48)
    result = invoke("model", tmp_path, "--hold-out", "4")
    assert result.exit_code == 0, result.output
    assert "epochs 48: all of its runs are held out" in result.output


def test_a_model_without_the_runs_of_all_numbers_of_ranks_is_refused(runs):
    everything = invoke("model", runs, "--hold-out", "1,2,4")
    assert "all of its runs are held out" in str(everything.exception)


def test_too_few_runs_are_named_with_their_series(tmp_path):
    plant_lawful(tmp_path, (2,), 1)
    with pytest.raises(ModelError, match="loader original: a model takes at least 2 runs"):
        predict_runs(read_runs([tmp_path]), "nt3", ["strong"], [4], Changes())
    plant(tmp_path, "p1b1", 1, status="failed")
    result = invoke("model", tmp_path)
    assert "repeat the runs" in str(result.exception)


def test_the_words_tell_of_two_sizes(tmp_path):
    plant_lawful(tmp_path, (1, 2), 2)
    (few,) = group(read_runs([tmp_path]).runs)
    models, _ = model_experiment(few)
    assert "5 % to the standard deviation, which is an assumption" in fitted_words(models)
