"""P1B3's choice of responses and its batches, against merged pandas frames."""

import re
import sys

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import FileSet, Reader
from candle_p1.data.table import TextColumn
from candle_p1.errors import DataError, ParameterError
from candle_p1.training.setup import locate_files

P1B3 = find_benchmark("p1b3")
SEED = 2017


@pytest.fixture(scope="module")
def directory(small_data):
    return small_data("p1b3")


@pytest.fixture
def prepared(directory):
    """Loads and preprocesses with flags; returns the data set."""

    def prepared(*flags):
        params = P1B3.read_parameters(["--data_dir", str(directory), *flags])
        reader = Reader(locate_files(P1B3, params))
        raw = P1B3.load_data(reader, params)
        reader.digest()
        return P1B3.preprocess(raw, params)

    return prepared


TABLES = {
    "expression": ("P1B3_cellline_expressions.tsv", "CellLine"),
    "mirna": ("P1B3_cellline_mirna.tsv", "CellLine"),
    "proteome": ("P1B3_cellline_proteome.tsv", "CellLine"),
    "descriptors": ("P1B3_drug_descriptors.tsv", "NAME"),
    "latent": ("P1B3_drug_latent.csv", "NSC"),
}


def read_features(path, key):
    separator = "\t" if path.suffix == ".tsv" else ","
    return pd.read_csv(path, sep=separator, na_values=["na", "-", ""], dtype={key: str})


def merge(frame, key, names):
    """Merges as pandas until 2.1: rows with the same key are adjacent."""
    frame = frame[frame[key].isin(names)]
    return frame.iloc[frame.groupby(key, sort=False).ngroup().argsort(kind="stable")]


