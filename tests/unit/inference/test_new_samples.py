"""How tables of new samples are understood: logarithms, names of genes, options, responses."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.names import place_features
from candle_p1.data.reader import FileSet, Reader
from candle_p1.datasets.foreign import SampleOptions
from candle_p1.errors import DataError
from candle_p1.inference.tables import read_samples
from tests.unit.inference.conftest import GENES, run_of

VALUES = np.array([[0, 1, 3], [7, 15, 31]], np.float32)
LOGARITHMS = np.log2(VALUES + 1)


def table(path, name):
    """Writes a table: NT3's own, P1B2's own, or any other, whose samples have names and a class."""
    own = name == "p1b2"
    columns = {"case_id" if own else "sample": ["S1", "S2"]}
    columns |= {"cancer_type" if own else "kind": ["a", "b"]}
    frame = pd.DataFrame(columns | dict(zip(GENES, VALUES.T, strict=True)))
    if name == "nt3":
        frame = pd.DataFrame([[0, *VALUES[0]], [1, *VALUES[1]]])
    frame.to_csv(path, index=False, header=name != "nt3")
    return path


@pytest.mark.parametrize(
    ("form", "log2", "options", "expected", "told"),
    [
        ("any", True, {}, LOGARITHMS, r"log2\(x \+ 1\) is taken.*--log2 False"),
        ("any", True, {"log2": True, "label": "kind"}, LOGARITHMS, r"log2\(x \+ 1\) is taken"),
        ("any", True, {"log2": False}, VALUES, r"taken as they are"),
        ("any", False, {}, VALUES, r"^$"),
        ("any", False, {"log2": True}, LOGARITHMS, r"^$"),
        ("nt3", True, {}, VALUES, r"taken as they are.*--log2 True"),
        ("nt3", True, {"log2": False}, VALUES, r"taken as they are"),
        ("nt3", True, {"log2": True}, None, r"not apply to files in the benchmark's own format"),
        (
            "nt3",
            False,
            {"label": "kind"},
            None,
            r"--label .*benchmark's own format.*omit them",
        ),
        ("p1b2", True, {}, VALUES, r"taken as they are.*--log2 True"),
        ("p1b2", True, {"log2": True}, LOGARITHMS, r"log2\(x \+ 1\) is taken"),
        ("p1b2", True, {"missing": "zero"}, None, r"--log2 False if so, otherwise --log2 True"),
        ("p1b2", True, {"missing": "zero", "log2": False}, VALUES, r"taken as they are"),
        ("p1b2", False, {"missing": "zero"}, VALUES, r"^$"),
    ],
)
def test_log2_is_taken_once_and_this_is_told(tmp_path, form, log2, options, expected, told):
    trained = run_of("nt3" if form == "any" else form, [*"ab"], log2)
    name = "new.csv.gz" if form == "p1b2" else "new.csv"
    path, options = table(tmp_path / name, form), SampleOptions(**options)
    if expected is None:
        with pytest.raises(DataError, match=told):
            read_samples(trained, path, options)
        return
    samples = read_samples(trained, path, options)
    (block,) = samples.blocks()
    np.testing.assert_allclose(np.reshape(block.x, (2, 3)), expected, rtol=1e-6)
    assert re.search(told, ", ".join(note for note in samples.notes if "log2" in note))


def test_gaps_are_filled_in_only_if_asked(tmp_path, monkeypatch):
    trained, path = run_of("p1b2", [*"ab"]), tmp_path / "new.csv"
    path.write_text("case_id,cancer_type,G0,G1,G2\nS1,a,0,,2\n")
    layouts = trained.benchmark.layouts
    monkeypatch.setitem(layouts, "test", replace(layouts["test"], missing=("",)))
    for options, expected in (({}, np.nan), ({"missing": "zero"}, 0)):
        (block,) = read_samples(trained, path, SampleOptions(**options)).blocks()
        np.testing.assert_array_equal(block.x, [[0, expected, 2]])


@pytest.mark.parametrize("row", ["1,2,3", "1,2,3,high"])
def test_a_wrong_row_of_the_benchmarks_own_file_is_named(tmp_path, row):
    (tmp_path / "new.csv").write_text(f"0,5,2,3\n{row}\n")
    with pytest.raises(DataError, match="line 2"):
        read_samples(run_of("nt3", [*"ab"]), tmp_path / "new.csv")


@pytest.mark.parametrize(
    ("found", "columns"),
    [
        (["ENSG00000182378.14_PAR_Y", "ENSG00000182378.14"], [1]),
        (["ENSG00000182378.14_PAR_Y", "X"], None),
    ],
)
def test_a_gene_in_another_place_is_not_taken_for_it(tmp_path, found, columns):
    if columns is None:
        with pytest.raises(DataError, match="ENSG00000182378"):
            place_features(["ENSG00000182378"], found, tmp_path)
    else:
        assert place_features(["ENSG00000182378"], found, tmp_path)[0] == columns


@pytest.fixture(scope="module")
def responses(small_data):
    """A run of P1B3 on all its tables, and some of its responses."""
    benchmark = find_benchmark("p1b3")
    directory = small_data("p1b3")
    params = benchmark.read_parameters([])
    paths = {
        role: directory / benchmark.recipe.roles[role] for role in benchmark.needed_files(params)
    }
    reader = Reader(FileSet.at(paths))
    inputs = benchmark.preprocess(benchmark.load_data(reader, params), params).preparation
    files = {role: SimpleNamespace(path=str(path), sha256=None) for role, path in paths.items()}
    record = SimpleNamespace(data=SimpleNamespace(files=files))
    trained = SimpleNamespace(benchmark=benchmark, params=params, inputs=inputs, record=record)
    rows = pd.read_csv(paths["response"], dtype={"NSC": str})
    known = pd.read_csv(paths["descriptors"], sep="\t", usecols=["NAME"], dtype=str)["NAME"]
    rows = rows[rows["LOG_CONCENTRATION"].between(-5, -4) & rows["NSC"].isin(known)]
    rows = rows.sample(40, random_state=1)
    return trained, rows.reset_index(drop=True)


def read_responses(trained, rows, path, **options):
    rows.to_csv(path, index=False)
    samples = read_samples(trained, path, SampleOptions(**options))
    return samples, list(samples.blocks())


def test_responses_are_read_as_by_the_import(responses, tmp_path):
    trained, rows = responses
    samples, (block,) = read_responses(trained, rows, tmp_path / "a.csv", group="CELLNAME")
    assert samples.notes == []
    assert block.groups == [*rows["CELLNAME"]]
    others = rows.assign(
        CELLNAME=rows["CELLNAME"].str.replace(":", "."),
        LOG_CONCENTRATION=rows["LOG_CONCENTRATION"].where(rows.index > 2, -7),
        GROWTH=rows["GROWTH"].where(rows.index > 0),
    )
    samples, (other,) = read_responses(trained, others, tmp_path / "b.csv")
    np.testing.assert_array_equal(other.x[:, 1:], block.x[:, 1:])
    (note,) = samples.notes
    assert re.search(r"3 of 40 concentrations .* -5 to -4", note)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"LOG_CONCENTRATION": 0.5}, {}, r"LOG_CONCENTRATION.* log10 of the molar.*convert"),
        ({"GROWTH": 0.5}, {}, r"GROWTH.* growth in percent.*convert"),
        ({}, {"label": "GROWTH"}, r"options .* --label .*omit them"),
        ({}, {"missing": "zero"}, r"options .* --missing.*omit them"),
        ({}, {"group": "patient"}, r"patient.*CELLNAME, NSC, LOG_CONCENTRATION"),
    ],
)
def test_responses_that_mean_something_else_are_refused(
    responses, tmp_path, changes, options, message
):
    trained, rows = responses
    with pytest.raises(DataError, match=message):
        read_responses(trained, rows.assign(**changes), tmp_path / "new.csv", **options)
