"""Custom operations for TensorFlow, in C++.

They are registered through TensorFlow's C interface, so they are compiled without TensorFlow and
work with every version of it. Their code is in ``source/``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def load() -> Any:
    """Returns a module of operations, for float32 tensors and variables on the CPU.

    - ``candle_p1_add_scaled(values, others, factor, threads)`` gives values + factor x others, and
      reuses the memory of the values unless it is still needed.
    - ``candle_p1_sparse_product(weights, places, values, shape, adds_squares, threads)`` gives the
      product of a sparse matrix and weights, and the sum of their squares; see
      `candle_p1.models.fast.operations`.
    - ``candle_p1_update(weights, states, gradients, constants, places, values, decays, rule,
      threads)``: see `candle_p1.ops.updates`. With ``memory, tag, rank, num_ranks, timeout_s``, by
      the averages of all ranks' gradients: see `candle_p1.distributed.reducers.shared_memory`.
    - ``candle_p1_average_on_node(value, memory, tag, rank, num_ranks, threads, root, timeout_s)``:
      see there; float64, too.
    - ``candle_p1_clock(after)``: see `read_clock`.
    - ``candle_p1_convolve(values, first_kernel, first_biases, kernel, biases, pool, rectify,
      by_tiles, threads)`` gives the maxima of pools of a 1D convolution and their places, and
      ``candle_p1_convolve_gradient`` the gradients; see `candle_p1.models.fast.convolutions`. The
      variable ``CANDLE_P1_INSTRUCTIONS`` (avx512, avx2 or portable) limits what they use of the
      processor.
    """
    import tensorflow as tf

    return tf.load_op_library(_library())


def read_clock(after: Any, *, on_gpu: bool = False) -> Any:
    """Returns the time.perf_counter at which a tensor becomes ready; float64, in s.

    The clock is read on the CPU, and TensorFlow copies there what an operation takes. Of a tensor
    on a GPU it takes one element, which arrives as soon as the GPU has computed the tensor; when
    the tensor itself is passed on says only when that work was submitted.
    """
    import tensorflow as tf

    if on_gpu:
        after = tf.reshape(after, [-1])[:1]
    with tf.device("CPU:0"):
        return load().candle_p1_clock(after)


def num_threads() -> int:
    """Returns the number of threads that an operation should use."""
    import tensorflow as tf

    return max(1, int(tf.config.threading.get_intra_op_parallelism_threads()))


def node_memory_bytes(num_ranks: int, num_threads: int) -> int:
    """Returns the size of the memory through which ranks average, each with some threads."""
    load()
    size = ctypes.CDLL(_library()).candle_p1_node_memory_bytes
    size.restype = ctypes.c_size_t
    return int(size(num_ranks, num_threads))


def _library() -> str:
    return str(files("candle_p1.ops").joinpath("operations.so"))
