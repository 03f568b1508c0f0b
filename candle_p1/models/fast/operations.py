"""The fast implementations in TensorFlow, except convolutions, and how large weights are drawn.

What is slow on CPUs, and what is done instead:

- The gradient of a dense layer's inputs, as a product with a large transposed kernel, is half as
  fast as the transposed product.
- A product with inputs that are mostly zeros, and the gradient of the kernel, which is then written
  and read, take as long as those of dense inputs.
- The gradient of a penalty, computed as a separate matrix and added to the gradient of the loss,
  takes five passes over memory instead of three.
- Random weights are drawn twice. Before TensorFlow executes a function, it computes what does not
  depend on the function's arguments (constant folding). Random weights do not, as their seed is a
  constant. The result is then thrown away, because it is too large to be kept in the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from candle_p1 import ops
from candle_p1.ops.updates import Factors

FOLDING = "constant_folding"


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


def multiply_sparse(
    inputs: Any, kernel: Any, bias: Any, *, penalty: float, num_bytes: int
) -> tuple[Any, Any]:
    """Returns a dense layer's outputs, and the penalty on the sum of the kernel's squares.

    The inputs are a SparseTensor, which needs no gradient. That of the kernel is `Factors`.
    `penalty` is the factor of the sum of squares; `num_bytes` are those of the factors.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def compute(kernel: Any, bias: Any) -> Any:
        def gradient(upstream: Any, of_penalty: Any) -> tuple[Any, Any]:
            decay = 2 * penalty * of_penalty
            factors = Factors(inputs.indices, inputs.values, upstream, decay, num_bytes)
            return factors, tf.raw_ops.BiasAddGrad(out_backprop=upstream)

        products, squares = ops.load().candle_p1_sparse_product(
            kernel,
            inputs.indices,
            inputs.values,
            inputs.dense_shape,
            adds_squares=int(penalty != 0),
            threads=ops.num_threads(),
        )
        products.set_shape((inputs.shape[0], kernel.shape[1]))
        squares.set_shape(())
        return (tf.nn.bias_add(products, bias), penalty * squares), gradient

    outputs, of_squares = compute(kernel, bias)
    return outputs, of_squares


def drawn_once(initializer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an initializer with the same values, which draws them once and in place.

    Operations called one by one keep the result of each, and TensorFlow's allocator keeps their
    memory for later. As one function they compute in the memory of the first. It is traced here,
    for one call: calls that trace would look to TensorFlow like one function that is traced anew.
    """

    def draw(shape: Any, dtype: Any = None) -> Any:
        options = tf.config.optimizer
        before = options.get_experimental_options().get(FOLDING)
        options.set_experimental_options({FOLDING: False})
        try:
            return tf.function(lambda: initializer(shape, dtype)).get_concrete_function()()
        finally:
            options.set_experimental_options({FOLDING: before})

    return draw


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
