"""Every parameter of the four benchmarks acts, or the run says that it does not.

Each is set in a short run, which must differ from the same run without it.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.parameters.parameter import SEVERAL_RANKS, Role
from tests.records import read_record

BENCHMARKS = ("nt3", "p1b1", "p1b2", "p1b3")
SHORT = "--epochs 2 --train_steps 3 --power none --early_stop False"
RUNS = {
    "nt3": f"nt3 --conv 4 20 1 --pool 10 --dense 8 {SHORT}",
    "p1b1": f"p1b1 --dense 16 8 --feature_subsample 40 {SHORT}",
    "p1b2": f"p1b2 --dense 16 8 --feature_subsample 40 {SHORT}",
    "p1b3": f"p1b3 --dense 16 8 --feature_subsample 40 --val_steps 3 --test_steps 3 {SHORT}",
}
HISTORY, FILES = "history", "files"
"""What differs: the metrics of the epochs or of the test, or the names of the files written."""


class Case(NamedTuple):
    """A value, with what it needs to act and what then differs.

    `differs` may also be a path in the record, or the file of tests that shows the effect.
    """

    value: str
    differs: str = HISTORY
    given: str = ""
    on: tuple[str, ...] = ("p1b2",)
    ranks: int = 1


ALL = BENCHMARKS
SAVING = "--ckpt_save_interval 1 --ckpt_keep_limit 5"
NT3, P1B1, P1B3 = ("nt3",), ("p1b1",), ("p1b3",)
CONVOLUTIONAL = ("nt3", "p1b3")
NARROW = "--conv 4 20 2 --pool 2 --dense 8"
CASES = {
    "data_type": Case("bf16", on=ALL),
    "rng_seed": Case("5", on=ALL),
    "train_bool": Case("False", "tests/integration/test_drivers.py"),
    "eval_bool": Case("False", "quality"),
    "timeout": Case("1", "tests/unit/training/test_place.py"),
    "gpus": Case("0", "tests/unit/distributed/test_gpus.py"),
    "config_file": Case("f", "tests/integration/test_options.py"),
    "model_name": Case("other", "parameters.model_name"),
    "home_dir": Case("h", "says"),
    "val_data": Case("v", "says"),
    "train_data": Case("t", "tests/unit/parameters/test_origins.py"),
    "test_data": Case("t", "tests/unit/parameters/test_origins.py"),
    "data_dir": Case("d", "tests/integration/test_own_files.py"),
    "data_url": Case("u", "tests/unit/datasets/test_fetch.py"),
    "save_path": Case("elsewhere", "tests/integration/test_options.py"),
    "output_dir": Case("o", "tests/integration/test_nt3.py"),
    "experiment_id": Case("E", "tests/integration/test_contract.py"),
    "run_id": Case("R", "tests/integration/test_nt3.py"),
    "logfile": Case("log", "tests/integration/test_options.py"),
    "timeline": Case("t", "tests/integration/test_measuring.py"),
    "scaling": Case("none", on=ALL),
    "shuffle": Case("True", given="--shuffle False", on=("p1b1", "p1b2")),
    "feature_subsample": Case("50", on=("p1b1", "p1b2", "p1b3")),
    "dense": Case("12", on=ALL),
    "conv": Case("3 20 2", given=NARROW, on=CONVOLUTIONAL),
    "locally_connected": Case("True", given=NARROW, on=CONVOLUTIONAL),
    "pool": Case("4", given=NARROW, on=CONVOLUTIONAL),
    "activation": Case("tanh", on=ALL),
    "out_activation": Case("linear", on=("nt3", "p1b1", "p1b2")),
    "dropout": Case("0.5", on=ALL),
    "batch_normalization": Case("True", on=("p1b1", "p1b3")),
    "initialization": Case("he_normal", on=ALL),
    "loss": Case("mae", on=ALL),
    "optimizer": Case("adagrad", on=ALL),
    "metrics": Case("mape", on=ALL),
    "epochs": Case("1"),
    "batch_size": Case("7", on=ALL),
    "learning_rate": Case("0.5", on=ALL),
    "optimizer_formula": Case("keras3"),
    "early_stop": Case("True", given="--epochs 6 --learning_rate 9 --patience 1"),
    "patience": Case("2", given="--epochs 6 --learning_rate 9 --early_stop True --patience 1"),
    "momentum": Case("0.9"),
    "val_split": Case("0.3", on=("p1b1", "p1b2", "p1b3")),
    "train_steps": Case("2"),
    "val_steps": Case("1", given="--batch_size 20"),
    "test_steps": Case("1", given="--batch_size 20"),
    "train_samples": Case("130", on=ALL),
    "val_samples": Case("9", on=ALL),
    "ckpt_save_interval": Case("1", FILES),
    "ckpt_every_s": Case("0.001", FILES),
    "ckpt_every_steps": Case("1", FILES),
    "ckpt_skip_epochs": Case("2", FILES, SAVING),
    "ckpt_save_best": Case("False", FILES, "--ckpt_save_interval 9 --epochs 5"),
    "ckpt_save_best_metric": Case("val_accuracy", "tests/unit/checkpoints/test_policy.py"),
    "ckpt_save_weights_only": Case("True", "checkpoints.saved_bytes", SAVING),
    "ckpt_checksum": Case("True", "tests/unit/checkpoints/test_writer.py"),
    "ckpt_writers": Case("node", "tests/unit/checkpoints/test_writer.py"),
    "ckpt_restart_mode": Case("off", "tests/unit/training/test_place.py"),
    "ckpt_directory": Case("elsewhere", "checkpoints.directory", SAVING),
    "ckpt_keep_mode": Case("exponential", FILES, f"{SAVING} --epochs 12 --ckpt_save_best False"),
    "ckpt_keep_limit": Case("1", FILES, "--ckpt_save_interval 1 --epochs 4 --ckpt_keep_limit 3"),
    "ckpt_required": Case("True", "tests/unit/checkpoints/test_writer.py"),
    "save_model": Case("True", FILES),
    "loader": Case("chunked", "data.loader"),
    "load_threads": Case("2", "data.load_threads", "--load_threads 1"),
    "kernels": Case("plain", "model.kernels"),
    "check_replicas": Case("True", "tests/parallel/check_restart.py"),
    "cache_dir": Case("caches", "tests/unit/data/test_cache.py"),
    "cache_limit": Case("0.5", "tests/unit/data/test_cache.py"),
    "stage_dir": Case("stage", "tests/unit/data/test_cache.py"),
    "size": Case("full", "tests/unit/benchmarks"),
    "data_seed": Case("7", on=ALL),
    "scaling_fit": Case("train", on=ALL),
    "reshuffle": Case("False", on=ALL),
    "engine": Case("jax", "tests/integration/test_bench.py"),
    "averaging": Case("horovod", "distributed.settings.averaging", ranks=2),
    "data_parallel": Case("batch_step", ranks=2, given="--epochs_scaling none"),
    "epochs_scaling": Case("weak", ranks=2),
    "batch_scaling": Case("sqrt", ranks=2),
    "lr_scaling": Case("none", ranks=2),
    "warmup_epochs": Case("1", ranks=2, given="--epochs 4"),
    "warmup_by": Case("epoch", ranks=2, given="--epochs 4 --warmup_epochs 1"),
    "base_lr": Case("0.0001", given="--warmup_epochs 1"),
    "compression": Case("fp16", ranks=2),
    "backward_passes_per_step": Case("3"),
    "allow_nan": Case("True", "tests/integration/test_drivers.py"),
    "deterministic": Case("False", "tests/integration/test_parameters_act.py"),
    "verbose": Case("True", "tests/unit/training/test_place.py"),
    "profiling": Case("True", FILES),
    "step_trace": Case("True", FILES),
    "stall_shutdown_s": Case("99", "distributed.stall_shutdown_s", ranks=2),
    "power": Case("auto", "tests/integration/test_measuring.py"),
    "power_hz": Case("5", "tests/integration/test_measuring.py"),
    "communication_log": Case("False", "communication.logged"),
    "tensorboard": Case("True", FILES),
    "mllog": Case("True", FILES),
    # NT3's own
    "classes": Case("3", on=NT3),
    "reduce_lr": Case("False", given="--epochs 14 --learning_rate 1e-9 --reduce_lr True", on=NT3),
    "add_noise": Case("True", on=NT3),
    "label_noise": Case("0.6", given="--add_noise True", on=NT3),
    "noise_correlated": Case("True", given="--add_noise True", on=NT3),
    "feature_col": Case("51", given="--add_noise True --noise_correlated True", on=NT3),
    "feature_threshold": Case("0.9", given="--add_noise True --noise_correlated True", on=NT3),
    "noise_gaussian": Case("True", on=NT3),
    "noise_cluster": Case("True", given="--sample_ids 0 1 2 3 4 5 6 7", on=NT3),
    "sample_ids": Case("9 8 7", given="--noise_cluster True --sample_ids 0 1 2", on=NT3),
    "noise_column": Case("True", on=NT3),
    "noise_type": Case("uniform", given="--noise_column True", on=NT3),
    "std_dev": Case("0.9", given="--noise_gaussian True", on=NT3),
    # P1B1's own
    "model": Case("vae", on=P1B1),
    "latent_activation": Case("tanh", on=P1B1),
    "latent_dim": Case("3", on=P1B1),
    "residual": Case("True", given="--dense 16 16", on=P1B1),
    "alpha_dropout": Case("True", given="--dropout 0.2", on=P1B1),
    "epsilon_std": Case("2", given="--model vae", on=P1B1),
    "warmup_lr": Case("True", given="--batch_size 50", on=P1B1),
    "use_landmark_genes": Case("True", given="--feature_subsample 0", on=P1B1),
    "landmark_data": Case("f", "tests/unit/test_benchmark.py", on=P1B1),
    "cp": Case("True", FILES, on=P1B1),
    "tsne": Case("True", "tests/unit/benchmarks/test_p1b1.py", on=P1B1),
    # P1B2's and P1B3's own
    "reg_l2": Case("0.1"),
    "cell_features": Case("mirna", on=P1B3),
    "drug_features": Case("latent", on=P1B3),
    "min_logconc": Case("-4.5", on=P1B3),
    "max_logconc": Case("-4.5", on=P1B3),
    "subsample": Case("none", on=P1B3),
    "category_cutoffs": Case("0.3", on=P1B3),
    "test_cell_split": Case("0.3", on=P1B3),
    "scramble": Case("True", on=P1B3),
    "cell_noise_sigma": Case("1", on=P1B3),
    "save_best_model": Case("True", FILES, on=P1B3),
}
PLACES_OF_P1B3 = set(find_benchmark("p1b3").files.values())
"""Of which tests/unit/benchmarks/test_p1b3.py reads each."""


def declared(name):
    return find_benchmark(name).declaration.parameters


def test_every_parameter_is_in_the_table():
    parameters = {name: each for of in BENCHMARKS for name, each in declared(of).items()}
    unused = {name for name, each in parameters.items() if each.role is Role.UNUSED}
    assert parameters.keys() == CASES.keys() | unused | PLACES_OF_P1B3
    for name, case in CASES.items():
        for of in BENCHMARKS:
            if name in declared(of) and case.differs == HISTORY and case.on == ALL:
                assert not declared(of)[name].needs_support, (name, of)
        if case.differs.startswith("tests/"):
            place = Path(__file__).parents[2] / case.differs
            files = place.rglob("*.py") if place.is_dir() else [place]
            assert any(name.removeprefix("ckpt_") in file.read_text() for file in files), name


@pytest.mark.parametrize("of", BENCHMARKS)
def test_what_has_no_effect_is_said(of):
    """A sentence names what lacks something it needs, or the benchmark's support."""
    benchmark = find_benchmark(of)
    for name, parameter in declared(of).items():
        if not (parameter.acts_with or parameter.needs_support or parameter.role is Role.UNUSED):
            continue
        value = CASES[name].value if name in CASES else "some"
        params = benchmark.read_parameters([f"--{name}", *value.split()])
        absent = {need: (None, params.origin(name)) for need in parameter.acts_with.keys() & params}
        idle = params.with_settings(absent)
        assert any(name in sentence for sentence in (*params.warnings, *idle.idle(1))), name
        if SEVERAL_RANKS in parameter.acts_with:
            assert not any(sentence.startswith(f"{name} ") for sentence in idle.idle(2)), name


