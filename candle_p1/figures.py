"""Plots of results, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES = (6.4, 4.8)
DOTS_PER_INCH = 150
MAX_DOTS = 5000  # a random selection of more samples is shown: dots would only hide each other
MAX_CURVES = 4  # of the loss and the first metrics
HIGHEST_SHARE = 1.02  # where the y axis of shares, as of accuracy, ends at most
MAX_NAME = 24  # the most characters of a class's name on an axis
MARKERS = "osD^v<>P*X"
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""Colours that the colour-blind can distinguish (Okabe and Ito, *Color Universal Design*, 2008)."""


def scatter_by_class(
    path: Path,
    points: NDArray[Any],
    classes: NDArray[Any],
    names: Sequence[str],
    *,
    title: str,
    axes: tuple[str, str],
    warning: str = "",
) -> None:
    """Plots points in the plane as a PNG file, with a colour and marker for each class.

    The points have shape (samples, 2), and the classes (samples,): indices into the names. The
    warning is what the reader must know to read the plot rightly.
    """
    import matplotlib

    figure, plot = _new(title, *axes)
    look: Any = {"color": VERMILION, "ha": "center", "va": "top", "transform": plot.transAxes}
    plot.text(0.5, 0.97, warning, **look)
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for i, name in enumerate(names):
        chosen = points[classes == i]
        if len(chosen):
            # Many classes share a colour with another one and differ from it by their marker.
            marker = MARKERS[(i + i // len(colours)) % len(MARKERS)]
            color = colours[i % len(colours)]
            xs, ys = chosen.T
            plot.scatter(xs, ys, s=12, color=color, marker=marker, linewidths=0, label=name)
    columns = 1 + (len(names) - 1) // 24
    plot.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=7, ncols=columns)
    _save(figure, path)


def error_histogram(
    path: Path, measured: NDArray[Any], predicted: NDArray[Any], *, title: str, unit: str
) -> None:
    """Plots the distribution of prediction errors, and that of randomly assigned values.

    Both arrays have the shape (samples,), and `unit` is that of their values.
    """
    figure, plot = _new(title, f"predicted - measured ({unit})", "samples")
    shuffled = np.random.default_rng(0).permutation(measured)
    errors = {
        "another sample's measured value": shuffled - measured,
        "predicted": predicted - measured,
    }
    low, high = np.percentile(np.concatenate(list(errors.values())), [0.5, 99.5])
    for name, values in errors.items():
        plot.hist(values, bins=100, range=(low, high), histtype="stepfilled", label=name, alpha=0.5)
    plot.axvline(0, color="0.3", linewidth=0.8)
    plot.legend()
    _save(figure, path)


def measured_against_predicted(
    path: Path, measured: NDArray[Any], predicted: NDArray[Any], *, title: str, unit: str
) -> None:
    """Plots the predicted against the measured value of each sample; see `error_histogram`."""
    figure, plot = _new(title, f"measured ({unit})", f"predicted ({unit})")
    if len(measured) > MAX_DOTS:
        chosen = np.random.default_rng(0).choice(len(measured), MAX_DOTS, replace=False)
        measured, predicted = measured[chosen], predicted[chosen]
    plot.scatter(measured, predicted, s=4, alpha=0.4, linewidths=0)
    ends = [measured.min(), measured.max()]
    plot.plot(ends, ends, color="0.2", linestyle="--", linewidth=1, label="predicted = measured")
    plot.legend()
    _save(figure, path)


def confusion_matrix(
    path: Path, counts: NDArray[np.int64], names: Sequence[str], *, title: str
) -> None:
    """Plots how often samples of each class are taken for each class, coloured by shares of rows.

    The counts have shape (classes, classes): true classes in rows, predicted ones in columns.
    """
    num = len(names)
    labels = [n if len(n) <= MAX_NAME else f"{n[: MAX_NAME - 1]}…" for n in names]
    side = max(3.2, 0.36 * num)
    beside = 0.08 * max(map(len, labels))
    figure = _figure(side + beside + 1.5, side + beside + 1)
    plot = figure.add_subplot(title=title, xlabel="predicted class", ylabel="true class")
    of_rows = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, of_rows, out=np.zeros(counts.shape), where=of_rows > 0)
    image = plot.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 11 if num <= 4 else 8 if num <= 12 else 6
    for (row, column), count in np.ndenumerate(counts):
        if count:
            ink = "white" if shares[row, column] > 0.5 else "black"
            text = f"{count:,}" if num <= 12 or count < 10_000 else f"{count / 1000:.0f}k"
            plot.text(column, row, text, color=ink, fontsize=size, ha="center", va="center")
    turned = num > 4 or len(max(labels, key=len)) > 12
    plot.set_xticks(range(num), labels, rotation=90 if turned else 0, fontsize=max(size, 7))
    plot.set_yticks(range(num), labels, fontsize=max(size, 7))
    figure.colorbar(image, label="share of the true class", shrink=0.7, pad=0.02)
    _save(figure, path)


