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
    "word": lambda random: random.choice(["inf", "-Infinity", "nan", "NAN", "+inf", "-0", "1e999"]),
}
FIELDS_PER_EXAMPLE = 14_000


def halfway(single):
    """A number halfway between two float32 numbers, where rounding twice may fail."""
    return f"{(float(single) + float(np.nextafter(single, np.float32(1e9)))) / 2:.25f}"


def parse(text, num_columns, dtype=np.float32, **layout):
    layout = kernel.Layout([False] * num_columns, **layout)
    raw = np.frombuffer(text, np.uint8)
    num_rows = kernel.count_rows(raw, 0, len(raw), layout)
    values = np.empty((num_rows, num_columns), dtype)
    codes = np.empty((0, num_rows), np.int32)
    parsed, names, problem = kernel.parse(raw, 0, len(raw), layout, values, codes, 0)
    assert names == []
    assert problem is not None or parsed == num_rows
    return values, problem


def same_bits(values, expected):
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), nan)
    assert values[~nan].tobytes() == expected[~nan].tobytes()


@pytest.mark.extended
@given(seed=st.integers(0, 2**32), separator=st.sampled_from(",\t;"), crlf=st.booleans())
@settings(max_examples=80)
def test_a_million_fields_are_parsed_as_python_does(seed, separator, crlf):
    random = np.random.default_rng(seed)
    num_columns = int(random.integers(1, 60))
    num_rows = FIELDS_PER_EXAMPLE // num_columns
    makers = [FORMS[name] for name in random.choice(list(FORMS), num_columns)]
    rows = [[make(random) for make in makers] for _ in range(num_rows)]
    if separator == "\t":
        rows = [[field.replace("\t", " ") for field in row] for row in rows]
    end = "\r\n" if crlf else "\n"
    text = end.join(separator.join(row) for row in rows).encode()
    expected = np.array([[float(field) for field in row] for row in rows])
    values, problem = parse(text, num_columns, np.float64, separator=separator, finite=False)
    assert problem is None
    same_bits(values, expected)
    singles, _ = parse(text + end.encode(), num_columns, separator=separator, finite=False)
    with np.errstate(over="ignore"):
        same_bits(singles, expected.astype(np.float32))


@pytest.mark.extended
@given(st.text(alphabet="0123456789+-.eEinfaNT_ x\"'\r", max_size=12))
@settings(max_examples=3000)
def test_any_field_is_a_number_if_python_accepts_it(field):
    """Except for underscores, quotes and carriage returns."""
    content = field[:-1] if field.endswith("\r") else field
    quoted = len(content) > 1 and content[0] == content[-1] == '"' and '"' not in content[1:-1]
    bare = content[1:-1] if quoted else content
    try:
        expected = None if set('_"\r') & set(bare) else float(bare)
    except ValueError:
        expected = None
    values, problem = parse(f"1,{field}\n".encode(), 2, np.float64, finite=False)
    if expected is None:
        assert problem is not None
    else:
        assert problem is None
        same_bits(values, np.array([[1.0, expected]]))


def test_unusual_text_is_parsed():
    values, problem = parse(b" 1 ,\t2\n\n \nna,\n-,4 ", 2, missing=["na", "", "-"])
    assert problem is None
    np.testing.assert_array_equal(values, [[1, 2], [np.nan, np.nan], [np.nan, 4]])


@pytest.mark.parametrize("num_columns", [1, 7, 8, 9, 16, 17, 33])
def test_runs_of_single_digits_are_parsed(num_columns):
    """Eight of them are read at once, unless they end the row."""
    expected = np.arange(3 * num_columns).reshape(3, num_columns) % 10
    expected[1, num_columns // 2] = -5
    text = "".join(",".join(map(str, row)) + "\n" for row in expected).encode()
    values, problem = parse(text, num_columns)
    assert problem is None
    np.testing.assert_array_equal(values, expected)
    for wrong in (num_columns + 1, num_columns - 1):
        if wrong:
            assert parse(text, wrong)[1][:2] == (0, num_columns)


DIGEST = """
import hashlib, sys
import numpy as np
from candle_p1.data import _csvkernel as kernel

text = np.frombuffer(sys.stdin.buffer.read(), np.uint8)
num_columns = int(sys.argv[1])
layout = kernel.Layout([column == 1 for column in range(num_columns)])
num_rows = kernel.count_rows(text, 0, len(text), layout)
values = np.empty((num_rows, num_columns - 1), np.float32)
codes = np.empty((1, num_rows), np.int32)
parsed, names, problem = kernel.parse(text, 0, len(text), layout, values, codes, 0)
assert (parsed, problem) == (num_rows, None)
print(kernel.uses_avx512(), hashlib.sha256(values.tobytes() + codes.tobytes()).hexdigest(), names)
"""
"""Parses a table, whose second column is text, from standard input."""


@pytest.mark.parametrize("num_columns", [4, 200])
@pytest.mark.filterwarnings("ignore:overflow")
def test_older_instructions_give_the_same_numbers(num_columns):
    """Rows of few columns are parsed several at a time, those of many eight numbers at a time."""
    random = np.random.default_rng(7)
    plain = [FORMS[name] for name in ("fixed", "short", "integer", "digit", "no digit before")]
    rows = []
    for _ in range(60):
        makers = random.choice([*plain, *FORMS.values()], num_columns)
        if random.random() < 0.7:
            makers = random.choice(plain[:2] if random.random() < 0.5 else plain[3:4], num_columns)
        fields = [make(random) for make in makers]
        fields = [field if np.isfinite(np.float32(field)) else "1" for field in fields]
        fields[1] = random.choice(["A549", "MCF7"])
        rows.append(",".join(fields))
    text = "\n".join(rows).encode()

    def digest(**variables):
        command = [sys.executable, "-W", "error", "-c", DIGEST, str(num_columns)]
        environment = os.environ | variables
        done = subprocess.run(command, input=text, env=environment, capture_output=True, check=True)
        return done.stdout.split(maxsplit=1)

    newest, older = digest(), digest(CANDLE_P1_INSTRUCTIONS="portable")
    assert older[0] == b"False"
    assert newest[1] == older[1]
    assert newest[0] == str(kernel.uses_avx512()).encode()
