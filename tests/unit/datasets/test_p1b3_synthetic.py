from __future__ import annotations

import io
import itertools
import sys

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark

pytestmark = pytest.mark.extended

P1B3 = find_benchmark("p1b3").recipe
synthetic = sys.modules[type(P1B3).__module__]
biology = sys.modules["p1b3_biology"]

MIB = 2**20
LINE_ROLES = ("expression", "mirna", "proteome", "kinome")
KEYS = dict.fromkeys(LINE_ROLES, "CellLine") | {"descriptors": "NAME", "latent": "NSC"}
FULL_NUM_COLUMNS = {"expression": 25_722, "mirna": 453, "descriptors": 3_809, "latent": 292}


@pytest.fixture(scope="module")
def directory(small_data):
    return small_data("p1b3")


@pytest.fixture(scope="module")
def tables(directory):
    """The feature tables, indexed by line or drug."""
    return {role: read_table((directory / P1B3.roles[role]).read_bytes(), role) for role in KEYS}


@pytest.fixture(scope="module")
def responses(directory):
    return pd.read_csv(directory / P1B3.roles["response"], dtype={"NSC": str})


@pytest.fixture(scope="module")
def test_drugs(directory):
    return pd.read_csv(directory / P1B3.roles["test_drugs"], dtype=str)["NSC"]


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
        P1B3.roles.values()
    )
    for role, table in tables.items():
        assert table.shape[1] == synthetic.NUM_COLUMNS[role]["small"]
        assert table.columns.is_unique
        assert table.index.is_unique
    assert list(responses) == ["NSC", "CELLNAME", "LOG_CONCENTRATION", "GROWTH"]
    assert sorted(set(responses["LOG_CONCENTRATION"])) == [-8, -7, -6, -5, -4]
    assert responses["GROWTH"].between(-100, 270).all()
    columns = [set(tables[role].columns) for role in ("proteome", "kinome")]
    assert not columns[0] & columns[1]  # the two are joined


@pytest.mark.parametrize(("role", "num_columns"), FULL_NUM_COLUMNS.items())
def test_full_tables_have_the_published_columns(role, num_columns):
    file = next(f for f in P1B3.files("full", 2019) if f.name == P1B3.roles[role])
    lines = b"".join(itertools.islice(file.blocks, 2)).splitlines()
    separator = b"," if role == "latent" else b"\t"
    assert {line.count(separator) for line in lines} == {num_columns}
    together = [synthetic.NUM_COLUMNS[role]["full"] for role in ("proteome", "kinome")]
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
    test_lines = pd.read_csv(directory / P1B3.roles["test_cells"])["CELLNAME"]
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
    descriptors = (directory / P1B3.roles["descriptors"]).read_bytes()
    assert descriptors.count(b"\tna\t") > 100
    assert 0 < tables["descriptors"].isna().to_numpy().mean() < 0.01
    assert (directory / P1B3.roles["latent"]).read_bytes().count(b",,") > 0
    assert (tables["expression"] < 0).to_numpy().any()


def test_descriptors_are_levels_counts_and_flags(tables):
    descriptors = tables["descriptors"].to_numpy()
    whole = (np.isnan(descriptors) | (descriptors % 1 == 0)).all(axis=0)
    counts_or_flags = descriptors[:, whole]
    assert whole.mean() == pytest.approx(0.74, abs=0.01)
    assert np.nanmin(counts_or_flags) == 0
    assert (np.nanmax(counts_or_flags, axis=0) == 1).mean() == pytest.approx(0.5, abs=0.05)


def test_growth_falls_with_the_concentration_to_its_minimum():
    random = np.random.default_rng(1)
    lines, drugs = biology.CellLines.draw(random), biology.Drugs.draw(200, random)
    log_ec50 = drugs.log_ec50(lines)
    curve = np.stack([drugs.growth(dose, log_ec50) for dose in np.arange(-9, 3)])
    assert curve.shape == (12, 200, 60)
    assert (np.diff(curve, axis=0) < 0).all()
    np.testing.assert_allclose(drugs.growth(-15, log_ec50), biology.TOP, atol=0.1)
    np.testing.assert_allclose(drugs.growth(6, log_ec50), np.tile(drugs.floor[:, None], 60), atol=1)
    assert drugs.floor.min() >= -100
    assert drugs.floor.max() < 70
    halfway = np.stack([drugs.take([i]).growth(log_ec50[i], log_ec50[[i]])[0] for i in range(200)])
    np.testing.assert_allclose(halfway, np.tile((biology.TOP + drugs.floor)[:, None] / 2, 60))


def test_a_drug_acts_more_on_lines_in_which_its_pathway_is_active():
    random = np.random.default_rng(1)
    lines, drugs = biology.CellLines.draw(random), biology.Drugs.draw(400, random)
    likeness = [
        np.corrcoef(-log_ec50, lines.activities[:, mechanism])[0, 1]
        for log_ec50, mechanism in zip(drugs.log_ec50(lines), drugs.mechanism, strict=True)
    ]
    assert min(likeness) > 0.5


def test_expression_depends_on_the_tissue(tables):
    tissue_of = {
        f"NCI60.{name}": tissue
        for tissue, names in biology.LINES_BY_TISSUE.items()
        for name in names.split()
    }
    assert set(tissue_of) == set(tables["expression"].index)
    likeness = np.corrcoef(tables["expression"].fillna(0).rank())
    tissues = np.array([tissue_of[name] for name in tables["expression"].index])
    same = (tissues[:, None] == tissues) & ~np.eye(60, dtype=bool)
    assert likeness[same].mean() > likeness[tissues[:, None] != tissues].mean() + 0.02


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
    study = synthetic.Screening("full", seed)
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
    for file in P1B3.files("small", 2019):
        num_bytes = (directory / file.name).stat().st_size
        tolerance = 0.1 if num_bytes < 250_000 else 0.02
        assert file.num_bytes_estimate == pytest.approx(num_bytes, rel=tolerance), file.name
    num_bytes = {file.name: file.num_bytes_estimate for file in P1B3.files("full", 2019)}
    assert num_bytes.pop(P1B3.roles["response"]) / MIB == pytest.approx(103, rel=0.01)
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
