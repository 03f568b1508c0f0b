"""Keras layers and penalties, in the implementation chosen in candle_p1.models.fast."""

from __future__ import annotations

import math
from typing import Any

import keras

from candle_p1.models import fast
from candle_p1.models.fast.convolution_algorithms import Convolution, tile_products


@keras.saving.register_keras_serializable("candle_p1")
class L2(keras.regularizers.L2):  # type: ignore[misc]
    """A penalty on the sum of squares. The fast implementation does not store the squares."""

    def __call__(self, x: Any) -> Any:
        """Returns the penalty."""
        if not fast.on_cpu():
            return super().__call__(x)
        from candle_p1.models.fast.operations import square_sum

        return self.l2 * square_sum(x)


@keras.saving.register_keras_serializable("candle_p1")
class Conv1D(keras.layers.Conv1D):  # type: ignore[misc]
    """A 1D convolution.

    The fast implementation is for inputs of known length, on GPUs of one channel, with a bias, a
    stride of one, and no padding, dilation or groups. It gains nothing for a sequence of up to
    CHUNK positions.
    """

    def call(self, inputs: Any) -> Any:
        """Returns the convolution, shape (batch, positions, filters)."""
        if not self._is_fast(inputs.shape[1]):
            return super().call(inputs)
        fast.note("Conv1D")
        kernel, bias = map(keras.ops.convert_to_tensor, (self.kernel, self.bias))
        if fast.on_gpu():
            from candle_p1.models.fast.gpu_forms import convolve_channel

            return self.activation(convolve_channel(inputs, kernel) + bias)
        from candle_p1.models.fast.convolutions import convolve

        rectify = self.activation is keras.activations.relu
        outputs = convolve(inputs, kernel, bias, rectify=rectify)
        return outputs if rectify else self.activation(outputs)

    def multiplications(self) -> float:
        """Returns how many multiplications the products take for each output position."""
        shape, length = self.kernel.shape, self.input.shape[1]
        in_blocks = self.compute_dtype == "float32"
        if (
            fast.on_cpu()
            and self._is_fast(length)
            and Convolution(length, *shape).choose(in_blocks=in_blocks) == "tiled"
        ):
            return tile_products(*shape)
        return float(math.prod(shape))

    def _is_fast(self, length: int | None) -> bool:
        on_cpu = fast.on_cpu() and self.compute_dtype not in fast.HALF_TYPES
        return bool(
            (on_cpu or (fast.on_gpu() and self.kernel.shape[1] == 1))
            and length is not None
            and length >= fast.CHUNK + self.kernel_size[0]
            and self.strides == self.dilation_rate == (1,)
            and self.groups == 1
            and self.padding == "valid"
            and self.data_format == "channels_last"
            and self.use_bias
        )


@keras.saving.register_keras_serializable("candle_p1")
class Dense(keras.layers.Dense):  # type: ignore[misc]
    """A dense layer.

    The fast implementation is for inputs with two dimensions, and adds the gradient of an `L2`
    penalty on the kernel to that of the loss in place.

    Attributes:
        sparse: What inputs that are mostly zeros have in common, where the layer takes them as
            sparse tensors; see `candle_p1.models.fast.sparse`.
    """

    sparse: Any = None
    _penalty: Any = None

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Creates the kernel (features, units) and the bias (units,)."""
        initializer: Any = self.kernel_initializer  # type: ignore[has-type]
        if fast.on_cpu():
            from candle_p1.models.fast.operations import drawn_once

            self.kernel_initializer = drawn_once(initializer)
        super().build(input_shape)
        self.kernel_initializer = initializer
        self._adds_penalty = (
            fast.on_cpu()
            and type(self.kernel_regularizer) is L2
            and self._kernel.dtype == self.compute_dtype == "float32"
        )
        if self._adds_penalty:
            self._kernel.regularizer = None

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs, shape (batch, units)."""
        simple = self.use_bias and len(inputs.shape) == 2
        if fast.on_gpu() and simple:
            from candle_p1.models.fast.gpu_forms import multiply as product

            fast.note("Dense")
            kernel, bias = map(keras.ops.convert_to_tensor, (self.kernel, self.bias))
            return self.activation(product(inputs, kernel) + bias)
        if self.sparse is not None and hasattr(inputs, "dense_shape"):
            return self._call_sparse(inputs)
        kernel = self._penalized_kernel()
        simple &= self.compute_dtype not in fast.HALF_TYPES
        if not (fast.on_cpu() and simple):
            return super().call(inputs, training=training)
        from candle_p1.models.fast.operations import multiply

        fast.note("Dense")
        bias = keras.ops.convert_to_tensor(self.bias)
        return self.activation(multiply(inputs, kernel, bias))

    def _call_sparse(self, inputs: Any) -> Any:
        from candle_p1.models.fast.operations import multiply_sparse

        fast.note("SparseDense")
        kernel, bias = map(keras.ops.convert_to_tensor, (self.kernel, self.bias))
        weight = self.kernel_regularizer.l2 if self._adds_penalty else 0.0
        outputs, penalty = multiply_sparse(
            inputs, kernel, bias, penalty=weight, num_bytes=self.sparse.num_bytes
        )
        if weight:
            self.add_loss(penalty)
        return self.activation(outputs)

    def _penalized_kernel(self) -> Any:
        """Returns the kernel, after adding its penalty to the losses of this pass."""
        kernel = keras.ops.convert_to_tensor(self.kernel)
        added = any(loss is self._penalty for loss in self._losses)  # by another call
        if not self._adds_penalty or not self._kernel.trainable or added:
            return kernel
        from candle_p1.models.fast.operations import penalize

        kernel, self._penalty = penalize(kernel, self.kernel_regularizer.l2)
        self.add_loss(self._penalty)
        return kernel


@keras.saving.register_keras_serializable("candle_p1")
class MaxPooling1D(keras.layers.MaxPooling1D):  # type: ignore[misc]
    """Maxima of neighbouring positions, without padding.

    The fast implementation skips a pool of one, and lets a convolution that computes by tiles find
    the maxima of its outputs.
    """

    def call(self, inputs: Any) -> Any:
        """Returns the maxima, shape (batch, pools, channels)."""
        simple = (
            self.pool_size == self.strides
            and self.padding == "valid"
            and self.data_format == "channels_last"
        )
        if not (fast.are_fast() and simple):
            return super().call(inputs)
        if self.pool_size == (1,):
            return inputs
        if fast.on_gpu():
            from candle_p1.models.fast import gpu_forms

            if self.pool_size[0] > gpu_forms.MAX_POOL:
                return super().call(inputs)
            fast.note("MaxPooling1D")
            return gpu_forms.pool(inputs, *self.pool_size)
        from candle_p1.models.fast.convolutions import pool

        maxima = pool(inputs, *self.pool_size)
        return super().call(inputs) if maxima is None else maxima
