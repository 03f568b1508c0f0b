"""Parameter files and command lines are read as by CANDLE; each value says which source set it."""

import ast
import configparser

import pytest

from candle_p1.benchmark import find_benchmark, list_benchmarks
from candle_p1.parameters.catalog import KNOWN
from tests.candle import FILES, LINES, benchmark_of

BENCHMARKS = [find_benchmark(name) for name in list_benchmarks()]
EARLIER_NAMES = {
    "drop": "dropout",
    "file_test": "test_data",
    "file_train": "train_data",
    "out_act": "out_activation",
    "penalty": "reg_l2",
    "save": "save_path",
    "url_p1b1": "data_url",
    "validation_split": "val_split",
}
IN_VAIN = (
    "acc_gain abs_gain min_acc max_abs alpha alpha_scale_factor init_abs_epoch task_list task_names"
)
"""The parameters of NT3's files with noise that have no effect here; other files have none."""
NOT_CANDLES = {"config_file", "batch_scaling", "model_name"}
"""What the flag or the benchmarks' own files set, and some of CANDLE's files do not."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def file(request):
    return request.param


def read_as_candle(path):
    """Returns the values that CANDLE's ``read_config_file`` makes of a file, by present names."""
    parser = configparser.ConfigParser()
    assert parser.read(path)
    values = {}
    for section in parser.sections():
        for name, text in parser.items(section):
            values.setdefault(EARLIER_NAMES.get(name, name), ast.literal_eval(text))
    return values


def in_vain(params):
    """Returns the names in the warning about parameters without effect."""
    texts = [each.partition(" without effect here: ")[2] for each in params.warnings]
    (names,) = filter(None, texts) if any(texts) else ("",)
    return names.partition(" (")[0].replace(",", "")


def test_a_file_is_read_as_candle_reads_it(file):
    benchmark = find_benchmark(benchmark_of(file))
    params = benchmark.initialize_parameters(file, argv=[])
    for name, value in read_as_candle(file).items():
        if name not in params:
            assert name in KNOWN
            continue
        if benchmark.declaration.parameters[name].many and value is not None:
            value = value if isinstance(value, list) else [value]
            if any(isinstance(each, list) for each in value):
                value = [number for each in value for number in each]
        assert params[name] == value, name
        assert isinstance(params[name], bool) == isinstance(value, bool), name
    origins = {params.base.origin(name).kind for name in read_as_candle(file) if name in params}
    assert origins == {"model file"}
    is_noise = file.name == "nt3_noise_model.txt"
    assert in_vain(benchmark.bind(params)) == (IN_VAIN if is_noise else "")


OWN = [path for each in BENCHMARKS for path in sorted(each.folder.glob("*_model.txt"))]


@pytest.mark.parametrize("path", [*FILES, *OWN], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_file_means_the_same_as_config_file_and_as_model_file(path):
    benchmark = find_benchmark(benchmark_of(path))
    as_model_file = benchmark.bind(benchmark.initialize_parameters(path, argv=[]))
    as_config_file = benchmark.read_parameters(["--config_file", str(path)])
    names = {name for name in as_config_file if as_config_file[name] != as_model_file[name]}
    assert names <= ({"config_file"} if path in OWN else NOT_CANDLES)
    assert in_vain(as_config_file) == in_vain(as_model_file)
    assert {as_config_file[name] for name in benchmark.files.values()} == {None}
    assert path not in OWN or as_model_file.warnings == as_config_file.warnings == ()


def test_a_file_can_stand_in_place_of_the_benchmarks_own(file, tmp_path, monkeypatch):
    known = find_benchmark(benchmark_of(file))
    monkeypatch.setattr(type(known), "model_file", file)
    benchmark = type(known)()  # which has read no file yet
    params = benchmark.read_parameters([])
    assert params["epochs"] == read_as_candle(file)["epochs"]
    assert {params[name] for name in benchmark.files.values()} == {None}
    assert in_vain(params) == in_vain(benchmark.bind(params))
    assert set(benchmark.published.files) == set(known.published.files)
    assert benchmark.published.url.startswith(("http://", "ftp://"))
    for name in benchmark.published.files.values():
        (tmp_path / name).touch()
    assert benchmark.read_parameters(["--data_dir", str(tmp_path)]).warnings == params.warnings


VALUES = {
    "p1b3 " + LINES["p1b3"][1]: {"epochs": 200, "conv": [10, 10, 1, 5, 5, 1]},
    "p1b3 " + LINES["p1b3"][4]: {
        "locally_connected": True, "batch_normalization": True, "pool": [100],
    },
    "p1b3 " + LINES["p1b3"][5]: {"conv": [10, 10, 5, 10, 10, 5], "dense": None},
    "nt3 " + LINES["nt3"][2]: {"batch_size": 5, "timeout": 7200},
}  # fmt: skip


@pytest.mark.parametrize("line", [f"{name} {line}" for name in LINES for line in LINES[name]])
def test_a_command_line_is_understood(line):
    name, *flags = line.split()
    params = find_benchmark(name).read_parameters(flags)
    given = {flag for flag in params if params.origin(flag).kind == "flag"}
    wanted = {word.lstrip("-") for word in flags if word.startswith("-")}
    short = {"e": "epochs", "conf": "config_file"}
    assert given == {short.get(word, word) for word in wanted}
    assert params.warnings == ()
    assert {**params, **VALUES.get(line, {})} == dict(params)


SOURCES = ("flag", "config file", "driver")
OTHERS = {
    "epochs": 3,
    "learning_rate": 0.25,
    "dense": [5, 4],
    "run_id": "x",
    "optimizer": "adagrad",
}
OTHERS |= {"optimizer": "adagrad", "warmup_epochs": 2, "base_lr": 0.125, "loader": "chunked"}
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
    values = OTHERS | {
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
