"""CANDLE's parameter files and command lines are read as CANDLE reads them."""

import ast
import configparser

import pytest

from candle_p1.benchmark import find_benchmark
from candle_p1.parameters.catalog import KNOWN
from tests.candle import FILES, LINES, benchmark_of

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


def test_a_file_means_the_same_as_config_file_and_as_model_file(file):
    benchmark = find_benchmark(benchmark_of(file))
    as_model_file = benchmark.bind(benchmark.initialize_parameters(file, argv=[]))
    as_config_file = benchmark.read_parameters(["--config_file", str(file)])
    names = {name for name in as_config_file if as_config_file[name] != as_model_file[name]}
    assert names <= NOT_CANDLES
    assert in_vain(as_config_file) == in_vain(as_model_file)
    assert {as_config_file[name] for name in benchmark.files.values()} == {None}


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
