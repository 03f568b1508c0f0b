"""How figures of a report look: lines of series over workers, with raw points and intervals."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING, Any

from candle_p1.figures import BLUE, GREEN, PURPLE, VERMILION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from candle_p1.reports.statistics import Estimate

BLACK, ORANGE, SKY = "#000000", "#E69F00", "#56B4E9"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Okabe and Ito's, without their yellow, which does not show on white."""

MARKERS = "osD^vPX"
STYLES = ("-", "--", "-.", ":", "-", "--", "-.")
PANEL_INCHES = (3.4, 3.0)
LEGEND_ROW_INCHES = 0.2
DOTS_PER_INCH = 150
LOG_FROM = 20
"""An axis whose largest value is so many times its smallest is logarithmic."""

MIN_SPAN = 0.1

BARS = (
    "Lines join medians; bars with caps are 95 % intervals, bars without caps the range of too few"
    " runs for one; faint dots are the runs."
)


@dataclass(frozen=True)
class Drawing:
    """A figure, drawn.

    Attributes:
        slug: Its files' name, without ending.
        title: What it shows.
        caption: Beneath it.
        svg: The picture, with its text as text.
        png: The same for print and slides.
    """

    slug: str
    title: str
    caption: str
    svg: str
    png: bytes

    @property
    def width_pt(self) -> float:
        """The picture's own width, in points of 1/72 inch."""
        found = re.search(r'<svg[^>]* width="([\d.]+)pt"', self.svg)
        return float(found[1]) if found else 720.0


@dataclass(frozen=True)
class Mark:
    """A median with its interval and raw values.

    Attributes:
        x: Where.
        estimate: The median, or a ratio.
        values: The raw values; a ratio has none.
    """

    x: float
    estimate: Estimate
    values: Sequence[float] = ()


@contextmanager
def style() -> Iterator[None]:
    """Draws with this project's look within the block."""
    import matplotlib as mpl

    look: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "candle_p1",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": "0.9",
        "axes.titlesize": 10,
        "legend.frameon": False,
    }
    with mpl.rc_context(look):
        yield


def new_figure(
    num_panels: int,
    columns: int | None = None,
    panel_inches: tuple[float, float] = PANEL_INCHES,
    **shared: Any,
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of so many panels, and these; at most `columns` beside each other."""
    from matplotlib.figure import Figure

    columns = min(num_panels, columns or num_panels)
    rows = -(-num_panels // columns)
    width, height = max(columns * panel_inches[0], 2 * PANEL_INCHES[0]), rows * panel_inches[1]
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for unused in grid[num_panels:]:
        unused.remove()
    return figure, list(grid[:num_panels])


def draw_line(axes: Axes, marks: Sequence[Mark], i: int, num: int, label: str) -> None:
    """Draws the i-th of `num` lines, each a little aside, so that no bar covers another."""
    color = COLORS[i % len(COLORS)]
    shape = (i + i // len(COLORS)) % len(COLORS)  # another one where a colour comes again
    aside = 2 ** (0.05 * (i - (num - 1) / 2))
    xs = [mark.x * aside for mark in marks]
    axes.plot(
        xs,
        [mark.estimate.value for mark in marks],
        color=color,
        marker=MARKERS[shape],
        markersize=4.5,
        lw=1.3,
        ls=STYLES[shape],
        label=label,
    )
    for x, mark in zip(xs, marks, strict=True):
        draw_bar(axes, x, mark.estimate, color)
        axes.scatter(
            [x] * len(mark.values),
            mark.values,
            s=9,
            color=color,
            alpha=0.3,
            linewidths=0,
            zorder=1.5,
        )


def draw_bar(axes: Axes, x: float, estimate: Estimate, color: str) -> None:
    """Draws the interval of an estimate: with caps if it has a confidence of 95 %."""
    if estimate.confidence == 0:
        return
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    confident = estimate.is_confident
    axes.errorbar(
        [x],
        [estimate.value],
        yerr=[[max(below, 0)], [max(above, 0)]],
        fmt="none",
        ecolor=color,
        elinewidth=1.2 if confident else 0.8,
        capsize=3 if confident else 0,
    )


def worker_axis(axes: Axes, counts: Iterable[int], label: str = "workers") -> None:
    """Makes the x axis one of powers of two with ticks at these counts."""
    every = sorted(set(counts))
    ticks = _thinned(every)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(every[0] / 1.3, every[-1] * 1.3)
    axes.set_xlabel(label)


def value_axis(plots: Sequence[Axes], values: Sequence[float], zero: bool = True) -> None:
    """Makes y axes logarithmic where values differ much, else start at 0 if they are to.

    Axes that need not start at 0 span at least a tenth of the largest value, so that noise does
    not look like an effect.
    """
    low, high = min(values, default=0), max(values, default=1)
    for axes in plots:
        if zero and 0 < LOG_FROM * low < high:
            log_axis(axes)
        elif zero:
            axes.set_ylim(min(0, low), max(1.08 * high, axes.get_ylim()[1]))
            _plain_numbers(axes)
        else:
            bottom, top = axes.get_ylim()
            short = MIN_SPAN * max(abs(low), abs(high)) - (top - bottom)
            if short > 0:
                axes.set_ylim(bottom - short / 2, top + short / 2)


def log_axis(axes: Axes) -> None:
    """Makes the y axis logarithmic, with numbers as people write them."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    _plain_numbers(axes)


def _plain_numbers(axes: Axes) -> None:
    """Writes the numbers of the y axis out, as 1,000,000 and 0.05."""
    axes.yaxis.set_major_formatter(
        lambda value, _position: f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.12g}"
    )


def legend_below(figure: Figure, axes: Axes) -> None:
    """Puts one legend of all lines below the panels, and makes the figure higher by it."""
    handles, labels = axes.get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int(width * 14 / (longest + 8))))
    rows = -(-len(labels) // columns)
    figure.set_size_inches(width, height + rows * LEGEND_ROW_INCHES)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def to_svg(figure: Figure, slug: str) -> str:
    """Returns a figure as SVG; identifiers begin with the slug, so that a page can hold many."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{slug}-", svg)


def to_png(figure: Figure) -> bytes:
    """Returns a figure as PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _thinned(counts: Sequence[int]) -> list[int]:
    """Leaves out ticks that would touch another one; the first and the last stay."""
    first, last = counts[0], counts[-1]
    apart = max(log2(last / first) / 9, 0.3)
    kept = [first]
    for count in counts[1:-1]:
        if log2(count / kept[-1]) >= apart and log2(last / count) >= apart:
            kept.append(count)
    return kept if last == first else [*kept, last]
