"""Tables of cases, how they are split, and folds, which keep the samples of a patient together."""

import json
import re
from collections import Counter
from itertools import chain

import numpy as np
import pandas as pd
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.cases import Cases
from candle_p1.data.reader import FileSet, Reader
from candle_p1.data.samples import Samples
from candle_p1.errors import CandleError, DataError, ParameterError
from candle_p1.training.setup import locate_files

TYPES = ["BRCA", "LUAD", "SKCM"]
PARAMS = {"folds": 0}
FEATURES = [f"gene{i}" for i in range(6)]


@pytest.fixture
def frames(tmp_path):
    """A training and a test file, and the frames they were written from."""
    random = np.random.default_rng(5)
    frames = {}
    for role, num in (("train", 40), ("test", 12)):
        values = random.integers(0, 9, size=(num, len(FEATURES))).astype(float)
        frame = pd.DataFrame(values, columns=FEATURES)
        frame.insert(0, "cancer_type", [TYPES[i % 3] for i in range(num)])
        frame.insert(0, "case_id", [f"{role}-{i}" for i in range(num)])
        frame.to_csv(tmp_path / f"{role}.csv", index=False)
        frames[role] = frame
    return frames


@pytest.fixture
def prepared(frames, tmp_path):
    """Preprocesses a benchmark's view of the files; returns the data set."""

    def prepared(name, *flags):
        benchmark = find_benchmark(name)
        roles = ["train", "test", *["landmark"] * ("--use_landmark_genes" in flags)]
        names = [f"--{role}_data={tmp_path / role}.csv" for role in roles]
        params = benchmark.read_parameters([*names, *flags])
        reader = prepared.reader = Reader(locate_files(benchmark, params))
        return benchmark.preprocess(benchmark.load_data(reader, params), params)

    return prepared


def scaled(frames, *fit):
    """The min-max scaled features of both files, fitted to some frames."""
    together = pd.concat(fit)[FEATURES]
    low, span = together.min(), together.max() - together.min()
    return [((frames[role][FEATURES] - low) / span).to_numpy() for role in ("train", "test")]


