import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from candle_p1.data.directory import MANIFEST_NAME, Manifest, synthetic_facts
from candle_p1.datasets.synthetic import SyntheticFile, SyntheticRecipe, ensure, format_rows, make
from candle_p1.errors import DataError, ParameterError


class Tiny(SyntheticRecipe):
    name, version, roles = "tiny", 1, {"train": "a.csv", "test": "b.csv"}

    def __init__(self, wait_s=0):
        self.num_made, self.wait_s = 0, wait_s

    def files(self, size, seed):
        self.num_made += 1
        time.sleep(self.wait_s)
        text = f"{size},{seed}\n".encode()
        return [SyntheticFile(name, 8, iter([text, text])) for name in self.roles.values()]


def test_the_manifest_describes_the_files(tmp_path):
    calls = []
    manifest = make(Tiny(), "small", tmp_path / "out", 7, lambda *call: calls.append(call))
    assert [call[0] for call in calls] == ["a.csv"] * 3 + ["b.csv"] * 3
    assert calls[2][1:] == (16, 16)
    path = tmp_path / "out/a.csv"
    assert manifest == Manifest.read(path.parent)
    assert manifest.files["a.csv"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "out/b.csv").unlink()
    assert synthetic_facts(path) == manifest.files["a.csv"]
    path.write_text("cut\n")
    assert synthetic_facts(path) is None


def damaged(made_of=(), facts=()):
    made_of = {"name": "tiny", "size": "small", "seed": 1, "version": 1} | dict(made_of)
    facts = {"bytes": 1, "sha256": ""} | dict(facts)
    return json.dumps({"made_of": made_of, "files": {"a\0.csv": facts}})


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "{}", damaged({"seed": "1"}), damaged(facts={"bytes": "1"})]
)
def test_a_damaged_manifest_is_ignored(tmp_path, text):
    manifest = make(Tiny(), "small", tmp_path, 1)
    (tmp_path / MANIFEST_NAME).write_text(text)
    assert Manifest.read(tmp_path) is None
    assert synthetic_facts(tmp_path / "a.csv") is None
    assert manifest.whole
    (tmp_path / MANIFEST_NAME).write_text(damaged())
    assert not Manifest.read(tmp_path).whole  # there is no such file


def test_a_data_set_is_made_once_and_made_again_when_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "cache"))
    recipe = Tiny(wait_s=0.2)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ensure, recipe, "small", 1) for _ in range(4)]
    manifest = ensure(recipe, "small", 1)
    assert all(job.result() == manifest for job in jobs)
    assert recipe.num_made == 1
    (manifest.directory / "a.csv").write_text("cut")
    assert ensure(recipe, "small", 1) == manifest
    assert recipe.num_made == 2
    assert ensure(recipe, "small", 2).directory != manifest.directory
    assert tmp_path / "cache" in manifest.directory.parents


def test_an_interrupted_write_leaves_nothing_behind(tmp_path):
    class Interrupted(Tiny):
        def files(self, size, seed):
            def blocks():
                yield b"half"
                raise KeyboardInterrupt

            return [*super().files(size, seed)[:1], SyntheticFile("b.csv", 8, blocks())]

    with pytest.raises(KeyboardInterrupt):
        make(Interrupted(), "small", tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}
    os.mkfifo(tmp_path / ".a.csv.partial")
    assert make(Tiny(), "small", tmp_path, 1).whole


def test_other_files_unwritable_directories_and_unknown_sizes_are_errors(tmp_path):
    (tmp_path / "a.csv").write_text("precious\n")
    with pytest.raises(DataError, match=r"a\.csv.*--out"):
        make(Tiny(), "small", tmp_path, 1)
    assert (tmp_path / "a.csv").read_text() == "precious\n"
    with pytest.raises(DataError, match="CANDLE_DATA_DIR"):
        make(Tiny(), "small", tmp_path / "a.csv/below", 1)
    with pytest.raises(ParameterError, match="medium"):
        make(Tiny(), "medium", tmp_path, 1)


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
