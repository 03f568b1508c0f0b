"""A report as files: the page, and every figure and table by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.reports.exports.files import write_exports
from candle_p1.reports.page import report_page

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.reports.report import Report

PAGE_NAME = "index.html"


def write_report(report: Report, directory: Path) -> Path:
    """Writes index.html, figures/*.png and *.svg, tables/*.csv and *.md, exports; returns the page.

    Files of an earlier report with other names stay.

    Raises:
        ParameterError: The directory cannot be made or written to.
    """
    try:
        for name in ("figures", "tables"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        for section in report.sections:
            for figure in section.figures:
                write_atomically(directory / "figures" / f"{figure.slug}.svg", figure.svg)
                write_atomically(directory / "figures" / f"{figure.slug}.png", figure.png)
        tables = [table for section in report.sections for table in section.tables]
        for table in (*tables, report.runs, report.problems):
            write_atomically(directory / "tables" / f"{table.slug}.csv", table.to_csv())
            write_atomically(directory / "tables" / f"{table.slug}.md", table.to_markdown())
        write_exports(report.exports, directory)
        write_atomically(directory / PAGE_NAME, report_page(report))
    except OSError as error:
        where = error.filename or directory
        raise ParameterError(f"-o {directory}: cannot write {where}: {error.strerror}") from error
    return directory / PAGE_NAME
