"""Times convolutions by each algorithm, and fits the model of their costs to the times.

``make bench-conv``. The model, candle_p1.models.fast.convolution_costs, is fitted to `fitted_set`,
none of which a benchmark has, and held to `held_out_set`, which is what the benchmarks have. Of
several calls the fastest counts, and of the rates as well: what else runs on the machine only adds
to times. What is printed as fitted goes into convolution_costs.py by hand, because the choice must
be the same everywhere.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import click
import numpy as np
import pandas as pd

from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import SetupError
from candle_p1.models.fast.convolution_costs import (
    FACTORS,
    Convolution,
    Rates,
    choose,
    ideal_seconds,
    seconds,
)

SHAPE = [field.name for field in fields(Convolution)]
NUM_DRAWN, NUM_FITS = 26, 20
LEAST_ERROR = 0.01
"""Relative errors below this count as this much when weights follow from them."""
OUTPUT_BYTES = (40e6, 100e6)
"""The size of the outputs of what is drawn: more than caches hold."""
LEAST_OF_TILES = 16
"""Channels and filters from which on tiles are timed; of fewer, they compute with zeros mostly."""
# length, taps, channels, filters, pool, batch, taps of the first
AFTER_FIRST = [
    (8000, 6, 64, 64, 4, 6, 8),
    (16000, 12, 96, 64, 8, 3, 12),
    (32000, 8, 64, 128, 5, 2, 15),
    (48000, 10, 96, 96, 10, 1, 25),
    (24000, 14, 64, 64, 1, 4, 10),
    (4000, 5, 128, 64, 2, 16, 16),
]
MANY_CHANNELS = [
    (50000, 8, 128, 64, 1, 1),
    (40000, 12, 64, 96, 5, 2),
    (10000, 6, 96, 64, 3, 8),
    (20000, 15, 32, 96, 8, 3),
    (24000, 5, 128, 128, 4, 2),
    (40000, 14, 128, 128, 8, 1),
]


def fitted_set() -> list[Convolution]:
    """Returns the convolutions to which the model is fitted; some are drawn at random."""
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
        found.append(Convolution(length, taps, channels, filters, pool, batch, 0, not is_first))
    found += [Convolution(*sizes) for sizes in AFTER_FIRST]
    return found + [Convolution(*sizes, gives_gradient=True) for sizes in MANY_CHANNELS]


def held_out_set() -> dict[Convolution, str]:
    """Returns the convolutions of the benchmarks at full size; NT3's for a tenth of a batch."""
    return {
        Convolution(29532, 10, 1, 10, 10, 100): "p1b3, first",
        Convolution(2952, 5, 10, 5, 10, 100, gives_gradient=True): "p1b3, second",
        Convolution(60483, 10, 128, 128, 10, 2, 20): "nt3",
    }


def measure(num_calls: int) -> pd.DataFrame:
    """Times both sets by all algorithms: a row each, with the machine's rates meanwhile.

    Raises:
        SetupError: There are no fast kernels for this backend.
    """
    from candle_p1.bench.roofline import fastest_rates
    from candle_p1.bench.task import seconds_of
    from candle_p1.distributed import devices
    from candle_p1.distributed.engines import make_engine
    from candle_p1.models import fast
    from candle_p1.models.fast.convolution_steps import step_of

    comm = SerialCommunicator()
    device = devices.configure(comm, make_engine("auto", comm), gpus=[], deterministic=True)
    if not fast.exist(on_cpu=not device.is_gpu):
        raise SetupError("the algorithms of convolutions are for TensorFlow on CPUs: make setup")
    rows: list[dict[str, Any]] = []
    for of in (*fitted_set(), *held_out_set()):
        before = fastest_rates(device.threads)
        times_s = {
            name: seconds_of(step_of(name, of), num_calls, min)
            for name in of.algorithms
            if name != "tiled" or min(of.channels, of.filters) >= LEAST_OF_TILES
        }
        gc.collect()
        rates = asdict(before.faster(fastest_rates(device.threads)))
        rows += [
            asdict(of) | {"algorithm": name} | rates | {"least_s": time_s}
            for name, time_s in times_s.items()
        ]
    return pd.DataFrame(rows)


