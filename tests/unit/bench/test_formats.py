import gzip
import sys

import numpy as np
import pytest

from candle_p1.bench.formats import FORMATS, ConvertedReader, is_installed
from candle_p1.data.reader import FileSet
from candle_p1.data.source import Loading
from candle_p1.data.table import CsvLayout

TEXT = CsvLayout(header=True, text_columns=("kind", "name"), missing=("na",))


@pytest.mark.parametrize("method", FORMATS)
@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (CsvLayout(), "1,2.5,-3e-40\n4,0.1,3e38\n"),
        (TEXT, "a,name,kind,b\n1,x,é,2\nna,y,z,3.25\n0.1,x,z,na\n"),
    ],
)
def test_what_is_converted_is_the_same_table(tmp_path, monkeypatch, method, layout, text):
    if not is_installed(method):
        pytest.skip("its library is not installed")
    monkeypatch.setattr(sys, "argv", ["task", str(tmp_path)])
    (tmp_path / "table.csv").write_text(text)
    files = FileSet.at({"train": tmp_path / "table.csv"})
    converter = ConvertedReader(files, Loading(), method, tmp_path / "made", converts=True)
    table = converter.read("train", layout)
    (made,) = (tmp_path / "made").iterdir()
    if method == "parallel-gz":
        assert gzip.decompress(made.read_bytes()).decode() == text
    (tmp_path / "table.csv").write_text("nothing that could be read instead")
    reader = ConvertedReader(files, Loading(), method, tmp_path / "made")
    found = reader.read("train", layout)
    assert found.values.dtype == np.float32
    assert found.values.flags.c_contiguous
    assert found.sha256() == table.sha256()
    assert found.columns == table.columns
    for each in (converter, reader):
        each.digest()
    assert converter.digests == reader.digests