SPLITS = {"p1b1": ["--model=cvae", "--val_split=0.5"], "p1b2": ["--val_split=0.2"]}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("name", "nrows"), [*(("p1b1", n) for n in (0, 2, 20, 400)), ("p1b2", 0)])
def test_cases_are_taken_shuffled_scaled_and_split_as_in_candle(
    prepared, frames, name, nrows, shuffle
):
    """By what CANDLE's load_csv_data does."""
    taken = [f"--train_samples={nrows}"] * (name == "p1b1")
    data = prepared(name, *SPLITS[name], f"--shuffle={shuffle}", *taken)
    num = min(nrows or 40, 40)
    parts = {"train": (8, num), "validation": (0, 8), "test": (num, None)}
    if name == "p1b1":
        parts |= {"train": (0, num // 2), "validation": (num // 2, num)}
    files = [frames[role].head(nrows or None) for role in ("train", "test")]
    if shuffle:
        files = [frame.sample(frac=1, random_state=2017) for frame in files]
    together = pd.concat(files)
    types = pd.get_dummies(together["cancer_type"]).to_numpy(np.float32)
    values = together[FEATURES]
    profiles = ((values - values.min()) / (values.max() - values.min()).replace(0, 1)).to_numpy()
    for role, (first, last) in parts.items():
        x, y = getattr(data, role)[:]
        features, one_hot = x if name == "p1b1" else (x, y)
        np.testing.assert_allclose(features, profiles[first:last], atol=1e-6)
        np.testing.assert_array_equal(one_hot, types[first:last])
        if name == "p1b1":
            np.testing.assert_array_equal(y, features)
    if name == "p1b1":
        assert data.types == sorted(frames["test"]["cancer_type"].unique())[: len(data.types)]
        np.testing.assert_array_equal(data.test_types, types[num:].argmax(axis=1))


def test_p1b1_can_use_only_landmark_genes_in_table_order(prepared, frames, tmp_path):
    path = tmp_path / "landmark.csv"
    path.write_text("pr_id\tgdc\n1\tgene4\n2\tgene1\n3\tother\n")
    data = prepared("p1b1", "--use_landmark_genes", "True")
    train, _ = scaled(frames, frames["train"], frames["test"])
    np.testing.assert_allclose(data.train[:][0], train[:36, [1, 4]], atol=1e-6)
    (warning,) = prepared.reader.warnings
    assert "1 of 3 genes in landmark.csv are not in train.csv ('other')" in warning
    path.write_text("pr_id\tgdc\n1\tgene1\n2\tother\n3\tGene3\n")
    with pytest.raises(DataError, match=r"landmark\.csv: .*'Gene3' and 'gene3'"):
        prepared("p1b1", "--use_landmark_genes", "True")


def test_scaling_can_be_fit_to_what_is_trained_on(prepared, frames):
    data = prepared("p1b1", "--val_split", "0.25", "--scaling_fit", "train")
    train, test = scaled(frames, frames["train"][:30])
    x, y = data.train[:]
    np.testing.assert_allclose(x, train[:30], atol=1e-6)
    np.testing.assert_array_equal(x, y)
    np.testing.assert_allclose(data.test[:][0], test, atol=1e-6)


@pytest.mark.parametrize("name", ["p1b1", "p1b2"])
def test_only_the_first_features_can_be_used(prepared, name):
    full, some = prepared(name), prepared(name, "--feature_subsample", "4")
    assert some.train.x_shape == (4,)
    np.testing.assert_array_equal(some.test[:][0], full.test[:][0][:, :4])


@pytest.mark.parametrize("fraction", ["0", "1", "0.01"])
def test_a_split_that_leaves_no_cases_is_an_error(prepared, fraction):
    with pytest.raises(ParameterError, match=f"val_split {float(fraction)} "):
        prepared("p1b2", "--val_split", fraction)


def test_a_test_file_may_have_other_types_but_not_other_features(frames, tmp_path):
    paths = {role: tmp_path / f"{role}.csv" for role in ("train", "test")}
    frames["test"].rename(columns={"gene3": "other"}).to_csv(paths["test"], index=False)
    with pytest.raises(DataError, match=r"test\.csv: it lacks .*'gene3'"):
        Cases.read(Reader(FileSet.at(paths)), PARAMS)
    frames["test"].assign(cancer_type="ACC").to_csv(paths["test"], index=False)
    with pytest.raises(DataError, match="too few types match: 1 of 1"):
        Cases.read(Reader(FileSet.at(paths)), PARAMS)
    half = [TYPES[0], "ACC"] * (len(frames["test"]) // 2)
    frames["test"].assign(cancer_type=half).to_csv(tmp_path / "half.csv", index=False)
    reader = Reader(FileSet.at(paths | {"test": tmp_path / "half.csv"}))
    assert Cases.read(reader, PARAMS).types == ["ACC", *TYPES]
    assert reader.warnings[0].endswith("('ACC'): no case trains their outputs")
    cases = Cases.read(Reader(FileSet.at(paths)), PARAMS, uses_types=False)
    assert cases.types == ["ACC", *TYPES]
    assert set(cases.y["test"]) == {0}
    assert [cases.types[i] for i in cases.y["train"]] == frames["train"]["cancer_type"].tolist()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",LUAD,", ",LUAD ,", "1 of 3 types in test.csv, in 4 of 12 rows, .*'LUAD ' and 'LUAD'"),
        (",LUAD,", ",Luad,", "'Luad' and 'LUAD'.*: no case trains their outputs"),
        (",LUAD,", ",1.0,", "'1.0' and '1'"),
        ("test-1,", "train-1,", "1 of 12 test cases are training cases, too"),
        ("test-1,", "train-2,", "refused: .*train.csv: the case 'train-2' has several types"),
        ("gene4", "further", "refused: .*test.csv: it lacks 1 of the 6 .* 'gene4'"),
        ("gene4", "gene3", "refused: .*test.csv, line 1: the header has several columns 'gene3'"),
    ],
)
def test_names_that_do_not_match_are_told_or_refused(prepared, frames, tmp_path, old, new, message):
    if new == ",1.0,":
        renamed = frames["train"].replace("LUAD", "1")
        renamed.to_csv(tmp_path / "train.csv", index=False)
    path = tmp_path / "test.csv"
    path.write_text(path.read_text().replace(old, new))
    try:
        prepared("p1b2")
        found = "\n".join(prepared.reader.warnings)
    except DataError as error:
        found = f"refused: {error}"
    assert re.search(message, found), found


