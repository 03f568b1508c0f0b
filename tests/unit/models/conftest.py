import numpy as np
import pytest


@pytest.fixture
def fast_kernels():
    from candle_p1.models import fast

    fast.choose("fast", on_cpu=True)
    yield
    fast.choose("plain", on_cpu=True)


@pytest.fixture
def double_precision():
    """Lets Keras's backend compute in float64, which JAX does only where it is told to."""
    import keras

    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def values_and_gradients(layer, x):
    """Returns outputs, and the gradients of a function of them to inputs and weights."""
    import keras

    if keras.backend.backend() == "jax":
        import jax

        def loss_and_outputs(x, weights):
            y, _ = layer.stateless_call(weights, [], x)
            return jax.numpy.sin(3 * y.astype("float32")).sum(), y

        compute = jax.jit(jax.value_and_grad(loss_and_outputs, argnums=(0, 1), has_aux=True))
        weights = [each.value for each in layer.trainable_variables]
        (_, y), (of_x, of_weights) = compute(x, weights)
        return [np.asarray(each, np.float32) for each in (y, of_x, *of_weights)]
    import tensorflow as tf

    @tf.function
    def compute(x):
        sources = [x, *(each.value for each in layer.trainable_variables)]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
            loss = tf.reduce_sum(tf.sin(3 * y))
        gradients = tape.gradient(loss, sources)
        # The log of communication needs the shapes while the step is traced.
        assert [each.shape for each in gradients] == [each.shape for each in sources]
        assert tuple(y.shape) == layer.compute_output_shape(x.shape)
        return y, *gradients

    return [each.numpy() for each in compute(tf.constant(x))]
