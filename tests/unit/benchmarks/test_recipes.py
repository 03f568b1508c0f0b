"""The synthetic data of the benchmarks: as published in shape and size, and as easy to learn."""

import itertools
import shutil
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from candle_p1.bench.published import table_1
from candle_p1.benchmark import find_benchmark, list_benchmarks
from candle_p1.data.reader import Reader
from candle_p1.datasets.synthetic import make
from candle_p1.training.setup import locate_files

pytestmark = pytest.mark.extended

MIB = 2**20


def recipe_of(name):
    return find_benchmark(name).recipe


def code_of(name):
    """Returns the module in which a benchmark's data are made."""
    return sys.modules[type(recipe_of(name)).__module__]


@pytest.fixture(scope="module")
def small(small_data):
    """Returns the path of a benchmark's small file with a role."""
    return lambda name, role: small_data(name) / recipe_of(name).roles[role]


@pytest.mark.parametrize("name", list_benchmarks())
def test_the_seed_determines_the_bytes_and_their_number_is_estimated(name):
    def contents(seed):
        return {f.name: b"".join(f.blocks) for f in recipe_of(name).files("small", seed)}

    first = contents(1)
    assert contents(1) == first
    assert not set(contents(2).values()) & set(first.values())
    for file in recipe_of(name).files("small", 1):
        num_bytes = len(first[file.name])
        tolerance = 0.1 if num_bytes < 250_000 else 0.03
        assert file.num_bytes_estimate == pytest.approx(num_bytes, rel=tolerance), file.name


SAMPLES_TOLERANCE = {"p1b3": 0.005}
"""Responses are selected at random."""
SAME_ELEMENTS = {"nt3", "p1b2"}


def with_repeated_rows(file, num_rows):
    """Returns a file of cases in which the rows of the first block are repeated."""
    blocks = iter(file.blocks)
    header, *rows = b"".join(itertools.islice(blocks, 2)).splitlines(keepends=True)
    repeated = itertools.islice(itertools.cycle(rows), num_rows)
    return replace(file, blocks=itertools.chain([header], repeated))


@pytest.mark.parametrize("name", ["nt3", "p1b1", "p1b2", "p1b3"])
def test_table_1_is_what_full_data_give(name, tmp_path, monkeypatch):
    benchmark, recipe = find_benchmark(name), recipe_of(name)
    estimates = {file.name: file.num_bytes_estimate for file in recipe.files("full", 2019)}
    if name == "p1b1":  # drawing all of its rows takes half a minute
        nums = code_of(name).SIZES["full"].num_patients
        num_rows = {recipe.roles[role]: num for role, num in nums.items()}
        files = [
            with_repeated_rows(file, num_rows[file.name]) if file.name in num_rows else file
            for file in recipe.files("full", 2019)
        ]
        monkeypatch.setattr(type(recipe), "files", lambda *_: files)
    make(recipe, "full", tmp_path, 2019)
    sizes = {path.name: path.stat().st_size / MIB for path in tmp_path.iterdir()}
    for file, num_bytes in estimates.items():
        assert num_bytes / MIB == pytest.approx(sizes[file], rel=0.03, abs=0.1), file
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
    rows = table_1(benchmark)
    assert loaded.keys() == rows.keys()
    for key, value in loaded.items():
        tolerance = 0.02 if key.endswith("_mb") else 0
        if key == "samples":
            tolerance = SAMPLES_TOLERANCE.get(name, 0)
        expected = value if isinstance(value, str) else pytest.approx(value, rel=tolerance, abs=0)
        assert rows[key]["here"] == expected, key
        if key != "elements" or name in SAME_ELEMENTS:
            assert rows[key]["published"] == expected, key


