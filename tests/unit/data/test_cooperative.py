"""Reading in blocks in one process, alone or with simulated ranks.

tests/parallel/check_loading.py has ranks of MPI.
"""

import math
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from candle_p1.data import _csvkernel as kernel
from candle_p1.data import cooperative
from candle_p1.data.cooperative import read_together
from candle_p1.data.read_ahead import ReadAhead
from candle_p1.data.source import Loading, Source
from candle_p1.data.table import CsvLayout
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError
from tests.unit.data.conftest import compress_gzip, compress_zstd, read_by_job

LAYOUT = CsvLayout(header=True, text_columns=("name", "kind"))


SKIPPED = b"\x50\x2a\x4d\x18\4\0\0\0abcd"
"""A frame of zstd without content, as several threads write first and seekable files last."""
PACKS = [
    lambda parts: b"".join(parts),
    lambda parts: b"".join(map(compress_gzip, parts)) + bytes(9),  # as padded on tapes
    lambda parts: SKIPPED + b"".join(map(compress_zstd, parts)) + SKIPPED,
]


def written(rows, blank=0, newline="\n", end="\n"):
    """Returns the bytes of a file of these rows, with an empty line before one of its lines."""
    lines = ["name,a,kind,b", *(f"{name},{a},{kind},{b}" for name, a, kind, b in rows)]
    lines.insert(blank, "")
    return (newline.join(lines) + end).encode()


@st.composite
def tables(draw):
    """Rows, the bytes of a plain or compressed file of them, and how many members that has."""
    name, kind = st.text("abc", min_size=1, max_size=30), st.sampled_from(["x", "y"])
    numbers = st.integers(-(10**6), 10**6), st.decimals(-100, 100, places=5)
    row = st.tuples(name, numbers[0], kind, numbers[1])
    rows = draw(st.lists(row, min_size=1, max_size=30))
    newline = draw(st.sampled_from(["\n", "\r\n"]))
    end = draw(st.sampled_from(["", newline]))
    text = written(rows, draw(st.integers(0, 31)), newline, end)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))  # equal ones: empty
    parts = [text[first:last] for first, last in zip([0, *cuts], [*cuts, None], strict=True)]
    return rows, draw(st.sampled_from(PACKS))(parts), len(parts)


def check(table, rows):
    expected = np.array([[float(a), float(b)] for _, a, _, b in rows], np.float32)
    assert table.values.tobytes() == expected.tobytes()
    assert table.columns == ["a", "b"]
    assert table.text["name"].values() == [row[0] for row in rows]
    assert table.text["name"].names == sorted({row[0] for row in rows})
    assert table.text["kind"].values() == [row[2] for row in rows]
    assert all(column.codes.dtype == np.int32 for column in table.text.values())


JOBS = st.tuples(st.integers(1, 7), st.integers(1, 4))
OPTIONS = {"block_bytes": st.integers(1, 300), "num_threads": st.integers(1, 4)}


@settings(max_examples=150)
@given(JOBS, st.fixed_dictionaries(OPTIONS), tables(), st.data())
def test_every_job_reads_what_the_text_says_and_damage_is_an_error_of_all(
    path, job, options, table, data
):
    rows, content, num_members = table
    path.write_bytes(content)
    for found in read_by_job(path, *job, LAYOUT, **options):
        check(found, rows)
    if content[0] in b"\r\nn" or not data.draw(st.booleans()):  # plain, or as it is
        return
    damaged, place = bytearray(content), data.draw(st.integers(4, len(content) - 1))
    if data.draw(st.booleans()):
        damaged[place] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[place:]
    path.write_bytes(damaged)
    of_ranks = read_by_job(path, *job, LAYOUT, **options)
    (first,) = {each if isinstance(each, str) else each.sha256() for each in of_ranks}
    # pyarrow adds no digest, and a file may be cut between members. Bytes that say when a file
    # was made, or that pad it, do not matter.
    if content.startswith(b"\x1f\x8b") and num_members == 1:
        assert first == found.sha256() or f"{path}: the file is damaged" in first


