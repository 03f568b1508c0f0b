"""Trains the steps of a measuring job in Keras 2, as CANDLE does.

The model that a run trains is built first, because both begin with its weights; then it is deleted.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np

from candle_p1.bench.task import Outcome, backend_version
from candle_p1.bench.training import Training, step_callback
from candle_p1.data.samples import join_batches
from candle_p1.distributed.comm import Communicator
from candle_p1.errors import CandleError, ParameterError
from candle_p1.models import keras2


def train(task: Any, comm: Communicator, training: Training, found: Outcome) -> Outcome:
    """Trains by tf_keras's ``fit``, on whole arrays of the batches of a run; see StepTask.course.

    Returns:
        ``state_bytes``, those of weights, gradients and optimizer state; and ``backend``, the name
        and version of tf_keras and of what it computes with.

    Raises:
        CandleError: There is no such model in Keras 2, or it has other weights.
    """
    k = keras2.load()
    model, names = _build(k, training)
    batches = training.batches()
    x, y = join_batches([batches[step] for step in range(task.all_steps)])

    def weights(model: Any) -> dict[str, Any]:
        layers = keras2.layers_with_weights(model)
        found = [weight.numpy() for layer in layers for weight in layer.trainable_weights]
        return dict(zip(names, found, strict=True))

    model.fit(
        list(x) if isinstance(x, tuple) else x,
        y,
        batch_size=training.plan.batch_size,
        shuffle=False,
        verbose=0,
        callbacks=[step_callback(task.course(comm, weights, found), k.callbacks.Callback)],
    )
    variables = [*model.weights, *model.trainable_weights, *model.optimizer.variables()]
    num_bytes = sum(
        v.shape.num_elements() * np.dtype(v.dtype.as_numpy_dtype).itemsize for v in variables
    )
    return {
        **found,
        "state_bytes": num_bytes,
        "backend": f"tf_keras {k.__version__}, {backend_version()}",
    }


def _build(k: Any, training: Training) -> tuple[Any, list[str]]:
    """Returns the model with the weights of that of a run, and what its weights are called there.

    The names are in the order of `keras2.layers_with_weights`. Empties `training.models`.
    """
    import keras

    benchmark, params = training.benchmark, training.params
    if params["data_type"] in ("f16", "bf16"):
        raise ParameterError(
            f"data_type {params['data_type']} ({params.origin('data_type')}): the networks in Keras"
            " 2 are for f32 and f64"
        )
    ours = training.models.pop()
    initial = keras2.weights_of(ours)
    numbers = {id(weight): number for number, weight in enumerate(ours.trainable_weights)}
    names = [
        f"{numbers[id(weight)]} {weight.path}"
        for layer in keras2.layers_with_weights(ours)
        for weight in layer.trainable_weights
    ]
    del ours
    keras.backend.clear_session()
    gc.collect()
    try:
        model = benchmark.keras2_model(k, params, training.data, training.plan.learning_rate)
    except ValueError as error:  # a name that Keras 3 knows and Keras 2 does not
        raise ParameterError(f"Keras 2 cannot build this model: {error}") from error
    if model is None:
        raise ParameterError(f"--keras2: {benchmark.name} has no model in Keras 2")
    try:
        keras2.set_weights(model, initial)
    except ValueError as error:
        raise CandleError(
            f"the model of {benchmark.name} in Keras 2 has other weights than that of a run:"
            f" {error}"
        ) from error
    return model, names
