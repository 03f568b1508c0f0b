"""Reading in blocks in one process, alone or with simulated ranks.

tests/parallel/check_loading.py has ranks of MPI.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from candle_p1.data import _csvkernel as kernel
from candle_p1.data import cooperative
from candle_p1.data.cooperative import read_together
from candle_p1.data.read_ahead import ReadAhead
from candle_p1.data.shared import NodeArray, try_directories
from candle_p1.data.source import Source, open_together
from candle_p1.data.table import CsvLayout
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.shared_file import NoRoomError
from candle_p1.errors import CandleError, DataError
from tools.simulated import WHOLE_RUN, SimulatedJob

LAYOUT = CsvLayout(header=True, text_columns=("name", "kind"))


TABLES = {
    "rows": st.lists(
        st.tuples(
            st.text("abc", min_size=1, max_size=30),
            st.integers(-(10**6), 10**6),
            st.sampled_from(["x", "y"]),
            st.decimals(-100, 100, places=5),
        ),
        min_size=1,
        max_size=30,
    ),
    "blank": st.integers(0, 30),
    "block_bytes": st.integers(1, 200),
    "num_threads": st.integers(1, 4),
    "newline": st.sampled_from(["\n", "\r\n"]),
    "ends": st.booleans(),
}


def write(path, rows, blank, newline, ends):
    lines = [f"{name},{a},{kind},{b}" for name, a, kind, b in rows]
    lines.insert(blank, "")
    text = newline.join(["name,a,kind,b", *lines]) + newline * ends
    path.write_bytes(text.encode())


def check(table, rows):
    expected = np.array([[float(a), float(b)] for _, a, _, b in rows], np.float32)
    assert table.values.tobytes() == expected.tobytes()
    assert table.columns == ["a", "b"]
    assert table.text["name"].values() == [row[0] for row in rows]
    assert table.text["name"].names == sorted({row[0] for row in rows})
    assert table.text["kind"].values() == [row[2] for row in rows]
    assert all(column.codes.dtype == np.int32 for column in table.text.values())


@given(**TABLES)
def test_every_block_size_gives_the_same_table(
    tmp_path_factory, rows, blank, block_bytes, num_threads, newline, ends
):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    write(path, rows, blank, newline, ends)
    check(read_together(path, LAYOUT, block_bytes=block_bytes, num_threads=num_threads), rows)


def test_a_thread_goes_on_with_the_next_block_while_another_one_parses(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    rows = [("abc", number, "x", 1) for number in range(40)]
    write(path, rows, 40, "\n", True)
    later = threading.Event()

    def parse(*arguments):
        first_row = arguments[-1]
        if first_row == 1:  # of the first block; row 0 is in its first line
            assert later.wait(20), "no thread has begun with the next block"
        elif first_row > 20:
            later.set()
        return kernel.parse(*arguments)

    functions = {name: getattr(kernel, name) for name in ("Layout", "count_rows")}
    monkeypatch.setattr(cooperative, "kernel", SimpleNamespace(parse=parse, **functions))
    block_bytes = path.stat().st_size // 2
    check(read_together(path, LAYOUT, block_bytes=block_bytes, num_threads=2), rows)


def test_a_block_is_not_read_over_before_its_last_line_has_arrived(tmp_path, monkeypatch):
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
    path = tmp_path / "table.csv"
    path.write_text("1,2\n" * 100)
    table = read_together(path, CsvLayout(), Slow(), block_bytes=25)
    assert table.values.tolist() == [[1, 2]] * 100
    assert b"1" in sent


@settings(max_examples=60)
@given(num_ranks=st.integers(2, 7), ranks_per_node=st.integers(1, 4), **TABLES)
def test_every_number_of_ranks_gives_the_same_table(
    tmp_path_factory,
    num_ranks,
    ranks_per_node,
    rows,
    blank,
    block_bytes,
    num_threads,
    newline,
    ends,
):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    write(path, rows, blank, newline, ends)

    def read(comm):
        return read_together(path, LAYOUT, comm, block_bytes=block_bytes, num_threads=num_threads)

    for table in SimulatedJob(num_ranks, ranks_per_node).run(read):
        check(table, rows)


@given(
    text=st.text("12,x\n ", min_size=1, max_size=60),
    num_ranks=st.integers(2, 5),
    block_bytes=st.integers(1, 20),
)
@settings(max_examples=60)
def test_every_number_of_ranks_finds_the_same_problem(
    tmp_path_factory, text, num_ranks, block_bytes
):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    path.write_text(text)

    def read(comm=None):
        try:
            return read_together(path, CsvLayout(), comm, block_bytes=block_bytes).values.tolist()
        except DataError as error:
            return str(error)

    assert SimulatedJob(num_ranks, 2).run(read) == [read()] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_read_that_fails_is_an_error_that_names_the_file(tmp_path, num_ranks):
    path = tmp_path / "table.csv"
    path.write_text("1,2\n" * 100)

    class Broken(Source):
        def read(self, into, start):
            if start == 200:
                raise OSError(5, "Input/output error")
            super().read(into, start)

    @contextmanager
    def open_broken(path, comm):
        with open_together(path, comm) as source:
            yield Broken(**vars(source))

    def read(comm):
        with pytest.raises(CandleError, match=r"table.csv: the file cannot be read: Input/output"):
            read_together(path, CsvLayout(), comm, block_bytes=20, open_source=open_broken)

    SimulatedJob(num_ranks).run(read)


def test_what_ranks_other_than_the_first_receive_does_not_grow_with_their_number(tmp_path):
    """Apart from the rows of other nodes; these are all on one."""
    path = tmp_path / "table.csv"
    path.write_text("name,kind,a,b\n" + "n,k,1,2\n" * 4000)

    def received(num_ranks):
        job = SimulatedJob(num_ranks, num_ranks)
        # Two blocks for each rank.
        block_bytes = path.stat().st_size // (2 * num_ranks)
        job.run(lambda comm: read_together(path, LAYOUT, comm, block_bytes=block_bytes))
        return job.traffic[WHOLE_RUN][1:].max(axis=0)

    few_messages, few_bytes = received(8)
    many_messages, many_bytes = received(128)
    doublings = 4
    assert many_bytes - few_bytes < doublings * 100
    assert many_messages - few_messages < doublings * 20


@pytest.mark.parametrize(
    ("text", "block_bytes", "line"),
    [
        ("1,2\n\n3,4\n5,6\n7,8\n9,x\n1,y\n", 3, 6),
        ("1,2\n\n3,4\n5,6\n7,8\n9,x\n1,y\n", 1000, 6),
        # The second block has the end of line 2, and line 3, which is parsed first.
        ("1,2\n1,x\n1,y\n", 6, 2),
    ],
)
def test_the_first_problem_is_found_in_every_block(tmp_path, text, block_bytes, line):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=f"table.csv, line {line}, column 2: the field 'x'"):
        read_together(path, CsvLayout(), block_bytes=block_bytes, num_threads=2)


def test_a_byte_order_mark_is_skipped_and_other_encodings_are_an_error(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes("\ufeffname,kind,a\nn,k,1\n".encode())
    assert read_together(path, LAYOUT).values.tolist() == [[1]]
    path.write_bytes(b"name,kind,a\n\xff,k,1\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_together(path, LAYOUT)


def test_the_shortest_possible_rows_fit(tmp_path):
    """A row has at least one byte per field, and the last row may have no newline."""
    path = tmp_path / "table.csv"
    path.write_text("name,kind,a,b\n" + "n,k,1,\n" * 500 + "n,k,1,")
    table = read_together(path, replace(LAYOUT, missing=("",)), block_bytes=100)
    np.testing.assert_array_equal(table.values, [[1, np.nan]] * 501)
    path.write_text(",,,,,\n" * 99 + ",,,,,")
    table = read_together(path, CsvLayout(missing=("",)), block_bytes=100)
    assert table.values.shape == (100, 6)


@pytest.mark.parametrize("block_bytes", [10, 10_000])
def test_too_many_short_lines_are_an_error(tmp_path, block_bytes):
    path = tmp_path / "table.csv"
    path.write_text("1,2,3,4,5,6\n" * 3 + "1\n" * 500)
    with pytest.raises(DataError, match="line 4: the line has 1 field instead of 6"):
        read_together(path, CsvLayout(), block_bytes=block_bytes, num_threads=3)


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    path.write_text("1,2\n" * 100)
    before = NodeArray.__init__

    def append(self, *arguments):
        with path.open("a") as file:
            file.write("3,4\n")
        before(self, *arguments)

    monkeypatch.setattr(NodeArray, "__init__", append)
    with pytest.raises(DataError, match="was changed while it was read"):
        read_together(path, CsvLayout())


def test_no_space_in_memory_and_on_disk_is_an_error(tmp_path):
    def refuse(directory):
        raise NoRoomError("no room", directory)

    with pytest.raises(DataError, match=r"/dev/shm.*TMPDIR"):
        try_directories(refuse, SerialCommunicator(), None)
