"""Tables as people make them become a benchmark's files; what is unclear ends in advice."""

import gzip
import lzma
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


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_a_byte_order_mark_is_no_part_of_the_first_name(imported, suffix, pack):
    table = LABELLED.to_csv(index_label="sample").encode("utf-8-sig")
    options = IN_TABLE | {"id_column": "sample"}
    found = imported(lambda path: path.write_bytes(pack(table)), f"a.csv{suffix}", **options)
    assert {*ids(found), *ids(found, "test")} == {*IDS}


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


def test_missing_cells_may_have_blanks_around_them(imported):
    gaps = FRAME.astype(str)
    gaps.iloc[-3:, 0] = [" NA", "NA ", " "]
    for sep in (",", "\t"):
        found = imported(partial(gaps.to_csv, sep=sep), benchmark="p1b1", missing="zero")
        assert "3 missing values are taken as 0" in found.notes


def test_a_group_is_on_one_side_and_the_split_follows_the_seed(imported):
    options = BESIDE | {"group": "patient"}
    found, again, other = (imported(FRAME.to_csv, **options, seed=seed) for seed in (1, 1, 2))
    of_sides = [{PATIENTS[IDS.index(each)] for each in ids(found, role)} for role in found.parts]
    assert of_sides[0].isdisjoint(of_sides[1])
    assert len(ids(found, "test")) == pytest.approx(NUM / 5, abs=3)
    assert ids(found, "test") == ids(again, "test") != ids(other, "test")


def test_test_tables_are_put_into_the_order_of_the_training_table(imported, tmp_path):
    later = LABELLED.set_axis([f"new{i}" for i in range(NUM)]).iloc[:, ::-1].assign(extra=1.0)
    later.to_csv(tmp_path / "later.csv")
    found = imported(LABELLED.to_csv, test=tmp_path / "later.csv", label="kind")
    for part in found.parts.values():
        np.testing.assert_array_equal(part.values, VALUES)


DOUBLED = FRAME.set_axis(["A", "A", *GENES[2:]], axis=1)
GAPS = FRAME.mask(np.eye(NUM, len(GENES), dtype=bool))


@pytest.mark.parametrize(
    ("frame", "options", "expected"),
    [
        (DOUBLED, {"duplicates": "first"}, np.delete(VALUES, 1, 1)),
        (DOUBLED, {"duplicates": "mean"}, np.c_[VALUES[:, :2].mean(axis=1), VALUES[:, 2:]]),
        (FRAME, {"log2": True}, np.log2(VALUES + 1)),
        (FRAME.to_parquet, {"log2": True}, np.log2(VALUES + 1)),
        (FRAME, {"drop": [VERSIONED[0]]}, VALUES[:, 1:]),
    ],
    ids=["first", "mean", "log2", "log2 of Parquet", "drop"],
)
def test_values_are_changed_as_asked(imported, frame, options, expected):
    is_table = isinstance(frame, pd.DataFrame)
    write, name = (frame.to_csv, "table.csv") if is_table else (frame, "table.parquet")
    found = imported(write, name, benchmark="p1b1", **options)
    order = [IDS.index(each) for each in ids(found)]
    np.testing.assert_allclose(found.parts["train"].values, expected[order], rtol=1e-6)


@pytest.mark.parametrize(
    ("missing", "note"), [("zero", "are taken as 0"), ("mean", "are filled in by mean")]
)
def test_gaps_are_filled_in_by_the_training_samples_and_this_is_told_once(imported, missing, note):
    found = imported(GAPS.to_csv, benchmark="p1b1", missing=missing)
    assert [each for each in found.notes if "missing" in each] == [f"20 missing values {note}"]
    gaps = GAPS.to_numpy()[[IDS.index(each) for each in ids(found)]]
    filled = np.nanmean(gaps, axis=0) if missing == "mean" else 0
    expected = np.where(np.isnan(gaps), filled, gaps)
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


def cell(row, column, value):
    frame = LABELLED.astype(object)
    frame.iloc[row, column] = value
    return frame


