from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark, list_benchmarks
from candle_p1.data.manifest import MANIFEST_NAME, Manifest, synthetic_facts
from candle_p1.datasets.synthetic import SyntheticFile, SyntheticRecipe, ensure, make
from candle_p1.errors import DataError, ParameterError

MIB = 2**20


class Tiny(SyntheticRecipe):
    name, version, roles = "tiny", 1, {"train": "a.csv", "test": "b.csv"}

    def __init__(self):
        self.num_made = 0

    def files(self, size, seed):
        self.num_made += 1
        text = f"{size},{seed}\n".encode()
        return [SyntheticFile(name, 8, iter([text, text])) for name in self.roles.values()]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_manifest_describes_the_files(tmp_path):
    manifest = make(Tiny(), "small", tmp_path / "out", 7)
    path = tmp_path / "out/a.csv"
    assert manifest == Manifest.read(path.parent)
    assert manifest.files["a.csv"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert synthetic_facts(path) == manifest.files["a.csv"]
    assert json.loads((tmp_path / "out" / MANIFEST_NAME).read_text())["synthetic"] is True
    (tmp_path / "out/b.csv").unlink()
    assert synthetic_facts(path) == manifest.files["a.csv"]
    path.write_text("cut\n")
    assert synthetic_facts(path) is None


MADE_OF = {"name": "tiny", "size": "small", "seed": 1, "version": 1}
FILES = {"a.csv": {"bytes": 1, "sha256": ""}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"made_of": 1, "files": {}}',
        *(
            json.dumps({"made_of": MADE_OF, "files": FILES} | changes)
            for changes in (
                {"made_of": {"name": "tiny"}},
                {"made_of": MADE_OF | {"size": []}},
                {"made_of": MADE_OF | {"seed": "1"}},
                {"files": {"a.csv": 1}},
                {"files": {"a.csv": {"bytes": 1}}},
                {"files": {"a.csv": {"bytes": "1", "sha256": ""}}},
            )
        ),
    ],
)
def test_a_damaged_manifest_is_ignored(tmp_path, text):
    manifest = make(Tiny(), "small", tmp_path, 1)
    (tmp_path / MANIFEST_NAME).write_text(text)
    assert Manifest.read(tmp_path) is None
    assert synthetic_facts(tmp_path / "a.csv") is None
    assert manifest.whole


def test_a_pipe_for_a_partial_file_is_replaced(tmp_path):
    os.mkfifo(tmp_path / ".a.csv.partial")
    assert make(Tiny(), "small", tmp_path, 1).whole


def test_a_data_set_is_made_once_and_made_again_when_damaged(cache):
    recipe = Tiny()
    manifest = ensure(recipe, "small", 1)
    assert ensure(recipe, "small", 1) == manifest
    assert recipe.num_made == 1
    (manifest.directory / "a.csv").write_text("cut")
    assert ensure(recipe, "small", 1) == manifest
    assert recipe.num_made == 2
    assert ensure(recipe, "small", 2).directory != manifest.directory
    assert cache in manifest.directory.parents


def test_other_files_are_never_overwritten(tmp_path):
    (tmp_path / "a.csv").write_text("precious\n")
    with pytest.raises(DataError, match=r"a\.csv.*--out"):
        make(Tiny(), "small", tmp_path, 1)
    assert (tmp_path / "a.csv").read_text() == "precious\n"


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
    assert make(Tiny(), "small", tmp_path, 1).files


def test_an_unwritable_directory_and_an_unknown_size_are_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="CANDLE_DATA_DIR"):
        make(Tiny(), "small", tmp_path / "file/below", 1)
    with pytest.raises(ParameterError, match="medium"):
        make(Tiny(), "medium", tmp_path, 1)


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    calls = []
    make(Tiny(), "small", tmp_path / "out", 1, lambda *call: calls.append(call))
    assert [call[0] for call in calls] == ["a.csv"] * 3 + ["b.csv"] * 3
    assert calls[2][1:] == (16, 16)


