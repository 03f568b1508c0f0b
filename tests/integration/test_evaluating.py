"""A run that is evaluated on its own test file has the quality that its record states."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from candle_p1.cli import cli
from candle_p1.errors import CandleError
from tests.conftest import CANDLE_P1
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

FILES = {
    "nt3": {"confusion.png", "precision_recall.png", "reliability.png", "roc.png"},
    "p1b1": {"reconstruction_error.png"},
}


@pytest.mark.parametrize("name", ["nt3", "p1b1", "p1b2"])
def test_its_test_file_gives_what_the_record_has(trained, name, tmp_path):
    run = trained / name
    record = read_record(run / "run.json")
    table = record["data"]["files"]["test"]["path"]
    out = tmp_path / "out"
    words = ["evaluate", run, "--test_data", table, "-o", out, "--samples", "200"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli, list(map(str, words)))
    assert result.exit_code == 0, result.output
    content = json.loads((out / "evaluation.json").read_text())
    assert {path.name for path in out.glob("*.png")} == FILES.get(name, FILES["nt3"])
    assert content["synthetic"]
    assert content["data"]["num_samples"] == record["data"]["num_test"]
    metrics, quality = content["metrics"], record["quality"]
    both = metrics.keys() & quality.keys()
    assert both >= ({"mse", "r2", "correlation"} if name == "p1b1" else {"accuracy"})
    for key in both:
        found, recorded = metrics[key], quality[key]
        assert found["recorded"] == recorded["value"]
        # Those of classes are counted, so they agree to the last digit of float32.
        tolerance = 1e-5 if name == "p1b1" else 0
        assert np.float32(found["value"]) == pytest.approx(
            np.float32(recorded["value"]), rel=tolerance, abs=0
        )
        assert found["naive"] == pytest.approx(recorded["naive"], rel=1e-12, nan_ok=True)
    assert "in the record" in result.output
    if name != "p1b1":
        assert sum(map(sum, content["confusion"])) == record["data"]["num_test"]


def test_what_cannot_be_evaluated_is_refused_in_one_line(trained, execute):
    table = read_record(trained / "p1b2/run.json")["data"]["files"]["test"]["path"]
    words = ["evaluate", str(trained / "nt3"), "--test_data", table]
    code, output = execute([*CANDLE_P1, *words])
    assert (code, output.count("\n")) == (2, 1), output
    assert "does not know the names of its features" in output
    with pytest.raises(CandleError, match="is a run of nt3, not of p1b2"):
        raise CliRunner().invoke(cli, [*words, "--benchmark", "p1b2"]).exception
