"""A report as one page that needs no other file and no network."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from candle_p1.reports.published import machines, source
from candle_p1.reports.table import LEGEND

if TYPE_CHECKING:
    from candle_p1.reports.report import Report


def report_page(report: Report) -> str:
    """Returns the page, as HTML."""
    return str(
        _template().render(report=report, source=source(), machines=machines(), legend=LEGEND)
    )


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    content = files("candle_p1.reports").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(content)
