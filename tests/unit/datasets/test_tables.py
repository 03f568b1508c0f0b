import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from candle_p1.datasets.tables import format_rows


@st.composite
def tables(draw):
    decimals = draw(st.integers(0, 6))
    number = st.integers(-(2**31), 2**31).map(lambda scaled: scaled / 10**decimals)
    shape = array_shapes(min_dims=2, max_dims=2, max_side=6)
    return decimals, draw(arrays(np.float64, shape, elements=number | st.just(np.nan)))


def as_python_does(value, decimals, strip_zeros):
    if np.isnan(value):
        return "na"
    text = f"{value:.{decimals}f}"
    if strip_zeros and "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" + text[2:] if float(text) == 0 and text.startswith("-") else text


@given(tables(), st.booleans(), st.sampled_from([",", "\t"]), st.booleans())
def test_rows_are_formatted_as_python_does(table, strip_zeros, separator, with_prefix):
    decimals, values = table
    prefixes = [f"row {i}" * with_prefix for i in range(len(values))]
    options = {"decimals": decimals, "separator": separator.encode(), "strip_zeros": strip_zeros}
    text = format_rows([p.encode() for p in prefixes], values, missing=b"na", **options)
    expected = [
        separator.join([p] * with_prefix + [as_python_does(v, decimals, strip_zeros) for v in row])
        for p, row in zip(prefixes, values, strict=True)
    ]
    assert text.decode().splitlines() == expected


def test_a_value_that_is_too_large_is_an_error():
    with pytest.raises(ValueError, match="5000"):
        format_rows([b""], np.array([[5000.0]]), decimals=6)
