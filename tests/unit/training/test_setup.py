"""Models as they are compiled for a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from candle_p1.benchmark import DataSet, Samples, Several, find_benchmark
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import make_engine
from candle_p1.errors import ParameterError
from candle_p1.models.optimizers import COMPUTE_TYPES, check_names
from candle_p1.parameters.parameter import Parameter
from candle_p1.training.measured import _loss_name, chosen_by_test, describe_model, unmet_requests
from candle_p1.training.setup import build_model

keras = pytest.importorskip("keras", reason="no Keras backend is installed")

NT3 = find_benchmark("nt3")
X = np.arange(12, dtype=np.float32).reshape(6, 2)
LABELS = np.arange(6) % 2
CHOICES = ("mine", "categorical_crossentropy")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--early_stop True --ckpt_save_interval 1", ["early_stop and ckpt_save_best"]),
        ("--ckpt_save_interval 1 --ckpt_save_best_metric loss", []),
    ],
)
def test_what_the_test_samples_choose_is_said(flags, names):
    params = NT3.read_parameters(flags.split())
    found = chosen_by_test(params, on_test=True)
    assert [text.partition(":")[0] for text in found] == names
    assert chosen_by_test(params, on_test=False) == []


def build(make_model, y, *, metrics=("accuracy",), flags=""):
    class Own(type(NT3)):
        def build_model(self, params, data):
            return make_model()

        def loss(self, params):
            return "sparse_categorical_crossentropy"

        def metrics(self, params):
            return metrics

    samples = Samples(X, y)
    data, device = DataSet(samples, samples, samples), SimpleNamespace(is_gpu=False)
    params, plan = NT3.read_parameters(flags.split()), SimpleNamespace(learning_rate=0.1)
    engine = make_engine("auto", SerialCommunicator())
    return build_model(Own(), params, data, plan, device, engine)


@pytest.fixture
def single_precision():
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("data_type", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("own", [None, "float32"])
def test_layers_compute_in_the_type_that_is_asked_for(single_precision, data_type, own):
    def network():
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype=own)])

    flags = f"--data_type {data_type}"
    model = build(network, LABELS, flags=flags)
    expected = data_type if own is None else "f32"
    assert model.layers[-1].compute_dtype == COMPUTE_TYPES[expected]
    assert model.layers[-1].kernel.dtype == "float32"
    facts = describe_model(model)
    assert facts.data_type == expected
    said = unmet_requests(NT3.read_parameters(flags.split()), facts, reads_tables=True)
    assert len(said) == (expected != data_type)


@pytest.mark.parametrize("form", [dict, tuple])
@pytest.mark.parametrize("metrics", [["accuracy"], {"a": ["accuracy"], "b": ["accuracy"]}])
def test_metrics_hold_for_every_output(form, metrics):
    def two_outputs():
        inputs = keras.Input((2,))
        outputs = {name: keras.layers.Dense(2, "softmax", name=name)(inputs) for name in "ab"}
        return keras.Model(inputs, outputs if form is dict else list(outputs.values()))

    y = Several({"a": LABELS, "b": LABELS} if form is dict else (LABELS, LABELS))
    model = build(two_outputs, y, metrics=metrics)
    found = model.test_on_batch(*Samples(X, y)[slice(0, 6)], return_dict=True)
    assert set(found) == {"loss", "a_loss", "b_loss", "a_accuracy", "b_accuracy"}


def test_a_model_that_is_a_class_gets_its_weights():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = build(Own, LABELS)
    assert model.count_params() == 6
    assert model.optimizer.built


def test_names_that_keras_does_not_have_are_refused_unless_the_benchmark_has_them():
    class Own(type(NT3)):
        folder = NT3.folder
        parameters = (*NT3.parameters, Parameter("loss", str, None, "…", choices=CHOICES))

    check_names(Own().read_parameters(["--loss", "mine"]))
    with pytest.raises(ParameterError, match=r"^loss = 'mine'"):
        check_names(NT3.read_parameters(["--loss", "mine"]))
    with pytest.raises(ParameterError, match=r"^activation = 'reluu' .*'relu'"):
        check_names(NT3.read_parameters(["--activation", "reluu"]))


def test_every_loss_has_a_name():
    def cubes(y_true, y_pred):
        return y_pred**3

    losses = ["mse", cubes, None, {"a": "mse", "b": cubes}]
    names = ["mse", "cubes", "computed by the model", "a: mse, b: cubes"]
    assert [_loss_name(loss) for loss in losses] == names
