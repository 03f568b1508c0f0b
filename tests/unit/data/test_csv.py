from __future__ import annotations

import bz2
import gzip
import lzma
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data import csv, source
from candle_p1.data.frames import FRAME_READERS
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.errors import DataError, ParameterError

READERS = csv.installed_readers()
METHODS = pytest.mark.parametrize("method", READERS)
LABELLED = CsvLayout(label_column=0)
EXPRESSION = CsvLayout(header=True, text_columns=("case_id", "cancer_type"))
HEADER = "case_id,cancer_type,g\n"
FIVE_COLUMNS = CsvLayout(num_columns=5)
SOME_MISSING = CsvLayout(header=True, missing=("na",))
ONE_TEXT = CsvLayout(header=True, text_columns=("t",))
TEXT_MISSING = CsvLayout(True, ("t",), "\t", ("na", "-", ""))


@pytest.fixture(autouse=True)
def data_directory(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path_factory.mktemp("data")))


def read_table(path, method, layout=None):
    return csv.read_table(path, csv.Loading(method), layout)


def read_matrix(path, method):
    return read_table(path, method).values


def write(directory, text):
    path = directory / "data.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@METHODS
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("end", ["", "newline"])
def test_values_are_float32_in_row_order(tmp_path, method, newline, end):
    path = write(tmp_path, f"1,0.5,-2e3{newline}0,10.123456,7{newline if end else ''}")
    matrix = read_matrix(path, method)
    assert matrix.dtype == np.float32
    assert matrix.flags.c_contiguous
    np.testing.assert_array_equal(matrix, np.array([[1, 0.5, -2e3], [0, 10.123456, 7]], np.float32))


@METHODS
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('"1","2"\n', [[1, 2]]),
        ("\ufeff1,2\n", [[1, 2]]),
        ("007,5.\n", [[7, 5]]),
        (".5,1e-400\n", [[0.5, 0]]),
        ("1,0.1000000000000000055511151231257827\n", [[1, 0.1]]),
        ("1,2\r\n3,4\r\n", [[1, 2], [3, 4]]),
    ],
)
def test_unusual_files_have_the_same_values_for_all_methods(tmp_path, method, text, rows):
    matrix = read_matrix(write(tmp_path, text), method)
    np.testing.assert_array_equal(matrix, np.array(rows, np.float32))


decimals = st.decimals(-100, 100, places=6, allow_nan=False)


@pytest.mark.extended
@given(st.lists(st.lists(decimals, min_size=3, max_size=3), min_size=1, max_size=8))
def test_methods_agree_bit_for_bit_with_python(tmp_path_factory, rows):
    text = "\n".join(",".join(f"{value:f}" for value in row) for row in rows) + "\n"
    path = write(tmp_path_factory.mktemp("csv"), text)
    expected = np.array([[np.float32(float(value)) for value in row] for row in rows])
    for method in READERS:
        assert read_matrix(path, method).tobytes() == expected.tobytes()


@METHODS
def test_finite_values_whose_sum_overflows_are_read(tmp_path, method):
    path = write(tmp_path, "3e38,3e38\n3e38,3e38\n")
    assert read_matrix(path, method).shape == (2, 2)


@METHODS
@pytest.mark.parametrize("blank", ["  \n", "\n \t\n", "\r\n \r\n"])
@pytest.mark.parametrize("header", ["", "a,b\n"])
def test_blank_lines_at_the_beginning_are_skipped(tmp_path, method, blank, header):
    path = write(tmp_path, f"{blank}{header}1,2\n3,4\n")
    table = read_table(path, method, CsvLayout(header=bool(header)))
    np.testing.assert_array_equal(table.values, np.array([[1, 2], [3, 4]], np.float32))


@METHODS
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_is_not_a_regular_file_is_refused_and_not_waited_for(tmp_path, method, kind):
    path = tmp_path / "data.csv"
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=kind):
        read_matrix(path, method)


