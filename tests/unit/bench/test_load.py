import pytest

from candle_p1.bench import formats, load
from candle_p1.bench.load import choose_methods, loads_to_pay
from candle_p1.bench.read import slow_source
from candle_p1.data.cooperative import read_together
from candle_p1.data.source import Loading
from candle_p1.data.table import CsvLayout
from candle_p1.errors import ParameterError, SetupError


def test_methods_are_used_once_and_those_that_are_not_installed_are_told(monkeypatch):
    assert choose_methods("chunked, original,chunked") == (["chunked", "original"], [])
    monkeypatch.setattr(load, "installed_readers", lambda: ["original"])
    monkeypatch.setattr(formats, "find_spec", lambda name: name in ("numpy", "zlib"))
    assert choose_methods(None) == (["original"], [])
    text = "parquet,original,polars,npy,parallel-zst,parallel-gz"
    missing = ["parquet", "polars", "parallel-zst"]
    assert choose_methods(text) == (["original", "npy", "parallel-gz"], missing)
    with pytest.raises(ParameterError, match=r"--methods.*'chunkd'.*'chunked'"):
        choose_methods("original,chunkd")
    with pytest.raises(SetupError, match=r"polars, parquet.*\[readers\]"):
        choose_methods("polars,parquet")


def test_loads_that_take_as_long_as_before_never_pay():
    assert [loads_to_pay(2, 2, after_s) for after_s in (0.5, 1, 2, 3)] == [2, 3, None, None]


def test_every_block_is_delayed_once_however_many_threads_read_it(tmp_path, monkeypatch):
    path, slept = tmp_path / "table.csv", []
    path.write_text("1,2\n" * 100)
    monkeypatch.setattr("time.sleep", slept.append)
    slow = {"source": slow_source(0.5)}
    table = read_together(path, CsvLayout(), Loading(num_threads=2, block_bytes=100, **slow))
    assert table.values.tolist() == [[1, 2]] * 100
    assert slept == [0.5] * 4  # each block by the thread that reads it
