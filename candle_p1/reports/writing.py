"""A report as files: the page, and every figure, table and export in a file of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from candle_p1.errors import ParameterError
from candle_p1.files import write_atomically
from candle_p1.reports.page import report_page

if TYPE_CHECKING:
    from pathlib import Path

    from candle_p1.reports.report import Report

PAGE_NAME = "index.html"


def write_report(report: Report, directory: Path) -> Path:
    """Writes index.html, figures/*.png and *.svg, tables/*.csv and *.md, exports; returns the page.

    Files of an earlier report that have other names are kept.

    Raises:
        ParameterError: The directory cannot be created or written to.
    """
    files = dict(report.exports)
    tables = [report.runs, report.problems]
    for section in report.sections:
        tables += section.tables
        for figure in section.figures:
            files |= {f"figures/{figure.slug}.svg": figure.svg}
            files |= {f"figures/{figure.slug}.png": figure.png}
    for table in tables:
        files |= {f"tables/{table.slug}.csv": table.to_csv()}
        files |= {f"tables/{table.slug}.md": table.to_markdown()}
    files[PAGE_NAME] = report_page(report)
    try:
        for name, content in files.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    except OSError as error:
        where = error.filename or directory
        raise ParameterError(f"-o {directory}: cannot write {where}: {error.strerror}") from error
    return directory / PAGE_NAME
