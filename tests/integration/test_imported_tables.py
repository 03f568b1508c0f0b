"""Tables as people make them train the networks, without a file being edited."""

import pytest
from click.testing import CliRunner

from candle_p1.cli import cli
from tests.foreign_tables import ACROSS, CLINICAL, FORMS, GENES, RESPONSES, write_features
from tests.records import read_record

pytestmark = pytest.mark.extended

FLAGS = {
    "nt3": "--conv 8 3 1 --pool 2 --dense 16 --scaling std --learning_rate 0.02 --epochs 30",
    "p1b1": "--dense 12 --optimizer adam --learning_rate 0.01 --batch_size 8 --epochs 60",
    "p1b2": "--dense 32 --learning_rate 0.02 --epochs 60",
}
CASES = {
    "default.csv": ("nt3", ""),
    "across.tsv": ("p1b1", "--transpose True"),
    "single.h5ad": ("p1b2", ""),
}
"""The benchmark that trains on a form of the table, and the flags that its import asks for.

tests/unit/datasets/test_importing.py shows that all forms give the same.
"""
JOINED = "p1b3 --subsample none --min_logconc -7 --dense 50 --epochs 20 --batch_size 20"
STEPS = "--learning_rate 0.01 --power none"


@pytest.fixture(scope="module")
def place(train_all, tmp_path_factory):
    """Imports the tables and trains on them, in one job; returns the directory of the runs."""
    directory, runs = tmp_path_factory.mktemp("tables"), {}

    def run(*argv):
        found = CliRunner().invoke(cli, ["data", "import", *map(str, argv)])
        assert found.exit_code == 0, found.output
        return found.output

    CLINICAL.to_csv(directory / "clinical.tsv", sep="\t", index=False)
    for name, (benchmark, flags) in CASES.items():
        write, options = FORMS[name]
        write(directory / name)
        out, beside = directory / f"own-{name}", ["--labels", directory / "clinical.tsv"]
        given = ["--label", "kind", *(beside if "labels" in options else []), *flags.split()]
        output = run(benchmark, directory / name, "--out", out, *given)
        assert f"{len(GENES)} features" in output
        runs[name] = f"{benchmark} --data_dir {out} {FLAGS[benchmark]} --power none"
    features = write_features(directory)
    RESPONSES.to_csv(directory / "responses.csv", index=False)
    tables = [f"--features={role}={path}" for role, path in features.items()]
    out = directory / "own-responses"
    output = run("p1b3", directory / "responses.csv", *tables, "--out", out)
    assert "--cell_features expression --drug_features descriptors" in " ".join(output.split())
    runs["responses"] = f"{JOINED} {STEPS} --data_dir {out}"
    return train_all(1, runs)


@pytest.mark.parametrize("name", [*CASES, "responses"])
def test_a_network_trains_on_an_imported_table(place, name):
    record = read_record(place / name / "run.json")
    assert not record["data"]["synthetic"]
    metric = {"p1b1": "mse", "p1b3": "loss"}.get(record["benchmark"], "accuracy")
    value, naive = (record["quality"][metric][each] for each in ("value", "naive"))
    better = value > naive + 0.2 if metric == "accuracy" else value < 0.8 * naive
    assert better, record["quality"]


def test_a_wrong_guess_ends_in_advice_and_writes_nothing(tmp_path):
    ACROSS.to_csv(tmp_path / "table.tsv", sep="\t")
    argv = ["nt3", tmp_path / "table.tsv", "--label", "kind", "--out", tmp_path / "own"]
    found = CliRunner().invoke(cli, ["data", "import", *map(str, argv)])
    assert "pass --transpose True" in str(found.exception)
    assert not (tmp_path / "own").exists()
