"""Times convolutions by each algorithm, and says how often the rule for them chose the fastest.

``make bench-conv``. The convolutions are of other shapes than the benchmarks', and those of the
benchmarks, too. Of several calls the fastest counts: what else runs on the machine only adds to
times.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import click
import numpy as np
import pandas as pd

from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import SetupError
from candle_p1.models.fast.convolution_algorithms import IN_BLOCKS, Convolution

NUM_DRAWN = 26
OUTPUT_BYTES = (40e6, 100e6)
"""The size of the outputs of what is drawn: more than caches hold."""
LEAST_OF_TILES = 16
"""Channels and filters from which on tiles are timed; of fewer, they compute with zeros mostly."""


@dataclass(frozen=True)
class Case:
    """A convolution in a training step."""

    length: int  # of its input; if there is a convolution before it, that one's
    taps: int  # the length of its kernel
    channels: int
    filters: int
    pool: int = 1  # the positions whose maximum is taken
    batch: int = 1  # the samples of a step
    # The length of the kernel of a rectified convolution of one channel before it, which makes the
    # channels; 0: there is none.
    first_taps: int = 0
    gives_gradient: bool = False  # whether the gradient of the input is wanted

    @property
    def convolution(self) -> Convolution:
        """The shape that an algorithm is chosen for."""
        length = self.length - max(self.first_taps - 1, 0)
        return Convolution(length, self.taps, self.channels, self.filters, self.pool)

    @property
    def algorithms(self) -> list[str]:
        """The algorithms that are timed; a direct one does not take the first convolution over."""
        left_out = set()
        if self.first_taps:
            left_out.add("direct")
        if min(self.channels, self.filters) < LEAST_OF_TILES:
            left_out.add("tiled")
        return [each for each in self.convolution.algorithms if each not in left_out]


SHAPE = [field.name for field in fields(Case)]
AFTER_FIRST = [
    Case(8000, 6, 64, 64, 4, 6, 8),
    Case(16000, 12, 96, 64, 8, 3, 12),
    Case(32000, 8, 64, 128, 5, 2, 15),
    Case(48000, 10, 96, 96, 10, 1, 25),
    Case(24000, 14, 64, 64, 1, 4, 10),
    Case(4000, 5, 128, 64, 2, 16, 16),
]
MANY_CHANNELS = [
    Case(50000, 8, 128, 64, 1, 1),
    Case(40000, 12, 64, 96, 5, 2),
    Case(10000, 6, 96, 64, 3, 8),
    Case(20000, 15, 32, 96, 8, 3),
    Case(24000, 5, 128, 128, 4, 2),
    Case(40000, 14, 128, 128, 8, 1),
]
BENCHMARKS = {
    Case(29532, 10, 1, 10, 10, 100): "p1b3, first",
    Case(2952, 5, 10, 5, 10, 100, gives_gradient=True): "p1b3, second",
    Case(60483, 10, 128, 128, 10, 2, 20): "nt3",
}
"""The convolutions of the benchmarks at full size; NT3's for a tenth of a batch."""


def cases() -> list[Case]:
    """Returns what is timed; some are drawn at random, the same every time."""
    random = np.random.default_rng(7)

    def one_of(*values: int) -> int:
        return int(random.choice(values))

    found = []
    for number in range(NUM_DRAWN):
        is_first = number % 2 == 0
        channels = 1 if is_first else one_of(2, 4, 8, 10, 16, 24, 32, 64)
        filters = one_of(4, 6, 8, 12, 16, 20, 32, 48, 64)
        taps, pool = one_of(3, 5, 7, 8, 12, 15), one_of(1, 2, 3, 5, 8, 12)
        length = one_of(2500, 4000, 8000, 16000, 32000)
        batch = max(1, round(random.uniform(*OUTPUT_BYTES) / 4 / filters / length))
        found.append(Case(length, taps, channels, filters, pool, batch, 0, not is_first))
    later = [replace(each, gives_gradient=True) for each in MANY_CHANNELS]
    return [*found, *AFTER_FIRST, *later, *BENCHMARKS]


