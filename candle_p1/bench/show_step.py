"""Shows a comparison of training steps as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.bench.step import KERAS2
from candle_p1.bench.tables import MB, digits, ms, plain_table, spread, too_few
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.table import Table

GIGA = 1e9


def parts(report: Mapping[str, Any], *, by_weight: bool = False) -> Iterator[str | Table]:
    """Yields the lines and tables that show a comparison.

    Args:
        report: What `candle_p1.bench.step.StepComparison.measure` returned.
        by_weight: Whether to list the differences of each weight.
    """
    results = report["results"]
    ours = results[0]
    rounds, steps = count(report["num_rounds"], "round"), count(report["num_steps"], "step")
    yield (
        f"{report['benchmark']}: training step, {ours['batch_size']} samples per rank,"
        f" {ours['device']}, {ours['backend']}, {rounds} of {steps}"
    )
    other = report["other"]
    if other:
        version = next(each["backend"] for each in results if each["python"] == other["python"])
        yield f"{other['name']}: the same with {version}, by {other['python']}"
    if any(each["kernels"] == "plain" and not each["has_fast_kernels"] for each in results):
        yield (
            "the fast kernels are for TensorFlow on CPUs only: elsewhere, a run and plain Keras"
            " compute with the same layers and optimizers, and differ in how batches are made"
        )
    yield _times(results)
    if ours["ci95_s"] is None:
        yield too_few(ours, "step")
    for name, found in report["differences"].items():
        yield (
            f"{name} trains the same model: the largest relative difference is {found['loss']:.1g}"
            f" in the losses and {found['update']:.1g} in the first updates"
            f"{_without(report) if name == KERAS2 else ''}"
        )
        if by_weight:
            yield _weights(found["weights"])
    if report["roofline"]:
        yield _roofline(report["roofline"], ours["median_s"])
    else:
        yield "roofline bound: not known, because the model does not say which products it computes"
    if report["prediction"]:
        yield from _prediction(report["prediction"])
    of_other = other["communication"] if other else None
    for of, exposed in (("", report["communication"]), (f", {other and other['name']}", of_other)):
        if exposed:
            yield (
                f"exposed communication{of}: {ms(exposed['exposed_s'])} ms per step,"
                f" {100 * exposed['share']:.1f} % of the step"
            )
    yield _memory(results)
    if report["synthetic"]:
        yield "the data are synthetic"


def _prediction(prediction: Mapping[str, Any]) -> Iterator[str | Table]:
    """Shows the predicted steps beside the measured ones."""
    steps, speedup = prediction["steps"], prediction["speedup"]
    table = plain_table(
        "predicted step (ms)",
        "convo-\nlutions",
        "dense",
        "opti-\nmizer",
        "other\nlayers",
        "batches",
        "total",
        "fastest\nmeasured",
        "deviation",
    )
    for name, each in steps.items():
        keys = ("convolutions_s", "dense_s", "optimizer_s", "other_layers_s", "batches_s")
        shown = [ms(each[key]) for key in (*keys, "total_s", "fastest_s")]
        table.add_row(name, *shown, f"{100 * each['deviation']:+.0f} %")
    yield table
    ours = next(iter(steps.values()))
    forms = ", ".join(f"{layer} {form}" for layer, form in ours["forms"].items())
    yield (
        f"predicted speed-up {digits(speedup['predicted'])}, of the fastest"
        f" steps {digits(speedup['measured'])}: a deviation of {100 * speedup['deviation']:+.0f} %"
        + (f". Forms of the convolutions: {forms}" if forms else "")
    )


def _without(report: Mapping[str, Any]) -> str:
    """Says how Keras 2 was compared, if its timed steps could not be."""
    flags = report["keras2_compared_without"]
    if not flags:
        return ""
    return (
        f" (of jobs of their own without {', '.join(flags)}: Keras 2 draws other random numbers, so"
        " the losses of the timed steps cannot be compared)"
    )


def _weights(weights: list[dict[str, Any]]) -> Table:
    """Shows by how much each weight differs."""
    table = plain_table(
        "weight",
        "values\ncompared",
        "first updates:\ndifference",
        "\nlargest",
        "values at the end:\ndifference",
        "\nlargest",
    )
    for each in weights:
        numbers = (each[key] for key in ("update", "largest_update", "value", "largest_value"))
        shown = ("not known" if number is None else f"{number:.1e}" for number in numbers)
        table.add_row(each["weight"], f"{each['num_compared']:,}", *shown)
    return table


def _roofline(bound: Mapping[str, float], median_s: float) -> str:
    text = (
        f"roofline bound of a rank: {ms(bound['total_s'])} ms, of which matrix products take"
        f" {ms(bound['products_s'])} ms ({digits(bound['flops'] / GIGA)} GFLOP at"
        f" {digits(bound['matmul_flops_per_s'] / GIGA)} GFLOP/s) and the optimizer's memory traffic"
        f" {ms(bound['optimizer_s'])} ms ({digits(bound['optimizer_bytes'] / GIGA)} GB at"
        f" {digits(bound['copy_bytes_per_s'] / GIGA)} GB/s);"
        f" a step takes {digits(median_s / bound['total_s'])} times as long"
    )
    if bound["used_flops"] < bound["flops"]:
        text += (
            f". With convolutions by tiles ({digits(bound['used_flops'] / GIGA)} GFLOP) the bound"
            f" is {ms(bound['used_total_s'])} ms, and a step takes"
            f" {digits(median_s / bound['used_total_s'])} times as long"
        )
    return text


def _times(results: list[dict[str, Any]]) -> Table:
    has_others = len(results) > 1
    table = plain_table(
        "variant",
        "ranks x\nthreads",
        "median\n(ms)",
        f"{spread(results[0])}\n(ms)",
        "samples\n/s",
        "GFLOP\n/s",
        *(["speed-up of\nthe first"] if has_others else []),
    )
    for result in results:
        low, high = result["ci95_s"] or result["range_s"]
        speedup = results[0]["speedup"].get(result["variant"], 1.0)
        table.add_row(
            result["variant"],
            f"{result['num_ranks']} x {result['threads']}",
            ms(result["median_s"]),
            f"{ms(low)} to {ms(high)}",
            digits(result["samples_per_s"]),
            "not known" if (rate := result["flops_per_s"]) is None else digits(rate / GIGA),
            *([digits(speedup)] if has_others else []),
        )
    return table


def _memory(results: list[dict[str, Any]]) -> Table:
    table = plain_table(
        "variant", "memory of\nthe node (MB)", "weights, gradients,\nstate (MB)", "matrices\n(MB)"
    )
    for result in results:
        peak = result["peak_bytes"]
        table.add_row(
            result["variant"],
            "not measured" if peak is None else digits(peak / MB),
            digits(result["state_bytes"] / MB),
            digits(result["matrix_bytes"] / MB),
        )
    return table