@pytest.mark.parametrize(
    ("frame", "options", "advice"),
    [
        (LABELLED, {}, r"--label COLUMN"),
        (LABELLED, {"label": "type"}, r"no column 'type'; .* 'kind'"),
        (ACROSS, BESIDE, r"ENSG.*--transpose True"),
        (ACROSS, {"label": "kind", "transpose": True}, r"--labels FILE"),
        (FRAME.iloc[:, :2].set_axis(["x", "x"], axis=1), BESIDE, r"'x': pass --duplicates mean"),
        (
            GAPS,
            BESIDE,
            r"20 values are missing \(--missing fills.*'ENSG00000000000' of .* 'TCGA-00'",
        ),
        (LABELLED.set_axis([IDS[0], *IDS[:-1]]), IN_TABLE, r"called 'TCGA-00'"),
        (cell(3, 20, None), IN_TABLE, r"1 of 60 samples have no label, such as 'TCGA-03'"),
        (
            LABELLED.assign(patient=[*PATIENTS[:-2], "", "NA"]),
            IN_TABLE | {"group": "patient"},
            r"2 samples have no 'patient': fill it in, or leave them out",
        ),
        (-FRAME, BESIDE | {"log2": True}, r"negative"),
        (LABELLED.assign(kind=["one", *["two"] * 59]), IN_TABLE, r"only one sample of the class"),
        (LABELLED.assign(kind="one"), IN_TABLE, r"all samples have the class 'one'"),
        (LABELLED[["kind"]], IN_TABLE, r"no columns of numbers"),
        (FRAME.set_axis([f"X{i}" for i in range(NUM)]), BESIDE, r"no column has the names"),
        (LABELLED, IN_TABLE | {"drop": ["nothing"]}, r"'nothing' to drop"),
    ],
)
def test_what_is_unclear_ends_in_advice(imported, frame, options, advice):
    with pytest.raises((DataError, ParameterError), match=advice):
        imported(frame.to_csv, **options)


@pytest.mark.parametrize(
    ("text", "options", "advice"),
    [
        ('s\tk\ta\ns1\t"x\t1\ns2\ty\t2\ns3\t"z\t3\n', {}, r"line 2: its quotes do not match"),
        ('s,k,a,b\n"s1, too",x,1\n', {}, r"line 2: the line has 3 fields instead of 4"),
        ("s\tk\ta\ns1\tx\t1,234\ns2\ty\t12\n", {}, r"'1,234' may have .* --decimal ,"),
        ("s\tk\ta\ns1\tx\t1\ns2\ty\t<0.01\n", {}, r"line 3, column 3: '<0.01' .*--drop a"),
        ("s,k,a\ns1,x,\ns2,y,1\n", {}, r"2 rows seem to name .* --header_rows 2"),
        ("1,2\n3,4\n", {}, r"add a row of names"),
        ("#s,k,a\ns1,x,1\ns2,y,2\n", {}, r"line 1: this line begins with #"),
        ("s,k,a\ns1,x,1\ns1,y,2\n", {}, r"several samples are called 's1': pass --id"),
        ("s,k,a,k\ns1,x,1,y\n", {}, r"several columns of text are called 'k'"),
        ("s,k,a,\ns1,x,1,2\n", {}, r"line 1, column 4: the column has no name"),
        ("patient,k,a\n1,x,1\n2,y,2\n", {}, r"'patient' would be features"),
        ("#1.3\n1\t1\t1\t1\nid\ta\n", {}, r"GCT 1.3: convert"),
        ("Hugo_Symbol\tEntrez_Gene_Id\tS0\nA\t1\t2\n", {"transpose": True}, r"'Entrez_Gene_Id'"),
        (
            "s,p,a\n" + "".join(f"s{i},p,{i}\n" for i in range(9)),
            {"group": "p"},
            r"only one 'p' of",
        ),
        ("g,s0\nA,1\n", {"transpose": True, "group": "p"}, r"pass --labels FILE"),
    ],
)
def test_what_would_be_guessed_wrong_is_refused(imported, text, options, advice):
    with pytest.raises((DataError, ParameterError), match=advice):
        imported(lambda path: path.write_text(text), benchmark="p1b1", **options)


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


