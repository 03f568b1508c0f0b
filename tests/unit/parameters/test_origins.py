"""The origin of every parameter of a run is the source that set its value."""

import pytest

from candle_p1.benchmark import find_benchmark, list_benchmarks

BENCHMARKS = [find_benchmark(name) for name in list_benchmarks()]
SOURCES = ("flag", "config file", "driver")
VALUES = {
    "epochs": 3,
    "learning_rate": 0.25,
    "dense": [5, 4],
    "run_id": "x",
    "optimizer": "adagrad",
}
VALUES |= {"optimizer": "adagrad", "warmup_epochs": 2, "base_lr": 0.125, "loader": "chunked"}
"""Beside booleans, which have other values than those of the benchmarks."""


@pytest.fixture(params=BENCHMARKS, ids=lambda benchmark: benchmark.name)
def benchmark(request):
    return request.param


@pytest.fixture
def files(benchmark, tmp_path):
    """A directory that holds all of the benchmark's files under CANDLE's names."""
    for name in benchmark.published.files.values():
        (tmp_path / name).touch()
    return tmp_path


def bind(benchmark, source, values, config_file):
    """Binds parameters that a source has set; returns them, and the origin expected of each."""
    if source == "flag":
        listed = {name: v if isinstance(v, list) else [v] for name, v in values.items()}
        argv = [word for name, v in listed.items() for word in (f"--{name}", *map(str, v))]
        return benchmark.read_parameters(argv), dict.fromkeys(values, "flag")
    if source == "config file":
        lines = [f"{name} = {value!r}" for name, value in values.items()]
        config_file.write_text("\n".join(["[Global_Params]", *lines]) + "\n")
        origins = {name: f"config file {config_file}, line {i}" for i, name in enumerate(values, 2)}
        argv = ["--config_file", str(config_file)]
        return benchmark.read_parameters(argv), origins | {"config_file": "flag"}
    parameters = benchmark.initialize_parameters(argv=[])
    before = parameters.base
    parameters.update(values)
    origins = {
        name: "program" if value != before[name] else str(before.origin(name))
        for name, value in values.items()
    }
    return benchmark.bind(parameters), origins


def source_of_untouched(benchmark, name, params):
    """Returns the origin of a value that only the benchmark's own file or the default sets."""
    if name in benchmark.files.values():
        needed = [benchmark.files[role] for role in benchmark.needed_files(params)]
        return "synthetic data" if name in needed else "not read"
    lines = benchmark.model_file.read_text().splitlines()
    set_on = [i for i, line in enumerate(lines, 1) if line.partition("=")[0].strip() == name]
    return f"model file {benchmark.model_file.name}, line {set_on[0]}" if set_on else "default"


def test_untouched_values_come_from_the_model_file_or_are_defaults(benchmark):
    params = benchmark.read_parameters([])
    expected = {name: source_of_untouched(benchmark, name, params) for name in params}
    assert {name: str(params.origin(name)) for name in params} == expected


@pytest.mark.parametrize("source", SOURCES)
def test_each_value_comes_from_the_source_that_set_it(benchmark, files, source):
    own = benchmark.read_parameters([])
    values = VALUES | {
        name: not own[name]
        for name, parameter in own.declared.items()
        if parameter.type is bool and not parameter.needs_support
    }
    roles = {name: role for role, name in benchmark.files.items()}
    names = benchmark.published.files
    # Those that CANDLE does not have, such as --val_data, are any file.
    names = dict.fromkeys(roles.values(), next(iter(names.values()))) | dict(names)
    values |= {name: str(files / names[role]) for name, role in roles.items()}
    params, origins = bind(benchmark, source, values, files / "config.txt")
    needed = [benchmark.files[role] for role in benchmark.needed_files(params)]
    for name in params:
        expected = origins.get(name) or source_of_untouched(benchmark, name, params)
        if name in roles and name not in needed:
            expected = "not read"
        elif name in values:
            assert params[name] == values[name], name
        assert (name, str(params.origin(name))) == (name, expected)
    assert sum(values[name] != own[name] for name in values) > 15


@pytest.mark.parametrize("source", SOURCES)
def test_files_of_a_directory_come_from_what_named_the_directory(benchmark, files, source):
    config_file = files / "config.txt"
    params, _ = bind(benchmark, source, {"data_dir": str(files)}, config_file)
    expected = {
        "flag": "flag --data_dir",
        "config file": f"config file {config_file}, line 2, data_dir",
        "driver": "program, data_dir",
    }[source]
    for role, name in benchmark.files.items():
        if role in benchmark.needed_files(params):
            assert params[name] == str(files / benchmark.published.files[role])
            assert str(params.origin(name)) == expected
        else:
            assert (params[name], str(params.origin(name))) == (None, "not read")
    assert benchmark.bind(params).origin(name) == params.origin(name)


def test_values_that_a_benchmark_derives_come_from_what_they_follow_from(tmp_path):
    flags = ["--warmup_lr", "True", "--base_lr", "0.01"]
    params = find_benchmark("p1b1").read_parameters(flags)
    derived = [str(params.origin(name)) for name in ("warmup_epochs", "learning_rate", "base_lr")]
    assert derived == ["flag --warmup_lr", "flag --warmup_lr", "flag"]
    conv = tmp_path / "conv.txt"
    conv.write_text("[Global_Params]\nconv = [10, 10, 5]\n")
    params = find_benchmark("p1b3").read_parameters(["--config_file", str(conv)])
    assert params["dense"] is None
    assert str(params.origin("dense")) == f"config file {conv}, line 2, conv"
