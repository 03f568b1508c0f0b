from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from candle_p1.errors import DataError, ParameterError
from candle_p1.studies.plan import Choice, make_plan
from candle_p1.studies.study_file import find_study, list_studies, read_study

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
FIRST = ["long-color-a_b-np2", "short-color-a_b-np1", "long-color-red-np1"]
ONE = f'title = "one"\nbenchmark = "{TOY}"\nrepeats = 1\nminutes = 5\n[sizes.small]\nranks = [1]\n'


@pytest.fixture
def plan(tmp_path):
    def plan(text=STUDY, **choice):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return make_plan(read_study(path), Choice(**choice), tmp_path / "out")

    return plan


def names(plan):
    return [run.name for run in plan.runs]


def test_each_block_holds_every_combination_once_in_its_own_order(plan):
    runs = plan().runs
    blocks = [runs[start : start + 8] for start in (0, 8, 16)]
    orders = [[run.point for run in block] for block in blocks]
    assert [{run.repeat for run in block} for block in blocks] == [{0}, {1}, {2}]
    points = product(("long", "short"), ("a_b", "red"), (1, 2))
    expected = [f"{variant}-color-{color}-np{ranks}" for variant, color, ranks in points]
    assert [sorted(order) for order in orders] == [expected] * 3
    assert orders[0] != orders[1] != orders[2]
    assert orders[0][:3] == FIRST  # the same on every machine, in every version


def test_the_order_depends_on_the_seed_and_not_on_other_ranks_and_repeats(plan):
    in_order = names(plan())
    assert in_order != names(plan(seed=1)) != sorted(in_order)
    assert names(plan(ranks=[2])) == [name for name in in_order if "-np2-" in name]
    assert names(plan(repeats=5))[:24] == in_order


def test_all_attributes_of_a_run(plan, tmp_path):
    run = next(run for run in plan().runs if run.name == "long-color-a_b-np2-r1")
    assert run.flags == {"epochs": 8, "toy_s": 2.5, "color": "a b", "rng_seed": 7103}
    assert (run.num_ranks, run.variables) == (2, {})
    assert (run.epochs_per_rank, run.minutes) == (4, 5)
    assert run.settings["toy_s"] == 2.5
    assert run.settings["rng_seed"] == 7103
    assert "output_dir" not in run.settings
    directory = tmp_path / "out/mine-small"
    assert run.directory() == directory / "long-color-a_b-np2-r1"
    assert run.directory(2) == directory / "long-color-a_b-np2-r1-attempt2"
    assert run.command_flags(run.directory()) == [
        *("--epochs", "8", "--toy_s", "2.5", "--color", "a b", "--rng_seed", "7103"),
        *("--output_dir", str(directory), "--experiment_id", ".", "--run_id", run.name),
    ]


def test_values_of_every_type_become_arguments_and_timelines_lie_beside_the_records(plan):
    keys = "timeline = true\nflags = { shape = [1, 2], verbose = true, dropout = 1e-5 }\n[sizes"
    text = ONE.replace("[1]", "[1, 2]").replace("[sizes", keys)
    one, two = sorted(plan(text).runs, key=lambda run: run.num_ranks)
    argv = [run.command_flags(run.directory()) for run in (one, two)]
    assert " ".join(argv[0]).startswith("--shape 1 2 --verbose True --dropout 1e-05 ")
    assert (one.settings["shape"], one.settings["verbose"]) == ([1, 2], True)
    assert "--timeline" not in argv[0]  # a single rank has none
    assert argv[1][-2:] == ["--timeline", f"{two.directory()}/timeline.json"]
    assert "timeline" not in two.settings
    off = f"{text}[sizes.off]\nranks = [2]\ntimeline = false\n"
    assert not plan(off, size="off").runs[0].timeline


def test_threads_and_environment_variables_are_crossed_too(plan):
    keys = 'threads = [1, 2]\nenvironment = { HOROVOD_LOG_LEVEL = ["1", "5"], NCCL_DEBUG = "INFO" }'
    runs = {run.point: run.variables for run in plan(ONE.replace("[s", f"{keys}\n[s")).runs}
    assert runs == {
        f"HOROVOD_LOG_LEVEL-{level}-threads-{threads}-np1": {
            "HOROVOD_LOG_LEVEL": level,
            "NCCL_DEBUG": "INFO",
            "OMP_NUM_THREADS": threads,
        }
        for level, threads in product("15", "12")
    }
    text = ONE.replace("[s", "threads = 3\n[s").replace(f'"{TOY}"', f'["{TOY}", "nt3"]')
    assert sorted(names(plan(text))) == ["nt3-np1-r0", "toy-np1-r0"]
    assert plan(text).runs[0].variables == {"OMP_NUM_THREADS": "3"}