def test_tables_without_names_of_samples_have_a_test_table(imported, tmp_path):
    LABELLED.to_csv(tmp_path / "later.csv", index=False)
    write = partial(LABELLED.to_csv, index=False)
    found = imported(write, test=tmp_path / "later.csv", label="kind", log2=True)
    assert [len(part.values) for part in found.parts.values()] == [NUM, NUM]


LATE = "id,kind,a,b\n" + "".join(f"s{i},{i % 2},1,2\n" for i in range(300))

DECIMAL_COMMAS = LATE.replace(",", ";").replace(";1;2\n", ";1,5;.\n")


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        *(
            (f"{LATE}s300,1,{cell},2\n", rf"line 302, column 3: .*'{cell}' is not .*--drop a")
            for cell in ("high", "1_0", "<1", "inf")
        ),
        (LATE + "s300,1,1\n", r"line 302: the line has 3 fields instead of 4"),
        (LATE + 's300,"1,1,2\n', r"line 302, column 2: .*its quotes do not match"),
        (LATE.replace("\n", "\r"), r"carriage returns alone"),
        (b"\xff\xfea\0b\0", r"UTF-8"),
        (gzip.compress(LATE.encode())[:-20], r"copied incompletely"),
        (DECIMAL_COMMAS + "s300;1;1.234;2\n", r"line 302, column 3: .*'1.234' is .* decimal comma"),
        ("", r"no rows"),
        ("one\ntwo\n", r"separated by none"),
        ("a,b\n", r"no rows below"),
        ("a,b\n1,2,\n", r"end with a separator"),
        (b"id,kind,a\ns1,1,2\n", r"not compressed by gzip, but its name"),
        (LATE.replace(",1,1,", ',"1\n1",1,') + "s300,1,high,2\n", r"line 452, column 3: .*'high'"),
        (LATE + "s300,1\r2,1,2\n", r"line 302, column 2: .* carriage return"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, content, advice):
    is_packed = isinstance(content, bytes) and "UTF" not in advice
    path = tmp_path / ("broken.csv" + ".gz" * is_packed)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=advice) as caught:
        understand_samples(target("nt3"), path, None, ImportOptions(label="kind", id_column="id"))
    assert str(path) in str(caught.value)


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


@pytest.mark.parametrize(
    ("changed", "options", "advice"),
    [
        ({"GROWTH": RESPONSES["GROWTH"] / 100}, {}, r"GROWTH.* growth in percent .*convert"),
        ({"LOG_CONCENTRATION": 0.5}, {}, r"log10 of the molar"),
        (
            {"GROWTH": RESPONSES["GROWTH"].mask(RESPONSES.index == 3)},
            {},
            r"1 of 160 .* row 4 .*--unlabelled drop",
        ),
        ({"GROWTH": "high"}, {}, r"no column 'GROWTH' of numbers.*--column GROWTH=COLUMN"),
        ({}, {"columns": {"GROWTH": "viability"}}, r"no column 'viability'"),
        ({}, {"columns": {"growth": "GROWTH"}}, r"--column growth: choose from NSC"),
        ({"NSC": RESPONSES["NSC"] + "x"}, {}, r"no column has the names .* '700x'"),
        ({}, {"drop": ["a", "nothing"]}, r"no table of features has 'nothing' to drop"),
        ({}, {"drugs": DESCRIPTORS.iloc[:1]}, r"fewer than 2 names in NSC"),
        ({}, {"drugs": DESCRIPTORS.iloc[[0, 1, 1]]}, r"several samples are called '701'"),
    ],
)
def test_responses_that_would_be_taken_wrong_are_refused(joined, changed, options, advice):
    with pytest.raises((DataError, ParameterError), match=advice):
        joined(RESPONSES.assign(**changed), **options)
