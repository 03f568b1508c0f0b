import bz2
import os
import re
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data import loaders, source
from candle_p1.data.loaders import FRAME_READERS
from candle_p1.data.source import Loading
from candle_p1.data.table import CsvLayout, Table, TextColumn
from candle_p1.errors import DataError, ParameterError
from tests.unit.data.conftest import compress_gzip, compress_zstd

READERS = loaders.installed_readers()
METHODS = pytest.mark.parametrize("method", READERS)
LABELLED = CsvLayout(label_column=0)
EXPRESSION = CsvLayout(header=True, text_columns=("case_id", "cancer_type"))
HEADER = "case_id,cancer_type,g\n"
FIVE_COLUMNS = CsvLayout(num_columns=5)
SOME_MISSING = CsvLayout(header=True, missing=("na",))
ONE_TEXT = CsvLayout(header=True, text_columns=("t",))
TEXT_MISSING = CsvLayout(True, ("t",), "\t", ("na", "-", ""))
GAPS = [[np.nan, 1], [2, np.nan]]
BLANK_LINES = ("  \n", "\n \t\n", "\r\n \r\n")
FOR_ZSTD = pytest.mark.skipif(not find_spec("zstandard"), reason="pandas needs zstandard")
LINES = [b"1,2.5\n", b"3,", b"", b"4\n"]
GZIP = b"".join(map(compress_gzip, LINES))
ZSTD = b"".join(map(compress_zstd, LINES))
"""Several members or frames, one of them empty; the second line is in two."""


@pytest.fixture(autouse=True)
def data_directory(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path_factory.mktemp("data")))


def read_table(path, method, layout=None):
    return loaders.read_table(path, Loading(method), layout)


def write(directory, text):
    path = directory / "data.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@METHODS
@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("1,0.5,-2e3\n0,10.123456,7", [[1, 0.5, -2e3], [0, 10.123456, 7]]),
        ("1,2\r\n3,4\r\n", [[1, 2], [3, 4]]),
        ('"1","2"\n', [[1, 2]]),
        ("\ufeff1,2\n", [[1, 2]]),
        ("007,5.\n", [[7, 5]]),
        (".5,1e-400\n", [[0.5, 0]]),
        ("1,0.1000000000000000055511151231257827\n", [[1, 0.1]]),
        ("3e38,3e38\n3e38,3e38\n", [[3e38, 3e38]] * 2),  # whose sum overflows
        *((f"{blank}1,2\n3,4\n", [[1, 2], [3, 4]]) for blank in BLANK_LINES),
        pytest.param(GZIP, [[1, 2.5], [3, 4]], id="gzip"),
        pytest.param(ZSTD, [[1, 2.5], [3, 4]], id="zstd", marks=FOR_ZSTD),
    ],
)
def test_values_are_float32_in_row_order(tmp_path, method, text, rows):
    matrix = read_table(write(tmp_path, text), method).values
    assert matrix.dtype == np.float32
    assert matrix.flags.c_contiguous
    np.testing.assert_array_equal(matrix, np.array(rows, np.float32))


@METHODS
@pytest.mark.parametrize(
    ("layout", "text", "columns", "rows", "words"),
    [
        *(
            (CsvLayout(header=True), f"{start}a,b\n1,2\n3,4\n", ["a", "b"], [[1, 2], [3, 4]], {})
            for start in ("\ufeff", *BLANK_LINES)
        ),
        (
            EXPRESSION,
            'case_id,g1,cancer_type,g2\nT-2,0.5,NA,1\nT-1,0,"x, ""y""",2.25\nT-2,1,NA,2\n',
            ["g1", "g2"],
            [[0.5, 1], [0, 2.25], [1, 2]],
            {"case_id": ["T-2", "T-1", "T-2"], "cancer_type": ["NA", 'x, "y"', "NA"]},
        ),
        (TEXT_MISSING, "t\ta\tb\n7\tna\t1\n8\t2\t\n", ["a", "b"], GAPS, {"t": ["7", "8"]}),
        (ONE_TEXT, "t\n12\n7\n", [], np.empty((2, 0)), {"t": ["12", "7"]}),
    ],
)
def test_the_header_separates_numbers_and_text(
    tmp_path, method, layout, text, columns, rows, words
):
    table = read_table(write(tmp_path, text), method, layout)
    assert table.columns == columns
    np.testing.assert_array_equal(table.values, np.array(rows, np.float32))
    for name, values in words.items():
        found = table.text[name]
        assert (found.values(), found.names) == (values, sorted(set(values)))
        assert found.codes.tolist() == [found.names.index(value) for value in values]


