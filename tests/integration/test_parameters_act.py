"""Every parameter of the four benchmarks acts, or the run says that it does not.

What decides on samples, network or plan must change what a run would train, and the others a run.
"""

from __future__ import annotations

import csv
import functools
import zlib
from itertools import groupby, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.data.reader import Reader
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import Engine
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
FEW = 200
"""Samples of each kind that are looked at."""
MADE, HISTORY, FILES = "made", "history", "files"
"""What differs: what is made before training; metrics of the epochs or the test; names of files."""


class Case(NamedTuple):
    """A value, with what it needs to act and what then differs.

    What no benchmark's own code looks at is set for one of them.
    `differs` may also be a path in the record.
    """

    value: str
    differs: str = MADE
    given: str = ""
    on: tuple[str, ...] = ("p1b2",)
    ranks: int = 1


ALL = BENCHMARKS
SAVED = (
    "--epochs 12 --shuffle False --batch_size 20 --load_threads 1"
    " --ckpt_save_interval 1 --ckpt_keep_limit 5 --ckpt_save_best False"
)
"""What many cases change, so that they share a run to compare with."""
PLATEAU = "--epochs 14 --learning_rate 1e-9 --reduce_lr True"
NT3, P1B1, P1B3 = ("nt3",), ("p1b1",), ("p1b3",)
CONVOLUTIONAL = ("nt3", "p1b3")
WARMED = "--epochs 4 --warmup_epochs 1"
NARROW = "--conv 4 20 2 --pool 2 --dense 8"
CASES = {
    "rng_seed": Case("5", on=P1B3),
    "eval_bool": Case("False", "quality", SAVED),
    "model_name": Case("other", "parameters.model_name", SAVED),
    "home_dir": Case("h", "says"),
    "val_data": Case("v", "says", on=P1B3),
    "group_data": Case("g", "says", on=P1B3),
    "folds": Case("4", on=("nt3", "p1b1", "p1b2")),
    "fold": Case("2", given="--folds 4", on=("nt3", "p1b1", "p1b2")),
    "scaling": Case("none", on=ALL),
    "shuffle": Case("True", HISTORY, SAVED, on=("p1b1", "p1b2")),
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
    "optimizer": Case("adagrad", on=NT3),
    "metrics": Case("mape", on=ALL),
    "epochs": Case("1", HISTORY, SAVED),
    "batch_size": Case("7", HISTORY, SAVED, on=P1B1),
    "learning_rate": Case("0.5", on=NT3),
    "optimizer_formula": Case("keras3"),
    "momentum": Case("0.9"),
    "val_split": Case("0.3", on=("p1b1", "p1b2", "p1b3")),
    "train_steps": Case("2", HISTORY, SAVED),
    "val_steps": Case("1", HISTORY, SAVED),
    "test_steps": Case("1", HISTORY, SAVED),
    "train_samples": Case("130", HISTORY, on=P1B3),
    "val_samples": Case("9", HISTORY, PLATEAU, on=NT3),
    "ckpt_save_interval": Case("2", FILES, SAVED),
    "ckpt_every_s": Case("0.001", FILES, SAVED),
    "ckpt_every_steps": Case("1", FILES, SAVED),
    "ckpt_skip_epochs": Case("10", FILES, SAVED),
    "ckpt_save_best": Case("False", FILES, "--ckpt_save_interval 9 --epochs 5"),
    "ckpt_save_weights_only": Case("True", "checkpoints.saved_bytes", SAVED),
    "ckpt_directory": Case("elsewhere", "checkpoints.directory", SAVED),
    "ckpt_keep_mode": Case("exponential", FILES, SAVED),
    "ckpt_keep_limit": Case("1", FILES, SAVED),
    "load_threads": Case("2", "data.load_threads", SAVED),
    "data_seed": Case("7", on=ALL),
    "scaling_fit": Case("train", on=ALL),
    "reshuffle": Case("False", HISTORY, SAVED, on=P1B1),
    "averaging": Case("horovod", "distributed.settings.averaging", WARMED, ranks=2),
    "lr_scaling": Case("none", HISTORY, WARMED, ranks=2),
    "warmup_epochs": Case("2", HISTORY, WARMED, ranks=2),
    "warmup_by": Case("epoch", HISTORY, WARMED, ranks=2),
    "base_lr": Case("0.0001", given="--warmup_epochs 1"),
    "backward_passes_per_step": Case("3", HISTORY, SAVED),
    "communication_log": Case("False", "communication.clock_waits_for", WARMED, ranks=2),
    # NT3's own
    "classes": Case("3", on=NT3),
    "reduce_lr": Case("False", HISTORY, PLATEAU, on=NT3),
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
    "latent_activation": Case("tanh", on=P1B1),
    "latent_dim": Case("3", on=P1B1),
    "residual": Case("True", given="--dense 16 16", on=P1B1),
    "alpha_dropout": Case("True", given="--dropout 0.2", on=P1B1),
    "epsilon_std": Case("2", given="--model vae", on=P1B1),
    "use_landmark_genes": Case("True", given="--feature_subsample 0", on=P1B1),
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
}
SHOWN_BY = {
    "tests/integration/conftest.py": "config_file=f save_path=elsewhere logfile=log early_stop=True"
    " patience=2 profiling=True model=vae warmup_lr=True save_model=True cp=True"
    " save_best_model=True data_parallel=batch_step batch_scaling=sqrt epochs_scaling=weak"
    " step_trace=True power=auto power_hz=5 tensorboard=True mllog=True check_replicas=True",
    "tests/integration/test_bench.py": "engine=jax kernels=plain",
    "tests/integration/test_data_types.py": "data_type=bf16",
    "tests/integration/test_device_data.py": "device_data_mb=0",
    "tests/integration/test_drivers.py": "train_bool=False allow_nan=True",
    "tests/faults/processes.py": "experiment_id=E run_id=R",
    "tests/integration/test_failing.py": "stall_shutdown_s=99 output_dir=o",
    "tests/integration/test_jax_backend.py": "compiled_dir=programs share_gpus=True",
    "tests/integration/test_job_scripts.py": "deterministic=False",
    "tests/integration/test_measuring.py": "timeline=t",
    "tests/integration/test_own_files.py": "data_dir=d",
    "tests/integration/test_study_cli.py": "loader=original",
    "tests/parallel/check_measuring.py": "compression=fp16",
    "tests/unit/benchmarks": "size=full tsne=True",
    "tests/unit/checkpoints/test_policy.py": "ckpt_save_best_metric=val_accuracy",
    "tests/unit/checkpoints/test_writer.py": "ckpt_checksum=True ckpt_required=True",
    "tests/unit/data/test_cache.py": "cache_dir=caches cache_limit=0.5 stage_dir=stage",
    "tests/unit/datasets/test_fetch.py": "data_url=u",
    "tests/unit/distributed/test_gpus.py": "gpus=0",
    "tests/unit/test_benchmark.py": "landmark_data=f train_data=t test_data=t",
    "tests/unit/training/test_run_directory.py": "timeout=1 ckpt_restart_mode=off verbose=True",
}
"""Other tests that show what parameters do, with a value of each."""
SHOWN = dict(pair.split("=") for pairs in SHOWN_BY.values() for pair in pairs.split())
PLACES_OF_P1B3 = set(find_benchmark("p1b3").files.values())
"""Of which tests/unit/benchmarks/test_p1b3.py reads each."""


