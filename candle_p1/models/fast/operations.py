"""The fast implementations in TensorFlow, except convolutions.

What is slow on CPUs, and what is done instead:

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
from tensorflow.python.eager import record

from candle_p1 import ops


def multiply(inputs: Any, kernel: Any, bias: Any) -> Any:
    """Returns a dense layer's outputs, shape (batch, units).

    The inputs have shape (batch, features), the kernel (features, units), the bias (units,).
    """
    wanted = record.should_record_backprop((inputs,))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(inputs: Any, kernel: Any, bias: Any) -> Any:
        def gradient(upstream: Any) -> tuple[Any, Any, Any]:
            of_inputs = tf.transpose(tf.matmul(kernel, upstream, transpose_b=True))
            # The kernel cannot be updated in place while another operation still reads it.
            with tf.control_dependencies([of_inputs] if wanted else []):
                of_kernel = tf.matmul(inputs, upstream, transpose_a=True)
            return of_inputs, of_kernel, tf.raw_ops.BiasAddGrad(out_backprop=upstream)

        return tf.nn.bias_add(tf.matmul(inputs, kernel), bias), gradient

    return compute(inputs, kernel, bias)


def in_place(initializer: Any) -> Any:
    """Returns an initializer with the same values, which needs less memory for large weights.

    Operations called one by one keep the result of each, and TensorFlow's allocator keeps their
    memory for later. As one function they compute in the memory of the first.
    """

    def compute(shape: Any, dtype: Any = None) -> Any:
        return tf.function(lambda: initializer(shape, dtype))()

    return compute


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
