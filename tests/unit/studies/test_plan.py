import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from candle_p1.cli import cli
from candle_p1.errors import DataError, ParameterError
from candle_p1.studies.plan import Choice, make_plan
from candle_p1.studies.study_file import find_study, list_studies, read_study
from tests.conftest import ROOT
from tests.expected import check_expected

TOY = Path(__file__).parents[2] / "files/toy"
STUDY = f"""
title = "a study"
benchmark = "{TOY}"
repeats = 3
minutes = 5
flags.epochs = 8
vary.color = ["red", "a b"]

[[variants]]
name = "long"
toy_s = 2.5

[[variants]]
name = "short"

[sizes.small]
ranks = [1, 2]
"""


@pytest.fixture
def plan(tmp_path):
    def plan(text=STUDY, **choice):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return make_plan(read_study(path), Choice(**choice), tmp_path / "out")

    return plan


FILES = ROOT / "tests/files/studies"
COMMANDS = (FILES / "commands.txt").read_text().splitlines()


@pytest.mark.parametrize("line", COMMANDS)
def test_the_runs_of_a_study_in_their_order(line, monkeypatch):
    """The order is the same on every machine, in every version."""
    monkeypatch.chdir(FILES)
    monkeypatch.delenv("COLUMNS", raising=False)
    result = CliRunner().invoke(cli, ["study", "show", *line.split()])
    text = re.sub(r" \\\n *", " ", result.output).replace(str(ROOT), "$ROOT")
    check_expected(FILES / "expected.txt", line, text, COMMANDS)


def test_the_order_depends_on_the_seed_and_not_on_other_ranks_and_repeats(plan):
    in_order, other, fewer, more = (
        [run.name for run in plan(**choice).runs]
        for choice in ({}, {"seed": 1}, {"ranks": [2]}, {"repeats": 5})
    )
    assert in_order != other != sorted(in_order)
    assert fewer == [name for name in in_order if "-np2-" in name]
    assert more[:24] == in_order


def test_all_attributes_of_a_run(plan, tmp_path):
    run = next(run for run in plan().runs if run.name == "long-color-a_b-np2-r1")
    assert run.flags == {"epochs": 8, "toy_s": 2.5, "color": "a b", "rng_seed": 7103}
    assert (run.num_ranks, run.epochs_per_rank, run.minutes) == (2, 4, 5)
    assert run.flags.items() <= run.settings.items()
    assert "output_dir" not in run.settings
    directory = tmp_path / "out/mine-small"
    assert run.directory(2) == directory / "long-color-a_b-np2-r1-attempt2"
    assert run.command_flags(run.directory()) == [
        *("--epochs", "8", "--toy_s", "2.5", "--color", "a b", "--rng_seed", "7103"),
        *("--output_dir", str(directory), "--experiment_id", ".", "--run_id", run.name),
    ]


@pytest.mark.parametrize(
    ("old", "new", "flags", "problem"),
    [
        ("", "", "--color blue", "--color "),
        ("", "", "--output_dir x", "--output_dir "),
        ("", "", "--epocs 4", "--epocs .*'--epochs'"),
        ("", "", "--epochs 5", r"mine\.toml, .*5 epochs .*2 ranks"),
        ("flags.epochs = 8", "flags.epoch = 8", "", r"mine\.toml, long-.*--epoch "),
        ("flags.epochs = 8", "flags.epochs = 0", "", r"mine\.toml, .*epochs = 0 "),
        ('name = "short"', 'name = "short"\ntoy_s = 2.5', "", "long-.* short-"),
        ('"a b"', '"a_b", "a b"', "", "long-color-a_b-np1"),
        ("repeats = 3", "repeats = 2000", "", "10,000"),
    ],
)
def test_what_the_benchmark_would_refuse_is_refused_before_anything_runs(
    plan, old, new, flags, problem
):
    with pytest.raises(ParameterError, match=problem):
        plan(STUDY.replace(old, new), flags=flags.split())


def test_a_missing_data_file_is_named(plan):
    text = 'title = ""\nbenchmark = "nt3"\nrepeats = 1\nminutes = 5\n[sizes.small]\nranks = [1]\n'
    with pytest.raises(DataError, match=r"absent\.csv"):
        plan(text, flags=["--train_data", "absent.csv", "--test_data", "b"])


READY = [(name, size) for name in list_studies() for size in find_study(name).sizes]


@pytest.mark.parametrize(("name", "size"), READY)
def test_every_ready_made_study_expands(name, size, tmp_path):
    study = find_study(name)
    runs = make_plan(study, Choice(size=size), tmp_path).runs
    assert study.shows
    assert len({run.name for run in runs}) == len(runs) >= 2
    assert {run.settings["size"] for run in runs} == {"small" if size == "small" else "full"}
    of_a_cluster = size in ("paper", "theta")
    assert of_a_cluster or max(run.num_ranks for run in runs) <= 4
    deterministic = {run.settings["deterministic"] for run in runs}
    assert deterministic == {not of_a_cluster and name != "allreduce"}


def test_the_ready_made_studies_cover_the_papers_sweeps():
    shown = {what for name in list_studies() for what in find_study(name).shows}
    figures = {f"Figure {i}" for i in (3, *range(6, 22))}
    assert shown >= figures | {f"Table {i}" for i in (2, 3, 4, 5, 6)}
    assert set(READY) >= {(name, size) for name in list_studies() for size in ("small", "paper")}


def test_folds_are_crossed_with_repeats_each_of_which_divides_anew(plan):
    text = 'title = "t"\nbenchmark = "nt3"\nrepeats = 2\nminutes = 5\nsizes.one.ranks = [1]\n'
    runs = plan(text, folds=3).runs
    found = sorted((run.settings["rng_seed"], run.settings["fold"]) for run in runs)
    assert found == [(7102 + repeat, fold) for repeat in range(2) for fold in (1, 2, 3)]
    assert {run.flags["folds"] for run in runs} == {3}
    with pytest.raises(ParameterError, match="are the same run"):
        plan(text.replace("nt3", "p1b3"), folds=3)