decimals = st.decimals(-100, 100, places=6, allow_nan=False)


@pytest.mark.extended
@given(st.lists(st.lists(decimals, min_size=3, max_size=3), min_size=1, max_size=8))
def test_methods_agree_bit_for_bit_with_python(tmp_path_factory, rows):
    text = "\n".join(",".join(f"{value:f}" for value in row) for row in rows) + "\n"
    path = write(tmp_path_factory.mktemp("csv"), text)
    expected = np.array([[np.float32(float(value)) for value in row] for row in rows])
    for method in READERS:
        assert read_table(path, method).values.tobytes() == expected.tobytes()


@METHODS
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "a pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: None, "No such file"),
    ],
)
def test_what_is_not_a_regular_file_is_refused_and_not_waited_for(tmp_path, method, make, problem):
    make(tmp_path / "data.csv")
    with pytest.raises(DataError, match=rf"data\.csv.*{problem}"):
        read_table(tmp_path / "data.csv", method)


def test_an_unknown_method_is_an_error(tmp_path):
    with pytest.raises(ParameterError, match="fast"):
        read_table(tmp_path, "fast")


@METHODS
@pytest.mark.parametrize(
    ("layout", "text", "message"),
    [
        (LABELLED, "1,2,3\n0,5\n1,8,9\n", "line 2: the line has 2 fields instead of 3"),
        (LABELLED, "1,2,3\n0,5,6,7\n", "line 2: the line has 4 fields instead of 3"),
        (LABELLED, "1,2,3\n0,5,6\n1,8", "2 fields instead of 3; the file ends within this line"),
        (LABELLED, "1,2,3\n0,x,6\n", "column 2: the field 'x' is not a finite float32 number"),
        (LABELLED, "1,2,3\n\n0,nan,6\n", "line 3, column 2: the field 'nan' is not"),
        (LABELLED, "1,2,3\n0,1e39,6\n", "line 2, column 2: the field '1e39' is not"),
        (LABELLED, "1,2,3\n,5,6\n", "line 2, column 1: the label is empty"),
        (LABELLED, "1,2,\n0,5,6\n", "line 1, column 3: the field is empty"),
        (LABELLED, "1,True,3\n0,True,6\n", "line 1, column 2: the field 'True' is not"),
        (LABELLED, "a,b,c\n0,5,6\n", "line 1, column 1: the label 'a' is not"),
        (LABELLED, "1,1_0,3\n", "line 1, column 2: the field '1_0' is not"),
        (LABELLED, b"1,2\n\xff\xfe,3\n", "line 2, column 1: the label "),
        (EXPRESSION, HEADER.encode() + b"\xff,BRCA,1\n", "not UTF-8"),
        (LABELLED, "", "the file is empty"),
        (LABELLED, "\n\n", "the file has no rows"),
        (EXPRESSION, HEADER + "TCGA,BRCA,\n", "line 2, column 3: the field is empty"),
        (EXPRESSION, HEADER + "TCGA,,1\n", "line 2, column 2: the field is empty"),
        (EXPRESSION, HEADER, "the file has no rows"),
        (EXPRESSION, "case,cancer_type,g\n1,2,3\n", "line 1: the header has no column 'case_id'"),
        (FIVE_COLUMNS, "1,2\n3,4\n", "line 1: the line has 2 fields instead of 5"),
        (LABELLED, "1,2\n3,4\r5,6\n", "line 2: the line has 3 fields instead of 2"),
        (LABELLED, "1\n2\r3\n", "line 2, column 1: the label '2\\r3' is not"),
        (LABELLED, "1\r2\r3\r", "line 1, column 1: the label "),
        (SOME_MISSING, "a,b\r1,2\n3,4\n", "line 1: the line has a carriage return or a NUL"),
        (EXPRESSION, HEADER + "T\rX,BRCA,1\n", "line 2, column 1: the field 'T\\rX' is not text"),
        (EXPRESSION, HEADER + "T\0X,BRCA,1\n", "line 2, column 1: the field 'T\\x00X' is not"),
        (EXPRESSION, HEADER + '"T\nX",BRCA,1\n', "line 2, column 1: the field '\"T' is not text"),
        (LABELLED, "1,2\n3,4\0\n", "line 2, column 2: the field '4\\x00' is not"),
        (LABELLED, '1,2\n3,"4\n5,6\n', "line 2, column 2: the field '\"4' is not"),
        (LABELLED, '1,2\n3,"4"4\n', "line 2, column 2: the field '\"4\"4' is not"),
        (LABELLED, "1,2\n\f\n", "line 2: the line has 1 field instead of 2"),
        (LABELLED, "1,0x10\n", "line 1, column 2: the field '0x10' is not"),
        (LABELLED, "1,\u0661\n", "line 1, column 2: the field '\u0661' is not"),
        (EXPRESSION, "case_id,cancer_type,g,h\n0,T,B,1,2\n", "line 2: the line has 5 fields"),
        (SOME_MISSING, "g,h,g\n1,2,0\n", "line 1: the header has several columns 'g'"),
        (SOME_MISSING, "a,b\n1,2,\n3,4,\n", "line 2: the line has 3 fields instead of 2"),
        (SOME_MISSING, "a,b\n1,na\n2,NaN\n", "line 3, column 2: the field 'NaN' is not"),
        (TEXT_MISSING, "t\ta\n-\t1\n", "line 2, column 1: the field '-' is not text"),
        (ONE_TEXT, "t\n \n", "the file has no rows"),
        (LABELLED, "\n\ufeff1,2\n", "line 2, column 1: the label '\\ufeff1' is not"),
        (SOME_MISSING, "a,b\n1,na\n2\n", "line 3: the line has 1 field instead of 2"),
        (LABELLED, "0,1,2,3\n1,5,6,7\n", "line 1: the line counts (0, 1, 2, …), as a header"),
        (LABELLED, ",0,1,2\n0,1,5,6\n", "line 1: the line counts (0, 1, 2, …), as a header"),
        (EXPRESSION, f",{HEADER}0,T,B,1\n", "line 1, column 1: the column's name is '', as that"),
        (EXPRESSION, f"Unnamed: 0,{HEADER}0,T,B,1\n", "the column's name is 'Unnamed: 0', as that"),
        (EXPRESSION, HEADER.replace(",", ";"), "line 1: the fields are separated by semicolons"),
        (TEXT_MISSING, "t,a\n", "are separated by commas: write the file by to_csv(sep='\\t')"),
        (LABELLED, "1;2,5;3\n", "line 1: the fields are separated by semicolons: write the file"),
        (LABELLED, "1 2 3\n", "are separated by spaces: write the file by to_csv(sep=','); expec"),
        (LABELLED, compress_gzip(b"1,2\n1,x\n"), "line 2, column 2: the field 'x' is not"),
        (LABELLED, compress_gzip(b"1,2\n3,4\n")[:-9], "the file is damaged or was copied incompl"),
        (LABELLED, compress_gzip(b"1,2\n3,4\n")[:-8] + bytes(8), "gzip -t"),
        (
            LABELLED,
            ZSTD[:-1],
            "the file is damaged or was copied incompletely: zstd cannot decompr",
        ),
        (LABELLED, bz2.compress(b"1,2\n"), "compressed by bzip2: decompress it with bzip2 -d; exp"),
        (LABELLED, compress_gzip(b"\xfd7zXZ\0"), "compressed by xz: decompress it with xz -d; ex"),
        (LABELLED, compress_gzip(b""), "the file has no rows"),
        (LABELLED, "1,2\n".encode("utf-16"), "the file is text in UTF-16: convert it with iconv"),
        (LABELLED, "1,2\n".encode("utf-16-le"), "the file is text in UTF-16 or not text: convert"),
        (EXPRESSION, b"\x89HDF\r\n\x1a\n", "UTF-8 with fields separated by commas, with a header"),
    ],
)
def test_the_first_problem_is_reported_with_line_and_column(
    tmp_path, method, layout, text, message
):
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=f"^{path}.*{re.escape(message)}"):
        read_table(path, method, layout)


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
        read_table(path, method)


def test_the_digest_depends_on_the_text():
    values = np.zeros((2, 1), np.float32)
    columns = [TextColumn(["a", "b"], np.array(codes, np.int32)) for codes in ([0, 1], [1, 0])]
    one, other = (Table(values, ["g"], {"type": column}).sha256() for column in columns)
    assert one != other
