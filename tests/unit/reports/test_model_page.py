"""candle-p1 model and forecast: their page, files and messages, from planted records."""

import csv
import itertools
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.errors import CandleError, ModelError
from candle_p1.modelling.forecast import Changes
from candle_p1.reports.forecasts import forecast_runs
from candle_p1.reports.frame import read_runs
from tests.planted_records import plant

LOADERS = {"original": 24.0, "parallel": 4.0}
COMM = {"operation": "allreduce", "num_ranks": 2, "latency_s": 1e-3, "bandwidth_bytes_per_s": 1e9}


def plant_lawful(
    directory, counts=(1, 2, 4), repeats=3, loaders=LOADERS, *, cores=8, epochs=48, **kwargs
):
    """Writes strong-scaling runs: loading that ranks repeat or share, and shared epochs."""
    random = np.random.default_rng(0)
    directory.mkdir(exist_ok=True)
    for num, repeat, loader in itertools.product(counts, range(repeats), loaders):
        start, load, epoch, exposed = 1 + 0.02 * random.standard_normal(4)
        times = {
            "startup_s": 3 * start,
            "load_s": load * LOADERS[loader] / (num if loader == "parallel" else 1),
            "epoch_s": epoch,
            "first_step_s": 0.1,
            "communication_s": 0.2 * exposed if num > 1 else 0.0,
        }
        facts = {"rng_seed": repeat, "environment": {"node_cores": cores}, "epochs": epochs}
        plant(directory, "nt3", num, loader=loader, **times, **facts, **kwargs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    plant_lawful(directory, energy_j=5000.0)
    return directory


@pytest.fixture(scope="module")
def modelled(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("model")
    result = invoke("model", runs, "-o", out, "--json", out / "given.json")
    assert result.exit_code == 0, result.output
    return result.output, out, json.loads((out / "model.json").read_text())


def rows_of(path, *keys):
    rows = csv.DictReader(path.read_text().splitlines())
    return {tuple(row[key] for key in keys): row for row in rows}


def invoke(*words):
    return CliRunner().invoke(cli.cli, [str(word) for word in words])


def forecast_of(directory):
    return forecast_runs(read_runs([directory]).runs, "nt3", ["strong"], [4], Changes())


def test_the_page_has_figures_and_json_with_what_was_fitted(modelled):
    output, out, content = modelled
    assert output.endswith("index.html: 18 runs, 2 modelled series\n")
    (caption,) = (out / "index.html").read_text().split("<figcaption>")[1:]
    assert "9 runs on 1, 2 and 4 ranks." in caption
    assert content == json.loads((out / "given.json").read_text())
    (first, _) = content["sections"][0]["series"]
    assert (first["runs"], first["ranks"]) == (9, [1, 2, 4])
    assert all(len(each["residuals"]) == 9 for each in first["phases"])
    root = ET.fromstring((out / "figures/nt3-strong-model.svg").read_text())
    assert len(root.findall(".//{http://www.w3.org/2000/svg}text")) > 5


def test_the_tables_hold_what_was_planted(modelled):
    _, out, content = modelled
    tables = out / "tables"
    at = rows_of(tables / "nt3-strong-model-sizes.csv", "series", "ranks")
    four, sixteen = (at["loader original", ranks] for ranks in ("4", "16"))
    assert float(four["measured (s)"]) == pytest.approx(24 + 3 + 12 + 0.1, rel=0.05)
    assert abs(float(four["off (%)"])) < 5
    assert (sixteen["measured (s)"], float(sixteen["extrapolation"])) == ("", 4)
    found = rows_of(tables / "nt3-strong-model-parameters.csv", "series", "phase", "name")
    (section,) = content["sections"]
    known = [p for each in section["series"] for p in each["parameters"] if p["value"] is not None]
    assert len(found) == len(known)  # with those that are 0
    found = {(series, name): row for (series, _, name), row in found.items()}
    rate = found["loader original", "rate at which a rank reads and parses"]
    assert float(rate["value"]) == pytest.approx(5e6 / 24, rel=0.03)
    assert float(rate["low"]) < 5e6 / 24 < float(rate["high"])
    shared = found["loader parallel", "rate at which one thread parses its share of a file"]
    assert float(shared["value"]) == pytest.approx(5e6 / 4, rel=0.05)
    what_if = rows_of(tables / "nt3-strong-what-if.csv", "series", "what if", "ranks")
    as_it_is, faster = (
        float(what_if["loader original", name, "4"]["time (s)"])
        for name in ("as it is", "network twice as fast")
    )
    assert as_it_is - faster == pytest.approx(0.1, rel=0.3)


def test_a_measurement_of_communication_is_used(runs, tmp_path):
    comm = tmp_path / "comm.json"
    comm.write_text(json.dumps({"fits": [COMM]}))
    assert "share of the measured allreduce" in invoke("model", runs, "--comm", comm).output


def test_forecasts_from_runs_have_gains_and_what_if_beside_what_is(runs, tmp_path):
    path = tmp_path / "forecast.json"
    words = ("forecast", "nt3", "--from", runs, "--ranks", "8,16", "--json", path)
    result = invoke(*words, "--set", "network=4")
    assert "network 4 times as fast" in result.output
    (found,) = json.loads(path.read_text())
    points = {(each["series"], each["ranks"]): each for each in found["as_it_is"]}
    original, parallel = (points[f"loader {name}", 8] for name in LOADERS)
    assert original["time_s"]["value"] == pytest.approx(24 + 3 + 6 + 0.1, rel=0.06)
    assert original["extrapolation"] == 2
    assert original["gain_percent"] is None
    assert parallel["gain_percent"]["value"] > 50
    assert original["energy_j"]["low"] < original["energy_j"]["high"]
    assert found["points"][0]["time_s"]["value"] < original["time_s"]["value"]


def test_runs_with_more_threads_than_cores_are_left_out(tmp_path):
    plant_lawful(tmp_path, (1, 2), 2, cores=2)
    plant_lawful(tmp_path, (4,), 2, cores=2, wait_s=200.0)
    (found,) = forecast_of(tmp_path)
    assert "4 runs on 4 ranks" in found["notes"][0]
    assert found["points"][0]["time_s"]["high"] < 60
    # A loader all of whose runs are left out has no forecast, and is named.
    plant_lawful(tmp_path / "threads", (1, 2), 2, ("parallel",))
    plant_lawful(tmp_path / "threads", (1, 2), 2, ("original",), threads=16)
    (found,) = forecast_of(tmp_path / "threads")
    assert "2 runs on 1 rank and 2 runs on 2 ranks" in found["notes"][1]
    assert {each["series"] for each in found["points"]} == {"loader parallel"}


SUMMIT = "forecast nt3 --machine summit --ranks 8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("forecast nt3 --ranks 8", "--machine summit"),
        ("forecast nt3 --ranks 8 --machine theta", "--machine theta"),
        ("forecast p1b3 --ranks 8 --machine summit", "p1b3"),
        (f"{SUMMIT} --mode batch", "--mode"),
        (f"{SUMMIT} --comm c.json", "--comm"),
        ("forecast p1b2 --ranks 8 --from RUNS", "p1b2"),
        ("forecast nt3 --ranks 8 --from RUNS --machine nowhere", "nowhere"),
        ("model RUNS --comm missing.json", "--comm missing.json"),
        ("model RUNS --hold_out 1,2,4", "held out"),
    ],
)
def test_what_cannot_be_done_is_one_message(words, message, runs):
    result = invoke(*words.replace("RUNS", str(runs)).split())
    assert isinstance(result.exception, CandleError)
    assert message in str(result.exception)
    assert result.exception.exit_code == 2