def step_of(algorithm: str, case: Case) -> Callable[[], Any]:
    """Returns a function that computes a convolution's outputs and gradients by an algorithm.

    The function returns the gradients of the weights and, if that is wanted, of the input, given
    the same random gradient of the outputs at every call.
    """
    import tensorflow as tf

    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return tf.constant(random.standard_normal(shape, dtype=np.float32))

    values = drawn(case.batch, case.length, 1 if case.first_taps else case.channels)
    shapes = [(case.taps, case.channels, case.filters)]
    if case.first_taps:
        shapes.insert(0, (case.first_taps, 1, case.channels))
    weights = [each for shape in shapes for each in (drawn(*shape), drawn(shape[-1]))]
    upstream = drawn(case.batch, case.convolution.positions // case.pool, case.filters)
    wanted = [*weights, values] if case.gives_gradient else weights

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(wanted)
            outputs = _outputs(algorithm, case.pool, values, weights)
        return tape.gradient(outputs, wanted, output_gradients=upstream)

    compute: Callable[[], Any] = step
    return compute


def _outputs(algorithm: str, pool: int, values: Any, weights: list[Any]) -> Any:
    import keras

    from candle_p1.models.fast.convolutions import Note, compute, convolve

    if algorithm == "plain":
        for kernel, bias in zip(weights[::2], weights[1::2], strict=True):
            image = keras.ops.conv(values, kernel, 1, "valid")
            values = keras.ops.relu(image + keras.ops.reshape(bias, (1, 1, -1)))
        return values if pool == 1 else keras.ops.max_pool(values, pool, pool)
    *first, kernel, bias = weights
    if first and algorithm == "tiled":  # which computes it once more instead of keeping it
        values = convolve(values, *first, rectify=True)
    elif first:
        values = compute(Note(values, first[0], first[1], rectify=True), algorithm)
    outputs = compute(Note(values, kernel, bias, rectify=True), algorithm, pool)
    is_pooled = pool == 1 or algorithm in IN_BLOCKS
    return outputs if is_pooled else keras.ops.max_pool(outputs, pool, pool)


def measure(num_calls: int) -> pd.DataFrame:
    """Times all cases by all algorithms: a row each.

    Raises:
        SetupError: There are no fast kernels for this backend.
    """
    from candle_p1.bench.task import seconds_of
    from candle_p1.distributed import devices
    from candle_p1.distributed.engine import make_engine
    from candle_p1.models import fast

    comm = SerialCommunicator()
    device = devices.configure(comm, make_engine("auto", comm), gpus=[], deterministic=True)
    if not fast.exist(on_cpu=not device.is_gpu):
        raise SetupError("the algorithms of convolutions are for TensorFlow on CPUs: make setup")
    rows: list[dict[str, Any]] = []
    for case in cases():
        for name in case.algorithms:
            least_s = seconds_of(step_of(name, case), num_calls, min)
            rows.append(asdict(case) | {"algorithm": name, "least_s": least_s})
        gc.collect()
    return pd.DataFrame(rows)


def analyse(times: pd.DataFrame) -> pd.DataFrame:
    """Returns a row for each case: its ``name``, the times by algorithm, and what was chosen.

    ``name`` is a benchmark's or "", ``chosen`` the algorithm that a layer takes, and ``loss`` how
    much longer that takes than the fastest, apart from plain Keras.
    """
    found = times.pivot(index=SHAPE, columns="algorithm", values="least_s")
    shapes = [Case(**dict(zip(SHAPE, index, strict=True))) for index in found.index]
    chosen = [case.convolution.choose() for case in shapes]
    chosen_s = [times_s[name] for (_, times_s), name in zip(found.iterrows(), chosen, strict=True)]
    fastest_s = found.drop(columns="plain").min(axis=1)
    return found.assign(
        name=[BENCHMARKS.get(case, "") for case in shapes],
        chosen=chosen,
        loss=np.array(chosen_s) / fastest_s - 1,
    )


@click.command()
@click.option("--calls", "num_calls", type=click.IntRange(1), default=7, help="Timed calls.")
@click.option(
    "--times", type=click.Path(), help="Measure nothing: read the times in this CSV file."
)
@click.option("--csv", type=click.Path(), help="Write the times to this file.")
def main(num_calls: int, times: str | None, csv: str | None) -> None:
    """Time convolutions by each algorithm, and say how often the rule chose the fastest."""
    measured = pd.read_csv(times) if times else measure(num_calls)
    if csv:
        measured.to_csv(csv, index=False)
    found = analyse(measured)
    loss = found["loss"]
    is_time = found.dtypes == np.float64
    is_time["loss"] = False
    table = found.assign(**{name: 1e3 * found[name] for name in found.columns[is_time]})
    click.echo("the fastest of several calls, in ms; the algorithm of a layer, and its loss\n")
    click.echo(table.to_string(float_format="{:.3g}".format, na_rep=""))
    click.echo(f"\nthe rule chooses the fastest algorithm of {(loss == 0).sum()} of {len(loss)}")
    click.echo(
        f"its choice takes {loss.mean():.0%} longer than the fastest, {loss.max():.0%} at most"
    )


if __name__ == "__main__":
    main()
