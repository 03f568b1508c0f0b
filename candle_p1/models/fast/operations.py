"""The fast implementations, in TensorFlow.

What is slow on CPUs, and what is done instead:

- oneDNN computes the gradient of a convolution's kernel at a small fraction of the speed of matrix
  products for a long sequence, but nearly at full speed for many short ones. Long ones are cut.
- The gradient of a dense layer's inputs, as a product with a large transposed kernel, is half as
  fast as the transposed product.
- The gradient of a penalty, computed as a separate matrix and added to the gradient of the loss,
  takes five passes over memory instead of three.
- An optimizer made of elementwise operations reads and writes every weight many times, and
  TensorFlow's RMSprop three times.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from candle_p1 import ops
from candle_p1.models.fast import STRETCH


def convolve(inputs: Any, kernel: Any, bias: Any, *, rectify: bool) -> Any:
    """Returns the 1D convolution with a stride of one and no padding, plus a bias for each filter.

    With inputs of shape (batch, length, channels), a kernel (size, channels, filters) and a bias
    (filters,), the result has shape (batch, length - size + 1, filters). `rectify` replaces
    negative values by zeros.
    """

    # TensorFlow fuses the three operations only within one function.
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(inputs: Any, kernel: Any, bias: Any) -> Any:
        image = tf.nn.conv2d(inputs[:, tf.newaxis], kernel[tf.newaxis], 1, "VALID")
        image = tf.nn.bias_add(image, bias)
        outputs = tf.squeeze(tf.nn.relu(image) if rectify else image, axis=1)

        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            if rectify:
                upstream = tf.raw_ops.ReluGrad(gradients=upstream, features=outputs)
            return (
                tf.nn.conv1d_transpose(upstream, kernel, tf.shape(inputs), 1, "VALID"),
                _kernel_gradient(inputs, upstream, kernel.shape),
                tf.raw_ops.BiasAddGrad(out_backprop=upstream),
            )

        return outputs, gradient

    return compute(inputs, kernel, bias)


def multiply(inputs: Any, kernel: Any, bias: Any) -> Any:
    """Returns a dense layer's outputs, shape (batch, units).

    The inputs have shape (batch, features), the kernel (features, units), the bias (units,).
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(inputs: Any, kernel: Any, bias: Any) -> Any:
        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            of_inputs = tf.transpose(tf.matmul(kernel, upstream, transpose_b=True))
            of_kernel = tf.matmul(inputs, upstream, transpose_a=True)
            return of_inputs, of_kernel, tf.raw_ops.BiasAddGrad(out_backprop=upstream)

        return tf.nn.bias_add(tf.matmul(inputs, kernel), bias), gradient

    return compute(inputs, kernel, bias)


def _kernel_gradient(inputs: Any, upstream: Any, shape: tuple[int, int, int]) -> Any:
    """Returns the gradient of a convolution's kernel, of this shape (size, channels, filters).

    It is a sum over positions, so each stretch of positions can become a sample of its own. The
    last stretch of a sequence is padded with zeros.
    """
    size, channels, filters = shape
    positions = upstream.shape[1]
    num = -(-positions // STRETCH)
    missing = num * STRETCH - positions
    padded = tf.pad(upstream, [[0, 0], [0, missing], [0, 0]])
    longer = tf.pad(inputs, [[0, 0], [0, missing], [0, 0]])
    stretches = tf.signal.frame(longer, STRETCH + size - 1, STRETCH, axis=1)
    gradient = tf.raw_ops.Conv2DBackpropFilter(
        input=tf.reshape(stretches, [-1, 1, STRETCH + size - 1, channels]),
        filter_sizes=[1, size, channels, filters],
        out_backprop=tf.reshape(padded, [-1, 1, STRETCH, filters]),
        strides=[1, 1, 1, 1],
        padding="VALID",
    )
    return tf.squeeze(gradient, axis=0)


def descend(optimizer: Any, variable: Any, gradient: Any, rate: Any) -> None:
    """Updates a ``tf.Variable`` as the optimizer SGD does at this learning rate."""
    if not optimizer.momentum:
        tf.raw_ops.ResourceApplyGradientDescent(
            var=variable.handle, alpha=_like(rate, variable), delta=gradient
        )
        return
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.handle,
        accum=_state(optimizer, optimizer.momentums, variable),
        lr=_like(rate, variable),
        grad=gradient,
        momentum=_like(optimizer.momentum, variable),
    )


def adam(optimizer: Any, variable: Any, gradient: Any, rate: Any) -> None:
    """Updates a ``tf.Variable`` as the optimizer Adam does at this learning rate."""
    step = _like(optimizer.iterations + 1, variable)
    first, second = (_like(each, variable) for each in (optimizer.beta_1, optimizer.beta_2))
    tf.raw_ops.ResourceApplyAdam(
        var=variable.handle,
        m=_state(optimizer, optimizer._momentums, variable),
        v=_state(optimizer, optimizer._velocities, variable),
        beta1_power=first**step,
        beta2_power=second**step,
        lr=_like(rate, variable),
        beta1=first,
        beta2=second,
        epsilon=_like(optimizer.epsilon, variable),
        grad=gradient,
    )


def rmsprop(optimizer: Any, variable: Any, gradient: Any, rate: Any, *, under_root: bool) -> None:
    """Updates a float32 ``tf.Variable`` as the optimizer RMSprop does without momentum.

    Epsilon is added to the mean square under the root (Keras 3) or to the root (Keras 2).
    """
    ops.load().candle_p1_rmsprop(
        variable.handle,
        _state(optimizer, optimizer._velocities, variable),
        gradient,
        _like(rate, variable),
        decay=optimizer.rho,
        epsilon=optimizer.epsilon if under_root else 0,
        outer_epsilon=0 if under_root else optimizer.epsilon,
        threads=ops.num_threads(),
    )


def penalize(weights: Any, weight: float) -> tuple[Any, Any]:
    """Returns weights, and the penalty on the sum of their squares.

    Only the returned float32 weights may be used from here on: the penalty's gradient is added to
    theirs. `weight` is the factor of the sum of squares in the penalty.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(weights: Any) -> Any:
        def gradient(of_weights: Any, of_penalty: Any) -> Any:
            factor, threads = 2 * weight * of_penalty, ops.num_threads()
            return ops.load().candle_p1_add_scaled(of_weights, weights, factor, threads=threads)

        return (tf.identity(weights), weight * square_sum(weights)), gradient

    passed_on, penalty = compute(weights)
    return passed_on, penalty


def square_sum(values: Any) -> Any:
    """Returns the sum of squares, computed in one pass."""
    return 2 * tf.nn.l2_loss(values)


def _state(optimizer: Any, states: Any, variable: Any) -> Any:
    """Returns the handle of the state that an optimizer keeps for a variable."""
    state = states[optimizer._get_variable_index(variable)]
    return getattr(state, "value", state).handle


def _like(value: Any, variable: Any) -> Any:
    """Returns a number as a tensor of the variable's dtype."""
    # tf.cast alone would convert a Python float to float32 first.
    return tf.cast(tf.convert_to_tensor(value, dtype_hint=variable.dtype), variable.dtype)
