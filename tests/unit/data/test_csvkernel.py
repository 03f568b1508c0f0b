"""The kernel compared with Python's float(), for many fields and unusual files."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from candle_p1.data import _csvkernel as kernel

FORMS = {
    "fixed": lambda random: f"{random.normal() * 10.0 ** random.integers(-3, 6):.6f}",
    "short": lambda random: f"{random.uniform(0, 20):.{random.integers(0, 4)}f}",
    "integer": lambda random: str(random.integers(-(10 ** random.integers(1, 18)), 10**17)),
    "digit": lambda random: str(random.integers(0, 10)),
    "shortest": lambda random: repr(float(np.frombuffer(random.bytes(8), np.float64)[0])),
    "long": lambda random: f"{random.uniform(-1e3, 1e3):.{random.integers(12, 30)}f}",
    "exponent": lambda random: f"{random.normal():.{random.integers(0, 20)}e}",
    "wide exponent": lambda random: f"{random.normal():+.3f}E{random.integers(-400, 400)}",
    "no digit before": lambda random: f"-.{random.integers(0, 10**9)}",
    "no digit after": lambda random: f"{random.integers(0, 10**9)}.",
    "spaces": lambda random: f" {random.normal():.4f}\t ",
    "zeros": lambda random: "0" * random.integers(1, 30) + f"{random.uniform(0, 1):.5f}",
    "halfway": lambda random: halfway(np.float32(random.uniform(1, 1e6))),
    "word": lambda random: random.choice(["-0", "+0", "1e-999"]),
}


def halfway(single):
    """A number halfway between two float32 numbers, where rounding twice may fail."""
    return f"{(float(single) + float(np.nextafter(single, np.float32(1e9)))) / 2:.25f}"


def finite(field):
    """A number, or "1" if float32 does not hold it, which is an error."""
    with np.errstate(over="ignore"):
        return field if np.isfinite(np.float32(float(field))) else "1"


def parse(text, num_columns, dtype=np.float32, text_column=None, **layout):
    """Returns the numbers, what is wrong, and the text of a column."""
    layout = kernel.Layout([column == text_column for column in range(num_columns)], **layout)
    raw = np.frombuffer(text, np.uint8)
    num_rows, num_text = kernel.count_rows(raw, 0, len(raw), layout), int(text_column is not None)
    values = np.empty((num_rows, num_columns - num_text), dtype)
    codes = np.empty((num_text, num_rows), np.int32)
    parsed, names, problem = kernel.parse(raw, 0, len(raw), layout, values, codes, 0)
    assert problem is not None or parsed == num_rows
    words = [names[0][code] for code in codes[0]] if num_text and problem is None else None
    return values, problem, words


def same_bits(values, expected):
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), nan)
    assert values[~nan].tobytes() == expected[~nan].tobytes()


@given(
    seed=st.integers(0, 2**32),
    num_columns=st.integers(2, 9) | st.integers(100, 200),
    separator=st.sampled_from(",\t;"),
    end=st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=25)
def test_fields_are_parsed_as_python_does(seed, num_columns, separator, end):
    """Rows of few columns are parsed several at a time, those of many eight numbers at a time."""
    random = np.random.default_rng(seed)
    kinds = random.choice([*FORMS], num_columns), ["fixed"] * num_columns, ["digit"] * num_columns
    rows = []
    for _ in range(4000 // num_columns):
        fields = [finite(FORMS[kind](random)) for kind in kinds[random.integers(3)]]
        fields[1] = random.choice(["A549", "MCF7"])
        rows.append([field.replace("\t", " ") for field in fields])
    text = end.join(separator.join(row) for row in rows).encode()
    expected = np.array([[float(field) for field in [row[0], *row[2:]]] for row in rows])
    for dtype in (np.float64, np.float32):
        options = {"text_column": 1, "separator": separator}
        values, problem, words = parse(text, num_columns, dtype, **options)
        assert problem is None
        same_bits(values, expected.astype(dtype))
        assert [word.decode() for word in words] == [row[1] for row in rows]


@pytest.mark.extended
@given(st.text(alphabet="0123456789+-.eEinfaNT_ x\"'\r", max_size=12))
@settings(max_examples=3000)
def test_any_field_is_a_number_if_python_accepts_it(field):
    """Except for underscores, quotes and carriage returns, infinity and NaN."""
    content = field[:-1] if field.endswith("\r") else field
    quoted = len(content) > 1 and content[0] == content[-1] == '"' and '"' not in content[1:-1]
    bare = content[1:-1] if quoted else content
    try:
        expected = None if set('_"\r') & set(bare) else float(bare)
        expected = expected if expected is not None and np.isfinite(expected) else None
    except ValueError:
        expected = None
    values, problem, _ = parse(f"1,{field}\n".encode(), 2, np.float64)
    if expected is None:
        assert problem is not None
    else:
        assert problem is None
        same_bits(values, np.array([[1.0, expected]]))


def test_unusual_text_is_parsed():
    values, problem, _ = parse(b" 1 ,\t2\n\n \nna,\n-,4 ", 2, missing=["na", "", "-"])
    assert problem is None
    np.testing.assert_array_equal(values, [[1, 2], [np.nan, np.nan], [np.nan, 4]])


def test_text_may_be_empty_if_the_layout_says_so():
    text = b"1,x,2\n" * 20 + b"3,,4\n5,na,6\n"
    _, problem, words = parse(text, 3, text_column=1, missing=["na"], empty_text=True)
    assert (problem, words[-3:]) == (None, [b"x", b"", b"na"])
    assert parse(text, 3, text_column=1, missing=["na"])[1] == (20 * 6, 3, 1, b"")
    padded = [b"1, na,2\n", b"1,na ,2\n", b"1, ,2\n"]
    values, problem, _ = parse(b"".join(padded), 3, missing=["na", ""], empty_text=True)
    assert problem is None
    np.testing.assert_array_equal(values, [[1, np.nan, 2]] * 3)
    for line in padded:
        assert parse(line, 3, missing=["na", ""])[1][:3] == (0, 3, 1)


@pytest.mark.parametrize("num_columns", [1, 7, 8, 9, 16, 17, 33])
def test_runs_of_single_digits_are_parsed(num_columns):
    """Eight of them are read at once, unless they end the row."""
    expected = np.arange(3 * num_columns).reshape(3, num_columns) % 10
    expected[1, num_columns // 2] = -5
    text = "".join(",".join(map(str, row)) + "\n" for row in expected).encode()
    values, problem, _ = parse(text, num_columns)
    assert problem is None
    np.testing.assert_array_equal(values, expected)
    for wrong in (num_columns + 1, num_columns - 1):
        if wrong:
            assert parse(text, wrong)[1][:2] == (0, num_columns)


def test_older_instructions_give_the_same_numbers():
    """The kernel chooses once in a process, so the tests above run in another one."""
    argv = ["-q", "-p", "no:cacheprovider", "-k", "python_does or digits", __file__]
    program = "import pytest; from candle_p1.data import _csvkernel; assert not"
    program += f" _csvkernel.uses_avx512(); raise SystemExit(pytest.main({argv}))"
    command = [sys.executable, "-c", program]
    environment = os.environ | {"CANDLE_P1_INSTRUCTIONS": "portable"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "8 passed" in found.stdout
