"""Gradients, replicas, metrics and states of several ranks, compared with numpy and one process."""

import keras
import numpy as np
import pytest
from engines import apply_gradients, averages, compiled, distribute, engine, shares_memory

from candle_p1.data.batches import EvaluationBatches, TrainBatches, epoch_order
from candle_p1.data.samples import Samples
from candle_p1.distributed.callbacks import ReplicaCheck, evaluate_shared
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.optimizer import average_gradients, can_fuse, self_test
from candle_p1.distributed.replicas import (
    average_state,
    broadcast_state,
    seed_ranks,
    seed_states,
)
from candle_p1.errors import DistributedError
from candle_p1.models import fast
from candle_p1.models.fast.optimizers import FORMS, KERAS2_FORMS
from candle_p1.scaling import ScalingPlan, share_bounds

NUM_SAMPLES, NUM_FEATURES, BATCH = 96, 30, 4


def samples():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(NUM_SAMPLES, NUM_FEATURES, 1)).astype("float32")
    y = np.eye(2, dtype="float32")[(x[:, :5, 0].sum(axis=1) > 0).astype(int)]
    return x, y


def small_nt3(optimizer, dropout=0.0, seed=7):
    """A convolutional network like NT3's."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((NUM_FEATURES, 1)),
            layers.Conv1D(8, 5, activation="relu"),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dropout(dropout),
            layers.Dense(2),
            layers.Activation("softmax", dtype="float32"),
        ]
    )
    loss = "categorical_crossentropy"
    return compiled(model, optimizer, loss=loss, metrics=["accuracy"])


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def plan_for(comm, **options):
    usual = {"num_ranks": comm.size, "epochs": 2, "epochs_scaling": "weak", "batch_size": BATCH}
    usual |= {"learning_rate": 0.05, "num_samples": NUM_SAMPLES}
    return ScalingPlan.make(**usual | options)


def fit(model, comm, plan, *callbacks):
    x, y = samples()
    batches = TrainBatches(Samples(x, y), plan, seed=3, rank=comm.rank, shuffle=True)
    set_epoch = keras.callbacks.LambdaCallback(lambda epoch, logs: batches.set_epoch(epoch))
    options = {"epochs": plan.epochs_per_rank, "shuffle": False, "verbose": 0}
    return model.fit(batches, callbacks=[set_epoch, *callbacks], **options)


def all_of(variables):
    return np.concatenate([keras.ops.convert_to_numpy(each).ravel() for each in variables])


def weights_of(model):
    return all_of(model.weights)


def sparse_gradients_become_dense_averages(comm):
    """Of TensorFlow's embeddings; JAX's gradients are dense."""
    if engine().backend == "jax":
        return
    import tensorflow as tf

    sparse = tf.IndexedSlices(tf.ones((1, 7)) * (comm.rank + 1), tf.constant([comm.rank]), (9, 7))
    variables = [keras.Variable(np.zeros((9, 7)), name="sparse")]
    (dense,) = average_gradients(engine().reducer, [sparse], variables)
    of_ranks = (np.arange(comm.size) + 1) / comm.size
    expected = np.pad(of_ranks, (0, 9 - comm.size))[:, np.newaxis].repeat(7, axis=1)
    np.testing.assert_allclose(dense.numpy(), expected)


def replicas_stay_identical_and_differences_are_detected(comm):
    model = small_nt3(distribute(sgd()), dropout=0.2)
    seed_ranks(model, 7, comm.rank)
    plan = plan_for(comm)
    fit(model, comm, plan, ReplicaCheck(comm))

    unaveraged = small_nt3(sgd(), dropout=0.2)
    with pytest.raises(DistributedError, match="step 1 of epoch 1: ranks 1"):
        fit(unaveraged, comm, plan, ReplicaCheck(comm))


def ranks_equal_one_process_with_the_global_batch(comm):
    x, y = samples()
    for level in ("epoch", "batch_step"):
        plan = plan_for(comm, data_parallel=level)
        model, single = small_nt3(distribute(sgd())), small_nt3(sgd())
        fit(model, comm, plan)
        for epoch in range(plan.epochs_per_rank):
            places = [{"seed": 3, "epoch": epoch, "rank": rank} for rank in range(comm.size)]
            orders = [epoch_order(plan, NUM_SAMPLES, **place) for place in places]
            if level == "batch_step":
                assert len(set(np.concatenate(orders))) == NUM_SAMPLES
            for first in range(0, plan.steps_per_epoch * BATCH, BATCH):
                batch = np.concatenate([order[first : first + BATCH] for order in orders])
                single.train_on_batch(x[batch], y[batch])
        np.testing.assert_allclose(weights_of(model), weights_of(single), rtol=1e-4, atol=1e-6)


FUSED = {
    "sgd": lambda: FORMS[keras.optimizers.SGD](0.05),
    "momentum": lambda: FORMS[keras.optimizers.SGD](0.05, momentum=0.9),
    "adam": lambda: FORMS[keras.optimizers.Adam](0.01),
    "rmsprop": lambda: FORMS[keras.optimizers.RMSprop](0.01),
    "keras2": lambda: KERAS2_FORMS[keras.optimizers.RMSprop](0.01, epsilon=1e-8),
}


def updates_that_the_ranks_divide_are_those_of_one_process(comm):
    """The optimizer's state, too, is the same on all ranks after every step."""
    x, y = samples()
    fast.choose("fast", on_cpu=True)
    try:
        for name, make in FUSED.items():
            optimizer = distribute(make())
            model, single = small_nt3(optimizer), small_nt3(make())
            for step in range(4):
                whole = slice(step * comm.size * BATCH, (step + 1) * comm.size * BATCH)
                mine = slice(whole.start + comm.rank * BATCH, whole.start + (comm.rank + 1) * BATCH)
                model.train_on_batch(x[mine], y[mine])
                single.train_on_batch(x[whole], y[whole])
                state = all_of([*model.weights, *optimizer.variables])
                assert not comm.find_different(state.tobytes()), name
            expected = all_of([*single.weights, *single.optimizer.variables])
            np.testing.assert_allclose(state, expected, rtol=2e-4, atol=2e-6, err_msg=name)
            assert can_fuse(optimizer, engine().reducer) is shares_memory()
        for options in ({"clipnorm": 1.0}, {"gradient_accumulation_steps": 2}, {"nesterov": True}):
            optimizer = distribute(FORMS[keras.optimizers.SGD](0.05, momentum=0.9, **options))
            optimizer.build(model.trainable_variables)
            assert not can_fuse(optimizer, engine().reducer)
    finally:
        fast.choose("plain", on_cpu=True)