def declared(name):
    return find_benchmark(name).declaration.parameters


def test_every_parameter_is_in_the_table():
    parameters = {name: each for of in BENCHMARKS for name, each in declared(of).items()}
    unused = {name for name, each in parameters.items() if each.role is Role.UNUSED}
    assert parameters.keys() == CASES.keys() | SHOWN.keys() | unused | PLACES_OF_P1B3
    for name, case in CASES.items():
        for of in BENCHMARKS:
            if name in declared(of) and case.on == ALL:
                assert not declared(of)[name].needs_support, (name, of)
    for path, pairs in SHOWN_BY.items():
        place = Path(__file__).parents[2] / path
        texts = [file.read_text() for file in (place.rglob("*.py") if place.is_dir() else [place])]
        for name in (pair.split("=")[0] for pair in pairs.split()):
            assert any(name.removeprefix("ckpt_") in text for text in texts), (name, path)


@pytest.mark.parametrize("of", BENCHMARKS)
def test_what_has_no_effect_is_said(of):
    """A sentence names what lacks something it needs, or the benchmark's support."""
    benchmark = find_benchmark(of)
    for name, parameter in declared(of).items():
        if not (parameter.acts_with or parameter.needs_support or parameter.role is Role.UNUSED):
            continue
        value = CASES[name].value if name in CASES else SHOWN.get(name, "some")
        params = benchmark.read_parameters([f"--{name}", *value.split()])
        absent = {need: (None, params.origin(name)) for need in parameter.acts_with.keys() & params}
        idle = params.with_settings(absent)
        assert any(name in sentence for sentence in (*params.warnings, *idle.idle(1))), name
        if SEVERAL_RANKS in parameter.acts_with:
            assert not any(sentence.startswith(f"{name} ") for sentence in idle.idle(2)), name


