"""Tables as people make them become a benchmark's files; what is unclear ends in advice."""

import re
from functools import partial

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.directory import Importable, imported_facts
from candle_p1.data.loaders import read_table
from candle_p1.data.source import Loading
from candle_p1.data.table import CsvLayout
from candle_p1.datasets.importing import (
    Imported,
    ImportOptions,
    ImportTarget,
    Part,
    understand_responses,
    understand_samples,
    write_import,
)
from candle_p1.errors import DataError, ParameterError
from tests.conftest import ROOT
from tests.foreign_tables import (
    ACROSS,
    BESIDE,
    CLINICAL,
    DESCRIPTORS,
    DRUGS,
    FORMS,
    FRAME,
    GENES,
    IDS,
    IN_TABLE,
    KINDS,
    LABELLED,
    LINES,
    NUM,
    PATIENTS,
    RESPONSES,
    VALUES,
    VERSIONED,
    write_features,
)
from tests.transcripts import Transcripts


def target(benchmark):
    found = find_benchmark(benchmark)
    return ImportTarget(found.name, found.layouts, found.published.files, found.importable)


def ids(found, role="train"):
    return [*found.parts[role].values.index]


@pytest.fixture
def imported(tmp_path):
    """Writes a table and imports it for a benchmark; returns what was understood."""
    CLINICAL.to_csv(tmp_path / "clinical.tsv", sep="\t", index=False)

    def imported(write, name="table.csv", benchmark="nt3", test=None, **options):
        write(tmp_path / name)
        if options.get("labels"):
            options["labels"] = tmp_path / options["labels"]
        return understand_samples(
            target(benchmark), tmp_path / name, test, ImportOptions(**options)
        )

    return imported


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_table_is_understood_alike(imported, name):
    write, options = FORMS[name]
    found = imported(write, name, **options)
    parts = pd.concat([found.parts[role].values for role in ("train", "test")])
    order = [int(each.split("-")[1]) - (name in each) for each in parts.index]
    assert sorted(order) == [*range(NUM)]
    np.testing.assert_array_equal(parts, VALUES[order])
    classes = found.facts["classes"]
    labels = [label for part in found.parts.values() for label in part.text[""]]
    assert [classes[int(label)] for label in labels] == [KINDS[row] for row in order]
    assert [*parts.columns] == found.facts["features"] == GENES
    assert found.facts["counts"] == {kind: {"train": 24, "test": 6} for kind in KINDS}


@pytest.mark.parametrize("benchmark", ["nt3", "p1b1", "p1b2"])
def test_files_and_parameters_follow_the_table(imported, tmp_path, benchmark):
    three = LABELLED.assign(kind=["a", "b", "c,d"] * 20)
    found = imported(three.to_csv, benchmark=benchmark, label="kind")
    train, test = write_import(found, tmp_path / "own")
    model = find_benchmark(benchmark)
    params = model.read_parameters(["--data_dir", str(tmp_path / "own")])
    assert (params["train_data"], params["test_data"]) == (str(train), str(test))
    table = read_table(train, Loading(), model.layouts["train"])
    if benchmark == "nt3":
        assert params["classes"] == 3
        labels, values = table.values[:, 0], table.values[:, 1:]
        assert [int(label) for label in found.parts["train"].text[""]] == [*labels]
        with pytest.raises(ParameterError, match=r"classes = 2 .* says 3"):
            model.read_parameters(["--data_dir", str(tmp_path / "own"), "--classes", "2"])
    else:
        values = table.values
        assert table.columns == GENES
        for name in ("case_id", "cancer_type"):
            assert table.text[name].values() == [*found.parts["train"].text[name]]
    np.testing.assert_array_equal(values, found.parts["train"].values)
    facts = imported_facts(tmp_path / "own")
    assert (facts["features"], facts["samples"]["test"]) == (GENES, ids(found, "test"))
    with pytest.raises(DataError, match="would be replaced"):
        write_import(found, tmp_path / "own")