@pytest.mark.parametrize("name", ["p1b1", "p1b2"])
def test_features_in_another_order_are_found_by_name(prepared, frames, tmp_path, name):
    expected = [part[:] for part in vars(prepared(name)).values() if isinstance(part, Samples)]
    mixed = frames["test"][["gene2", "case_id", *reversed(FEATURES[3:]), "cancer_type"]]
    mixed = mixed.assign(further=1.0, gene0=frames["test"].gene0, gene1=frames["test"].gene1)
    mixed = mixed.set_index("case_id").reset_index()
    mixed.insert(1, "cancer_type", mixed.pop("cancer_type"))
    mixed.to_csv(tmp_path / "test.csv", index=False)
    found = [part[:] for part in vars(prepared(name)).values() if isinstance(part, Samples)]
    for one, other in zip(chain(*found), chain(*expected), strict=True):
        np.testing.assert_array_equal(one, other)
    further, order, *_ = prepared.reader.warnings
    assert further.startswith("test.csv: 1 further features are ignored: 'further'")
    assert order == "test.csv: features are put in the order of the training"


@pytest.mark.parametrize("fit", ["all", "train"])
@pytest.mark.parametrize("name", ["nt3", "p1b1", "p1b2"])
def test_validation_cases_of_ones_own_are_scaled_with_the_others(
    prepared, frames, tmp_path, name, fit
):
    own = frames["test"].head(5).assign(case_id=[f"own-{i}" for i in range(5)], gene0=20.0)
    own.to_csv(tmp_path / "own.csv", index=False)
    if name == "nt3":  # whose tables have no header, and the class first
        for role, frame in {**frames, "own": own}.items():
            frame = frame[FEATURES].assign(cancer_type=np.arange(len(frame)) % 2)
            frame = frame[["cancer_type", *FEATURES]]
            frame.to_csv(tmp_path / f"{role}.csv", index=False, header=False)
    flags = ["--scaling", "minmax"] if name == "nt3" else ["--shuffle=0"]
    data = prepared(name, f"--val_data={tmp_path}/own.csv", "--scaling_fit", fit, *flags)
    fitted = [frames["train"], *([frames["test"], own] if fit == "all" else [])]
    train, _ = scaled(frames, *fitted)
    features = [part[:][0].reshape(len(part), -1) for part in (data.train, data.validation)]
    np.testing.assert_allclose(features[0], train, atol=1e-6)
    values = pd.concat(fitted)["gene0"]
    expected = (20 - values.min()) / (values.max() - values.min())
    np.testing.assert_allclose(features[1][:, 0], expected, rtol=1e-6)
    assert len(data.validation) == 5
    assert prepared.reader.identify()["validation"]["path"].endswith("own.csv")
    if name != "nt3":
        own.rename(columns={"gene3": "other"}).to_csv(tmp_path / "own.csv", index=False)
        with pytest.raises(DataError, match=r"own\.csv: it lacks .*'gene3'"):
            prepared(name, f"--val_data={tmp_path}/own.csv")


NUM_PATIENTS, FOLDS = 60, 5
PATIENTS = [f"P{i % NUM_PATIENTS}" for i in range(3 * NUM_PATIENTS)]
CLASSES = [int(name[1:]) % 3 == 0 for name in PATIENTS]
NAMES = ("nt3", "p1b1", "p1b2")


@pytest.fixture
def cohort(tmp_path):
    """The files of 60 patients with three samples; the number of each is its only feature."""
    (tmp_path / "groups.txt").write_text("\n".join(PATIENTS) + "\n")
    rows = [f"{int(kind)},{i},1\n" for i, kind in enumerate(CLASSES)]
    (tmp_path / "nt3.csv").write_text("".join(rows))
    named = [f"case{i},{'AB'[kind]},{i},1\n" for i, kind in enumerate(CLASSES)]
    for name in ("p1b1", "p1b2"):
        (tmp_path / f"{name}.csv").write_text("".join(["case_id,cancer_type,number,one\n", *named]))
    return tmp_path