def cases(small, name):
    """Returns the names of the types, and the values, of the training and the test file."""
    tables = [pd.read_csv(small(name, role)) for role in ("train", "test")]
    train, test = tables
    assert list(train.columns) == list(test.columns)
    assert list(train.columns[:2]) == ["case_id", "cancer_type"]
    assert train.columns.is_unique
    assert len({*train["case_id"], *test["case_id"]}) == len(train) + len(test), "one patient twice"
    for table in tables:
        assert len(set(table["cancer_type"][:20])) > 5, "types are in random order"
        assert set(table["cancer_type"]) <= set(code_of(name).CANCER_TYPES)
    types = [table["cancer_type"].to_numpy() for table in tables]
    return types, [table.iloc[:, 2:] for table in tables]


def nearest_mean(train_types, train, test):
    """Returns the type of each test sample whose mean profile is the nearest."""
    names = np.unique(train_types)
    means = np.stack([train[train_types == name].mean(axis=0) for name in names])
    return names[((test[:, np.newaxis] - means) ** 2).sum(axis=2).argmin(axis=1)]


def test_nt3_has_balanced_classes_that_can_be_learned(small):
    tables = [np.loadtxt(small("nt3", role), delimiter=",") for role in ("train", "test")]
    assert [table.shape for table in tables] == [(280, 61), (140, 61)]
    for table in tables:
        labels, genes = table[:, 0], table[:, 1:]
        assert Counter(labels) == dict.fromkeys((0, 1), len(labels) // 2)
        assert len(set(labels[:20])) == 2, "in random order"
        assert genes.min() == 0
        assert 10 < genes.max() <= 18
    train, test = tables
    assert (nearest_mean(train[:, 0], train[:, 1:], test[:, 1:]) == test[:, 0]).mean() > 0.95


@pytest.mark.parametrize(("size", "num_patients"), [("small", 210), ("full", 700)])
def test_both_samples_of_a_patient_are_in_the_same_file_of_nt3(monkeypatch, size, num_patients):
    drawn = []

    def sample(genes, patient, tumor, seed):
        drawn.append((patient, tumor))
        return np.zeros(3)

    monkeypatch.setattr(code_of("nt3").Genes, "sample", sample)
    sides = []
    for file in recipe_of("nt3").files(size, 1):
        drawn.clear()
        assert sum(block.count(b"\n") for block in file.blocks) == len(drawn)
        assert len(set(drawn)) == len(drawn) == 2 * len({patient for patient, _ in drawn})
        sides.append({patient for patient, _ in drawn})
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == num_patients


def test_p1b1_has_levels_of_unequally_frequent_types_in_few_dimensions(small):
    types, tables = cases(small, "p1b1")
    assert [table.shape for table in tables] == [(400, 300), (200, 300)]
    assert all(name.startswith("ENSG") for name in tables[0].columns)
    frequency = Counter(types[0])
    assert len(frequency) > 20
    assert frequency.most_common(1)[0][0] == "BRCA"
    levels = [table.to_numpy() for table in tables]
    for each in levels:
        assert each.min() == 0
        assert 12 < each.max() < 40
        assert 0.3 < (each == 0).mean() < 0.6
        assert each[each > 0].min() >= 1
    both = np.concatenate(levels)
    low, high = both.min(axis=0), both.max(axis=0)
    train, test = ((part - low) / np.where(high > low, high - low, 1) for part in levels)
    mean = train.mean(axis=0)
    _, _, components = np.linalg.svd(train - mean, full_matrices=False)
    compressed = (test - mean) @ components[:2].T
    naive = ((test - mean) ** 2).mean()
    left = ((test - mean - compressed @ components[:2]) ** 2).mean()
    assert 0.04 < naive < 0.06
    assert 0.05 * naive < left < 0.35 * naive
    chance = Counter(types[1]).most_common(1)[0][1] / len(types[1])
    assert (nearest_mean(types[0], train, test) == types[1]).mean() > 4 * chance


def test_the_landmarks_of_p1b1_are_expressed_genes_of_different_pathways(small):
    _, (train, _) = cases(small, "p1b1")
    landmarks = pd.read_csv(small("p1b1", "landmarks"), sep="\t")["gdc"]
    assert len(landmarks) == landmarks.nunique() == 20
    assert set(landmarks) <= set(train.columns)
    assert (train[landmarks].std() > train.std().median()).mean() > 0.9
    genes = code_of("p1b1").Genes.draw(code_of("p1b1").SIZES["full"], seed=2019)
    landmarks = genes.landmarks(978)
    assert len(set(landmarks)) == len(set(genes.pathway[landmarks])) == 978
    assert genes.baseline[landmarks].min() > code_of("p1b1").DETECTION_LIMIT


def test_p1b2_has_sparse_impacts_that_tell_balanced_types(small):
    types, tables = cases(small, "p1b2")
    assert [table.shape for table in tables] == [(320, 300), (160, 300)]
    names = np.array(code_of("p1b2").CANCER_TYPES)
    for each, num in zip(types, (32, 16), strict=True):
        assert Counter(each) == dict.fromkeys(names, num)
    genome = code_of("p1b2").Genome.draw(code_of("p1b2").SIZES["full"], seed=2019)
    full = np.stack([genome.tumor(i, i % len(names), 2019) for i in range(200)])
    for impacts, least_0 in (*((table.to_numpy(), 0.85) for table in tables), (full, 0.95)):
        assert impacts.dtype == np.int64
        assert impacts.min() == 0
        assert least_0 < (impacts == 0).mean() < 0.995
        assert (impacts > 9).mean() < (1 - least_0) / 15
    train, test = (table.to_numpy() > 0 for table in tables)
    rates = np.stack([(train[types[0] == name].sum(axis=0) + 0.5) / 33 for name in names])
    likelihood = test @ np.log(rates).T + ~test @ np.log(1 - rates).T
    assert 0.4 < (names[likelihood.argmax(axis=1)] == types[1]).mean() < 0.95


LINE_ROLES = ("expression", "mirna", "proteome", "kinome")
NUM_LINES = {"expression": 60, "mirna": 59, "proteome": 58, "kinome": 58}
KEYS = dict.fromkeys(LINE_ROLES, "CellLine") | {"descriptors": "NAME", "latent": "NSC"}
FULL_NUM_COLUMNS = {"expression": 25_722, "mirna": 453, "descriptors": 3_809, "latent": 292}


@pytest.fixture(scope="module")
def tables(small):
    """The feature tables of P1B3, indexed by line or drug."""
    found = {}
    for role, key in KEYS.items():
        options = {"index_col": 0, "dtype": {0: str}, "keep_default_na": False}
        options |= {"sep": "," if role == "latent" else "\t", "na_values": ["na", ""]}
        table = found[role] = pd.read_csv(small("p1b3", role), **options)
        assert table.index.name == key
        assert all(kind in (np.float64, np.int64) for kind in table.dtypes)
    return found


@pytest.fixture(scope="module")
def responses(small):
    return pd.read_csv(small("p1b3", "response"), dtype={"NSC": str})


@pytest.fixture(scope="module")
def test_drugs(small):
    return pd.read_csv(small("p1b3", "test_drugs"), dtype=str)["NSC"]


def share_kept(growth):
    """The probability with which CANDLE's naive balancing keeps a response."""
    return np.select([growth <= 0, growth < 50, growth <= 100], [1, 0.7, 0.18], 0.01)


def in_range(responses):
    return responses["LOG_CONCENTRATION"].between(-5, -4)


def test_the_tables_of_p1b3_have_the_published_columns_and_some_values_missing(small, tables):
    num_columns = code_of("p1b3").NUM_COLUMNS
    for role, table in tables.items():
        assert table.shape[1] == num_columns[role]["small"]
        assert table.columns.is_unique
        assert table.index.is_unique
        values = table.to_numpy()
        assert np.isfinite(values[~np.isnan(values)]).all()
        assert not np.isnan(values).all(axis=0).any()
    assert (tables["expression"] < 0).to_numpy().any()
    assert 0 < tables["descriptors"].isna().to_numpy().mean() < 0.01
    assert small("p1b3", "descriptors").read_bytes().count(b"\tna\t") > 100
    assert small("p1b3", "latent").read_bytes().count(b",,") > 0
    assert not set(tables["proteome"].columns) & set(tables["kinome"].columns), "they are joined"
    assert sum(num_columns[role]["full"] for role in ("proteome", "kinome")) == 9_760
    assert {role: num_columns[role]["full"] for role in FULL_NUM_COLUMNS} == FULL_NUM_COLUMNS


def test_the_tables_of_p1b3_can_be_joined_with_the_responses(small, tables, responses, test_drugs):
    assert list(responses) == ["NSC", "CELLNAME", "LOG_CONCENTRATION", "GROWTH"]
    lines, drugs = set(responses["CELLNAME"]), set(responses["NSC"])
    assert len(lines) == 60
    for role in LINE_ROLES:
        assert len(tables[role]) == NUM_LINES[role]
        assert {name.replace(".", ":") for name in tables[role].index} <= lines
    for role in ("descriptors", "latent"):
        known = set(tables[role].index)
        assert 0.9 < len(known & drugs) / len(drugs) < 1  # as in reality, some are only screened
        assert known - drugs  # and some are only described
    test_lines = pd.read_csv(small("p1b3", "test_cells"))["CELLNAME"]
    assert len(test_lines) == len(set(test_lines)) == 6
    assert set(test_lines) <= lines
    usable = drugs & set(tables["descriptors"].index)
    assert test_drugs.is_unique
    assert set(test_drugs) <= usable
    assert len(test_drugs) / len(usable) == pytest.approx(0.0905, abs=0.001)


def test_every_drug_is_screened_at_one_dose_and_effective_ones_at_five(responses):
    doses = responses.groupby(["NSC", "CELLNAME"], sort=False)["LOG_CONCENTRATION"].agg(tuple)
    assert set(doses) == {(-5,), (-5, -8, -7, -6, -5, -4)}
    assert len(doses) == 60 * responses["NSC"].nunique()
    assert (doses.str.len() > 1).mean() == pytest.approx(0.31, abs=0.02)
    first = responses.drop_duplicates(["NSC", "CELLNAME"])
    num_rows = responses.groupby("NSC").size()
    growth = first.groupby("NSC")["GROWTH"].mean()
    assert growth[num_rows > 60].mean() < growth[num_rows == 60].mean() - 30


def test_growth_after_balancing_is_close_to_the_published(responses):
    assert responses["GROWTH"].between(-100, 270).all()
    growth = responses.loc[in_range(responses), "GROWTH"].to_numpy()
    weight = share_kept(growth)
    mean = np.average(growth, weights=weight)
    assert np.average(growth <= 0, weights=weight) == pytest.approx(0.495, abs=0.05)
    assert mean == pytest.approx(-1.3, abs=8)
    assert np.sqrt(np.average((growth - mean) ** 2, weights=weight)) == pytest.approx(62, abs=5)


def test_an_unseen_drug_is_predicted_from_its_descriptors(tables, responses, test_drugs):
    """Ridge regression of a drug's mean growth beats the mean."""
    descriptors = tables["descriptors"]
    standard = ((descriptors - descriptors.mean()) / descriptors.std()).fillna(0)
    growth = responses[in_range(responses)].groupby("NSC")["GROWTH"].mean()
    standard, growth = standard.align(growth, join="inner", axis=0)
    is_test = growth.index.isin(test_drugs)
    x, y = standard.to_numpy(), growth.to_numpy()
    train_x, train_y = x[~is_test], y[~is_test] - y[~is_test].mean()
    squares = train_x.T @ train_x + len(train_x) * np.eye(x.shape[1])
    weights = np.linalg.solve(squares, train_x.T @ train_y)
    error = y[is_test] - y[~is_test].mean() - x[is_test] @ weights
    assert 1 - error.var() / y[is_test].var() > 0.4
