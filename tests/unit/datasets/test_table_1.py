"""The paper's Table 1 against data of full size, made and loaded."""

from __future__ import annotations

import itertools
import shutil
import sys
from dataclasses import replace

import pytest

from candle_p1.bench.published import table_1
from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import Reader
from candle_p1.datasets.synthetic import make
from candle_p1.training.setup import locate_files

MIB = 2**20
SAMPLES_TOLERANCE = {"p1b3": 0.005}
"""Responses are selected at random."""
SAME_ELEMENTS = {"nt3", "p1b2"}


def with_repeated_rows(file, num_rows):
    """Returns a file of cases in which the rows of the first block are repeated."""
    blocks = iter(file.blocks)
    header, *rows = b"".join(itertools.islice(blocks, 2)).splitlines(keepends=True)
    repeated = itertools.islice(itertools.cycle(rows), num_rows)
    return replace(file, blocks=itertools.chain([header], repeated))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["nt3", "p1b1", "p1b2", "p1b3"])
def test_table_1_is_what_full_data_give(name, tmp_path, monkeypatch):
    benchmark = find_benchmark(name)
    recipe = benchmark.recipe
    if name == "p1b1":  # drawing all of its rows takes half a minute
        nums = sys.modules[type(recipe).__module__].SIZES["full"].num_patients
        num_rows = {recipe.roles[role]: num for role, num in nums.items()}
        files = [
            with_repeated_rows(file, num_rows[file.name]) if file.name in num_rows else file
            for file in recipe.files("full", 2019)
        ]
        monkeypatch.setattr(type(recipe), "files", lambda *_: files)
    make(recipe, "full", tmp_path, 2019)
    sizes = {path.name: path.stat().st_size / MIB for path in tmp_path.iterdir()}
    testing_mb = sizes.pop(recipe.roles[benchmark.paper.testing_role])
    params = benchmark.read_parameters(["--data_dir", str(tmp_path)])
    reader = Reader(locate_files(benchmark, params))
    data = benchmark.preprocess(benchmark.load_data(reader, params), params)
    shutil.rmtree(tmp_path)
    loaded = {
        "training_mb": sum(sizes.values()),
        "testing_mb": testing_mb,
        "epochs": params["epochs"],
        "batch_size": params["batch_size"],
        "learning_rate": params["learning_rate"] or "none",
        "optimizer": params["optimizer"],
        "samples": len(data.train),
        "elements": data.train.x_shape[0],
    }
    rows = {row.name: row for row in table_1(benchmark)}
    assert loaded.keys() == rows.keys()
    for key, value in loaded.items():
        tolerance = 0.02 if key.endswith("_mb") else 0
        if key == "samples":
            tolerance = SAMPLES_TOLERANCE.get(name, 0)
        expected = value if isinstance(value, str) else pytest.approx(value, rel=tolerance, abs=0)
        assert rows[key].here == expected, key
        if key != "elements" or name in SAME_ELEMENTS:
            assert rows[key].published == expected, key
