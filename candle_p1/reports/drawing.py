"""How figures look, and how each kind is drawn: lines over ranks, bars, and spans of time."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.figures import BLUE, GREEN, PURPLE, VERMILION, end_at_one
from candle_p1.reports.statistics import Estimate, contents

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = (BLUE, VERMILION, GREEN, PURPLE, "#E69F00", "#56B4E9", "#000000")
"""Those of Okabe and Ito, without yellow, which is hard to see on white."""

PHASES: dict[str, list[str]] = contents()["phases"]
"""The title, colour and hatch of each phase, and of the regions of the broadcast."""

MARKERS = "osD^vPX"
STYLES = ("-", "--", "-.", ":", "-", "--", "-.")
PANEL_INCHES = (3.4, 3.0)
LEGEND_ROW_INCHES = 0.2
DOTS_PER_INCH = 150
LOG_FROM = 20
"""An axis is logarithmic where its largest value is this many times its smallest."""

MIN_SPAN = 0.1
PLAIN_NUMBERS = "{x:,.12g}"
MAX_TEXT = 200
"""The most characters of a label."""

LOOK: Any = contents()["look"]
"""Settings of matplotlib, for its rc_context."""


class Drawing(NamedTuple):
    """A figure as images: SVG in which text remains text, and PNG; widths are in 1/72 inch."""

    slug: str
    title: str
    caption: str
    svg: str
    png: bytes
    width_pt: float


class Mark(NamedTuple):
    """An estimate at a number of ranks or epochs, with the values of the runs; ratios have none."""

    x: float
    estimate: Estimate
    values: Sequence[float] = ()


class Panel(NamedTuple):
    """One plot of a figure.

    Attributes:
        lines: The marks of each line, by label.
        y_label: The unit, or what the values are.
        reference: An axis ("x" or "y"), a value on it that is marked by a line, and its label.
    """

    title: str
    lines: Mapping[str, Sequence[Mark]]
    y_label: str = ""
    reference: tuple[str, float, str] | None = None

    @property
    def marks(self) -> list[Mark]:
        """The marks of all lines."""
        return [mark for marks in self.lines.values() for mark in marks]

    @property
    def values(self) -> list[float]:
        """All that has to be seen of the y axis."""
        at = [self.reference[1]] if self.reference and self.reference[0] == "y" else []
        runs = [v for _, e, values in self.marks for v in values or (e.low, e.high)]
        return [*at, *runs]


def new_figure(
    num_panels: int,
    columns: int | None = None,
    panel_inches: tuple[float, float] = PANEL_INCHES,
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """Returns an empty figure and its panels, at most `columns` of them side by side."""
    from matplotlib.figure import Figure

    columns = min(num_panels, columns or num_panels)
    rows = -(-num_panels // columns)
    width, height = max(columns * panel_inches[0], 2 * PANEL_INCHES[0]), rows * panel_inches[1]
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for unused in grid[num_panels:]:
        unused.remove()
    return figure, list(grid[:num_panels])


def line_figure(
    panels: Sequence[Panel],
    *,
    x_label: str = "ranks",
    columns: int | None = None,
    same_y: bool = False,
    from_zero: bool = True,
) -> Figure:
    """Draws lines over numbers of ranks or epochs; the legend has those of the first panel.

    All panels may have the same y axis, labelled once in a row. Axes `from_zero` start at 0, or are
    logarithmic.
    """
    figure, plots = new_figure(len(panels), columns, sharey=same_y)
    columns = columns or len(panels)
    ticks = {int(mark.x) for panel in panels for mark in panel.marks}
    for axes, panel in zip(plots, panels, strict=True):
        for i, (label, marks) in enumerate(panel.lines.items()):
            _draw_line(axes, marks, i, len(panel.lines), label)
        if panel.reference:
            _draw_reference(axes, *panel.reference)
        count_axis(axes, ticks, x_label)
        axes.set_title(panel.title)
    for i, (axes, panel) in enumerate(zip(plots, panels, strict=True)):
        axes.set_ylabel("" if same_y and i % columns else panel.y_label)
        alike = panels if same_y else [panel]
        _value_axis(axes, [value for each in alike for value in each.values], from_zero)
    legend_below(figure, plots[0])
    return figure


def _draw_line(axes: Axes, marks: Sequence[Mark], i: int, num: int, label: str) -> None:
    """Draws line i of `num`, shifted a little, so that bars do not cover each other.

    The bar of an interval has caps if its confidence is 95 %.
    """
    color = COLORS[i % len(COLORS)]
    shape = (i + i // len(COLORS)) % len(COLORS)  # another one where a colour is repeated
    aside = 2 ** (0.05 * (i - (num - 1) / 2))
    xs, ys = [mark.x * aside for mark in marks], [mark.estimate.value for mark in marks]
    look: Any = {"marker": MARKERS[shape], "markersize": 4.5, "lw": 1.3, "ls": STYLES[shape]}
    axes.plot(xs, ys, color=color, label=label, **look)
    dots: Any = {"s": 9, "color": color, "alpha": 0.3, "linewidths": 0, "zorder": 1.5}
    for x, (_, estimate, values) in zip(xs, marks, strict=True):
        if estimate.confidence > 0:
            y, sure = estimate.value, estimate.is_confident
            ends = [[max(y - estimate.low, 0)], [max(estimate.high - y, 0)]]
            bar: Any = {"elinewidth": 1.2 if sure else 0.8, "capsize": 3 if sure else 0}
            axes.errorbar([x], [y], yerr=ends, fmt="none", ecolor=color, **bar)
        axes.scatter([x] * len(values), values, **dots)


def _draw_reference(axes: Axes, axis: str, value: float, label: str) -> None:
    draw = axes.axvline if axis == "x" else axes.axhline
    draw(value, color="0.45", lw=1.0, ls=(0, (1, 2)))
    place: Any = ((value, 0), ("data", "axes fraction"), (3, 3), "left")
    if axis == "y":
        place = ((1, value), ("axes fraction", "data"), (0, 3), "right")
    xy, coords, offset, align = place
    look: Any = {"textcoords": "offset points", "fontsize": "small", "color": "0.3", "ha": align}
    axes.annotate(label, xy, offset, xycoords=coords, **look)


def look_of(phase: str, otherwise: str = "#777777") -> dict[str, Any]:
    """Returns the look of a phase, with another colour where it is not among PHASES."""
    _, color, hatch = PHASES.get(phase, ("", otherwise, "oo"))
    return {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


def count_axis(axes: Axes, counts: Iterable[int], label: str) -> None:
    """Makes the x axis logarithmic with base 2, with ticks at these counts."""
    every = sorted(set(counts))
    ticks = _thinned(every)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(every[0] / 1.3, every[-1] * 1.3)
    axes.set_xlabel(label)


def _value_axis(axes: Axes, values: Sequence[float], zero: bool) -> None:
    """Scales the y axis: logarithmic where values differ much, otherwise from 0 if `zero`.

    Others span at least a tenth of the largest value, so that noise does not look like an effect.
    """
    low, high = min(values, default=0), max(values, default=1)
    bottom, top = axes.get_ylim()
    if zero and 0 < LOG_FROM * low < high:
        log_axis(axes)
    elif zero:
        axes.set_ylim(bottom if low < 0 else 0, max(1.08 * high, top))
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    else:
        short = max(MIN_SPAN * max(abs(low), abs(high)) - (top - bottom), 0)
        axes.set_ylim(bottom - short / 2, top + short / 2)
        end_at_one(axes)


def log_axis(axes: Axes) -> None:
    """Makes the y axis logarithmic, with plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS)


