"""Trains a few steps of a benchmark, in a variant that `candle-p1 bench step` compares."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from candle_p1.bench.node_state import MemorySampler
from candle_p1.bench.task import BenchmarkTask, Outcome
from candle_p1.bench.training import (
    Course,
    Training,
    bound,
    matrix_product_flops,
    prepare_training,
    state_bytes,
    step_callback,
)
from candle_p1.benchmark import Benchmark
from candle_p1.data.samples import join_batches
from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import CandleError, ParameterError
from candle_p1.models import fast, keras2
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records import environment

WARM_UP_STEPS = 2  # that are not timed; the first one traces the model
MAX_COMPARED = 4096  # elements of a weight

Weights = Callable[[Any], Mapping[str, Any]]
"""Returns the weights of a model, by name."""


@dataclass(frozen=True, kw_only=True)
class StepTask(BenchmarkTask):
    """Trains a benchmark for some steps and times each of them."""

    own_flags: ClassVar[Mapping[str, str]] = {"kernels": "both kinds are measured"}

    kernels: str = "fast"  # or "plain"
    inputs: str = "samples"  # as in a run; "arrays" of NumPy; or one of `other_samples`
    averages_gradients: bool = True
    num_steps: int = 5  # that are timed
    measures_memory: bool = False  # in a further step
    measures_bound: bool = False  # of the roofline, after the steps
    keras2: str | None = None  # the directory of tf_keras; None: Keras 3 trains
    is_random: bool = True  # with the random numbers that flags ask for, such as for dropout

    @property
    def settings(self) -> dict[str, Any]:
        return super().settings | {"kernels": self.kernels}

    @property
    def environment(self) -> dict[str, str]:
        """Where Python finds tf_keras."""
        paths = [self.keras2, os.environ.get("PYTHONPATH")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))} if self.keras2 else {}

    def bind(self, benchmark: Benchmark) -> ParameterSet:
        params = super().bind(benchmark)
        zeros = {} if self.is_random else dict.fromkeys(benchmark.random_parameters(params), 0.0)
        return params.replace(zeros)

    @property
    def all_steps(self) -> int:
        """The number of steps, including those that are not timed."""
        return WARM_UP_STEPS + self.num_steps + self.measures_memory

    def measure(self, comm: Communicator) -> Outcome:
        import keras

        partners = comm if self.averages_gradients else SerialCommunicator()
        training = prepare_training(self, comm, partners=partners, num_steps=self.all_steps)
        device, model, batch_size = training.device, training.model, training.plan.batch_size
        found: Outcome = {
            **training.facts,
            "has_fast_kernels": fast.exist(on_cpu=not device.is_gpu),
            "flops": matrix_product_flops(model, batch_size),
            "roofline": None,
            "memory": [],
            "backend": backend_version(),
        }
        if self.keras2 is None:
            self._train(comm, training, _weights, keras.callbacks.Callback, found)
            if self.measures_bound:
                found["roofline"] = bound(model, batch_size, device.threads)
            return found | {"state_bytes": state_bytes(model)}
        k, initial, names = keras2.load(), keras2.weights_of(model), _names(model)
        del model  # there would be two of them
        training.model = None
        keras.backend.clear_session()
        gc.collect()
        training.model = model = _keras2_model(k, training, initial)
        found["backend"] = f"tf_keras {k.__version__}, {found['backend']}"
        self._train(comm, training, partial(_keras2_weights, names), k.callbacks.Callback, found)
        variables = [*model.weights, *model.trainable_weights, *model.optimizer.variables()]
        sizes = ((v.shape.num_elements(), v.dtype.as_numpy_dtype) for v in variables)
        return found | {"state_bytes": sum(num * np.dtype(of).itemsize for num, of in sizes)}

    def _train(
        self, comm: Communicator, training: Training, weights: Weights, base: Any, found: Outcome
    ) -> None:
        from candle_p1.models.fast.batches import for_fit, taken_by

        data, is_own = training.data, self.inputs in ("samples", "arrays")
        samples = data.train if is_own else training.benchmark.other_samples(data)[self.inputs]
        model, batches = training.model, training.batches(taken_by(training.model, samples))
        callback = step_callback(partial(self._course, comm, weights, found), base)
        epoch: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": [callback]}
        if self.inputs == "arrays":
            x, y = join_batches([batches[step] for step in range(self.all_steps)])
            x = list(x) if self.keras2 and isinstance(x, tuple) else x
            model.fit(x, y, batch_size=training.plan.batch_size, **epoch)
        elif self.inputs == "samples" and backend_version().startswith("jax"):
            _train_as_runs(training, callback, self.all_steps)
        else:
            model.fit(for_fit(batches), steps_per_epoch=self.all_steps, **epoch)

    def _course(
        self, comm: Communicator, weights: Weights, found: Outcome, callback: Any
    ) -> Course:
        """Trains; ranks begin together after the warm-up.

        Adds to what is found the times of timed steps, the ``losses`` after every one, by weight
        the ``updates`` of some elements by the warm-up and their ``values`` after all timed steps,
        and the ``memory`` during a further step.
        """
        before, losses, steps_s = _elements(weights(callback.model)), [], []
        for _ in range(WARM_UP_STEPS):
            _, loss = yield
            losses.append(loss)
        after = _elements(weights(callback.model))
        updates = {name: (after[name] - before[name]).tolist() for name in after}
        comm.barrier()
        for _ in range(self.num_steps):
            seconds, loss = yield
            losses.append(loss)
            steps_s.append(seconds)
        values = {name: e.tolist() for name, e in _elements(weights(callback.model)).items()}
        found.update(losses=losses, steps_s=steps_s, updates=updates, values=values)
        if self.measures_memory:
            sampler = MemorySampler()
            yield
            found["memory"] = sampler.stop()


def backend_version() -> str:
    """Returns the name and version of Keras's backend, such as "jax 0.10.2"."""
    import keras

    name = str(keras.backend.backend())
    installed = environment.package_versions()
    return next((f"{name} {v}" for k, v in installed.items() if k.startswith(name)), name)