def runs_of(num_ranks):
    """Returns each case on each benchmark, and what it is compared with, by name."""
    runs, beside = {}, {}
    for name, case in CASES.items():
        if case.ranks != num_ranks or case.differs == "says" or case.differs.startswith("tests/"):
            continue
        for of in case.on:
            base = f"{RUNS[of]} {case.given}".strip()
            bases = {line: each for each, line in runs.items()}
            beside[f"{of}-{name}"] = bases.get(base, f"{of}-beside-{name}")
            runs[beside[f"{of}-{name}"]] = base
            runs[f"{of}-{name}"] = f"{without(base, name)} --{name} {case.value}"
    return runs, beside


def without(line, name):
    """Returns a command line without a flag."""
    first, *flags = line.split(" --")
    return " --".join([first, *(flag for flag in flags if flag.split()[0] != name)])


@pytest.mark.extended
@pytest.mark.horovod
def test_every_value_makes_a_difference(train_all):
    check(train_all, 1)


@pytest.mark.extended
@pytest.mark.parallel
def test_every_value_makes_a_difference_on_two_ranks(train_all):
    check(train_all, 2)


def check(train_all, num_ranks):
    runs, beside = runs_of(num_ranks)
    place = train_all(num_ranks, runs, limit_s=1500)
    same = [
        name
        for name, other in beside.items()
        if observed(place / name, name) == observed(place / other, name)
    ]
    assert not same


@pytest.mark.extended
@pytest.mark.parallel
def test_only_deterministic_runs_average_each_gradient_by_itself(train_all):
    """Horovod reads its settings once, so these runs have a process each."""
    found = []
    for value in ("True", "False"):
        line = f"{RUNS['p1b2']} --averaging horovod --deterministic {value}"
        record = read_record(train_all(2, {value: line}) / value / "run.json")
        found.append(record["distributed"]["settings"]["HOROVOD_FUSION_THRESHOLD"])
    assert found == ["0", "134217728"]


def observed(directory, name):
    """Returns that part of a run which a case's parameter should change."""
    differs, record = CASES[name.partition("-")[2]].differs, read_record(directory / "run.json")
    if differs == FILES:
        return {str(path.relative_to(directory)) for path in directory.rglob("*")}
    if differs == HISTORY:
        rows = list(csv.DictReader((directory / "history.csv").read_text().splitlines()))
        return rows, record["quality"]
    found = record
    for key in differs.split("."):
        found = found.get(key) if found else None
    return found
