"""A report, or one run, as a page that needs no other file and no network."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from candle_p1.records.summary import as_cells, details
from candle_p1.reports.figures.power import power_svg
from candle_p1.reports.published import machines, source
from candle_p1.reports.table import LEGEND

if TYPE_CHECKING:
    from candle_p1.reports.report import Report
    from candle_p1.reports.runs import RecordedRun


def report_page(report: Report) -> str:
    """Returns the page of a report, as HTML."""
    return _rendered(
        "page.html", report=report, source=source(), machines=machines(), legend=LEGEND
    )


def run_page(run: RecordedRun) -> str:
    """Returns the page of a run, as HTML: all of its tables, and its picture."""
    parts: list[dict[str, Any]] = []
    for part in details(run.record):
        if isinstance(part, str):
            parts.append({"text": part})
        else:
            headings, rows = as_cells(part)
            parts.append({"title": str(part.title), "headings": headings, "rows": rows})
    picture = power_svg(run) if run.phase_s else None
    return _rendered("run_page.html", run=run, parts=parts, picture=picture)


def _rendered(template: str, **content: Any) -> str:
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = files("candle_p1.reports").joinpath(template).read_text(encoding="utf-8")
    return environment.from_string(text).render(**content)
