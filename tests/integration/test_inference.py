"""Trained networks applied to samples, by commands and by plain Keras; and their evaluation."""

import csv
import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from candle_p1.benchmark import find_benchmark
from candle_p1.cli import cli
from candle_p1.data.reader import FileSet, Reader
from candle_p1.errors import CandleError
from candle_p1.inference.tables import read_samples, write_predictions
from candle_p1.inference.trained import open_run
from tests.conftest import ROOT
from tests.integration.conftest import NARROW
from tests.records import read_record

pytestmark = [pytest.mark.extended, pytest.mark.parallel]

NUM_GENES, BATCH = 40, 16
DRAWN = {
    "nt3": {"confusion.png", "precision_recall.png", "reliability.png", "roc.png"},
    "p1b1": {"reconstruction_error.png"},
}
"""What an evaluation draws."""


def run_cli(*words):
    """Runs a command in this process; returns how it ended."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli, list(map(str, words)))


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    """A table of two tissues with names, as people have it."""
    random = np.random.default_rng(1)
    tissue = np.tile(["normal", "tumor"], 60)
    levels = random.normal(8, 1, (120, NUM_GENES))
    levels[tissue == "tumor", ::2] += 1
    table = pd.DataFrame(levels, columns=[f"GENE{i}" for i in range(NUM_GENES)]).round(3)
    table.insert(0, "sample", [f"S{i}" for i in range(120)])
    table.insert(1, "tissue", tissue)
    directory = tmp_path_factory.mktemp("cohort")
    table.to_csv(directory / "cohort.csv", index=False)
    flags = ["--label", "tissue", "--out", directory / "own"]
    assert run_cli("data", "import", "nt3", directory / "cohort.csv", *flags).exit_code == 0
    return directory


@pytest.fixture(scope="module")
def own(cohort, train_all):
    """The directory of NT3's run on the cohort, with checkpoints and a model for inference."""
    flags = "--epochs 3 --scaling std --learning_rate 0.01 --save_model inference"
    line = f"{NARROW} --data_dir {cohort / 'own'} {flags} --ckpt_save_interval 1"
    return train_all(1, {"own": line}) / "own"


def predicted(run, table, out, **options):
    """Returns the table that `predict` writes."""
    trained = open_run(run, **options)
    write_predictions(trained, read_samples(trained, table), out, BATCH)
    return pd.read_csv(out, dtype={"class": str})


def test_own_test_file_has_the_accuracy_of_the_record(own, cohort, tmp_path):
    (test,) = (cohort / "own").glob("*test*")
    labels = pd.read_csv(test, header=None)[0].map({0: "normal", 1: "tumor"})
    record = read_record(own / "run.json")
    tables = [predicted(own, test, tmp_path / "p.csv", checkpoint=c) for c in (None, "latest")]
    for found in tables:
        hits = np.float32((found["class"] == labels).sum()) / np.float32(len(labels))
        assert hits == np.float32(record["quality"]["accuracy"]["value"])
    pd.testing.assert_frame_equal(*tables)
    names = [f"GENE{i}" for i in range(NUM_GENES)]
    inputs = json.loads((own / "inputs.json").read_text())
    assert (inputs["features"], inputs["classes"]) == (names, ["normal", "tumor"])
    assert inputs["split"]["num_test"] == len(labels)
    assert record["data"]["inputs"]["classes"] == ["normal", "tumor"]


