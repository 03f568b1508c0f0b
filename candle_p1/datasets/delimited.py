"""Reading text with separators as people and programs write it.

What the columns hold is seen from the first rows; all rows are then parsed by the kernel, so that a
short row, or a cell that is no number among numbers, is an error with its line.
"""

from __future__ import annotations

import bz2
import csv
import io
import lzma
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from candle_p1.data import _csvkernel as kernel
from candle_p1.data.source import BYTE_ORDER_MARK, open_together
from candle_p1.data.table import repeated, wrong_line, wrong_width
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError

SEPARATORS = "\t,;|"
COMMENTS = ("#", "!", "^")
"""How lines above the header begin that describe a table, as in GEO's and GDC's files."""
GCT, KNOWN_GCT = "#1.", "#1.2"
"""How a GCT file begins, whose second line has the numbers of its rows and columns."""
MISSING = {
    *("", "NA", "na", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "None", "<NA>"),
    *(".", "-", "--", "'--"),
}
SAMPLE_FIELDS, MIN_SAMPLE, MAX_SAMPLE = 1_000_000, 20, 200
"""From so many fields, but at least and at most so many rows, it is seen which columns are text."""
PLAIN = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|Inf|INF)(?:inity)?"
EITHER = rf"{PLAIN}|[-+]?\d+,\d+(?:[eE][-+]?\d+)?"
ABSENT = "|".join(map(re.escape, sorted(MISSING)))
NUMBER, NUMBERS = re.compile(PLAIN), re.compile(rf"(?:(?:{PLAIN}|{ABSENT})\n)*")
"""A number with a point; and lines, of which each is one or missing."""
ANY_NUMBER, ANY_NUMBERS = re.compile(EITHER), re.compile(rf"(?:(?:{EITHER}|{ABSENT})\n)*")
"""The same with a point or a comma."""
THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(,\d{3})+")
SWAP = bytes.maketrans(b",.", b".,")
"""Makes a decimal comma a point, and a point what no number has."""
QUOTED = re.compile(r'"[^"]*"')
QUOTED_CELL = re.compile(rb'"(?<![^\t,;|\n]")[^"]*(?:""[^"]*)*"(?=[\t,;|\r\n]|\Z)')
LINE_BREAK = re.compile(rb"\r\n?|\n")
JOINT = "\v"
"""Stands for a line break within a cell, so that lines can be counted; a blank for users."""

IsText = Callable[[int, str], bool]


class TextForm(NamedTuple):
    """How many rows name the columns, which has the names to use, and the decimal mark.

    None: as the cells say, and an error if they do not.
    """

    header_rows: int | None = None
    name_row: int = 1
    decimal: str | None = None


class Content(NamedTuple):
    """The content of a file.

    Attributes:
        numbers: The columns of numbers, float32, NaN where they are missing.
        text: The columns of text by name; "" names the rows, if no name stands above them.
        notes: What was understood, as clauses for the user.
        is_across: Whether columns are samples, where the format says so.
    """

    numbers: pd.DataFrame
    text: dict[str, list[str]]
    notes: Sequence[str] = ()
    is_across: bool | None = None


class Row(NamedTuple):
    """A row: the number of its line in the file, where that begins in the text, and its cells."""

    number: int
    offset: int
    cells: list[str]


