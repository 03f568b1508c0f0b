"""The synthetic data of the benchmarks: as published in shape and size, and as easy to learn."""

from __future__ import annotations

import io
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


def code_of(name):
    """Returns the module in which a benchmark's data are made."""
    return sys.modules[type(find_benchmark(name).recipe).__module__]


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


# NT3


@pytest.fixture(scope="module")
def small(small_data):
    """NT3's small data: (label, genes) of the training and the test file."""
    names = find_benchmark("nt3").recipe.roles.values()
    tables = [np.loadtxt(small_data("nt3") / name, delimiter=",") for name in names]
    return [(table[:, 0], table[:, 1:]) for table in tables]


def test_classes_are_balanced_and_in_random_order(small):
    for (labels, genes), num_rows in zip(small, (280, 140), strict=True):
        assert genes.shape == (num_rows, 60)
        assert Counter(labels) == {0: num_rows // 2, 1: num_rows // 2}
        assert genes.min() == 0
        assert 10 < genes.max() <= 18
        assert len(set(labels[:20])) == 2


@pytest.mark.parametrize(("size", "num_patients"), [("small", 210), ("full", 700)])
def test_both_samples_of_a_patient_are_in_the_same_file(monkeypatch, size, num_patients):
    drawn = []

    def sample(genes, patient, tumor, seed):
        drawn.append((patient, tumor))
        return np.zeros(3)

    monkeypatch.setattr(code_of("nt3").Genes, "sample", sample)
    sides = []
    for file in find_benchmark("nt3").recipe.files(size, 1):
        drawn.clear()
        assert sum(block.count(b"\n") for block in file.blocks) == len(drawn)
        assert len(set(drawn)) == len(drawn) == 2 * len({patient for patient, _ in drawn})
        sides.append({patient for patient, _ in drawn})
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == num_patients


def test_the_classes_can_be_learned(small):
    (train_labels, train), (test_labels, test) = small
    means = [train[train_labels == label].mean(axis=0) for label in (0, 1)]
    direction = means[1] - means[0]
    predicted = (test - sum(means) / 2) @ direction > 0
    assert (predicted == test_labels).mean() > 0.95


# P1B1


@pytest.fixture(scope="module")
def profiles(small_data):
    """The small data, by role."""
    return {
        role: pd.read_csv(small_data("p1b1") / find_benchmark("p1b1").recipe.roles[role])
        for role in ("train", "test")
    }


@pytest.fixture(scope="module")
def scaled(profiles):
    """(train, test): the levels, scaled to [0, 1] by both."""
    train, test = (profiles[role].iloc[:, 2:].to_numpy() for role in ("train", "test"))
    both = np.concatenate([train, test])
    low, high = both.min(axis=0), both.max(axis=0)
    return [(part - low) / np.where(high > low, high - low, 1) for part in (train, test)]


def test_values_are_logarithms_of_levels_with_many_zeros(profiles):
    for table in profiles.values():
        assert all(name.startswith("ENSG") for name in table.columns[2:])
        levels = table.iloc[:, 2:].to_numpy()
        assert levels.min() == 0
        assert 12 < levels.max() < 40
        assert 0.3 < (levels == 0).mean() < 0.6
        assert levels[levels > 0].min() >= 1


def test_types_are_as_frequent_as_in_tcga_and_in_random_order(profiles):
    frequency = Counter(profiles["train"]["cancer_type"])
    assert set(frequency) <= set(code_of("p1b1").CANCER_TYPES)
    assert len(frequency) > 20
    assert frequency.most_common(1)[0][0] == "BRCA"
    assert len(set(profiles["train"]["cancer_type"][:20])) > 5


def test_landmarks_name_columns_of_the_table(small_data, profiles):
    landmarks = pd.read_csv(
        small_data("p1b1") / find_benchmark("p1b1").recipe.roles["landmarks"], sep="\t"
    )
    assert len(landmarks) == landmarks["gdc"].nunique() == 20
    assert set(landmarks["gdc"]) <= set(profiles["train"].columns[2:])
    levels = profiles["train"][landmarks["gdc"]]
    assert (levels.std() > profiles["train"].iloc[:, 2:].std().median()).mean() > 0.9


def test_full_data_have_978_landmarks():
    genes = code_of("p1b1").Genes.draw(code_of("p1b1").SIZES["full"], seed=2019)
    landmarks = genes.landmarks(978)
    assert len(set(landmarks)) == len(set(genes.pathway[landmarks])) == 978
    assert genes.baseline[landmarks].min() > code_of("p1b1").DETECTION_LIMIT


def test_two_dimensions_describe_most_of_a_profile(scaled):
    train, test = scaled
    mean = train.mean(axis=0)
    _, _, components = np.linalg.svd(train - mean, full_matrices=False)
    compressed = (test - mean) @ components[:2].T
    naive = ((test - mean) ** 2).mean()
    left = ((test - mean - compressed @ components[:2]) ** 2).mean()
    assert 0.04 < naive < 0.06
    assert 0.05 * naive < left < 0.35 * naive


def test_types_are_predicted_by_the_nearest_mean_profile(scaled, profiles):
    train_types, test_types = (profiles[role]["cancer_type"].to_numpy() for role in profiles)
    names = sorted(set(train_types))
    means = np.stack([scaled[0][train_types == name].mean(axis=0) for name in names])
    distances = ((scaled[1][:, np.newaxis] - means) ** 2).sum(axis=2)
    predicted = np.array(names)[distances.argmin(axis=1)]
    chance = Counter(test_types).most_common(1)[0][1] / len(test_types)
    assert (predicted == test_types).mean() > 4 * chance


# P1B2


@pytest.fixture(scope="module")
def mutations(small_data):
    """The small data, by role."""
    return {
        role: pd.read_csv(small_data("p1b2") / name)
        for role, name in find_benchmark("p1b2").recipe.roles.items()
    }


@pytest.fixture(scope="module")
def full_tumors():
    """Tumors of the full data: (types, impacts), some of each type."""
    genome = code_of("p1b2").Genome.draw(code_of("p1b2").SIZES["full"], seed=2019)
    types = np.arange(200) % len(code_of("p1b2").CANCER_TYPES)
    return types, np.stack([genome.tumor(patient, types[patient], 2019) for patient in range(200)])


def test_ten_types_are_balanced_and_in_random_order(mutations):
    for role, table in mutations.items():
        frequency = Counter(table["cancer_type"])
        assert set(frequency) == set(code_of("p1b2").CANCER_TYPES)
        assert set(frequency.values()) == {{"train": 32, "test": 16}[role]}
        assert len(set(table["cancer_type"][:20])) > 5


def test_impacts_are_small_integers_and_mostly_0(mutations, full_tumors):
    for table in mutations.values():
        impacts = table.iloc[:, 2:].to_numpy()
        assert impacts.dtype == np.int64
        assert impacts.min() == 0
        assert (impacts == 0).mean() > 0.85
        assert (impacts > 9).mean() < 0.01
    _, impacts = full_tumors
    assert 0.95 < (impacts == 0).mean() < 0.995
    assert (impacts > 9).mean() < 0.001


def test_types_can_be_predicted_by_their_mean_rates(mutations):
    train, test = (mutations[role].iloc[:, 2:].to_numpy() > 0 for role in ("train", "test"))
    train_types, test_types = (mutations[role]["cancer_type"].to_numpy() for role in mutations)
    names = np.array(code_of("p1b2").CANCER_TYPES)
    rates = np.stack([(train[train_types == name].sum(axis=0) + 0.5) / 33 for name in names])
    likelihood = test @ np.log(rates).T + ~test @ np.log(1 - rates).T
    predicted = names[likelihood.argmax(axis=1)]
    assert 0.4 < (predicted == test_types).mean() < 0.95


# P1B3


LINE_ROLES = ("expression", "mirna", "proteome", "kinome")
KEYS = dict.fromkeys(LINE_ROLES, "CellLine") | {"descriptors": "NAME", "latent": "NSC"}
FULL_NUM_COLUMNS = {"expression": 25_722, "mirna": 453, "descriptors": 3_809, "latent": 292}


@pytest.fixture(scope="module")
def directory(small_data):
    return small_data("p1b3")


@pytest.fixture(scope="module")
def tables(directory):
    """The feature tables, indexed by line or drug."""
    return {
        role: read_table((directory / find_benchmark("p1b3").recipe.roles[role]).read_bytes(), role)
        for role in KEYS
    }


@pytest.fixture(scope="module")
def responses(directory):
    return pd.read_csv(
        directory / find_benchmark("p1b3").recipe.roles["response"], dtype={"NSC": str}
    )


@pytest.fixture(scope="module")
def test_drugs(directory):
    return pd.read_csv(directory / find_benchmark("p1b3").recipe.roles["test_drugs"], dtype=str)[
        "NSC"
    ]


def read_table(text, role):
    separator = "," if role == "latent" else "\t"
    table = pd.read_csv(
        io.BytesIO(text),
        sep=separator,
        index_col=0,
        dtype={0: str},
        na_values=["na", ""],
        keep_default_na=False,
    )
    assert table.index.name == KEYS[role]
    assert all(kind in (np.float64, np.int64) for kind in table.dtypes)
    return table


def share_kept(growth):
    """The probability with which CANDLE's naive balancing keeps a response."""
    return np.select([growth <= 0, growth < 50, growth <= 100], [1, 0.7, 0.18], 0.01)


def in_range(responses):
    return responses["LOG_CONCENTRATION"].between(-5, -4)


def test_files_have_the_published_layout(directory, tables, responses):
    assert {path.name for path in directory.iterdir()} - {".lock", "synthetic.json"} == set(
        find_benchmark("p1b3").recipe.roles.values()
    )
    for role, table in tables.items():
        assert table.shape[1] == code_of("p1b3").NUM_COLUMNS[role]["small"]
        assert table.columns.is_unique
        assert table.index.is_unique
    assert list(responses) == ["NSC", "CELLNAME", "LOG_CONCENTRATION", "GROWTH"]
    assert sorted(set(responses["LOG_CONCENTRATION"])) == [-8, -7, -6, -5, -4]
    assert responses["GROWTH"].between(-100, 270).all()
    columns = [set(tables[role].columns) for role in ("proteome", "kinome")]
    assert not columns[0] & columns[1]  # the two are joined


@pytest.mark.parametrize(("role", "num_columns"), FULL_NUM_COLUMNS.items())
def test_full_tables_have_the_published_columns(role, num_columns):
    file = next(
        f
        for f in find_benchmark("p1b3").recipe.files("full", 2019)
        if f.name == find_benchmark("p1b3").recipe.roles[role]
    )
    lines = b"".join(itertools.islice(file.blocks, 2)).splitlines()
    separator = b"," if role == "latent" else b"\t"
    assert {line.count(separator) for line in lines} == {num_columns}
    together = [code_of("p1b3").NUM_COLUMNS[role]["full"] for role in ("proteome", "kinome")]
    assert sum(together) == 9_760


def test_tables_can_be_joined_with_the_responses(tables, responses):
    lines, drugs = set(responses["CELLNAME"]), set(responses["NSC"])
    assert len(lines) == 60
    for role, table in tables.items():
        known, needed = (
            ({name.replace(".", ":") for name in table.index}, lines)
            if role in LINE_ROLES
            else (set(table.index), drugs)
        )
        assert 0.9 < len(known & needed) / len(needed) <= 1
        assert known <= needed or role not in LINE_ROLES
    for role, num_absent in {"expression": 0, "mirna": 1, "proteome": 2, "kinome": 2}.items():
        assert len(tables[role]) == 60 - num_absent
    for role in ("descriptors", "latent"):
        assert drugs - set(tables[role].index)  # as in reality, some are only screened
        assert set(tables[role].index) - drugs  # and some are only described


def test_test_lines_and_drugs_are_known_and_few(directory, tables, responses, test_drugs):
    test_lines = pd.read_csv(directory / find_benchmark("p1b3").recipe.roles["test_cells"])[
        "CELLNAME"
    ]
    assert len(test_lines) == len(set(test_lines)) == 6
    assert set(test_lines) <= set(responses["CELLNAME"])
    assert test_drugs.is_unique
    usable = set(responses["NSC"]) & set(tables["descriptors"].index)
    assert set(test_drugs) <= usable
    assert len(test_drugs) / len(usable) == pytest.approx(0.0905, abs=0.001)


def test_some_values_are_missing(directory, tables):
    for table in tables.values():
        values = table.to_numpy()
        assert np.isfinite(values[~np.isnan(values)]).all()
        assert not np.isnan(values).all(axis=0).any()
    descriptors = (directory / find_benchmark("p1b3").recipe.roles["descriptors"]).read_bytes()
    assert descriptors.count(b"\tna\t") > 100
    assert 0 < tables["descriptors"].isna().to_numpy().mean() < 0.01
    assert (directory / find_benchmark("p1b3").recipe.roles["latent"]).read_bytes().count(b",,") > 0
    assert (tables["expression"] < 0).to_numpy().any()


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
    growth = responses.loc[in_range(responses), "GROWTH"].to_numpy()
    weight = share_kept(growth)
    mean = np.average(growth, weights=weight)
    assert np.average(growth <= 0, weights=weight) == pytest.approx(0.495, abs=0.05)
    assert mean == pytest.approx(-1.3, abs=8)
    assert np.sqrt(np.average((growth - mean) ** 2, weights=weight)) == pytest.approx(62, abs=5)


@pytest.mark.parametrize("seed", [1, 2019])
def test_full_responses_after_processing_are_as_many_as_published(seed):
    study = code_of("p1b3").Screening("full", seed)
    usable = np.intersect1d(study._present("response"), study._present("descriptors"))[::3]
    doses = np.array([-5, -5, -4])
    growth = study.drugs.take(usable).screen(doses, study.lines, np.random.default_rng(seed))
    kept = share_kept(growth)
    kept[~study.has_five_doses[usable], :, 1:] = 0
    is_test_drug = np.isin(usable, study.test_drugs())
    is_train_line = ~np.isin(np.arange(60), study.test_lines())
    train_val = 3 * kept[~is_test_drug][:, is_train_line].sum()
    assert train_val == pytest.approx(1_000_151, rel=0.03)  # estimated from a third of the drugs
    share_of_test = study.test_drugs().size / len(usable) / 3
    test = 3 * kept[:, is_train_line].sum() * share_of_test * 8 / 54  # 15 % of 54 lines
    assert test == pytest.approx(14_740, rel=0.05)


def test_files_have_the_published_size(directory):
    """For the full files by their estimates, which are right for the small ones."""
    for file in find_benchmark("p1b3").recipe.files("small", 2019):
        num_bytes = (directory / file.name).stat().st_size
        tolerance = 0.1 if num_bytes < 250_000 else 0.02
        assert file.num_bytes_estimate == pytest.approx(num_bytes, rel=tolerance), file.name
    num_bytes = {
        file.name: file.num_bytes_estimate
        for file in find_benchmark("p1b3").recipe.files("full", 2019)
    }
    assert num_bytes.pop(find_benchmark("p1b3").recipe.roles["response"]) / MIB == pytest.approx(
        103, rel=0.01
    )
    assert sum(num_bytes.values()) / MIB == pytest.approx(318, rel=0.01)


def test_an_unseen_drug_is_predicted_from_its_descriptors(tables, responses, test_drugs):
    """Ridge regression of a drug's mean growth beats the mean."""
    descriptors = tables["descriptors"]
    standard = ((descriptors - descriptors.mean()) / descriptors.std()).fillna(0)
    growth = responses[in_range(responses)].groupby("NSC")["GROWTH"].mean()
    standard, growth = standard.align(growth, join="inner", axis=0)
    is_test = growth.index.isin(test_drugs)
    x, y = standard.to_numpy(), growth.to_numpy()
    train_x, train_y = x[~is_test], y[~is_test] - y[~is_test].mean()
    weights = np.linalg.solve(
        train_x.T @ train_x + len(train_x) * np.eye(x.shape[1]), train_x.T @ train_y
    )
    error = y[is_test] - y[~is_test].mean() - x[is_test] @ weights
    assert 1 - error.var() / y[is_test].var() > 0.4