def test_the_work_for_a_long_first_line_is_proportional_to_its_length(tmp_path, monkeypatch):
    path = write(tmp_path, "1," * 200_000 + "1")
    num_reads = 0
    pread = os.pread

    def counted(*arguments):
        nonlocal num_reads
        num_reads += 1
        assert num_reads < 100
        return pread(*arguments)

    monkeypatch.setattr(source, "HEAD_BYTES", 1)
    monkeypatch.setattr(source.os, "pread", counted)
    assert read_matrix(path, "parallel").shape == (1, 200_001)


@METHODS
def test_a_missing_file_or_a_directory_is_an_error(tmp_path, method):
    with pytest.raises(DataError, match="No such file"):
        read_matrix(tmp_path / "absent.csv", method)
    with pytest.raises(DataError, match=r"directory"):
        read_matrix(tmp_path, method)


def test_an_unknown_method_is_an_error(tmp_path):
    with pytest.raises(ParameterError, match="fast"):
        read_matrix(tmp_path, "fast")


@METHODS
def test_numbers_and_text_are_separated_by_the_header(tmp_path, method):
    path = write(tmp_path, "case_id,g1,cancer_type,g2\nTCGA-2,0.5,NA,1\nTCGA-1,0,BRCA,2.25\n")
    table = read_table(path, method, EXPRESSION)
    assert table.columns == ["g1", "g2"]
    np.testing.assert_array_equal(table.values, np.array([[0.5, 1], [0, 2.25]], np.float32))
    assert table.text["case_id"].values() == ["TCGA-2", "TCGA-1"]
    assert table.text["cancer_type"].names == ["BRCA", "NA"]
    assert table.text["cancer_type"].codes.tolist() == [1, 0]


@METHODS
def test_missing_numbers_are_nan_if_the_layout_allows_them(tmp_path, method):
    layout = CsvLayout(True, ("NAME",), "\t", ("na", "-", ""))
    path = write(tmp_path, "NAME\ta\tb\n7\tna\t1\n8\t2\t\n")
    table = read_table(path, method, layout)
    np.testing.assert_array_equal(table.values, np.array([[np.nan, 1], [2, np.nan]], np.float32))
    assert table.text["NAME"].names == ["7", "8"]


@METHODS
def test_a_table_can_have_only_text(tmp_path, method):
    path = write(tmp_path, "NSC\n12\n7\n")
    table = read_table(path, method, CsvLayout(header=True, text_columns=("NSC",)))
    assert table.values.shape == (2, 0)
    assert table.text["NSC"].values() == ["12", "7"]


