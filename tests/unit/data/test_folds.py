"""Cross-validation of a cohort with several samples of each patient."""

import json
from collections import Counter

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import Reader
from candle_p1.errors import CandleError
from candle_p1.training.setup import locate_files

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