def candles(directory, line_kinds, drug_kinds, num_columns=0, cell_split=0.15, scramble=False):
    """CANDLE's loader: the samples as a frame, how many are for training, and the inputs."""
    random = np.random.RandomState(SEED)
    frame = pd.read_csv(directory / "P1B3_dose_response.csv", dtype={"NSC": str})
    frame = frame[(frame["LOG_CONCENTRATION"] >= -5) & (frame["LOG_CONCENTRATION"] <= -4)]
    growth = frame["GROWTH"]
    frame = pd.concat(
        [
            frame[growth <= 0],
            frame[(growth > 0) & (growth < 50)].sample(frac=0.7, random_state=SEED),
            frame[(growth >= 50) & (growth <= 100)].sample(frac=0.18, random_state=SEED),
            frame[growth > 100].sample(frac=0.01, random_state=SEED),
        ]
    )
    inputs = []
    for kind in [*line_kinds, *drug_kinds]:
        key = "CELLNAME" if kind in line_kinds else "NSC"
        if kind == "categorical":
            values = pd.get_dummies(frame[key].drop_duplicates().str.replace(":", "."), dtype=float)
            values.index = frame[key].drop_duplicates()
            inputs.append((key, values))
            continue
        if kind == "noise":
            names = frame[key].drop_duplicates()
            inputs.append((key, pd.DataFrame(random.normal(size=(len(names), 500)), index=names)))
            continue
        name, column = TABLES[kind]
        values = read_features(directory / name, column).set_index(column)
        if kind == "proteome":
            kinome = read_features(directory / "P1B3_cellline_kinome.tsv", column)
            values = values.join(kinome.set_index(column).add_suffix(".K"), how="inner")
        if key == "CELLNAME":
            values.index = values.index.str.replace(".", ":")
        if 0 < num_columns < values.shape[1]:
            values = values.iloc[:, random.choice(values.shape[1], num_columns, replace=False)]
        values = values.dropna(axis=1, how="all")
        values = values.fillna(values.mean())
        values = (values - values.mean()) / values.std(ddof=0).replace(0, 1)
        inputs.append((key, values))
        frame = merge(frame, key, values.index)
    lines = pd.read_csv(directory / "P1B3_test_celllines.txt")["CELLNAME"]
    drugs = pd.read_csv(directory / "P1B3_test_drugs.txt", dtype=str)["NSC"]
    seen = frame[~frame["NSC"].isin(drugs) & ~frame["CELLNAME"].isin(lines)]
    if cell_split:
        lines = seen["CELLNAME"].drop_duplicates().sample(frac=cell_split, random_state=SEED)
    test = merge(merge(frame, "CELLNAME", lines), "NSC", drugs)
    seen, test = (part.sample(frac=1.0, random_state=SEED) for part in (seen, test))
    frame = pd.concat([seen, test]).reset_index(drop=True)
    if scramble:
        shuffled = random.permutation(np.arange(len(frame)))
        frame["GROWTH"] = frame["GROWTH"].to_numpy()[shuffled]
    return frame, len(seen) - int(len(seen) * 0.1), len(seen), inputs


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (
            "--cell_features proteome categorical --drug_features noise latent"
            " --feature_subsample 7 --scramble True --test_cell_split 0",
            {
                "line_kinds": ["proteome", "categorical"],
                "drug_kinds": ["noise", "latent"],
                "num_columns": 7,
                "cell_split": 0,
                "scramble": True,
            },
        ),
        pytest.param(
            "--cell_features all --drug_features all",
            {
                "line_kinds": ["expression", "mirna", "proteome"],
                "drug_kinds": ["descriptors", "latent"],
            },
            marks=pytest.mark.extended,
        ),
    ],
    ids=["drawn", "all"],
)
def test_samples_are_those_of_candles_merged_frames(prepared, directory, flags, options):
    data = prepared(*flags.split())
    frame, num_train, num_seen, inputs = candles(directory, **options)
    parts = (data.train, 0, num_train), (data.validation, num_train, num_seen)
    for samples, first, stop in (*parts, (data.test, num_seen, len(frame))):
        part = frame[first:stop]
        assert len(samples) == len(part)
        _, y = samples[:]
        np.testing.assert_allclose(y[:, 0], part["GROWTH"] / 100, rtol=1e-5, atol=1e-6)
        which = np.arange(0, len(part), max(1, len(part) // 50))
        x, _ = samples[which]
        part = part.iloc[which]
        expected = [part[["LOG_CONCENTRATION"]], *(v.loc[part[key]] for key, v in inputs)]
        expected = np.concatenate([each.to_numpy() for each in expected], axis=1)
        np.testing.assert_allclose(x, expected, rtol=1e-3, atol=2e-3)


def test_rows_are_merged_as_by_pandas_1_5():
    tables = sys.modules["p1b3_tables"]
    line, drug = (
        TextColumn(list(names), np.array([names.index(value) for value in values], np.int32))
        for names, values in (("abcd", "abcabcabd"), ("xyz", "xyzzyxyxx"))
    )
    rows = tables.merge(line, np.arange(9), ["c", "b", "a"])
    # The results of pandas 1.5.3.
    assert rows.tolist() == [0, 3, 6, 1, 4, 7, 2, 5]
    assert tables.merge(drug, rows, ["z", "x", "y"]).tolist() == [0, 7, 5, 3, 2, 6, 1, 4]


def test_scaling_fitted_to_training_samples_ignores_the_test_drugs(prepared):
    data = prepared("--scaling_fit", "train")
    used = np.unique(data.train.x.indices[1])
    np.testing.assert_allclose(data.train.x.tables[1][used].mean(axis=0), 0, atol=1e-4)
    assert np.abs(prepared().train.x.tables[1][used].mean(axis=0)).max() > 1e-3


def test_too_few_samples_for_training_are_refused(prepared):
    with pytest.raises(ParameterError, match=r"\b0 samples .*min_logconc"):
        prepared("--min_logconc", "-3", "--max_logconc", "-2")


FILES = {
    "expression": "CellLine\tg\th\n" + "".join(f"NCI60.L{i}\t{i}\t{i % 2}\n" for i in range(6)),
    "descriptors": "NAME\td\te\n" + "".join(f"{i}\t{i}\t{i % 3}\n" for i in range(10, 20)),
    "response": "NSC,CELLNAME,LOG_CONCENTRATION,GROWTH\n"
    + "".join(f"{drug},NCI60:L{i},-5,-{drug + i}\n" for drug in range(10, 20) for i in range(6)),
    "test_cells": "CELLNAME\nNCI60:L0\n",
    "test_drugs": "NSC\n10\n11\n",
}


@pytest.mark.parametrize(
    ("role", "old", "new", "message"),
    [
        ("response", "", "", r"^$"),
        (
            "response",
            ":L5",
            ":L5 ",
            "1 of 6 cell lines .*10 of 60 rows.*'NCI60:L5 ' and 'NCI60:L5'",
        ),
        ("expression", "NCI60.L5", "Nci60.L5", "'NCI60:L5' and 'Nci60:L5'"),
        ("expression", "NCI60.L5.*\n", "", r"cell lines .*\('NCI60:L5'\): the rows are left out"),
        ("descriptors", "\n19", "\n19.0", "1 of 10 drugs .*6 of 60 rows.*'19' and '19.0'"),
        ("descriptors", "1[4-9].*\n", "", r"6 of 10 drugs .*\('14', '15', '16'\)"),
        ("response", "10,NCI60.*\n", "", "1 of 2 drugs in test_drugs .*'10'"),
        ("descriptors", "\n1", "\n3", "refused: .*response: too few drugs match: 10 of 10"),
        ("expression", "NCI60.L[2-5].*\n", "", "refused: .*response: too few cell lines .*4 of 6"),
        ("test_drugs", "10", "99", "refused: .*test_drugs: 1 of 2 drugs .*'99'.* trained on"),
        ("test_drugs", "10", "10.0", "refused: .*test_drugs: .*'10.0' and '10'.* trained on"),
        ("test_cells", ":", ".", "refused: .*test_cells: .*'NCI60.L0' and 'NCI60:L0'"),
        ("response", "10,NCI60:L0", "10,NCI60:L0 ", "refused: .*'NCI60:L0' and 'NCI60:L0 '"),
        ("response", "LOG_CONC.*,", "GROWTH,", "refused: .*line 1: .*several columns 'GROWTH'"),
        ("expression", "NCI60.L5", "NCI60:L4", "refused: .*'NCI60:L4' has more than one row"),
    ],
)
def test_names_that_do_not_match_are_told_or_refused(tmp_path, role, old, new, message):
    paths = {each: tmp_path / each for each in FILES}
    for each, path in paths.items():
        path.write_text(re.sub(old, new, FILES[each]) if each == role else FILES[each])
    reader, params = Reader(FileSet.at(paths)), P1B3.read_parameters([])
    try:
        P1B3.preprocess(P1B3.load_data(reader, params), params)
        found = "\n".join(reader.warnings)
        assert [join.what for join in reader.joins] == ["cell lines"] * 2 + ["drugs"] * 2
    except DataError as error:
        found = f"refused: {error}"
    assert re.search(message, found), found


def test_missing_numbers_are_read_as_by_pandas_and_responses_without_growth_left_out(tmp_path):
    tables, choice = sys.modules["p1b3_tables"], sys.modules["p1b3_split"]
    features = tmp_path / "proteome.tsv"
    features.write_text("CellLine\ta\tb\nA\tNA\t1\nB\t3\t-\nC\t4\tNaN\n")
    responses = tmp_path / "response.csv"
    rows = ("1,A,-5,7", "1,A,-4.5,", "1,B,-4,NA", "2,B,,8", "2,C,-4,-9")
    responses.write_text("\n".join(["NSC,CELLNAME,LOG_CONCENTRATION,GROWTH", *rows]) + "\n")
    reader = Reader(FileSet.at({"proteome": features, "response": responses}))
    table = tables.Features.read(reader, "proteome")
    table.impute_and_scale("none", None)
    assert table.values.tolist() == [[3.5, 1], [3, 1], [4, 1]]
    read = choice.Responses.of(reader.read("response", tables.RESPONSE))
    assert choice.choose(read, P1B3.read_parameters(["--subsample", "none"])).tolist() == [0, 4]