@dataclass
class Delimited:
    """The table in a text file, compressed or not.

    Attributes:
        path: The file.
        form: What is known of it.
        is_text: Called with the place and the name of a column: whether it is text even if it holds
            numbers.
    """

    path: Path
    form: TextForm
    is_text: IsText

    def read(self) -> Content:
        """Returns the table, without the comments above it.

        Raises:
            DataError: The file is no such table, or can be read in several ways.
            OSError: It cannot be read; a decompressor may raise its own errors.
        """
        self.text = self._whole_text()
        (header_rows, name_row, decimal), rows = self.form, self._first_rows()
        num_headers = header_rows or self._num_headers([row.cells for row in rows])
        if not 1 <= name_row <= num_headers:
            raise self._error(f"there is no header row {name_row}, only {num_headers}")
        body = rows[num_headers:]
        if not body:
            raise self._error("there are no rows below the header")
        names = self._whole_header(rows[name_row - 1].cells, body)
        self._mark = decimal or self._decimal(body)
        is_text = [
            name == "" or self.is_text(place, name) or self._holds_text(place, name, body)
            for place, name in enumerate(names)
        ]
        named = [*zip(names, is_text, strict=True)]
        numbers, texts = ([name for name, kind in named if kind == want] for want in (False, True))
        for name in repeated(texts)[:1]:
            raise self._error(f"several columns of text are called {name!r}")
        values, words = self._parsed(names, is_text, body[0])
        notes = [f"fields separated by {self._separator!r}"]
        notes += [f"names from row {name_row} of {num_headers} header rows"] * (num_headers > 1)
        notes += [f"decimal {self._mark!r}"] * (self._mark != ".")
        text = dict(zip(texts, words, strict=True))
        is_across = True if self._is_gct else None
        return Content(pd.DataFrame(values, columns=numbers), text, notes, is_across)

    def _whole_text(self) -> bytes:
        openers: dict[str, Callable[[Path], Any]] = {".bz2": bz2.open, ".xz": lzma.open}
        if opener := openers.get(self.path.suffix.lower()):
            with opener(self.path) as packed:
                text: bytes = packed.read()
        else:
            with open_together(self.path, SerialCommunicator()) as source, source.text() as stream:
                source.check_suffix()
                text = stream.read()
                source.check()
        text = text.removeprefix(BYTE_ORDER_MARK)
        if any(line.count(b'"') % 2 for line in io.BytesIO(text)):
            text = QUOTED_CELL.sub(lambda cell: LINE_BREAK.sub(JOINT.encode(), cell[0]), text)
        return text

    def _error(self, problem: str, line: int = 0, column: int | None = None) -> DataError:
        return DataError(problem, self.path, line or self._begin, column)

    def _first_rows(self) -> list[Row]:
        """Finds the table's first rows and its separator, and what the lines above it tell."""
        self._is_gct, self._is_geo, self._begin, comment, offset = False, False, 1, "", 0
        lines = enumerate(io.BytesIO(self.text), start=1)
        first: list[tuple[int, str]] = []
        for number, raw in lines:
            line = raw.decode()
            if number == 1 and line.startswith(GCT):
                self._is_gct = True
                if line.strip() != KNOWN_GCT:
                    problem = f"this is GCT {line.strip()[1:]}: convert it to GCT 1.2, or to CSV"
                    raise self._error(problem)
            elif not first and (line.startswith(COMMENTS) or not line.strip()):
                self._is_geo |= line.startswith("!")
                comment = line if line.strip() else comment
            elif not self._is_gct or number > 2:
                self._begin = self._begin if first else number
                first.append((number, line))
            if len(first) == 2:
                break
            offset += 0 if first else len(raw)
        if not first:
            raise self._error("the file has no rows")
        if "\r" in first[0][1].rstrip("\r\n"):
            raise self._error("its lines end with carriage returns alone: save it with line feeds")
        bare = [QUOTED.sub("", line) for _, line in first]
        counts = {each: min(line.count(each) for line in bare) for each in SEPARATORS}
        self._separator = max(counts, key=lambda each: counts[each])
        if not (num_separators := counts[self._separator]):
            problem = "the fields are separated by none of tab, comma, semicolon and bar"
            raise self._error(problem)
        if comment.startswith("#") and comment.count(self._separator) == num_separators:
            problem = "this line begins with # and may be the header: remove the #, or the line"
            raise self._error(problem, self._begin - 1)
        size = min(max(SAMPLE_FIELDS // num_separators, MIN_SAMPLE), MAX_SAMPLE)
        rows, num_joints = [], self.text.count(JOINT.encode(), 0, offset)
        csv.field_size_limit(2**30)
        for number, line in (
            *first,
            *((number, raw.decode()) for number, raw in islice(lines, size)),
        ):
            if self._is_geo and line.startswith("!"):
                break
            try:
                (cells,) = csv.reader([line], delimiter=self._separator, strict=True)
            except csv.Error as error:
                problem = f"its quotes do not match ({error}): correct the row"
                raise self._error(problem, number + num_joints) from error
            if line.strip():
                rows.append(Row(number + num_joints, offset, [*map(_plain, cells)]))
            num_joints += line.count(JOINT)
            offset += len(line.encode())
        return rows

    def _num_headers(self, rows: Sequence[Sequence[str]]) -> int:
        """Returns 1; raises DataError if none or several rows seem to name the columns."""
        has_numbers = [any(map(ANY_NUMBER.fullmatch, row[1:])) for row in rows]
        num = next((i for i, found in enumerate(has_numbers) if i and found), 1)
        while num < len(rows) and not rows[num][0]:
            num += 1
        if num > 1:
            raise self._error(
                f"{num} rows seem to name the columns: pass --header_rows {num} if so (and"
                " --name_row, which of them has the features' names), else --header_rows 1"
            )
        if all(map(NUMBER.fullmatch, rows[0][1:])):
            problem = "the first row holds numbers: add a row of names, or pass --header_rows 1"
            raise self._error(problem)
        return 1

    def _whole_header(self, names: list[str], body: Sequence[Row]) -> list[str]:
        """Returns a name for each column; "" for the first one, if it only names the rows."""
        if len(body[0].cells) == len(names) + 1:  # as R writes it: the column of names has none
            if not any(row.cells[-1] for row in body):
                problem = "the rows end with a separator, but the header does not: remove it"
                raise self._error(problem, body[0].number)
            names = ["", *names]
        if "" in names[1:]:
            problem = "the column has no name: name it or remove it"
            raise self._error(problem, column=names.index("", 1) + 1)
        for number, _, cells in body:
            if len(cells) != len(names):
                raise wrong_width(len(cells), len(names), self.path, number)
        return names

    def _decimal(self, body: Sequence[Row]) -> str:
        """Returns the decimal mark; raises DataError if it may be either."""
        found: set[str] = set()
        for column in zip(*(row.cells for row in body), strict=True):
            if self._separator != "," and ANY_NUMBERS.fullmatch("\n".join((*column, ""))):
                found.update(cell for cell in column if "," in cell or "." in cell)
        commas = [cell for cell in found if "," in cell]
        if commas and (len(commas) < len(found - MISSING) or all(map(THOUSANDS.fullmatch, commas))):
            raise self._error(
                f"{min(commas)!r} may have a decimal comma or mean thousands: pass --decimal , or"
                " remove the commas"
            )
        return "," if commas else "."

    def _holds_text(self, place: int, name: str, body: Sequence[Row]) -> bool:
        """Returns whether a column holds text; raises DataError if it also holds numbers."""
        column = "\n".join([*(row.cells[place] for row in body), ""]).replace(self._mark, ".")
        if NUMBERS.fullmatch(column):
            return False
        pairs = zip(body, column.split("\n"), strict=False)
        cells = [(row, cell) for row, cell in pairs if cell not in MISSING]
        words = [row for row, cell in cells if not NUMBER.fullmatch(cell)]
        if len(words) < len(cells):
            raise self._error(
                f"{words[0].cells[place]!r} is not a number, as other cells of the column {name!r}"
                f" are: correct it, or leave the column out (--drop {name})",
                words[0].number,
                place + 1,
            )
        return True

    def _parsed(
        self, names: Sequence[str], is_text: Sequence[bool], first: Row
    ) -> tuple[NDArray[np.float32], list[list[str]]]:
        """Returns the numbers and, by column, the text of all rows from the first one on."""
        swap = SWAP if self._mark == "," else None
        separator, *missing = (
            word.encode().translate(swap).decode() for word in (self._separator, *MISSING)
        )
        layout = kernel.Layout(is_text, separator, missing, empty_text=True)
        end = self.text.find(b"\n!", first.offset) + 1 if self._is_geo else 0
        if swap:
            self.text = self.text.translate(swap)
        text = np.frombuffer(self.text, np.uint8)
        bounds = text, first.offset, end or len(text), layout
        num_rows, num_texts = kernel.count_rows(*bounds), sum(is_text)
        values = np.empty((num_rows, len(names) - num_texts), np.float32)
        codes = np.empty((num_texts, num_rows), np.int32)
        _, found, wrong = kernel.parse(*bounds, values, codes, 0)
        if wrong is not None:
            offset, num_fields, column, content = wrong
            breaks = (self.text.count(each, first.offset, offset) for each in b"\n\v")
            line, cell = first.number + sum(breaks), content.translate(swap)
            error = wrong_line(num_fields, column, cell, is_text, self.path, line)
            if error.column is None:
                raise error
            if cell.startswith(b'"'):
                advice = ": its quotes do not match"
            elif is_text[column]:
                advice = ": it has a carriage return or a NUL within it"
            else:
                advice = ", as the cells above are" + " with a decimal comma" * (self._mark == ",")
            advice += f": correct it, or leave the column out (--drop {names[column]})"
            raise self._error(error.problem + advice, line, error.column)
        words = []
        for name_of, code_of in zip(found, codes, strict=True):
            known = [_plain(name.translate(swap).decode()) for name in name_of]
            known = ["" if name in MISSING else name for name in known]
            words.append([known[code] for code in code_of])
        return values, words


def _plain(cell: str) -> str:
    return cell.replace(JOINT, " ").strip()
