"""P1B3's choice of responses and its batches, against merged pandas frames."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import FileSet, Reader
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


def table(directory, name, key):
    separator = "\t" if name.endswith(".tsv") else ","
    frame = pd.read_csv(
        directory / name, sep=separator, na_values=["na", "-", ""], dtype={key: str}
    )
    if key == "CellLine":
        frame[key] = frame[key].str.replace(".", ":")
    numbers = frame.drop(columns=key).dropna(axis=1, how="all")
    numbers = numbers.fillna(numbers.mean())
    spread = numbers.std(ddof=0).replace(0, 1)
    numbers = (numbers - numbers.mean()) / spread
    return pd.concat([frame[key].rename("key"), numbers], axis=1)


def merged(directory, tables):
    """Train and validation, then test samples, as CANDLE's loader joins and divides them."""
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
    for key, features in tables:
        frame = frame.merge(features[["key"]], left_on=key, right_on="key").drop(columns="key")
    cells = pd.read_csv(directory / "P1B3_test_celllines.txt")["CELLNAME"]
    drugs = pd.read_csv(directory / "P1B3_test_drugs.txt", dtype=str)["NSC"]
    of_drug = frame["NSC"].isin(drugs)
    seen = frame[~of_drug & ~frame["CELLNAME"].isin(cells)]
    drawn = seen[["CELLNAME"]].drop_duplicates().sample(frac=0.15, random_state=SEED)
    test = frame[of_drug & frame["CELLNAME"].isin(drawn["CELLNAME"])]
    return (part.sample(frac=1.0, random_state=SEED) for part in (seen, test))


def inputs(frame, tables):
    parts = [frame[["LOG_CONCENTRATION"]].to_numpy()]
    for key, features in tables:
        part = frame[[key]].merge(features, left_on=key, right_on="key", how="left")
        parts.append(part.drop(columns=[key, "key"]).to_numpy())
    return np.concatenate(parts, axis=1)


@pytest.mark.extended
def test_samples_equal_those_of_candles_merged_frames(prepared, directory):
    data = prepared()
    tables = [
        ("CELLNAME", table(directory, "P1B3_cellline_expressions.tsv", "CellLine")),
        ("NSC", table(directory, "P1B3_drug_descriptors.tsv", "NAME")),
    ]
    seen, test = merged(directory, tables)
    num_validation = int(0.1 * len(seen))
    parts = [
        (data.train, seen[:-num_validation]),
        (data.validation, seen[-num_validation:]),
        (data.test, test),
    ]
    for samples, frame in parts:
        assert len(samples) == len(frame)
        _, y = samples[:]
        np.testing.assert_allclose(y[:, 0], frame["GROWTH"] / 100, rtol=1e-5, atol=1e-6)
        which = np.array([0, len(samples) // 2, len(samples) - 1])
        x, _ = samples[which]
        np.testing.assert_allclose(x, inputs(frame.iloc[which], tables), rtol=1e-3, atol=2e-3)


def test_test_drugs_are_not_used_for_training(prepared):
    data = prepared()
    seen = {*data.train.x.drug, *data.validation.x.drug}
    assert not seen & set(data.test.x.drug)
    assert set(data.test.x.line) <= set(data.train.x.line)


def test_without_a_fraction_the_reserved_lines_are_used_for_testing(prepared):
    data = prepared("--test_cell_split", "0")
    assert not set(data.test.x.line) & {*data.train.x.line, *data.validation.x.line}


def test_features_of_all_kinds_are_joined(prepared, directory):
    data = prepared("--cell_features", "all", "--drug_features", "all")
    expected = 1
    for name in P1B3.recipe.roles.values():
        if name.endswith(".tsv") or "latent" in name:
            header = (directory / name).read_text().split("\n", 1)[0]
            expected += len(header.replace("\t", ",").split(",")) - 1
    assert data.train.x_shape == (expected,)
    assert np.isfinite(data.train[:5][0]).all()


def test_categorical_lines_and_noise_for_drugs(prepared):
    data = prepared("--cell_features", "categorical", "--drug_features", "noise")
    x, _ = data.train[:200]
    num_lines = data.num_line_features
    assert x.shape[1] == 1 + num_lines + 500
    np.testing.assert_array_equal(x[:, 1 : 1 + num_lines].sum(axis=1), 1)
    same_drug = data.train.x.drug[:200] == data.train.x.drug[0]
    assert np.unique(x[same_drug][:, 1 + num_lines :], axis=0).shape[0] == 1


def test_features_are_subsampled_as_in_candle(prepared, directory):
    x, _ = prepared("--feature_subsample", "7").train[:1]
    assert x.shape == (1, 15)
    random = np.random.RandomState(SEED)
    full, _ = prepared().train[:1]
    num_genes = table(directory, "P1B3_cellline_expressions.tsv", "CellLine").shape[1] - 1
    genes = random.choice(num_genes, size=7, replace=False)
    np.testing.assert_allclose(x[0, 1:8], full[0, 1:][genes], rtol=1e-5, atol=1e-5)


def test_scrambled_growth_belongs_to_other_samples(prepared):
    plain, scrambled = prepared(), prepared("--scramble", "True")
    parts = [
        np.concatenate([data.train.y[:], data.validation.y[:], data.test.y[:]])[:, 0]
        for data in (plain, scrambled)
    ]
    assert not np.array_equal(*parts)
    np.testing.assert_array_equal(*(np.sort(part) for part in parts))


def test_scaling_fitted_to_training_samples_ignores_the_test_drugs(prepared):
    data = prepared("--scaling_fit", "train")
    used = np.unique(data.train.x.drug)
    drugs = data.train.x.drugs[used]
    np.testing.assert_allclose(drugs.mean(axis=0), 0, atol=1e-4)
    assert np.abs(prepared().train.x.drugs[used].mean(axis=0)).max() > 1e-3


def test_too_few_samples_for_training_are_refused(prepared):
    with pytest.raises(ParameterError, match=r"\b0 samples .*min_logconc"):
        prepared("--min_logconc", "-3", "--max_logconc", "-2")


def test_a_repeated_name_in_a_table_is_refused(tmp_path):
    module = sys.modules["p1b3_tables"]
    path = tmp_path / "mirna.tsv"
    path.write_text("CellLine\ta\nNCI60.A\t1\nNCI60.A\t2\n")
    with pytest.raises(DataError, match=r"'NCI60\.A'"):
        module.Features.read(Reader(FileSet.of({"mirna": path})), "mirna")