def clipping_acts_on_the_averaged_gradient(comm):
    """Each gradient is larger than the clip, but their average is 0 or small."""
    value = 3.0 if comm.rank == 0 else -3.0
    average = (3.0 - 3.0 * (comm.size - 1)) / comm.size
    for clip in ({"clipvalue": 1.0}, {"clipnorm": 1.0}):
        variable = keras.Variable(np.zeros(1, "float32"), name="clipped")
        optimizer = distribute(keras.optimizers.SGD(1.0, **clip))
        apply_gradients(optimizer, [np.float32([value])], [variable])
        clipped = -np.clip(average, -1, 1)
        np.testing.assert_allclose(np.asarray(variable.value), [clipped], atol=1e-6)


def compressed_gradients_are_averaged_to_half_precision(comm):
    everyone = np.random.default_rng(8).normal(size=(comm.size, 50)).astype("float32")
    variable = keras.Variable(np.zeros(50, "float32"), name="compressed")
    (averaged,) = averages([everyone[comm.rank]], [variable], "fp16")
    expected = everyone.mean(axis=0)
    assert averaged.dtype == np.float32
    assert (averaged != expected).any()
    np.testing.assert_allclose(averaged, expected, atol=3e-3)

    # Sums of float16 numbers as large, and float16 numbers as small as these, do not exist. The
    # largest element is that of another rank.
    share = np.float32([6e4, -6.5e4, 1e3]) * np.float32(1 if comm.rank == 0 else 0.5)
    mean = share / (1 if comm.rank == 0 else 0.5) * (1 + 0.5 * (comm.size - 1)) / comm.size

    variables = [keras.Variable(np.zeros(3, "float32"), name=f"half{i}") for i in range(2)]
    large, small = averages([share, share * np.float32(1e-15)], variables, "fp16")
    np.testing.assert_allclose(large, mean, rtol=2e-3)
    np.testing.assert_allclose(small, mean * 1e-15, rtol=2e-3)


