"""The engine of this environment, which checks test, and averaging with it outside a training.

To be imported before Keras, whose backend is the engine's.
"""

import functools
import sys

import numpy as np

from candle_p1.distributed.backend import choose_backend, engine_of
from candle_p1.distributed.comm import SerialCommunicator, connect
from candle_p1.distributed.engine import Engine, make_engine
from candle_p1.distributed.optimizer import average_gradients, distribute_optimizer

NAME = engine_of(choose_backend())
AVERAGING = next((each[10:] for each in sys.argv if each.startswith("averaging=")), "auto")
"""What averages gradients with the engine horovod."""


@functools.cache
def started(compression):
    from candle_p1.distributed import devices

    comm = connect()
    made = make_engine(NAME, comm)
    devices.configure(comm, made)
    made.start(averaging=AVERAGING, compression=compression)
    return made


def engine(compression="none"):
    """Returns the engine, started with the devices of all ranks; collective at the first call."""
    return started(compression)


def shares_memory():
    """Returns whether ranks average through memory that they share."""
    return NAME == "horovod" and AVERAGING == "auto"


def distribute(optimizer, compression="none", log=None):
    """Returns an optimizer that averages with the engine, and marks it for `compiled`."""
    distributed = distribute_optimizer(optimizer, engine(compression).reducer, log)
    distributed.is_distributed = True
    return distributed


def compiled(model, optimizer, **options):
    """Compiles a model as a run does, for all ranks if the optimizer is distributed."""
    is_distributed = getattr(optimizer, "is_distributed", False)
    made = engine()
    if not is_distributed:
        made = Engine("serial", SerialCommunicator(), made.backend)
    made.compile(model, is_gpu=False, optimizer=optimizer, **options)
    return model


def averages(gradients, variables, compression="none"):
    """Returns the averages of arrays over ranks, as arrays; None stays None."""

    reducer = engine(compression).reducer

    def average(*given):
        return average_gradients(reducer, given, variables)

    if NAME == "jax":
        averaged = reducer.mapped(average)(*gradients)
    else:
        import tensorflow as tf

        averaged = tf.function(average)(
            *(each if each is None else tf.convert_to_tensor(each) for each in gradients)
        )
    return [each if each is None else np.asarray(each) for each in averaged]


def apply_gradients(optimizer, gradients, variables):
    """Lets a distributed optimizer update variables by this rank's gradients."""
    if NAME != "jax":
        import tensorflow as tf

        optimizer.apply([tf.convert_to_tensor(each) for each in gradients], variables)
        return
    if not optimizer.built:
        optimizer.build(variables)
    state, values = ([each.value for each in of] for of in (optimizer.variables, variables))
    step = engine().reducer.mapped(optimizer.stateless_apply)
    for variable, value in zip(
        [*variables, *optimizer.variables],
        [each for part in step(state, list(map(np.asarray, gradients)), values) for each in part],
        strict=True,
    ):
        variable.assign(value)


def metrics_of_all(model, comm):
    """Returns a callback that puts the metrics over the samples of all ranks into the logs."""
    import keras

    from candle_p1.distributed.callbacks import reduce_metrics

    return keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(reduce_metrics(model, comm))
    )