def load(name, directory, *flags, group_data="groups.txt"):
    """Returns the data of a run, unscaled, the reader and the parameters."""
    benchmark = find_benchmark(name)
    groups = [f"--group_data={directory / group_data}"] if group_data else []
    params = benchmark.read_parameters(
        [f"--train_data={directory / name}.csv", *groups, "--scaling", "none", *flags]
    )
    reader = Reader(locate_files(benchmark, params))
    return benchmark.preprocess(benchmark.load_data(reader, params), params), reader, params


def numbers(samples):
    return np.ravel(np.reshape(samples[:][0], (len(samples), -1))[:, 0]).astype(int).tolist()


def folds(name, directory, *flags):
    """Returns the samples to train on and those held out, of every fold."""
    found = []
    for fold in range(1, FOLDS + 1):
        data, _, _ = load(name, directory, f"--folds={FOLDS}", f"--fold={fold}", *flags)
        assert data.validation is data.test
        found.append((numbers(data.train), numbers(data.test)))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_sample_is_held_out_once_and_no_patient_is_on_both_sides(cohort, name):
    found = folds(name, cohort)
    assert sorted(i for _, held in found for i in held) == [*range(len(PATIENTS))]
    for train, held in found:
        assert sorted(train + held) == [*range(len(PATIENTS))]
        assert not {PATIENTS[i] for i in train} & {PATIENTS[i] for i in held}
        assert len(held) == len(PATIENTS) // FOLDS
        if name != "p1b1":  # whose model does not see classes
            assert Counter(CLASSES[i] for i in held) == {True: 12, False: 24}
    assert folds(name, cohort) == found
    assert folds(name, cohort, "--rng_seed", "5") != found


def test_a_fold_reads_groups_from_the_import_and_names_their_file(cohort):
    facts = {"benchmark": "nt3", "parameters": {}, "options": {}, "groups": {"train": PATIENTS}}
    facts |= {"features": ["number", "one"], "classes": ["a", "b"]}
    (cohort / "import.json").write_text(json.dumps(facts))
    data, reader, params = load("nt3", cohort, "--folds=5", group_data=None)
    assert params["group_data"] == str(cohort / "import.json")
    assert str(params.origin("group_data")).startswith("imported data")
    assert numbers(data.test) == folds("nt3", cohort)[0][1]
    reader.digest()
    described = reader.describe()
    assert described.keys() == {"train", "groups"}
    assert described["groups"]["values_sha256"]


def test_without_groups_a_case_is_not_divided(cohort):
    table = (cohort / "p1b2.csv").read_text().splitlines()
    (cohort / "p1b2.csv").write_text("\n".join([*table, *table[1:]]) + "\n")
    data, _, _ = load("p1b2", cohort, "--folds=5", group_data=None)
    assert set(Counter(numbers(data.train)).values()) == {2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--folds=5", "--fold=6"), "fold 6 .flag.: there are 5 folds"),
        (("--folds=1",), "folds 1 .flag.: give 2 or more"),
        (("--folds=61",), "folds 61: there are only 60 groups of samples"),
        ("A\nB\n", "groups.txt.*the groups of 2 samples, but .*nt3.csv has 180"),
        ("A\n\nB\n", "groups.txt.*line 2 is empty"),
    ],
)
def test_what_cannot_be_divided_is_refused(cohort, change, message):
    if isinstance(change, str):
        (cohort / "groups.txt").write_text(change)
    with pytest.raises(CandleError, match=message):
        load("nt3", cohort, *(("--folds=5",) if isinstance(change, str) else change))


def test_a_class_that_is_not_on_both_sides_is_told(cohort):
    table = (cohort / "p1b2.csv").read_text()
    (cohort / "p1b2.csv").write_text(table.replace("case7,A", "case7,C"))
    warned = [load("p1b2", cohort, "--folds=5", f"--fold={i}")[1].warnings for i in range(1, 6)]
    assert all("the classes C are not on both sides" in "".join(each) for each in warned)
