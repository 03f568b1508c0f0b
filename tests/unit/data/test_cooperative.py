"""Reading in blocks with one process; tests/parallel/check_loading.py has several ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data.cooperative import read_together
from candle_p1.data.shared import NodeArray, NoRoomError, try_directories
from candle_p1.data.table import CsvLayout
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError

LAYOUT = CsvLayout(header=True, text_columns=("name", "kind"))


@given(
    rows=st.lists(
        st.tuples(
            st.text("abc", min_size=1, max_size=30),
            st.integers(-(10**6), 10**6),
            st.sampled_from(["x", "y"]),
            st.decimals(-100, 100, places=5),
        ),
        min_size=1,
        max_size=30,
    ),
    blank=st.integers(0, 30),
    block_bytes=st.integers(1, 200),
    num_threads=st.integers(1, 4),
    newline=st.sampled_from(["\n", "\r\n"]),
    ends=st.booleans(),
)
def test_every_block_size_gives_the_same_table(
    tmp_path_factory, rows, blank, block_bytes, num_threads, newline, ends
):
    lines = [f"{name},{a},{kind},{b}" for name, a, kind, b in rows]
    lines.insert(blank, "")
    text = newline.join(["name,a,kind,b", *lines]) + newline * ends
    path = tmp_path_factory.mktemp("table") / "table.csv"
    path.write_bytes(text.encode())
    table = read_together(path, LAYOUT, block_bytes=block_bytes, num_threads=num_threads)
    expected = np.array([[float(a), float(b)] for _, a, _, b in rows], np.float32)
    assert table.values.tobytes() == expected.tobytes()
    assert table.columns == ["a", "b"]
    assert table.text["name"].values() == [row[0] for row in rows]
    assert table.text["name"].names == sorted({row[0] for row in rows})
    assert table.text["kind"].values() == [row[2] for row in rows]
    assert all(column.codes.dtype == np.int32 for column in table.text.values())


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
