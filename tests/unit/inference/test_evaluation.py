import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.inputs import Target
from candle_p1.datasets.foreign import SampleOptions
from candle_p1.datasets.importing import (
    ImportOptions,
    ImportTarget,
    understand_samples,
    write_import,
)
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import content_sha256
from candle_p1.inference.evaluation import Bootstrap, Evaluator, tables
from candle_p1.inference.tables import Block, NewSamples, read_samples
from tests.unit.inference.conftest import run_of

CLASSES = ["normal", "tumor"]


@pytest.fixture
def cohort(tmp_path):
    """A table of 30 patients with two samples each, which are alike; G1 tells the class."""
    random = np.random.default_rng(1)
    patients = np.repeat(np.arange(30), 2)
    tumor = patients % 2
    genes = random.normal(size=(60, 3))
    genes[:, 1] = 2 * tumor - 1 + random.normal(size=30)[patients]
    table = pd.DataFrame(genes, columns=["G0", "G1", "G2"])
    table.insert(0, "sample", [f"S{i}" for i in range(60)])
    table.insert(1, "tissue", np.array(CLASSES)[tumor])
    table.insert(2, "patient", [f"P{i}" for i in patients])
    table.to_csv(tmp_path / "cohort.csv", index=False)
    return tmp_path / "cohort.csv"


def run_that_trained(path, name="nt3", classes=CLASSES, quality=None, role="test"):
    """A run whose network takes the second gene for the evidence of a tumor."""

    def outputs(x):
        evidence = np.asarray(x).reshape(len(x), -1)[:, 1]
        p = 1 / (1 + np.exp(-2 * evidence))
        return np.stack([1 - p, p], axis=1) if name == "nt3" else np.asarray(x) + 0.5

    file = SimpleNamespace(
        path=str(path), file_bytes=path.stat().st_size, sha256=content_sha256(path)
    )
    figures = {key: SimpleNamespace(value=value) for key, value in (quality or {}).items()}
    data = SimpleNamespace(synthetic=True, files={role: file})
    return run_of(
        name,
        classes,
        mean_target=[0.7, 0.3] if name == "nt3" else [0, 0, 0],
        record=SimpleNamespace(data=data, quality=figures),
        model=SimpleNamespace(predict_on_batch=outputs, layers=[SimpleNamespace()]),
        weights=path.parent / "model.keras",
    )


def evaluate(trained, path, group=None, label="tissue", **options):
    samples = read_samples(trained, path, SampleOptions(label=label, group=group))
    evaluator = Evaluator(trained, samples, path.parent / "out", Bootstrap(group=group, **options))
    return evaluator, evaluator.evaluate()


def test_what_is_written_about_classes(cohort):
    trained = run_that_trained(cohort, quality={"accuracy": 0.8, "loss": 0.5})
    evaluator, content = evaluate(trained, cohort, "patient", num_draws=200, seed=4)
    assert evaluator.warnings == []
    assert json.loads((cohort.parent / "out/evaluation.json").read_text()) == content
    assert {path.name for path in (cohort.parent / "out").iterdir()} == {
        *("evaluation.json", "confusion.png", "roc.png", "precision_recall.png", "reliability.png")
    }
    assert content["synthetic"] is True
    data = content["data"]
    assert data["sha256"] == content_sha256(cohort)
    assert (data["num_samples"], data["num_units"], data["same_as"]) == (60, 30, ["test"])
    assert [sum(row) for row in content["confusion"]] == [30, 30]
    table = pd.read_csv(cohort)
    right = (table["G1"] > 0) == (table["tissue"] == "tumor")
    accuracy = content["metrics"]["accuracy"]
    assert accuracy["value"] == right.mean()
    assert accuracy["recorded"] == 0.8
    assert accuracy["naive"] == 0.5  # of always predicting the class that training had most of
    assert accuracy["low"] < right.mean() < accuracy["high"]
    assert "recorded" not in content["metrics"]["macro_f1"]
    of_samples = evaluate(trained, cohort, num_draws=200, seed=4)[1]["metrics"]["accuracy"]
    width, narrow = (each["high"] - each["low"] for each in (accuracy, of_samples))
    assert width > 1.2 * narrow
    assert [row["name"] for row in content["classes"]] == CLASSES
    curve = content["curves"]["tumor"]
    area = np.trapezoid([0, *curve["recall"]], [0, *curve["false_positive_rate"]])
    assert content["classes"][1]["auroc"]["value"] == pytest.approx(area)
    assert sum(each["num_samples"] for each in content["reliability"]) == 60
    first, second = tables(content)
    assert first.row_count == len(content["metrics"])
    assert second.row_count == 2


def test_what_is_written_about_reconstructions(cohort):
    trained = run_that_trained(cohort, "p1b1", classes=None, role="train")
    evaluator, content = evaluate(trained, cohort, label=None, num_draws=100)
    assert evaluator.warnings == [
        "the network was trained on samples of this file: new ones will do worse"
    ]
    assert content["metrics"]["mse"]["value"] == pytest.approx(0.25)
    genes = pd.read_csv(cohort)[["G0", "G1", "G2"]].astype(np.float32)
    assert content["metrics"]["mse"]["naive"] == pytest.approx(np.square(genes).mean(axis=None))
    assert content["reconstruction_error"] == pytest.approx(
        {"p05": 0.25, "median": 0.25, "p95": 0.25}
    )
    assert (cohort.parent / "out/reconstruction_error.png").exists()
    (table,) = tables(content)
    assert table.row_count == len(content["metrics"])