PROGRAM = """
from candle_p1.benchmark import find_benchmark
from candle_p1.datasets import synthetic
made = []
write = synthetic._write
synthetic._write = lambda *call: made.append(call[0].name) or write(*call)
print(len(synthetic.ensure(find_benchmark("nt3").recipe, "small", 3).files), len(made))
"""


@pytest.mark.extended
def test_only_one_of_several_processes_makes_the_data():
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    results = sorted(process.communicate(timeout=60)[0].split() for process in processes)
    assert results == [["2", "0"]] * 3 + [["2", "2"]]


@pytest.mark.extended
@pytest.mark.parametrize("name", list_benchmarks())
def test_the_seed_determines_the_bytes(name):
    def contents(seed):
        return [b"".join(f.blocks) for f in find_benchmark(name).recipe.files("small", seed)]

    first = contents(1)
    assert contents(1) == first
    assert not set(contents(2)) & set(first)


@pytest.mark.parametrize(
    ("name", "role", "num_rows", "num_columns", "num_bytes", "tolerance"),
    [
        ("nt3", "train", 1120, 60_484, 597 * MIB, 0.03),
        ("nt3", "test", 280, 60_484, 150 * MIB, 0.03),
        ("p1b1", "train", 3000, 60_485, 771 * MIB, 0.02),
        ("p1b1", "test", 1000, 60_485, 258 * MIB, 0.02),
        ("p1b2", "train", 3000, 28_206, 169_631_113, 0.005),
        ("p1b2", "test", 1000, 28_206, 56_690_533, 0.005),
    ],
)
def test_full_files_have_the_published_size(
    name, role, num_rows, num_columns, num_bytes, tolerance
):
    recipe = find_benchmark(name).recipe
    file = next(f for f in recipe.files("full", 2019) if f.name == recipe.roles[role])
    lines = b"".join(itertools.islice(file.blocks, 4)).splitlines(keepends=True)
    assert {line.count(b",") + 1 for line in lines} == {num_columns}
    header = b"" if name == "nt3" else lines.pop(0)
    estimate = len(header) + num_rows * np.mean([len(line) for line in lines])
    assert estimate == pytest.approx(num_bytes, rel=tolerance)
    assert file.num_bytes_estimate == pytest.approx(num_bytes, rel=max(tolerance, 0.01))


@pytest.mark.extended
@pytest.mark.parametrize(("name", "drawn"), [("p1b1", "Genes"), ("p1b2", "Genome")])
def test_full_tables_of_cases_have_the_published_rows(monkeypatch, name, drawn):
    recipe = find_benchmark(name).recipe
    drawn = getattr(sys.modules[type(recipe).__module__], drawn)
    monkeypatch.setattr(drawn, "tumor", lambda *_, seed: np.zeros(3, np.int64))
    files = {file.name: file for file in recipe.files("full", 1)}
    for role, num_rows in (("train", 3000), ("test", 1000)):
        blocks = files[recipe.roles[role]].blocks
        assert sum(block.count(b"\n") for block in blocks) == 1 + num_rows


@pytest.mark.parametrize(("name", "num_rows"), [("p1b1", (400, 200)), ("p1b2", (320, 160))])
def test_small_tables_of_cases_have_the_published_layout(small_data, name, num_rows):
    roles = find_benchmark(name).recipe.roles
    train, test = (pd.read_csv(small_data(name) / roles[role]) for role in ("train", "test"))
    assert (train.shape, test.shape) == tuple((num, 302) for num in num_rows)
    assert list(train.columns) == list(test.columns)
    assert list(train.columns[:2]) == ["case_id", "cancer_type"]
    assert train.columns[2:].is_unique
    cases = {*train["case_id"], *test["case_id"]}
    assert len(cases) == sum(num_rows)  # no patient is in both files


def test_a_manifest_with_an_impossible_name_is_not_whole(tmp_path):
    files = {"a\0b": {"bytes": 1, "sha256": ""}}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"made_of": MADE_OF, "files": files}))
    assert not Manifest.read(tmp_path).whole