@METHODS
@pytest.mark.parametrize(
    ("layout", "text", "message"),
    [
        (LABELLED, "1,2,3\n0,5\n1,8,9\n", "line 2: the line has 2 fields instead of 3"),
        (LABELLED, "1,2,3\n0,5,6,7\n", "line 2: the line has 4 fields instead of 3"),
        (LABELLED, "1,2,3\n0,5,6\n1,8", "2 fields instead of 3; the file ends within this line"),
        (LABELLED, "1,2,3\n0,x,6\n", "column 2: the field 'x' is not a finite float32 number"),
        (LABELLED, "1,2,3\n\n0,nan,6\n", "line 3, column 2: the field 'nan' is not"),
        (LABELLED, "1,2,3\n0,inf,6\n", "line 2, column 2: the field 'inf' is not"),
        (LABELLED, "1,2,3\n0,1e39,6\n", "line 2, column 2: the field '1e39' is not"),
        (LABELLED, "1,2,3\n,5,6\n", "line 2, column 1: the label is empty"),
        (LABELLED, "1,2,\n0,5,6\n", "line 1, column 3: the field is empty"),
        (LABELLED, "1,True,3\n0,True,6\n", "line 1, column 2: the field 'True' is not"),
        (LABELLED, "a,b,c\n0,5,6\n", "line 1, column 1: the label 'a' is not"),
        (LABELLED, "1,1_0,3\n", "line 1, column 2: the field '1_0' is not"),
        (LABELLED, b"1,2\n\xff\xfe,3\n", "line 2, column 1: the label "),
        (LABELLED, "", "the file is empty"),
        (LABELLED, "\n\n", "the file has no rows"),
        (EXPRESSION, HEADER + "TCGA,BRCA\n", "line 2: the line has 2 fields instead of 3"),
        (EXPRESSION, HEADER + "TCGA,BRCA,1,2\n", "line 2: the line has 4 fields instead of 3"),
        (EXPRESSION, HEADER + "TCGA,BRCA,x\n", "line 2, column 3: the field 'x' is not"),
        (EXPRESSION, HEADER + "TCGA,BRCA,\n", "line 2, column 3: the field is empty"),
        (EXPRESSION, HEADER + "TCGA,,1\n", "line 2, column 2: the field is empty"),
        (EXPRESSION, HEADER, "the file has no rows"),
        (EXPRESSION, "case,cancer_type,g\n1,2,3\n", "line 1: the header has no column 'case_id'"),
        (FIVE_COLUMNS, "1,2\n3,4\n", "line 1: the line has 2 fields instead of 5"),
        (LABELLED, "1,2\n3,4\r5,6\n", "line 2: the line has 3 fields instead of 2"),
        (LABELLED, "1,2\n3\r,4\n", "line 2, column 1: the label '3\\r' is not"),
        (LABELLED, "1\n2\r3\n", "line 2, column 1: the label '2\\r3' is not"),
        (LABELLED, "1\r2\r3\r", "line 1, column 1: the label "),
        (SOME_MISSING, "a,b\n1,2\r3,4\n", "line 2: the line has 3 fields instead of 2"),
        (SOME_MISSING, "a,b\r1,2\n3,4\n", "line 1: the line has a carriage return or a NUL"),
        (EXPRESSION, HEADER + "T\rX,BRCA,1\n", "line 2, column 1: the field 'T\\rX' is not text"),
        (EXPRESSION, HEADER + "T\0X,BRCA,1\n", "line 2, column 1: the field 'T\\x00X' is not"),
        (EXPRESSION, HEADER + '"T\nX",BRCA,1\n', "line 2, column 1: the field '\"T' is not text"),
        (LABELLED, "1,2\n3,4\0\n", "line 2, column 2: the field '4\\x00' is not"),
        (LABELLED, "1,2\n3,True\n", "line 2, column 2: the field 'True' is not"),
        (LABELLED, '1,2\n3,4,"5\n', "line 2: the line has 3 fields instead of 2"),
        (LABELLED, "1,2\n3,4,", "line 2: the line has 3 fields instead of 2; the file ends"),
        (LABELLED, "1,2\n\f\n", "line 2: the line has 1 field instead of 2"),
        (LABELLED, "1,0x10\n", "line 1, column 2: the field '0x10' is not"),
        (LABELLED, "1,\u0661\n", "line 1, column 2: the field '\u0661' is not"),
        (EXPRESSION, "case_id,cancer_type,g,h\n0,T,B,1,2\n", "line 2: the line has 5 fields"),
        (SOME_MISSING, "g,h,g\n1,2,0\n", "line 1: the header has several columns 'g'"),
        (EXPRESSION, "case_id,case_id,cancer_type\n", "the header has several columns 'case_id'"),
        (SOME_MISSING, "a,b\n1,2\n0,1,2\n", "line 3: the line has 3 fields instead of 2"),
        (SOME_MISSING, "a,b\n1,2,\n3,4,\n", "line 2: the line has 3 fields instead of 2"),
        (SOME_MISSING, "a,b\n0,1,2\n1,1,2\n", "line 2: the line has 3 fields instead of 2"),
        (SOME_MISSING, "a,b\n1,na\n2,NaN\n", "line 3, column 2: the field 'NaN' is not"),
        (TEXT_MISSING, "t\ta\n-\t1\n", "line 2, column 1: the field '-' is not text"),
        (ONE_TEXT, "t\n \n", "the file has no rows"),
        (LABELLED, "\n\ufeff1,2\n", "line 2, column 1: the label '\\ufeff1' is not"),
        (SOME_MISSING, "a,b\n1,na\n2\n", "line 3: the line has 1 field instead of 2"),
        (LABELLED, "0,1,2,3\n1,5,6,7\n", "line 1: the line counts (0, 1, 2, …), as a header"),
        (LABELLED, ",0,1,2\n0,1,5,6\n", "line 1: the line counts (0, 1, 2, …), as a header"),
        (LABELLED, '"0","1","2"\r\n1,5,6\n', "line 1: the line counts (0, 1, 2, …), as a header"),
        (EXPRESSION, f",{HEADER}0,T,B,1\n", "line 1, column 1: the column's name is '', as that"),
        (EXPRESSION, f"Unnamed: 0,{HEADER}0,T,B,1\n", "the column's name is 'Unnamed: 0', as that"),
        (EXPRESSION, HEADER.replace(",", ";"), "line 1: the fields are separated by semicolons"),
        (TEXT_MISSING, "t,a\n", "are separated by commas: write the file by to_csv(sep='\\t')"),
        (LABELLED, "1;2,5;3\n", "line 1: the fields are separated by semicolons: write the file"),
        (LABELLED, "1 2 3\n", "are separated by spaces: write the file by to_csv(sep=','); expec"),
        (LABELLED, gzip.compress(b"1,2\n"), "compressed by gzip: decompress it with gzip -d; expe"),
        (LABELLED, lzma.compress(b"1,2\n"), "the file is compressed by xz: decompress it with xz"),
        (LABELLED, bz2.compress(b"1,2\n"), "the file is compressed by bzip2: decompress it with"),
        (LABELLED, b"(\xb5/\xfd\0", "the file is compressed by zstd: decompress it with zstd -d"),
        (LABELLED, "1,2\n".encode("utf-16"), "the file is text in UTF-16: convert it with iconv"),
        (LABELLED, "1,2\n".encode("utf-16-le"), "the file is text in UTF-16 or not text: convert"),
        (EXPRESSION, b"PK\3\4\n", "an Excel workbook (xlsx) or another ZIP archive: unzip it, or"),
        (EXPRESSION, b"PAR1\n", "the file is a Parquet file: convert it with pandas's to_csv; exp"),
        (EXPRESSION, b"\x89HDF\r\n\x1a\n", "UTF-8 with fields separated by commas, with a header"),
    ],
)
def test_the_first_problem_is_reported_with_line_and_column(
    tmp_path, method, layout, text, message
):
    path = write(tmp_path, text)
    with pytest.raises(DataError) as caught:
        read_table(path, method, layout)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


@METHODS
@pytest.mark.parametrize("change", ["grows", "shrinks", "is replaced"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, method, change, monkeypatch):
    path = write(tmp_path, "1,2\n" * 5000)
    lines, is_blank = [], source.is_blank

    def change_the_file(line, separator):
        """Changes it when its first line is looked at or, with a library, looked at again."""
        lines.append(line)
        if len(lines) == 1 + (method in FRAME_READERS):
            if change == "is replaced":
                path.rename(tmp_path / "old.csv")
            else:
                os.truncate(path, 4000)  # which killed a process that had mapped the file
            if change != "shrinks":
                write(tmp_path, "1,2\n" * (5000 + 1000 * (change == "grows")))
        return is_blank(line, separator)

    monkeypatch.setattr(source, "is_blank", change_the_file)
    with pytest.raises(DataError, match="the file was changed while it was read"):
        read_matrix(path, method)


def test_the_digest_depends_on_the_text():
    values = np.zeros((2, 1), np.float32)
    columns = [TextColumn(["a", "b"], np.array(codes, np.int32)) for codes in ([0, 1], [1, 0])]
    one, other = (Table(values, ["g"], {"type": column}).sha256() for column in columns)
    assert one != other