def understood(path, **options):
    nt3 = find_benchmark("nt3")
    target = ImportTarget("nt3", nt3.layouts, nt3.published.files, nt3.importable)
    return understand_samples(target, path, None, ImportOptions(**options))


def test_samples_of_an_imported_file_are_drawn_by_the_groups_of_the_import(cohort):
    directory = cohort.parent / "own"
    _, table = write_import(understood(cohort, label="tissue", group="patient"), directory)
    trained = run_that_trained(table)
    samples = read_samples(trained, table)
    evaluator = Evaluator(trained, samples, directory / "out", Bootstrap(100))
    content = evaluator.evaluate()
    assert (content["data"]["num_samples"], content["data"]["num_units"]) == (12, 6)
    assert content["bootstrap"]["group"] == "patient"
    table.write_text("".join(reversed(table.read_text().splitlines(keepends=True))))
    content = Evaluator(trained, samples, directory / "out", Bootstrap(100)).evaluate()
    assert content["data"]["num_units"] == 12  # nobody knows the groups of other files


def test_samples_that_an_import_gave_to_the_training_are_told(cohort):
    directory, imported = cohort.parent, understood(cohort, label="tissue")
    train, test = write_import(imported, directory / "own")
    trained = run_that_trained(train, role="train")

    def warnings(path, label="tissue", **changes):
        samples = read_samples(trained, path, SampleOptions(label=label))
        samples = dataclasses.replace(samples, **changes)
        return Evaluator(trained, samples, directory / "out", Bootstrap()).warnings

    table = pd.read_csv(cohort)
    table.assign(code=table["tissue"] == "tumor").astype({"code": int}).iloc[:40].to_csv(
        directory / "part.csv", index=False
    )
    known = table["sample"].isin(imported.facts["samples"]["train"])
    assert warnings(directory / "part.csv") == [
        f"{known[:40].sum()} of 40 samples were trained on: new ones will do worse"
    ]
    assert warnings(cohort, blocks=lambda: iter(())) == [
        "the network was trained on samples of this file: new ones will do worse"
    ]
    assert warnings(test, None) == []


@pytest.fixture
def regression(cohort):
    """A run that predicts growth, and four samples of which it is given."""
    trained = run_that_trained(cohort, "p1b3", classes=None)
    trained.inputs.target = Target(name="growth", unit="percent", factor=100)
    trained.model.predict_on_batch = lambda x: x[:, :1] + 0.5
    x = np.arange(12, dtype=np.float32).reshape(4, 3) / 10

    def samples(y):
        halves = [slice(0, 2), slice(2, 4)]
        blocks = [Block(x[h], {"NSC": [*"ab"]}, y=y if y is None else y[h]) for h in halves]
        return NewSamples(cohort, lambda: iter(blocks))

    return trained, samples, x[:, :1]


@pytest.mark.parametrize(
    ("row", "problem"),
    [(None, "no column GROWTH to compare with"), (2, "row 3 of .* no GROWTH: leave the row out")],
)
def test_a_row_without_growth_is_named(regression, tmp_path, row, problem):
    trained, samples, growth = regression
    y = None if row is None else np.where(np.arange(4)[:, np.newaxis] == row, np.nan, growth)
    with pytest.raises(DataError, match=problem):
        Evaluator(trained, samples(y), tmp_path, Bootstrap(100)).evaluate()


def test_a_regression_needs_no_cutoffs(regression, tmp_path):
    trained, samples, growth = regression
    content = Evaluator(trained, samples(growth), tmp_path, Bootstrap(100)).evaluate()
    assert content["metrics"]["mse"]["value"] == pytest.approx(0.25)
    assert "accuracy" not in content["metrics"]


def test_classes_by_number_have_no_mean_that_is_naive(cohort):
    trained = run_that_trained(cohort)
    trained.inputs.mean_target = np.array([0.3])
    assert "naive" not in evaluate(trained, cohort, num_draws=100)[1]["metrics"]["accuracy"]


@pytest.mark.parametrize("name", ["nt3", "p1b1"])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda y: y[:, :1], r"\(7, 1\)|\(60, 1\)"),
        (lambda y: y[:, :1, np.newaxis], "1, 1"),
        (lambda y: [y, y], "several arrays"),
    ],
)
def test_outputs_that_cannot_be_understood_are_refused(cohort, name, change, what):
    trained = run_that_trained(cohort, name, classes=CLASSES if name == "nt3" else None)
    apply = trained.model.predict_on_batch
    trained.model.predict_on_batch = lambda x: change(apply(x))
    with pytest.raises(ParameterError, match=f"the network returns .*({what}).*Inputs.target"):
        evaluate(trained, cohort, num_draws=100)
    if name == "nt3":
        predict = trained.benchmark.predictor(trained.model, trained.params, trained.inputs)
        with pytest.raises(ParameterError, match=what):
            predict(np.zeros((7, 3)))


def test_tables_without_classes_or_with_unknown_ones_are_refused(cohort):
    with pytest.raises(DataError, match=r"no classes to compare with: pass --label COLUMN"):
        evaluate(run_that_trained(cohort), cohort, "patient", label=None)
    with pytest.raises(DataError, match=r"not trained on the classes 'normal', 'tumor'.*'a', 'b'"):
        evaluate(run_that_trained(cohort, classes=["a", "b"]), cohort)