def test_columns_are_found_by_name(own, cohort, tmp_path):
    table = pd.read_csv(cohort / "cohort.csv")
    first = predicted(own, cohort / "cohort.csv", tmp_path / "p.csv")
    assert (first["class"] == table["tissue"]).mean() > 0.75
    others = table.iloc[:, [0, *np.random.default_rng(0).permutation(np.arange(2, 42))]]
    others.assign(EXTRA=1.5).to_csv(tmp_path / "shuffled.tsv.gz", sep="\t", index=False)
    words = ["predict", own, tmp_path / "shuffled.tsv.gz", "-o", tmp_path / "q.csv"]
    found = run_cli(*words, "--batch_size", BATCH)
    assert found.exit_code == 0, found.output
    assert "further" in found.output
    assert "EXTRA" in found.output
    assert (tmp_path / "q.csv").read_bytes() == (tmp_path / "p.csv").read_bytes()
    table.rename(columns={"GENE7": "GENX"}).to_csv(tmp_path / "renamed.csv", index=False)
    found = run_cli("predict", own, tmp_path / "renamed.csv", "-o", tmp_path / "r.csv")
    assert "'GENE7'" in str(found.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("p.csv", "q.csv", "renamed.csv", "shuffled.tsv.gz")
    ]


def test_files_are_found_from_any_directory(own, cohort, tmp_path):
    record = read_record(own / "run.json")
    record["parameters"]["save_path"]["value"] = "results"  # where the run began
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert open_run(tmp_path).weights == own / "model.keras"


def test_plain_keras_takes_raw_values(own, trained, cohort, small_data, tmp_path):
    """The model for inference by itself, and the program in the docs with any other one."""
    import keras

    model = keras.saving.load_model(own / "model.keras")
    raw = pd.read_csv(cohort / "cohort.csv").iloc[:, 2:].to_numpy(np.float32)
    found = model.predict(raw[:, :, np.newaxis], verbose=0)
    expected = predicted(own, cohort / "cohort.csv", tmp_path / "p.csv")
    for name in ("normal", "tumor"):
        np.testing.assert_allclose(found[name][:, 0], expected[f"probability_{name}"], atol=1e-5)
    page = (ROOT / "docs/running.md").read_text()
    (program,) = re.findall(r"```python\n(import json\n.*?)```", page, re.S)
    test = small_data("p1b2") / find_benchmark("p1b2").recipe.roles["test"]
    for name in ("model.keras", "inputs.json"):
        (tmp_path / name).symlink_to(trained / "p1b2" / name)
    (tmp_path / "new.csv").symlink_to(test)
    (tmp_path / "predict.py").write_text(program)
    subprocess.run([sys.executable, "-I", "predict.py"], cwd=tmp_path, check=True)
    table = pd.read_csv(test)  # with names, and columns in any order
    table[[*table.columns[:2], *table.columns[:1:-1]]].to_csv(tmp_path / "r.csv", index=False)
    expected = predicted(trained / "p1b2", tmp_path / "r.csv", tmp_path / "q.csv")
    assert expected["sample"].tolist() == table["case_id"].tolist()
    assert pd.read_csv(tmp_path / "classes.csv")["class"].tolist() == expected["class"].tolist()


def test_p1b1_gives_the_latent_space_and_the_error(trained, small_data, tmp_path):
    test = small_data("p1b1") / find_benchmark("p1b1").recipe.roles["test"]
    found = predicted(trained / "p1b1", test, tmp_path / "p.csv")
    latent = np.load(trained / "p1b1" / "latent.npz")["latent"]
    columns = [f"latent_{i + 1}" for i in range(latent.shape[1])]
    # The run shuffles the cases.
    ours, theirs = (np.sort(each, axis=0) for each in (found[columns].to_numpy(), latent))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    mse = read_record(trained / "p1b1" / "run.json")["quality"]["mse"]["value"]
    assert found["reconstruction_mse"].mean() == pytest.approx(mse, rel=1e-4)