def test_flags_of_the_command_line_apply_to_all_runs(plan):
    runs = plan(flags=["-e", "4", "--data_seed=5", "--rng_seed", "10"]).runs
    assert {(run.flags["epochs"], run.settings["data_seed"]) for run in runs} == {(4, 5)}
    assert {(run.repeat, run.settings["rng_seed"]) for run in runs} == {(0, 10), (1, 11), (2, 12)}


@pytest.mark.parametrize(
    ("old", "new", "flags", "problem"),
    [
        ("", "", "--color blue", "--color "),
        ("", "", "--toy_s 1", "--toy_s "),
        ("", "", "--output_dir x", "--output_dir "),
        ("", "", "--epocs 4", "--epocs .*'--epochs'"),
        ("", "", "--epochs 5", r"mine\.toml, .*5 epochs .*2 ranks"),
        ("", "", "--ckpt_directory x", "ckpt_directory "),
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
    with pytest.raises(DataError, match=r"absent\.csv"):
        plan(ONE.replace(str(TOY), "nt3"), flags=["--train_data", "absent.csv", "--test_data", "b"])


READY = [(name, size) for name in list_studies() for size in find_study(name).sizes]


@pytest.mark.parametrize(("name", "size"), READY)
def test_every_ready_made_study_expands(name, size, tmp_path):
    study = find_study(name)
    plan = make_plan(study, Choice(size=size), tmp_path)
    assert study.shows
    assert plan.directory == tmp_path / f"{name}-{size}"
    assert len({run.name for run in plan.runs}) == len(plan.runs) >= 2
    assert {run.settings["size"] for run in plan.runs} == {"small" if size == "small" else "full"}
    of_a_cluster = size in ("paper", "theta")
    deterministic = {run.settings["deterministic"] for run in plan.runs}
    assert deterministic == {not of_a_cluster and name != "allreduce"}
    assert of_a_cluster or max(run.num_ranks for run in plan.runs) <= 4
    loaders = {each.name: each.flags.get("loader") for each in study.sizes[size].variants}
    if size == "small" and name.startswith("weak-"):
        assert loaders == {"": None}  # their subject is quality
    elif name.startswith(
        ("strong-", "weak-", "timeline-", "power-")
    ):  # the paper's method is there
        others = {variant: loader for variant, loader in loaders.items() if "batch" not in variant}
        assert others == {"original": "original", "chunked": "chunked", "default": None}


def test_the_ready_made_studies_cover_the_papers_sweeps():
    shown = {what for name in list_studies() for what in find_study(name).shows}
    figures = {f"Figure {i}" for i in (3, *range(6, 22))}
    assert shown >= figures | {f"Table {i}" for i in (2, 3, 4, 5, 6)}
    assert set(READY) >= {(name, size) for name in list_studies() for size in ("small", "paper")}
    assert all(find_study(name).size()[0] == "small" for name in list_studies())
    of_loading = [name for name in list_studies() if name.startswith(("strong-", "weak-"))]
    assert len(of_loading) == 7
    assert all("files" in find_study(name).sizes for name in of_loading)


@pytest.mark.parametrize(
    ("names", "most", "epochs"),
    [
        ("strong-nt3 batch-p1b3 timeline-strong-nt3 power-nt3", 384, 1),
        ("strong-p1b1", 96, 4),
        ("strong-p1b2", 384, 2),
        ("weak-nt3", 3072, 8),
        ("timeline-weak-nt3", 768, 8),
    ],
)
def test_studies_have_the_papers_sizes(names, most, epochs, tmp_path):
    for name in names.split():
        runs = make_plan(find_study(name), Choice(size="paper"), tmp_path).runs
        assert max(run.num_ranks for run in runs) == most
        assert {run.epochs_per_rank for run in runs if run.num_ranks == most} == {epochs}