def gradients_of_several_passes_are_those_of_one_larger_batch(comm):
    x, y = samples()
    passes = 2

    def optimizer(passes):
        return keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=passes)

    model = small_nt3(distribute(optimizer(passes)))
    for i in range(2 * passes):
        before = weights_of(model)
        first = (i * comm.size + comm.rank) * BATCH
        model.train_on_batch(x[first : first + BATCH], y[first : first + BATCH])
        assert (weights_of(model) != before).any() == (i % passes == passes - 1)
    mine = weights_of(model)
    assert not comm.find_different(mine.tobytes())
    alone = small_nt3(optimizer(None))
    whole = passes * comm.size * BATCH
    for step in range(2):
        alone.train_on_batch(*(each[step * whole : (step + 1) * whole] for each in (x, y)))
    np.testing.assert_allclose(mine, weights_of(alone), rtol=1e-4, atol=1e-6)


def variables_without_gradients_are_left_out_of_several_passes(comm):
    """Of TensorFlow; JAX's gradients are never missing."""
    if engine().backend == "jax":
        return
    import tensorflow as tf

    optimizer = distribute(keras.optimizers.SGD(0.5, gradient_accumulation_steps=2))
    used, unused = (keras.Variable(np.ones(3, "float32"), name=name) for name in "ab")
    optimizer.build([used, unused])
    update = tf.function(lambda gradient: optimizer.apply([gradient, None], [used, unused]))
    for _ in range(2):
        update(tf.fill((3,), comm.rank + 1.0))
    expected = 1 - 0.5 * (comm.size + 1) / 2
    np.testing.assert_allclose(keras.ops.convert_to_numpy(used), expected, rtol=1e-6)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(unused), 1)


def mixed_precision_trains(comm):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        optimizer = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**10)
        model = small_nt3(distribute(optimizer))
        history = fit(model, comm, plan_for(comm, epochs=6), ReplicaCheck(comm))
        losses = history.history["loss"]
        assert losses[-1] < 0.8 * losses[0], losses
        assert model.layers[0].compute_dtype == "float16"

        # An overflow on one rank must make all ranks skip the step.
        before = weights_of(model)
        gradients = [np.zeros(v.shape, "float32") for v in model.trainable_variables]
        if comm.rank == comm.size - 1:
            gradients[0] = gradients[0] + np.inf
        apply_gradients(model.optimizer, gradients, model.trainable_variables)
        np.testing.assert_array_equal(weights_of(model), before)
    finally:
        keras.config.set_dtype_policy("float32")


def the_self_test_accepts_ours_and_refuses_others(comm):
    for plain in (
        sgd,
        lambda: keras.optimizers.Adam(0.01, clipnorm=0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.01)),
    ):
        self_test(engine(), plain)
    used = sgd()
    used.build([keras.Variable(np.zeros(2, "float32"))])
    with pytest.raises(DistributedError, match="built"):
        distribute(used)
    wrong = [sgd]
    if engine().name == "horovod":
        import horovod.tensorflow as hvd
        from horovod.tensorflow.keras import DistributedOptimizer as StockOptimizer

        hvd.init()  # if the engine has not needed it
        wrong.append(lambda: StockOptimizer(sgd()))
    for make in wrong:
        with pytest.raises(DistributedError, match=f"{comm.size} ranks") as caught:
            self_test(engine(), sgd, make)
        assert caught.value.agreed


def metrics_of_unequal_shares_equal_one_process(comm):
    """Ranks cannot share 37 samples equally; in other cases, some of them or all have none."""
    x, y = (each[:37] for each in samples())
    model = small_nt3(sgd())
    expected = model.evaluate(x, y, batch_size=5, verbose=0, return_dict=True)
    some = [(0, 36), (36, 37), *[(37, 37)] * comm.size]
    for shares in ([share_bounds(37, rank, comm.size) for rank in range(comm.size)], some):
        mine = slice(*shares[comm.rank])
        share = EvaluationBatches(Samples(x[mine], y[mine]), 5, SerialCommunicator())
        metrics = evaluate_shared(model, share, comm)
        assert metrics.keys() == expected.keys()
        for name, value in metrics.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-6, err_msg=name)
    nothing = EvaluationBatches(Samples(x[:0], y[:0]), 4, comm)
    assert evaluate_shared(small_nt3(sgd()), nothing, comm) == {}