def fit(times: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Returns the factors of each algorithm with which the sum of the relative errors is least.

    So a time that something else has disturbed counts no more than any other.
    """
    from scipy.optimize import nnls

    factors = {}
    for algorithm, rows in times.groupby("algorithm", sort=False):
        ideal = [ideal_seconds(str(algorithm), *_case(row)) for row in rows.to_dict("records")]
        relative = pd.DataFrame(ideal).to_numpy() / rows[["least_s"]].to_numpy()
        weights = np.ones(len(rows))
        for _ in range(NUM_FITS):
            found, _ = nnls(relative * weights[:, np.newaxis], weights)
            # Least squares with these weights are least absolute errors.
            weights = 1 / np.sqrt(np.maximum(np.abs(relative @ found - 1), LEAST_ERROR))
        factors[str(algorithm)] = dict(zip(ideal[0], map(float, found), strict=True))
    return factors


def _case(row: Mapping[Any, Any]) -> tuple[Convolution, Rates]:
    of = Convolution(**{name: row[name] for name in SHAPE})
    return of, Rates(row["flops_per_s"], row["bytes_per_s"])


def analyse(times: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, dict[str, float]]]:
    """Returns the times with what the model predicts, and the factors fitted to `fitted_set`.

    ``fitted_s`` is predicted with these factors, ``predicted_s`` with those in use. ``name`` is a
    benchmark's or "", ``chosen`` the algorithm that the model chooses, and ``loss`` how much longer
    an algorithm takes than the fastest, apart from plain Keras.
    """
    names = held_out_set()
    cases = [_case(row) for row in times.to_dict("records")]
    found = times.assign(name=[names.get(of, "") for of, _ in cases])
    factors = fit(found[found["name"] == ""])
    for column, used in (("fitted_s", factors), ("predicted_s", FACTORS)):
        pairs = zip(found["algorithm"], cases, strict=True)
        found[column] = [seconds(algorithm, *case, used) for algorithm, case in pairs]
    found["chosen"] = [choose(of) for of, _ in cases]
    own = found["least_s"].where(found["algorithm"] != "plain")
    fastest_s = own.groupby([found[name] for name in SHAPE]).transform("min")
    return found.assign(loss=found["least_s"] / fastest_s - 1), factors


@click.command()
@click.option("--calls", "num_calls", type=click.IntRange(1), default=7, help="Timed calls.")
@click.option("--times", type=click.Path(), help="Measure nothing: fit the times in this CSV file.")
@click.option("--csv", type=click.Path(), help="Write the times to this file.")
def main(num_calls: int, times: str | None, csv: str | None) -> None:
    """Time convolutions by each algorithm, and fit the model of their costs."""
    measured = pd.read_csv(times) if times else measure(num_calls)
    if csv:
        measured.to_csv(csv, index=False)
    found, factors = analyse(measured)
    found["deviation"] = found["fitted_s"] / found["least_s"] - 1
    found["ms"] = 1e3 * found["least_s"]
    table = found.pivot(
        index=["name", *SHAPE, "chosen"], columns="algorithm", values=["ms", "deviation"]
    )
    click.echo("the fastest of several calls, and the deviation of the fitted model\n")
    click.echo(table.to_string(float_format="{:.3g}".format, na_rep=""))
    error = (
        found[found["name"] == ""]
        .groupby("algorithm")["deviation"]
        .apply(lambda x: x.abs().median())
    )
    click.echo(
        f"\nmedian deviation of what was fitted\n{error.to_string(float_format='{:.0%}'.format)}"
    )
    for name, used in FACTORS.items():
        terms = pd.DataFrame({"fitted": factors.get(name), "in use": used})
        click.echo(f"\nfactors, {name}\n{terms.to_string(float_format='{:.3g}'.format)}")
    loss = found["loss"][found["algorithm"] == found["chosen"]]
    click.echo(f"\nthe model chooses the fastest algorithm of {(loss == 0).sum()} of {len(loss)}")
    click.echo(
        f"its choice takes {loss.mean():.0%} longer than the fastest, {loss.max():.0%} at most"
    )


if __name__ == "__main__":
    main()
