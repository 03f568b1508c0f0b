"""A report as files, and one run as a page; pages need no other file and no network."""

from __future__ import annotations

from importlib.resources import files
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.records.summary import details
from candle_p1.records.tables import as_cells
from candle_p1.reports.figures.time import run_drawings
from candle_p1.reports.published import machines, source
from candle_p1.reports.table import LEGEND
from candle_p1.text import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rich.table import Table

    from candle_p1.reports.drawing import Drawing
    from candle_p1.reports.report import Report
    from candle_p1.reports.runs import RecordedRun
    from candle_p1.reports.table import ReportTable

PAGE_NAME = "index.html"


def write_report(report: Report, directory: Path) -> Path:
    """Writes index.html, figures/*.png and *.svg, tables/*.csv and *.md, exports; returns the page.

    Files of an earlier report that have other names are kept.

    Raises:
        ParameterError: The directory cannot be created or written to.
    """
    tables = [report.runs, report.problems]
    figures = [figure for section in report.sections for figure in section.figures]
    for section in report.sections:
        tables += section.tables
    contents = dict(report.exports) | files_of(figures, tables)
    contents[PAGE_NAME] = rendered(
        "page.html", report=report, source=source(), machines=machines(), legend=LEGEND
    )
    return write_page(contents, directory)


def files_of(figures: Iterable[Drawing], tables: Iterable[ReportTable]) -> dict[str, str | bytes]:
    """Returns the files of figures and tables, by their paths within a report."""
    contents: dict[str, str | bytes] = {}
    for figure in figures:
        contents |= {f"figures/{figure.slug}.svg": figure.svg}
        contents |= {f"figures/{figure.slug}.png": figure.png}
    for table in tables:
        contents |= {f"tables/{table.slug}.csv": table.to_csv()}
        contents |= {f"tables/{table.slug}.md": table.to_markdown()}
    return contents


def write_page(contents: Mapping[str, str | bytes], directory: Path) -> Path:
    """Writes files with these contents, by their paths below a directory; returns PAGE_NAME's.

    Raises:
        ParameterError: The directory cannot be created or written to.
    """
    try:
        for name, content in contents.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        where = error.filename or directory
        raise ParameterError(f"-o {directory}: cannot write {where}: {error.strerror}") from error
    return directory / PAGE_NAME


def run_page(run: RecordedRun) -> str:
    """Returns the page of a run, as HTML: its figures, and all of its tables."""
    notices = []
    if run.limits:
        limits = ", ".join(f"{name} {steps}" for name, steps in run.limits)
        notices.append(f"The steps were limited ({limits}): the model has hardly been trained.")
    drawn = list(run_drawings(run))
    return page_of(
        f"{run.benchmark} on {count(run.num_ranks, 'rank')}: {run.status}",
        details(run.record),
        [each for each in drawn if not isinstance(each, str)],
        notices=notices,
        missing=[each for each in drawn if isinstance(each, str)],
    )


def page_of(
    title: str,
    parts: Iterable[str | Table],
    figures: Sequence[Drawing],
    *,
    notices: Sequence[str] = (),
    missing: Sequence[str] = (),
) -> str:
    """Returns a page, as HTML, of what a command prints, and of figures.

    Args:
        title: Its heading.
        parts: Lines, and tables with titles.
        figures: What stands between the first lines and the first table.
        notices: What the reader must know first.
        missing: Why further figures are not drawn.
    """
    shown: list[dict[str, Any]] = []
    parts = list(parts)
    lines = list(takewhile(lambda part: isinstance(part, str), parts))
    for part in parts[len(lines) :]:
        if isinstance(part, str):
            shown.append({"text": part})
        else:
            headings, rows = as_cells(part)
            shown.append({"title": str(part.title), "headings": headings, "rows": rows})
    return rendered(
        "plain_page.html",
        title=title,
        notices=notices,
        lines=lines,
        figures=figures,
        missing=missing,
        parts=shown,
    )


def rendered(template: str, **content: Any) -> str:
    """Returns a page that is made from one of the templates beside this module."""
    import jinja2

    def load(name: str) -> str:
        return files("candle_p1.reports").joinpath(name).read_text(encoding="utf-8")

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(load), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(template).render(**content)