def test_p1b3_predicts_responses(trained, small_data, tmp_path):
    benchmark, run = find_benchmark("p1b3"), trained / "p1b3"
    files = small_data("p1b3")
    params = benchmark.read_parameters(["--config_file", str(run / "final_params.txt")])
    paths = {role: files / benchmark.recipe.roles[role] for role in benchmark.needed_files(params)}
    raw = benchmark.load_data(Reader(FileSet.at(paths)), params)
    test = benchmark.preprocess(raw, params).test
    drugs, lines = raw.responses.drug.names, raw.responses.line.names
    rows = zip(
        [drugs[code] for code in test.x.indices[1]],
        [lines[code] for code in test.x.indices[0]],
        test.x.own[:, 0].tolist(),
        strict=True,
    )
    with (tmp_path / "new.csv").open("w") as file:
        csv.writer(file).writerows([("NSC", "CELLNAME", "LOG_CONCENTRATION"), *rows])
    record = read_record(run / "run.json")
    assert "TableDense" in record["model"]["fast_kernels"]
    for checkpoint in (None, "latest"):
        found = predicted(run, tmp_path / "new.csv", tmp_path / "p.csv", checkpoint=checkpoint)
        mse = np.square(found["growth_percent"] / 100 - test.y[:, 0]).mean()
        assert mse == pytest.approx(record["quality"]["loss"]["value"], rel=1e-5)


def unfinished(run, directory):
    record = read_record(run / "run.json")
    failed = {"status": "failed", "failure": {"reason": "killed", "rank": 0}}
    (directory / "run.json").write_text(json.dumps(record | failed))


def without_model(run, directory):
    (directory / "run.json").symlink_to(run / "run.json")
    (directory / "inputs.json").symlink_to(run / "inputs.json")


def without_inputs(run, directory):
    for name in ("run.json", "model.keras"):
        (directory / name).symlink_to(run / name)


def after_another_run(changed):
    """Returns what prepares a directory in which another run has saved the same file, too."""

    def prepare(run, directory):
        for name in ("run.json", "model.keras", "inputs.json"):
            content = (run / name).read_bytes() + b" " * (name == changed)
            (directory / name).write_bytes(content)

    return prepare


def without_layers(run, directory):
    without_model(run, directory)
    (directory / "ckpts").symlink_to(run / "ckpts")


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (unfinished, [], "has not finished.*--checkpoint"),
        (without_model, [], "no model.keras.*--save_model"),
        (without_model, ["--checkpoint", "best"], "no best checkpoint"),
        (without_layers, ["--checkpoint", "latest"], "model.json.*train again with --save_model"),
        (without_inputs, [], "inputs.json.*train again with --save_model"),
        (after_another_run("inputs.json"), [], "inputs.json.*another run .*--save_path"),
        (after_another_run("model.keras"), [], "model.keras.*another run .*--save_path"),
        (without_model, ["--benchmark", "p1b2"], "a run of nt3, not of p1b2"),
    ],
)
def test_runs_that_cannot_predict_are_refused(own, cohort, tmp_path, prepare, options, message):
    prepare(own, tmp_path)
    words = ["predict", tmp_path, cohort / "cohort.csv", "-o", tmp_path / "p", *options]
    with pytest.raises(CandleError, match=message):
        raise run_cli(*words).exception
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", ["nt3", "p1b1", "p1b2"])
def test_its_test_file_gives_what_the_record_has(trained, name, tmp_path):
    run = trained / name
    record = read_record(run / "run.json")
    table = record["data"]["files"]["test"]["path"]
    out = tmp_path / "out"
    words = ["evaluate", run, "--test_data", table, "-o", out, "--samples", "200"]
    result = run_cli(*words)
    assert result.exit_code == 0, result.output
    content = json.loads((out / "evaluation.json").read_text())
    assert {path.name for path in out.glob("*.png")} == DRAWN.get(name, DRAWN["nt3"])
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "does not know the names of its features"),
        (["--benchmark", "p1b2"], "is a run of nt3, not of p1b2"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(trained, options, message):
    table = read_record(trained / "p1b2/run.json")["data"]["files"]["test"]["path"]
    with pytest.raises(CandleError, match=message):
        raise run_cli("evaluate", trained / "nt3", "--test_data", table, *options).exception
