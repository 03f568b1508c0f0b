"""One run as one page: all of its tables and its picture in a file that needs no other."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from candle_p1.records.summary import as_cells, details
from candle_p1.reports.power_picture import power_svg

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def run_page(record: Mapping[str, Any], directory: Path) -> str:
    """Returns the page of a run, as HTML.

    Args:
        record: The run's.
        directory: Where its files are.
    """
    parts: list[dict[str, Any]] = []
    for part in details(record):
        if isinstance(part, str):
            parts.append({"text": part})
        else:
            headings, rows = as_cells(part)
            parts.append({"title": str(part.title), "headings": headings, "rows": rows})
    picture = power_svg(record, directory) if "phases" in record else None
    return str(_template().render(record=record, parts=parts, picture=picture))


@cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    content = files("candle_p1.reports").joinpath("run_page.html").read_text(encoding="utf-8")
    return environment.from_string(content)