def legend_below(figure: Figure, *axes: Axes) -> None:
    """Puts one legend of some panels below all, and makes the figure higher to fit it.

    What several panels call by the same name appears once.
    """
    looks: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            looks.setdefault(label, handle)
    labels, handles = list(looks), list(looks.values())
    longest = max(map(len, labels), default=0)
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int(width * 14 / (longest + 8))))
    rows = -(-len(labels) // columns)
    figure.set_size_inches(width, height + rows * LEGEND_ROW_INCHES)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def to_drawing(figure: Figure, slug: str, title: str, caption: str) -> Drawing:
    """Returns a figure as images. Identifiers begin with the slug, so a page can hold many."""
    from matplotlib.text import Text

    for label in figure.findobj(Text):
        text = label.get_text()
        label.set_text(text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…")
    svg, png = io.StringIO(), io.BytesIO()
    with warnings.catch_warnings():  # of letters that the font lacks
        warnings.simplefilter("ignore", UserWarning)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # arranged by now, and for both formats alike
        figure.savefig(svg, format="svg", metadata={"Date": None})
        figure.savefig(png, format="png", metadata={"Software": None})
    text = svg.getvalue()
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{slug}-", text[text.index("<svg") :])
    return Drawing(slug, title, caption, text, png.getvalue(), 72 * figure.get_figwidth())


def _thinned(counts: Sequence[int]) -> list[int]:
    """Drops ticks whose labels would touch; keeps the first and the last."""
    first, last = counts[0], counts[-1]
    apart = max(log2(last / first) / 9, 0.3)
    kept = [first]
    for count in counts[1:-1]:
        if log2(count / kept[-1]) >= apart and log2(last / count) >= apart:
            kept.append(count)
    return kept if last == first else [*kept, last]