def class_curves(
    path: Path,
    curves: Mapping[str, tuple[NDArray[Any], NDArray[Any]]],
    *,
    title: str,
    axes: tuple[str, str],
    number: str,
    reference: str = "",
) -> None:
    """Plots a curve of each class in the unit square, and the diagonal if it has a label.

    The points (xs, ys) are by the labels of the curves, in which a number is what `number` says.
    """
    import matplotlib

    figure, plot = _new(title, *axes)
    columns = 1 + len(curves) // 22
    longest = max(map(len, [*curves, number]))
    figure.set_figwidth(SIZE_INCHES[1] + columns * (0.06 * longest + 0.6))
    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for i, (label, (xs, ys)) in enumerate(curves.items()):
        style = ("-", "--", ":", "-.")[i // len(colours) % 4]
        color = colours[i % len(colours)]
        plot.plot(xs, ys, style, color=color, linewidth=1.3, label=label)
    if reference:
        plot.plot([0, 1], [0, 1], color="0.6", linewidth=0.8, label=reference)
    plot.set(xlim=(-0.01, 1.01), ylim=(-0.01, HIGHEST_SHARE), aspect="equal")
    plot.grid(color="0.92")
    legend: Any = {"title": f"class ({number})", "title_fontsize": 8, "fontsize": 7}
    plot.legend(loc="upper left", bbox_to_anchor=(1.01, 1), ncols=columns, **legend)
    _save(figure, path)


def reliability(path: Path, bins: Sequence[Mapping[str, Any]], *, title: str) -> None:
    """Plots how often predictions are right against their probability, and how many there are.

    The bins are those of `candle_p1.inference.metrics.ClassMetrics.reliability`.
    """
    width, height = SIZE_INCHES
    figure = _figure(0.8 * width, 1.1 * height)
    shares, counts = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    shares.set(title=title, ylabel="share that is right", xlim=(0, 1), ylim=(0, HIGHEST_SHARE))
    shares.plot([0, 1], [0, 1], color="0.4", linestyle="--", linewidth=1, label="as probable")
    used = [each for each in bins if each["num_samples"]]
    points = [(each["mean_probability"], each["accuracy"]) for each in used]
    shares.plot(*zip(*points, strict=True), "o-", color=BLUE, linewidth=1.3, label="the model")
    shares.legend(loc="upper left")
    shares.grid(color="0.92")
    lows = [each["low"] for each in bins]
    widths = [each["high"] - each["low"] for each in bins]
    numbers = [each["num_samples"] for each in bins]
    bars = counts.bar(lows, numbers, widths, align="edge", color=BLUE, alpha=0.5, edgecolor="white")
    counts.bar_label(bars, [f"{num:,}" if num else "" for num in numbers], fontsize=7, padding=1)
    counts.set(xlabel="probability of the predicted class", ylabel="samples")
    counts.margins(y=0.25)
    _save(figure, path)


def histogram(path: Path, values: NDArray[Any], *, title: str, axis: str) -> None:
    """Plots the distribution of a value of each sample, shape (samples,), and its median."""
    figure, plot = _new(title, axis, "samples")
    plot.hist(values, bins=min(100, max(10, len(values) // 10)), color=BLUE, alpha=0.6)
    median = float(np.median(values))
    plot.axvline(median, color=VERMILION, linewidth=1.3, label=f"median {median:.3g}")
    plot.legend()
    _save(figure, path)


def training_curves(path: Path, history: Mapping[str, Sequence[float]], *, title: str) -> None:
    """Plots loss and metrics over the epochs.

    The history is as Keras keeps it: the values of each epoch by name, with those of the validation
    samples under "val_" and the same name.
    """
    _save(curves(history, title=title), path)


def curves(history: Mapping[str, Sequence[float]], *, title: str) -> Figure:
    """Returns the figure of `training_curves`; values that are not numbers leave gaps."""
    from matplotlib.ticker import MaxNLocator

    names = [name for name in history if not name.startswith("val_") and name != "learning_rate"]
    names.sort(key=lambda name: name != "loss")
    names = names[:MAX_CURVES]
    width, height = SIZE_INCHES
    figure = _figure(0.7 * width * len(names), 0.8 * height)
    figure.suptitle(title)
    plots = figure.subplots(1, len(names), squeeze=False)[0]
    for plot, name in zip(plots, names, strict=True):
        for key, label, color, style in (
            (name, "training", BLUE, "o-"),
            (f"val_{name}", "validation", VERMILION, "s--"),
        ):
            values = np.array(history.get(key, ()), np.float64)  # None becomes NaN
            epochs = np.arange(1, len(values) + 1)
            plot.plot(epochs, values, style, color=color, markersize=3, linewidth=1.3, label=label)
        plot.set_title(name, fontsize="medium")
        plot.set_xlabel("epoch")
        plot.xaxis.set_major_locator(MaxNLocator(integer=True))
        plot.grid(axis="y", color="0.9")
        end_at_one(plot)
    handles, labels = plots[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def end_at_one(plot: Axes) -> None:
    """Keeps the y axis of shares, as of accuracy, from going far beyond 1."""
    shown = plot.dataLim.y1
    if shown <= 1:
        plot.set_ylim(top=min(HIGHEST_SHARE, plot.get_ylim()[1]))


def compared_times(
    path: Path,
    measured: Mapping[str, Sequence[float]],
    published: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    published_title: str,
) -> None:
    """Plots repeated times of several methods, and published ones by machine in a separate panel.

    All times are in s; there may be no published ones.
    """
    methods = dict.fromkeys(
        [*measured, *(method for times in published.values() for method in times)]
    )
    rows = {method: row for row, method in enumerate(methods)}
    figure = _figure(1.5 * SIZE_INCHES[0], 2 + 0.55 * len(rows))
    figure.suptitle(title)
    widths = [3, 2] if published else [1]
    plots = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    plots[0].set_title("measured on this machine", fontsize="medium")
    for method, times in measured.items():
        row, median = rows[method], float(np.median(times))
        apart = np.linspace(-0.3, 0.3, len(times) + 2)[1:-1]  # equal times would hide each other
        dots = plots[0].scatter(times, row + apart, s=25, color=BLUE, alpha=0.6, linewidths=0)
        line = plots[0].vlines(median, row - 0.35, row + 0.35, color=VERMILION, linewidth=2)
        look: Any = {"textcoords": "offset points", "va": "center", "fontsize": "small"}
        plots[0].annotate(f"{median:.3g}", (max(times), row), (8, 0), **look)
    legend: dict[str, Artist] = {"a repeat": dots, "median": line}
    plots[0].set_yticks(list(rows.values()), list(rows))
    plots[0].set_ylim(len(rows) - 0.5, -0.5)
    for i, (machine, times_of) in enumerate(published.items()):
        plots[1].set_title(published_title, fontsize="medium")
        look = {"s": 45, "marker": MARKERS[1 + i], "edgecolors": (GREEN, PURPLE)[i % 2]}
        look |= {"facecolors": "none", "linewidths": 1.5}
        places = [rows[method] for method in times_of]
        legend[machine] = plots[1].scatter(list(times_of.values()), places, **look)
    for plot in plots:
        right = 1.15 * plot.get_xlim()[1]
        plot.set_xlim(-0.01 * right, right)
        plot.set_xlabel("time (s)")
        plot.grid(axis="x", color="0.9")
        plot.set_axisbelow(True)
    handles, labels = list(legend.values()), list(legend)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(legend), frameon=False)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure((width, height), DOTS_PER_INCH, layout="constrained")


def _new(title: str, x_axis: str, y_axis: str) -> tuple[Figure, Axes]:
    figure = _figure(*SIZE_INCHES)
    return figure, figure.add_subplot(title=title, xlabel=x_axis, ylabel=y_axis)


def _save(figure: Figure, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", bbox_inches="tight")
    write_atomically(path, content.getvalue())
