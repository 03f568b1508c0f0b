"""What a line is, apart from its fields."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data.source import is_blank


@given(
    blanks=st.text(" \t", max_size=3),
    times=st.integers(0, 70),
    rest=st.text("a,\t\r ", max_size=3),
    end=st.sampled_from(["", "\r", "\n", "\r\n"]),
    separator=st.sampled_from([",", "\t", " "]),
)
def test_a_line_is_blank_if_it_has_only_spaces_and_tabs(blanks, times, rest, end, separator):
    line = blanks * times + rest + end
    expected = re.fullmatch("[ \t]*\r?\n?", line) is not None and separator not in line
    assert is_blank(line.encode(), separator) == expected
    assert is_blank(memoryview(line.encode()), separator) == expected