def test_runs_that_are_held_out_are_compared_and_not_used(runs, tmp_path):
    result = invoke("model", runs, "--hold_out", "4", "-o", tmp_path)
    assert "Held out were 6 runs on 4 ranks; of these, 6 are in the 90 %" in result.output
    at = rows_of(tmp_path / "tables/nt3-strong-model-sizes.csv", "series", "ranks")
    four = at["loader original", "4"]
    assert (four["note"], float(four["extrapolation"])) == ("held out", 2)
    assert float(four["measured (s)"]) == pytest.approx(39, rel=0.05)
    held = rows_of(tmp_path / "tables/nt3-strong-model-held-out.csv", "series", "ranks", "phase")
    assert held["loader original", "4", "whole run"]["measured (s)"] == four["measured (s)"]
    loading = held["loader original", "4", "loading"]
    assert float(loading["measured (s)"]) == pytest.approx(24, rel=0.05)
    assert (loading["runs"], loading["inside"]) == ("3", "3")


def test_of_runs_that_are_held_out_the_phase_is_named_that_follows_another_law(tmp_path):
    plant_lawful(tmp_path, (1, 2), loaders=("original",))
    plant_lawful(tmp_path, (4,), loaders=("original",), wait_s=200.0)
    plant_lawful(tmp_path, (4,), 2, ("original",), epochs=16)
    result = invoke("model", tmp_path, "--hold_out", "4", "--json", tmp_path / "model.json")
    assert "epochs 16: all" in result.output
    (section,) = json.loads((tmp_path / "model.json").read_text())["sections"]
    held = {each["phase"]: each for each in section["held_out"]}
    assert (held["whole run"]["inside"], held["loading"]["inside"]) == (0, 3)
    waiting = held["waiting for the slowest loader"]
    assert (waiting["inside"], waiting["measured_s"]) == (0, pytest.approx([200.0] * 3))
    assert waiting["predicted_s"]["high"] < 20


def test_too_few_runs_are_named_with_their_series(tmp_path):
    plant_lawful(tmp_path, (2,), 1)
    with pytest.raises(ModelError, match="loader original: "):
        forecast_of(tmp_path)
    assert isinstance(invoke("model", tmp_path).exception, ModelError)
