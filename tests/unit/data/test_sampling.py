from __future__ import annotations

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.data.sampling import pandas_sample


@given(st.integers(1, 300), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_rows_are_those_that_pandas_samples(num_rows, fraction, seed):
    frame = pd.DataFrame({"row": range(num_rows)})
    expected = frame.sample(frac=fraction, random_state=seed)["row"].tolist()
    assert pandas_sample(num_rows, fraction, seed).tolist() == expected