def test_cells_with_line_breaks_are_read_in_tables_and_beside_them(imported, tmp_path):
    comments = [f'two{end}lines, "quoted"' for end in ("\n", "\r\n")] * (NUM // 2)
    comments[0] += "x" * 2**18
    kinds = [kind.replace(", ", ",\n") for kind in KINDS]
    clinical = CLINICAL.assign(comment=comments, kind=kinds).rename(columns={"kind": "the\nkind"})
    clinical.to_csv(tmp_path / "clinical.tsv", sep="\t", index=False)
    beside = imported(FRAME.to_csv, **BESIDE | {"label": "the kind"})
    table = LABELLED.assign(kind=kinds, comment=comments, **{"A\nB": 1.5})
    within = imported(table.to_csv, **IN_TABLE)
    assert within.facts["features"] == [*GENES, "A B"]
    for found in (beside, within):
        assert found.facts["counts"] == {kind: {"train": 24, "test": 6} for kind in KINDS}
    table = table.astype({GENES[0] + ".1": object})
    table.iloc[-1, 0] = "high"
    with pytest.raises(DataError, match=rf"line {2 * NUM + NUM // 2 + 1}, column 2: .*'high'"):
        imported(table.to_csv, **IN_TABLE)


def test_a_group_is_on_one_side_and_the_split_follows_the_seed(imported):
    options = BESIDE | {"group": "patient"}
    found, again, other = (imported(FRAME.to_csv, **options, seed=seed) for seed in (1, 1, 2))
    of_sides = [{PATIENTS[IDS.index(each)] for each in ids(found, role)} for role in found.parts]
    assert of_sides[0].isdisjoint(of_sides[1])
    assert len(ids(found, "test")) == pytest.approx(NUM / 5, abs=3)
    assert ids(found, "test") == ids(again, "test") != ids(other, "test")


@pytest.mark.parametrize("has_names", [True, False])
def test_test_tables_are_put_into_the_order_of_the_training_table(imported, tmp_path, has_names):
    later = LABELLED.set_axis([f"new{i}" for i in range(NUM)])
    later = later.iloc[:, ::-1].assign(extra=1.0) if has_names else LABELLED
    later.to_csv(tmp_path / "later.csv", index=has_names)
    write = partial(LABELLED.to_csv, index=has_names)
    found = imported(write, test=tmp_path / "later.csv", label="kind", log2=not has_names)
    for part in found.parts.values():
        expected = VALUES if has_names else np.log2(VALUES + 1)
        np.testing.assert_allclose(part.values, expected, rtol=1e-6)


DOUBLED = FRAME.set_axis(["A", "A", *GENES[2:]], axis=1)
GAPS = FRAME.mask(np.eye(NUM, len(GENES), dtype=bool))
BLANKS = FRAME.astype(str)
BLANKS.iloc[-3:, 0] = [" NA", "NA ", " "]


def filled_in(rows):
    """Returns what fills gaps: the mean over the training samples."""
    gaps = GAPS.to_numpy()[rows]
    return np.where(np.isnan(gaps), np.nanmean(gaps, axis=0), gaps)


@pytest.mark.parametrize(
    ("write", "options", "expected", "note"),
    [
        (DOUBLED.to_csv, {"duplicates": "first"}, np.delete(VALUES, 1, 1), None),
        (
            DOUBLED.to_csv,
            {"duplicates": "mean"},
            np.c_[VALUES[:, :2].mean(axis=1), VALUES[:, 2:]],
            None,
        ),
        (FRAME.to_csv, {"log2": True}, np.log2(VALUES + 1), None),
        (FRAME.to_parquet, {"log2": True}, np.log2(VALUES + 1), None),
        (FRAME.to_csv, {"drop": [VERSIONED[0]]}, VALUES[:, 1:], None),
        (GAPS.to_csv, {"missing": "zero"}, GAPS.fillna(0).to_numpy(), "20 .* are taken as 0"),
        (GAPS.to_csv, {"missing": "mean"}, filled_in, "20 .* are filled in by mean"),
        (BLANKS.to_csv, {"missing": "zero"}, None, "3 .* are taken as 0"),
        (partial(BLANKS.to_csv, sep="\t"), {"missing": "zero"}, None, "3 .* are taken as 0"),
    ],
)
def test_values_are_changed_as_asked_and_gaps_are_told_once(
    imported, write, options, expected, note
):
    name = "table.parquet" if write == FRAME.to_parquet else "table.csv"
    found = imported(write, name, benchmark="p1b1", **options)
    rows = [IDS.index(each) for each in ids(found)]
    told = [each for each in found.notes if "missing" in each]
    assert len(told) == (note is not None)
    assert note is None or re.fullmatch(note, told[0])
    if expected is not None:
        expected = expected(rows) if callable(expected) else expected[rows]
        np.testing.assert_allclose(found.parts["train"].values, expected, rtol=1e-6)


RANDOM = np.random.default_rng(1)


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize(
    "values",
    [
        RANDOM.normal(8, 1, (40, 7)).round(2),
        RANDOM.normal(size=(33, 3)).round(6) * 1000,
        RANDOM.lognormal(0, 5, (40, 7)),
        [[0, 1e9, 1e-9, -2.25]] * 17,
        [[5e9, 3e38]],
        np.where(RANDOM.random((20, 4)) < 0.2, np.nan, 1.25),
    ],
)
def test_what_is_written_is_what_was_understood_bit_for_bit(tmp_path, values, separator):
    frame = pd.DataFrame(np.array(values, np.float32)).rename(columns=str)
    names = [f"a{separator}b{i}" for i in range(len(frame))]
    layout = CsvLayout(header=True, text_columns=("id",), separator=separator, missing=("nan",))
    written = Imported(
        ImportTarget("none", {"train": layout}, {"train": "a.csv"}, Importable()),
        *({"train": Part({"id": names}, frame)}, {}, [], ImportOptions(), []),
    )
    (path,) = write_import(written, tmp_path)
    table = read_table(path, Loading(), layout)
    np.testing.assert_array_equal(table.values, frame)
    assert table.text["id"].values() == names


def test_a_column_that_tells_the_class_is_no_feature(imported):
    coded = LABELLED.assign(code=[1, 2] * (NUM // 2))
    with pytest.raises(DataError, match=r"'code' reveals the class"):
        imported(coded.to_csv, label="kind")
    few = coded.iloc[[*range(0, NUM, 2), 1, 3]]  # of which one class has too few to tell
    assert "code" in imported(few.to_csv, label="kind", test_fraction=0.5).facts["features"]


def test_patients_and_classes_are_on_the_sides_where_they_belong(imported, tmp_path):
    owned = LABELLED.assign(patient=PATIENTS)
    owned.set_axis([f"new{i}" for i in range(NUM)]).to_csv(tmp_path / "later.csv")
    with pytest.raises(DataError, match=r"'P0'.* are in .*test on others"):
        imported(owned.to_csv, test=tmp_path / "later.csv", label="kind", group="patient")
    rare = LABELLED.assign(kind=["rare"] * 2 + ["common"] * (NUM - 2))
    with pytest.raises(DataError, match=r"'rare' would not be on both sides: pass another --seed"):
        imported(rare.to_csv, label="kind")


def test_two_columns_that_name_the_samples_differently_are_not_chosen_between(imported, tmp_path):
    mixed = CLINICAL.assign(other=IDS[::-1])
    mixed.to_csv(tmp_path / "mixed.tsv", sep="\t", index=False)
    options = {"label": "kind", "labels": "mixed.tsv"}
    with pytest.raises(DataError, match=r"'sample', 'other' name .* pass --labels_id"):
        imported(FRAME.to_csv, **options)
    assert imported(FRAME.to_csv, **options, labels_id="sample").parts


LATE = "id,kind,a,b\n" + "".join(f"s{i},{i % 2},1,2\n" for i in range(300))


@pytest.fixture
def joined(tmp_path):
    """Writes responses and tables of features, and imports them for P1B3."""

    def joined(responses=RESPONSES, lines=LINES, drugs=DESCRIPTORS, columns=None, **options):
        responses.to_csv(tmp_path / "responses.csv", index=False)
        features = write_features(tmp_path, lines, drugs)
        return understand_responses(
            target("p1b3"),
            tmp_path / "responses.csv",
            features,
            columns or {},
            ImportOptions(**{"missing": None} | options),
        )

    return joined


@pytest.mark.parametrize("lines", [LINES, LINES.T, LINES.rename_axis("name").reset_index()])
def test_responses_are_joined_with_features_whichever_way_these_lie(joined, tmp_path, lines):
    own = RESPONSES.rename(columns={"GROWTH": "viability"})
    found = joined(
        own, lines if lines is not None else LINES, columns={"GROWTH": "viability"}, log2=True
    )
    paths = write_import(found, tmp_path / "own")
    layouts = find_benchmark("p1b3").layouts
    tables = {
        role: read_table(path, Loading(), layouts[role])
        for role, path in zip(found.parts, paths, strict=True)
    }
    response = tables["response"]
    np.testing.assert_array_equal(response.values, RESPONSES[["LOG_CONCENTRATION", "GROWTH"]])
    assert response.text["NSC"].values() == [*RESPONSES["NSC"]]
    assert response.text["CELLNAME"].values() == [*RESPONSES["CELLNAME"].str.replace(".", ":")]
    expression, descriptors = tables["expression"], tables["descriptors"]
    assert (expression.columns, descriptors.columns) == (GENES, list("abcde"))
    np.testing.assert_allclose(expression.values, np.log2(VALUES[:8] + 1), rtol=1e-6)
    np.testing.assert_array_equal(descriptors.values, DESCRIPTORS.astype(np.float32))
    assert descriptors.text["NAME"].values() == DRUGS
    assert {*tables["test_drugs"].text["NSC"].names} < {*DRUGS}
    assert (len(tables["test_drugs"]), len(tables["test_cells"])) == (2, 2)
    assert found.flags() == ["--cell_features", "expression", "--drug_features", "descriptors"]
    params = ["--data_dir", str(tmp_path / "own"), *found.flags()]
    assert find_benchmark("p1b3").read_parameters(params)["response_data"] == str(paths[0])


@pytest.mark.parametrize(("missing", "expected"), [(None, np.nan), ("zero", 0), ("mean", 1.5)])
def test_missing_features_are_left_to_the_benchmark_or_filled_in(
    joined, tmp_path, missing, expected
):
    gap = DESCRIPTORS.assign(a=[np.nan, *[1.0, 2.0] * 4, 1.5])
    found = joined(drugs=gap, missing=missing)
    path = write_import(found, tmp_path / "own")[[*found.parts].index("descriptors")]
    table = read_table(path, Loading(), find_benchmark("p1b3").layouts["descriptors"])
    np.testing.assert_array_equal(table.values[:2, 0], [expected, 1])


def test_names_without_features_or_responses_are_told_and_not_reserved(joined):
    lacking = DESCRIPTORS.iloc[2:].rename(index={"709": "800"})
    found = joined(drugs=lacking, seed=1)
    (note,) = [each for each in found.notes if "names in NSC" in each and "features" in each]
    assert note.endswith(
        "5 features of 7 of the 10 names in NSC; none of '700', '701', '709', in 48 responses; 1"
        " other rows have no responses ('800')"
    )
    assert {*found.parts["test_drugs"].text["NSC"]} < {*DRUGS[2:9]}


REFUSED = Transcripts(ROOT / "tests/files/imports")
TABLES = {"labelled": LABELLED, "frame": FRAME, "across": ACROSS, "gaps": GAPS}
TABLES["owned"] = LABELLED.assign(patient=PATIENTS)


@pytest.mark.parametrize("name", REFUSED.cases)
def test_what_cannot_be_imported_ends_in_advice(tmp_path, monkeypatch, name):
    for each, table in TABLES.items():
        table.to_csv(tmp_path / f"{each}.csv")
    CLINICAL.to_csv(tmp_path / "clinical.tsv", sep="\t", index=False)
    (tmp_path / "late.csv").write_text(LATE)
    RESPONSES.to_csv(tmp_path / "responses.csv", index=False)
    write_features(tmp_path)
    REFUSED.check(name, tmp_path, monkeypatch)