def read_plainly(text):
    """Returns the rows of numbers, or None if the file is to be refused."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    rows = [line.split(",") for line in lines if line.strip(" \t")]
    if not rows or any(len(row) != len(rows[0]) or "\r" in "".join(row) for row in rows):
        return None
    try:
        return [[float(field) for field in row] for row in rows]
    except ValueError:
        return None


@settings(max_examples=150)
@example(text=["1,2\n", "\r", " "], num_ranks=1, block_bytes=1)
@given(
    text=st.lists(st.sampled_from(["1", "2", ",", "\n", "1,2\n", "\r\n", " ", "\t", "\r", "x"])),
    num_ranks=st.integers(1, 5),
    block_bytes=st.integers(1, 20),
)
def test_any_text_is_read_or_refused_alike_by_all_ranks(path, text, num_ranks, block_bytes):
    path.write_bytes("".join(text).encode())
    whole, *of_ranks = (
        found if isinstance(found, str) else found.values.tolist()
        for num in (1, num_ranks)
        for found in read_by_job(path, num, block_bytes=block_bytes)
    )
    assert of_ranks == [whole] * num_ranks
    expected = read_plainly("".join(text))
    assert whole == expected or (expected is None and whole.startswith(str(path)))


def test_a_thread_goes_on_with_the_next_block_while_another_one_parses(path, monkeypatch):
    rows = [("abc", number, "x", 1) for number in range(40)]
    path.write_bytes(written(rows))
    later, texts = threading.Event(), []

    def parse(*arguments):
        texts.append(arguments[0])
        if len(texts) == 2:  # the lines of the first block after its first one
            assert later.wait(20), "no thread has begun with the next block"
        elif len(texts) > 2:
            later.set()
        return kernel.parse(*arguments)

    functions = {name: getattr(kernel, name) for name in ("Layout", "count_rows")}
    monkeypatch.setattr(cooperative, "kernel", SimpleNamespace(parse=parse, **functions))
    block_bytes = path.stat().st_size // 2
    check(read_together(path, LAYOUT, Loading(block_bytes=block_bytes, num_threads=2)), rows)


def test_a_block_is_not_read_over_before_its_last_line_has_arrived(path, monkeypatch):
    under_way, sent = set(), []

    class Slow(SerialCommunicator):
        def send_bytes(self, content, rank):
            super().send_bytes(content, rank)
            under_way.add(id(content.obj))
            sent.append(bytes(content))
            return lambda: under_way.discard(id(content.obj))

    give_back = ReadAhead.give_back

    def checked(self, block):
        assert id(block.buffer) not in under_way
        give_back(self, block)

    monkeypatch.setattr(ReadAhead, "give_back", checked)
    path.write_text("1,2\n" * 100)
    table = read_together(path, CsvLayout(), Loading(comm=Slow(), block_bytes=25))
    assert table.values.tolist() == [[1, 2]] * 100
    assert b"1" in sent


def test_a_read_that_fails_is_an_error_that_names_the_file(path):
    path.write_text("1,2\n" * 100)

    class Broken(Source):
        def read(self, into, start):
            if start == 200:
                raise OSError(5, "Input/output error")
            super().read(into, start)

    for error in read_by_job(path, block_bytes=20, source=Broken):
        assert "table.csv: the file cannot be read: Input/output" in error


MANY_SHORT = "1,2,3,4,5,6\n" * 3 + "1\n" * 500


@pytest.mark.parametrize(
    ("text", "block_bytes", "problem"),
    [
        ("1,2\n\n3,4\n5,6\n7,8\n9,x\n1,y\n", 3, "6, column 2: the field 'x'"),
        # The second block has the end of line 2, and line 3, which is parsed first.
        ("1,2\n1,x\n1,y\n", 6, "2, column 2: the field 'x'"),
        *((MANY_SHORT, size, "4: the line has 1 field instead of 6") for size in (10, 10_000)),
        # More memory, by whole huge pages, than the table can take.
        (MANY_SHORT * 20_000, None, "4: the line has 1 field instead of 6"),
        ("1\n" * 800_000 + "x\n", None, "800001, column 1: the field 'x'"),
    ],
)
def test_the_first_problem_is_found_in_every_block(path, monkeypatch, text, block_bytes, problem):
    monkeypatch.setattr("candle_p1.data.shared.SLOW_S", math.inf)  # pages are huge at any time
    path.write_text(text)
    with pytest.raises(DataError, match=f"table.csv, line {re.escape(problem)}"):
        read_together(path, CsvLayout(), Loading(block_bytes=block_bytes, num_threads=3))


def test_the_shortest_possible_rows_fit(path):
    """A row has at least one byte per field, and the last row may have no newline."""
    path.write_text(",,,,,\n" * 99 + ",,,,,")
    table = read_together(path, CsvLayout(missing=("",)), Loading(block_bytes=100))
    assert table.values.shape == (100, 6)
