"""Trains a few steps of a benchmark, in a variant that `candle-p1 bench step` compares."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from candle_p1.bench import roofline
from candle_p1.bench.node_state import MemorySampler
from candle_p1.bench.task import BenchmarkTask, Outcome, backend_version
from candle_p1.benchmark import Benchmark
from candle_p1.distributed.comm import Communicator, SerialCommunicator
from candle_p1.errors import CandleError, ParameterError
from candle_p1.models import keras2
from candle_p1.parameters.parameter_set import ParameterSet

if TYPE_CHECKING:
    from candle_p1.bench.training import Course, Training

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

        from candle_p1.bench.training import prepare_training
        from candle_p1.models import fast

        partners = comm if self.averages_gradients else SerialCommunicator()
        training = prepare_training(self, comm, partners=partners, num_steps=self.all_steps)
        device, model, training.model = training.device, training.model, None
        found: Outcome = {
            **training.facts,
            "has_fast_kernels": fast.exist(on_cpu=not device.is_gpu),
            "flops": roofline.matrix_product_flops(model, training.plan.batch_size),
            "roofline": None,
            "memory": [],
            "backend": backend_version(),
        }
        if self.keras2 is not None:
            k, initial = keras2.load(), keras2.weights_of(model)
            names = _names(model)
            del model  # there would be two of them
            keras.backend.clear_session()
            gc.collect()
            model = _keras2_model(k, training, initial)
            found["backend"] = f"tf_keras {k.__version__}, {found['backend']}"
            self._train(comm, training, model, _keras2_weights(names), k.callbacks.Callback, found)
            variables = [*model.weights, *model.trainable_weights, *model.optimizer.variables()]
            sizes = ((v.shape.num_elements(), v.dtype.as_numpy_dtype) for v in variables)
            return found | {"state_bytes": sum(num * np.dtype(of).itemsize for num, of in sizes)}
        self._train(comm, training, model, _weights, keras.callbacks.Callback, found)
        if self.measures_bound:
            found["roofline"] = roofline.bound(model, training.plan.batch_size, device.threads)
        return found | {"state_bytes": roofline.state_bytes(model)}

    def _train(
        self,
        comm: Communicator,
        training: Training,
        model: Any,
        weights: Weights,
        callback: Any,
        found: Outcome,
    ) -> None:
        from candle_p1.bench.training import step_callback, train_as_runs
        from candle_p1.data.samples import join_batches
        from candle_p1.models.fast.batches import for_fit
        from candle_p1.models.fast.tables import taken_by

        data, is_own = training.data, self.inputs in ("samples", "arrays")
        samples = data.train if is_own else training.benchmark.other_samples(data)[self.inputs]
        batches = training.batches(taken_by(model, samples))
        goes = step_callback(self._course(comm, weights, found), callback)
        epoch: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": [goes]}
        if self.inputs == "arrays":
            x, y = join_batches([batches[step] for step in range(self.all_steps)])
            x = list(x) if self.keras2 and isinstance(x, tuple) else x
            model.fit(x, y, batch_size=training.plan.batch_size, **epoch)
        elif self.inputs == "samples" and backend_version().startswith("jax"):
            train_as_runs(training, model, goes, self.all_steps)
        else:
            model.fit(for_fit(batches), steps_per_epoch=self.all_steps, **epoch)

    def _course(
        self, comm: Communicator, weights: Weights, found: Outcome
    ) -> Callable[[Any], Course]:
        """Returns the course of the training, which ranks begin together after the warm-up.

        It adds to what is found the times of timed steps, the ``losses`` after every one, by weight
        the ``updates`` of some elements by the warm-up and their ``values`` after all timed steps,
        and the ``memory`` during a further step.
        """

        def course(callback: Any) -> Course:
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

        return course


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


def _keras2_weights(names: list[str]) -> Weights:
    def weights(model: Any) -> dict[str, Any]:
        layers = keras2.layers_with_weights(model)
        found = [weight.numpy() for layer in layers for weight in layer.trainable_weights]
        return dict(zip(names, found, strict=True))

    return weights


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