def cases_of(differs, num_ranks=1):
    """Returns cases by the line that they change; a function selects them by where they differ."""
    cases = {}
    for name, case in CASES.items():
        if case.ranks == num_ranks and differs(case.differs):
            for of in case.on:
                cases.setdefault(f"{RUNS[of]} {case.given}".strip(), []).append(name)
    return cases


def changed(line, *names):
    """Returns a command line in which these parameters have the values of their cases."""
    first, *flags = line.split(" --")
    kept = [flag for flag in flags if flag.split()[0] not in names]
    return " --".join([first, *kept, *(f"{name} {CASES[name].value}" for name in names)])


def digest(array):
    return zlib.crc32(np.ascontiguousarray(array))


@functools.cache
def made(line):
    """Returns what a run would train: samples, the plan, the network, its weights and optimizer."""
    from candle_p1.training.setup import build_model, locate_files, make_plan

    name, *flags = line.split()
    benchmark, comm = find_benchmark(name), SerialCommunicator()
    params = benchmark.read_parameters(flags)
    reader = Reader(locate_files(benchmark, params))
    data = benchmark.preprocess(benchmark.load_data(reader, params), params)
    plan = make_plan(benchmark, params, len(data.train), comm)
    engine, device = Engine("serial", comm, "tensorflow"), SimpleNamespace(is_gpu=False)
    model = build_model(benchmark, params, data, plan, device, engine)
    parts = data.train, data.validation, data.test
    return (
        [(len(part), *map(digest, part[0:FEW])) for part in parts],
        plan,
        model.to_json(),
        [digest(weight) for weight in model.get_weights()],
        {key: str(value) for key, value in model.get_compile_config().items()},
    )


@pytest.mark.extended
@pytest.mark.horovod
def test_every_value_changes_what_is_made(environment):
    for line in RUNS.values():
        assert made.__wrapped__(line) == made(line)
    same = [
        (line, name)
        for line, names in cases_of(lambda differs: differs == MADE).items()
        for name in names
        if made(line) == made(changed(line, name))
    ]
    assert not same


@pytest.mark.extended
@pytest.mark.horovod
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.parallel)])
def test_every_value_changes_what_runs_do(train_all, num_ranks):
    """A run shows several parameters, if each differs elsewhere."""
    runs, shown = {}, []
    cases = cases_of(lambda differs: differs not in (MADE, "says"), num_ranks)
    for i, (line, names) in enumerate(cases.items()):
        runs[f"{i}"] = line
        names.sort(key=differs_of)
        by_place = [list(group) for _, group in groupby(names, differs_of)]
        for j, together in enumerate(zip_longest(*by_place)):
            together = list(filter(None, together))
            runs[f"{i}-{j}"] = changed(line, *together)
            shown += [(name, f"{i}", f"{i}-{j}") for name in together]
    place = train_all(num_ranks, runs, limit_s=1000)
    for name, *both in shown:
        base, other = (observed(place / run, differs_of(name)) for run in both)
        assert base != other, (name, both)
    if num_ranks > 1:  # a run that need not be deterministic is in test_job_scripts.py
        settings = (observed(place / run, "distributed.settings") for run in runs)
        assert {each.get("HOROVOD_FUSION_THRESHOLD") for each in settings} == {None, "0"}


def differs_of(name):
    return CASES[name].differs


def observed(directory, differs):
    """Returns that part of a run in which it should differ."""
    record = read_record(directory / "run.json")
    if differs == FILES:
        return {str(path.relative_to(directory)) for path in directory.rglob("*")}
    if differs == HISTORY:
        rows = list(csv.DictReader((directory / "history.csv").read_text().splitlines()))
        return rows, record["quality"]
    found = record
    for key in differs.split("."):
        found = found.get(key) if found else None
    return found
