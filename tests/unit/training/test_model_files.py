"""When a run saves its model, what remains of the best epoch, and what is told of failures."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.benchmark import ModelFile, find_benchmark
from candle_p1.data.inputs import Inputs
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import ParameterError
from candle_p1.files import content_sha256

keras = pytest.importorskip("keras", reason="no Keras backend is installed")
from candle_p1.training.model_files import ModelFiles  # noqa: E402
from candle_p1.training.setup import check_best_metric  # noqa: E402
from tests.unit.training.conftest import NotingScreen  # noqa: E402

NT3, P1B1, P1B3 = map(find_benchmark, ("nt3", "p1b1", "p1b3"))


class ManyFiles:
    """Stands for a benchmark."""

    def model_files(self, params):
        def first_layer(model):
            return keras.Model(model.inputs, model.layers[0].output)

        return [
            ModelFile("model.json", "begin"),
            ModelFile("best.weights.h5", "best"),
            ModelFile("half.keras", "end", first_layer),
        ]


@pytest.fixture
def model():
    yield keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    keras.backend.clear_session()


def make_files(directory):
    """Returns the files of a run with --save_model, and its screen."""
    run = SimpleNamespace(comm=SerialCommunicator(), screen=NotingScreen())
    params = NT3.read_parameters(["--save_model", "True"])
    return ModelFiles(ManyFiles(), params, directory, run), run.screen


def train(model, files, losses, first=0):
    """Trains epochs in each of which the weights are its number."""
    files.save_initial(model)
    for i, loss in enumerate(losses, start=first + 1):
        model.set_weights([np.full((2, 1), i, np.float32)])
        files.save_best(model, {"val_loss": loss})


def best_epoch(model, path):
    model.load_weights(path)
    return int(model.get_weights()[0][0, 0])


def test_files_are_saved_before_after_and_between(model, tmp_path):
    files, screen = make_files(tmp_path)
    train(model, files, [0.5, 0.3, float("nan"), 0.4])
    assert {path.name for path in tmp_path.iterdir()} == {"best.weights.h5", "model.json"}
    assert files.are_final
    files.save_final(model)
    assert {"half.keras", "model.keras"} < {path.name for path in tmp_path.iterdir()}
    rebuilt = keras.models.model_from_json((tmp_path / "model.json").read_text())
    assert best_epoch(rebuilt, tmp_path / "best.weights.h5") == 2
    assert len(screen.said) == 2
    assert (screen.warned, files.warnings) == ([], [])


def test_the_record_tells_its_files_from_those_of_other_runs(model, tmp_path):
    files, _ = make_files(tmp_path)
    columns = dict.fromkeys(("offset", "scale"), np.ones(2))
    files._inputs = Inputs(benchmark="nt3", **columns, scaling="std", fitted_to="all")
    train(model, files, [0.5])
    files.save_final(model)
    found = files.describe_inputs(SimpleNamespace())
    assert found["path"] == str(tmp_path / "inputs.json")
    assert found["sha256"] == content_sha256(tmp_path / "inputs.json")
    assert files.final_sha256 == content_sha256(tmp_path / "model.keras")


@pytest.mark.parametrize(
    ("is_missing", "losses", "best"), [(False, [0.2, 0.05], 4), (True, [0.4, 0.5], 3)]
)
def test_a_continued_run_remembers_the_best_epoch(model, tmp_path, is_missing, losses, best):
    files, _ = make_files(tmp_path)
    train(model, files, [0.5, 0.1])
    state = json.loads(json.dumps(files.checkpoint_state()))
    if is_missing:
        (tmp_path / "best.weights.h5").unlink()
    continued, _ = make_files(tmp_path)
    continued.restore_state(state)
    train(model, continued, losses, first=2)
    assert best_epoch(model, tmp_path / "best.weights.h5") == best


def test_what_cannot_be_written_causes_one_warning_for_each_file(model, tmp_path):
    files, screen = make_files(tmp_path / "missing")
    train(model, files, [0.5, 0.4, 0.3])
    files.save_final(model)
    assert screen.said == []
    names = ["model.json", "best.weights.h5", "half.keras", "model.keras"]
    for name, warning in zip(names, files.warnings, strict=True):
        assert str(tmp_path / "missing" / name) in warning
        assert "No such file or directory" in warning
    assert screen.warned == files.warnings


def test_a_model_that_has_no_description_is_refused_before_training(tmp_path):
    class Undescribed(keras.layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, inputs):
            return self.function(inputs)

    strange = keras.Sequential([keras.layers.Input((2,)), Undescribed(lambda x: 2 * x)])
    with pytest.raises(ParameterError, match=r"model\.json.*get_config"):
        make_files(tmp_path)[0].check(strange, SimpleNamespace(preparation=None))


@pytest.mark.parametrize(
    ("benchmark", "metrics"),
    [(NT3, "val_loss val_acc accuracy lr"), (P1B1, "val_corr xent"), (P1B3, "val_accuracy")],
)
def test_the_best_checkpoints_metric_is_one_of_the_run(model, benchmark, metrics):
    def check(metric, *flags):
        argv = ["--ckpt_save_interval", "1", "--ckpt_save_best_metric", metric, *flags]
        check_best_metric(benchmark, benchmark.read_parameters(argv), model)

    for metric in metrics.split():
        check(metric)
    with pytest.raises(ParameterError, match=r"flag.*learning_rate, loss, .*val_loss"):
        check("val_auc")
    check("val_auc", "--ckpt_save_best", "False")