def _train_as_runs(training: Training, callback: Any, num_steps: int) -> None:
    """Trains the first steps of an epoch one by one, as a run with such a callback does."""
    from candle_p1.training.state import attach_state
    from candle_p1.training.steps import python_logs

    steps = training.steps()
    callback.set_model(training.model)
    callback.on_train_begin()
    for step in range(num_steps):
        callback.on_train_batch_end(step, python_logs(steps.train(0, step, 1)))
    attach_state(training.model)


def _elements(weights: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: values.reshape(-1)[:: -(-values.size // MAX_COMPARED)].astype(float)
        for name, values in weights.items()
    }


def _weights(model: Any) -> dict[str, Any]:
    from candle_p1.models.fast.tables import whole_weights

    weights = whole_weights(model, trainable=True)
    return {f"{number} {path}": read() for number, (path, read) in enumerate(weights)}


def _names(model: Any) -> list[str]:
    """Returns the names of `_weights` in the order of layers, which Keras 2 has, too."""
    numbers = {id(weight): number for number, weight in enumerate(model.trainable_weights)}
    return [
        f"{numbers[id(weight)]} {weight.path}"
        for layer in keras2.layers_with_weights(model)
        for weight in layer.trainable_weights
    ]


def _keras2_weights(names: list[str], model: Any) -> dict[str, Any]:
    layers = keras2.layers_with_weights(model)
    found = [weight.numpy() for layer in layers for weight in layer.trainable_weights]
    return dict(zip(names, found, strict=True))


def _keras2_model(k: Any, training: Training, initial: Any) -> Any:
    benchmark, params = training.benchmark, training.params
    if params["data_type"] in ("f16", "bf16"):
        raise ParameterError(
            f"data_type {params['data_type']} ({params.origin('data_type')}): the networks in Keras"
            " 2 are for f32 and f64"
        )
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
    return model