def broadcast_copies_weights_and_optimizer_state_but_no_random_state(comm):
    model = small_nt3(distribute(sgd()), dropout=0.2, seed=100 + comm.rank)
    seed_ranks(model, 1, comm.rank)
    model.optimizer.build(model.trainable_variables)
    momenta = [each for each in model.optimizer.variables if each.name.endswith("momentum")]
    for variable in momenta:
        variable.assign(variable + comm.rank)

    def num_different(variables):
        return len({each.tobytes() for each in comm.allgather(all_of(variables))})

    states = seed_states(model)
    before = all_of(states)
    assert num_different(model.weights) == num_different(states) == comm.size
    broadcast_state(model, engine().reducer)
    assert num_different(model.weights) == 1
    assert len(momenta) == len(model.trainable_variables)
    assert not all_of(momenta).any()
    np.testing.assert_array_equal(all_of(states), before)
    drawn = keras.ops.convert_to_numpy(model(samples()[0][:4], training=True))
    assert len({each.tobytes() for each in comm.allgather(drawn)}) == comm.size


def the_mean_of_what_no_gradient_updates_is_numpys(comm):
    """Such as the moving statistics of batches."""
    keras.utils.set_random_seed(7)
    normalization = keras.layers.BatchNormalization()
    count = normalization.add_weight((), "zeros", "int32", trainable=False)
    model = keras.Sequential([keras.layers.Input((5,)), normalization, keras.layers.Dense(1)])
    compiled(model, distribute(keras.optimizers.SGD(0.01)), loss="mse")
    count.assign(comm.rank + 3)
    x = np.random.default_rng(comm.rank).normal(comm.rank, 1 + comm.rank, (24, 5)).astype("f4")
    y = x[:, :1]
    held_out = np.linspace(-1, 1, 35, dtype="f4").reshape(7, 5)
    of_ranks = []

    def state():
        return [keras.ops.convert_to_numpy(weight) for weight in model.non_trainable_weights]

    def validate(epoch, logs):
        average_state(model, comm)
        batches = EvaluationBatches(Samples(held_out, held_out[:, :1]), 2, comm)
        logs["val_loss"] = evaluate_shared(model, batches, comm)["loss"]

    callbacks = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: of_ranks.extend(comm.allgather(state()))
        ),
        keras.callbacks.LambdaCallback(on_epoch_end=validate),
        ReplicaCheck(comm),
    ]
    history = model.fit(x, y, batch_size=6, shuffle=False, verbose=0, callbacks=callbacks)
    averaged, num_samples = state(), comm.allgather(len(x))
    for mean, each in zip(averaged, zip(*of_ranks, strict=True), strict=True):
        if mean.ndim:
            of_numpy = np.average(each, axis=0, weights=num_samples)
            np.testing.assert_allclose(mean, of_numpy, rtol=1e-6)
            assert np.abs(each[-1] - mean).max() > 0.01, "the ranks were equal anyway"
    assert int(count.value) == 3, "an integer is rank 0's"
    whole = model.evaluate(held_out, held_out[:, :1], verbose=0)
    np.testing.assert_allclose(history.history["val_loss"][-1], whole, rtol=1e-5)


OF_GRADIENTS = (
    sparse_gradients_become_dense_averages,
    replicas_stay_identical_and_differences_are_detected,
    ranks_equal_one_process_with_the_global_batch,
    clipping_acts_on_the_averaged_gradient,
    compressed_gradients_are_averaged_to_half_precision,
    gradients_of_several_passes_are_those_of_one_larger_batch,
    variables_without_gradients_are_left_out_of_several_passes,
    mixed_precision_trains,
)
"""What depends on how gradients are averaged."""
OF_ENGINES = (
    *OF_GRADIENTS,
    the_self_test_accepts_ours_and_refuses_others,
    metrics_of_unequal_shares_equal_one_process,
    broadcast_copies_weights_and_optimizer_state_but_no_random_state,
    the_mean_of_what_no_gradient_updates_is_numpys,
)
CHECKS = (*OF_ENGINES, updates_that_the_ranks_divide_are_those_of_one_process)
