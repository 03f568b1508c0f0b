"""A rank of a measuring job that trains a benchmark for some steps and times each of them.

``python -m candle_p1.bench.step_worker DIRECTORY``, alone or under a launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from candle_p1.bench import step_keras2
from candle_p1.bench.roofline import bound, fastest_rates, matrix_product_flops, state_bytes
from candle_p1.bench.step import OURS, PLAIN, WARM_UP_STEPS, StepJob, StepOutcome
from candle_p1.bench.step_prediction import dense_products, making_s, predict, products_s
from candle_p1.bench.step_timer import StepTimer, as_callback
from candle_p1.bench.training import Training, prepare_training
from candle_p1.bench.worker import backend_version, serve
from candle_p1.data.samples import join_batches
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.models import fast
from candle_p1.models.fast.batches import for_fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from candle_p1.distributed.comm import Communicator
    from candle_p1.models.fast.convolution_costs import Rates


def measure(job: StepJob, comm: Communicator) -> StepOutcome:
    """Returns what this rank has measured; collective.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    partners = comm if job.averages_gradients else SerialCommunicator()
    training = prepare_training(job, comm, partners=partners, num_steps=job.all_steps)
    device, plan, model = training.device, training.plan, training.models[0]
    flops = matrix_product_flops(model, plan.batch_size)
    found, predictions = None, {}
    if job.keras2 is None:
        if job.measures_machine:
            found = bound(model, plan.batch_size, device.threads)
        is_predicted = job.is_predicted and fast.are_fast()
        before = fastest_rates(device.threads) if is_predicted else None
        timer = _train(job, comm, training)
        if before is not None:
            predictions = _predict(training, before.faster(fastest_rates(device.threads)))
        num_bytes, backend = state_bytes(model), backend_version()
    else:
        del model  # there would be two of them
        timer, num_bytes, backend = step_keras2.train(job, comm, training)
    return StepOutcome(
        steps_s=timer.seconds[WARM_UP_STEPS : WARM_UP_STEPS + job.num_steps],
        losses=timer.losses,
        updates=timer.updates,
        values=timer.values,
        batch_size=plan.batch_size,
        threads=device.threads,
        device=device.name,
        backend=backend,
        has_fast_kernels=fast.exist(on_cpu=not device.is_gpu),
        flops=flops,
        state_bytes=num_bytes,
        matrix_bytes=training.matrix_bytes,
        roofline=found,
        memory=timer.memory,
        predictions=predictions,
    )


def _predict(training: Training, rates: Rates) -> dict[str, dict[str, Any]]:
    """Returns the predicted steps of the variants of which they are known."""
    model, size = training.models[0], training.plan.batch_size
    # One thread makes batches while the others compute.
    batches_s = making_s(for_fit(training.batches())) / training.device.threads
    dense_s = products_s(dense_products(model, size))
    predicted = {
        OURS: predict(model, size, rates, is_fast=True, dense_s=dense_s, batches_s=batches_s),
        PLAIN: predict(model, size, rates, is_fast=False, dense_s=dense_s),
    }
    return {name: each for name, each in predicted.items() if each is not None}


def _train(job: StepJob, comm: Communicator, training: Training) -> StepTimer:
    """Trains the steps of a job; returns the timer."""
    data, (model,) = training.data, training.models
    own_samples = job.inputs in ("samples", "arrays")
    samples = data.train if own_samples else training.benchmark.other_samples(data)[job.inputs]
    batches = training.batches(samples)

    def weights(model: keras.Model) -> dict[str, NDArray[Any]]:
        return {
            f"{number} {weight.path}": keras.ops.convert_to_numpy(weight.value)
            for number, weight in enumerate(model.trainable_weights)
        }

    timer = StepTimer(comm, weights, job.num_steps, samples_memory=job.measures_machine)
    callback = as_callback(timer, keras.callbacks.Callback)
    epoch: dict[str, Any] = {"shuffle": False, "verbose": 0, "callbacks": [callback]}
    if job.inputs == "arrays":
        parts = [batches[step] for step in range(job.all_steps)]
        x, y = join_batches(parts)
        del parts
        model.fit(x, y, batch_size=training.plan.batch_size, **epoch)
    else:
        model.fit(for_fit(batches), steps_per_epoch=job.all_steps, **epoch)
    return timer


if __name__ == "__main__":
    serve(measure)
