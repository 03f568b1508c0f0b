"""Shows what training with JAX on a GPU takes, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.gpu import OURS, PLAIN
from candle_p1.bench.tables import digits, ms, plain_table
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

GIGA, TERA = 1e9, 1e12
NOTHING = "-"
READINGS = {"energy": "counter", "power": "integrated power"}


def parts(report: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yields the lines and tables that show a measurement.

    Args:
        report: What `candle_p1.bench.gpu.GpuMeasurement.measure` returned.
    """
    device = report["device"]
    if report["on"] == "cpu":
        yield (
            "MEASURED ON CPUs (--device cpu), which shows that the command works, and nothing of"
            " any GPU"
        )
    yield (
        f"{device['kind']}, {count(device['num_devices'], 'device')}, {device['platform']};"
        f" driver: {device['driver'] or 'not known'};"
        f" JAX {report['machine']['packages'].get('jax', 'of an unknown version')}"
    )
    yield _rates(device)
    rounds = count(report["num_rounds"], "round")
    yield (
        f"training, {report['size']} size, {rounds} of at least {report['seconds']:g} s for each"
        " variant; the range is that of timed blocks of steps, and an epoch is its steps times the"
        " median"
    )
    yield _steps(report["results"])
    yield (
        "bound: the matrix products of the step and the optimizer's memory traffic, at the rates"
        " above; activations, gradients and batches are not included"
    )
    yield _starts(report["results"])
    yield from _energies(report["results"])
    yield "the data are synthetic"


def _rates(device: Mapping[str, Any]) -> Table:
    table = plain_table("what the device does", "rate")
    for name, rate in device["flops_per_s"].items():
        table.add_row(f"matrix products, {name}", f"{digits(rate / TERA)} TFLOP/s")
    table.add_row("its memory", f"{digits(device['copy_bytes_per_s'] / GIGA)} GB/s")
    table.add_row("from the host to it", f"{digits(device['upload_bytes_per_s'] / GIGA)} GB/s")
    return table


def _steps(results: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "training",
        "precision",
        "ranks",
        "step\n(ms)",
        "range\n(ms)",
        "samples\n/s",
        "epoch\n(s)",
        "bound\n(ms)",
        "times the\nbound",
        "plain Keras\n/ ours",
    )
    plain = {
        (each["benchmark"], each["precision"]): each["step_s"]
        for each in results
        if each["variant"] == PLAIN
    }
    for each in results:
        key, bound_s = (each["benchmark"], each["precision"]), each["bound_s"]
        is_compared = each["variant"] == OURS and each["num_ranks"] == 1
        table.add_row(
            _name(each),
            each["precision"],
            str(each["num_ranks"]),
            ms(each["step_s"]),
            " to ".join(map(ms, each["range_s"])),
            digits(each["samples_per_s"]),
            digits(each["epoch_s"]),
            NOTHING if bound_s is None else ms(bound_s),
            NOTHING if bound_s is None else digits(each["step_s"] / bound_s),
            digits(plain[key] / each["step_s"]) if is_compared else NOTHING,
        )
    return table


def _starts(results: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "from the start to the first step",
        "precision",
        "ranks",
        "nothing compiled\nbefore (s)",
        "compiled\nbefore (s)",
        "of this, the first\nstep (s)",
    )
    for each in results:
        warm_s, first_steps_s = each["warm_start_s"], each["first_steps_s"]
        table.add_row(
            _name(each),
            each["precision"],
            str(each["num_ranks"]),
            digits(each["cold_start_s"]),
            NOTHING if warm_s is None else digits(warm_s),
            ", then ".join(map(digits, first_steps_s)),
        )
    return table


def _energies(results: list[dict[str, Any]]) -> Iterator[str | Table]:
    if not any(each["epoch_energies_j"] for each in results):
        yield f"energy: absent ({results[0]['no_energy']})"
        return
    columns = (f"{words}\n(J per epoch)" for words in READINGS.values())
    table = plain_table(
        "energy of the GPUs, or Grace Hopper modules", "precision", "ranks", *columns
    )
    for each in results:
        found = (each["epoch_energies_j"].get(reading) for reading in READINGS)
        table.add_row(
            _name(each),
            each["precision"],
            str(each["num_ranks"]),
            *(NOTHING if joules is None else digits(joules) for joules in found),
        )
    yield table


def _name(result: Mapping[str, Any]) -> str:
    return f"{result['benchmark']}, {result['variant']}"
