"""Finding benchmarks, and the files of a run."""

import bz2
import shutil
import sys
from pathlib import Path

import pytest

from candle_p1.benchmark import find_benchmark, list_benchmarks
from candle_p1.errors import DataError, ParameterError
from candle_p1.training.setup import locate_files

NT3 = find_benchmark("nt3")
LAZY = """
from candle_p1.benchmark import Benchmark

class Lazy(Benchmark):
    name = title = "lazy"
    preprocess = build_model = None

    def load_data(self, reader, params):
        import lazy_part

        return lazy_part.VALUE

BENCHMARK = Lazy()
"""
CANDLES_NAMES = "[Global_Params]\ntrain_data = 'nt_train2.csv'\ntest_data = 'nt_test2.csv'\n"
NAMES = {"train": "nt_train2.csv", "test": "nt_test2.csv"}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The working directory and the data directory are empty."""
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def bind(*flags, benchmark=NT3):
    return benchmark.read_parameters(flags)


@pytest.fixture
def files(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    for name in NAMES.values():
        (directory / name).write_text("0,1\n1,2\n")
    return directory


def test_a_folder_of_results_is_not_mistaken_for_a_benchmark(tmp_path):
    (tmp_path / "nt3").mkdir()
    assert find_benchmark("nt3") is NT3
    with pytest.raises(ParameterError, match=r"\./nt3 .*nt3\.py"):
        find_benchmark("./nt3")


def test_functions_of_a_benchmark_import_modules_of_its_folder(tmp_path):
    folder = tmp_path / "lazy"
    folder.mkdir()
    (folder / "lazy.py").write_text(LAZY)
    (folder / "lazy_part.py").write_text("VALUE = 3\n")
    before = list(sys.path)
    assert find_benchmark(str(folder)).load_data(None, None) == 3
    assert sys.path[: len(before)] == before, "they are looked for last"


def test_commands_find_a_benchmark_by_what_messages_call_it(monkeypatch):
    folder = NT3.folder.parent.parent / "examples/mnist"
    mnist = find_benchmark(str(folder))
    assert mnist.argument == str(folder)
    with pytest.raises(DataError, match=f"data fetch {folder}"):
        bind("--train_data", "missing.npz", benchmark=mnist)
    monkeypatch.setenv("CANDLE_BENCHMARKS_PATH", str(folder.parent))
    assert (mnist.argument, NT3.argument) == ("mnist", "nt3")


def test_a_named_file_takes_precedence_over_the_directory(files, tmp_path):
    (tmp_path / "other.csv").write_text("0,1\n")
    located = locate_files(NT3, bind("--data_dir", "data", "--test_data", "other.csv"))
    assert not located.synthetic
    assert located.paths == {"train": files / "nt_train2.csv", "test": tmp_path / "other.csv"}


def test_a_users_file_beside_the_benchmarks_own_names_data(tmp_path, monkeypatch):
    (tmp_path / NT3.model_file.name).write_text(NT3.model_file.read_text())
    monkeypatch.setattr(type(NT3), "folder", tmp_path)
    for name in ("nt3_perf_bench_model.txt", "mine.txt"):
        (tmp_path / name).write_text(CANDLES_NAMES)
    for name in NAMES.values():
        (tmp_path / name).touch()
    assert bind("--config_file", str(tmp_path / "nt3_perf_bench_model.txt"))["train_data"] is None
    params = bind("--config_file", str(tmp_path / "mine.txt"))
    assert params["train_data"] == str(tmp_path / "nt_train2.csv")


def test_candles_names_in_a_config_file_name_files_if_they_exist(files, tmp_path):
    (tmp_path / "candle.txt").write_text(CANDLES_NAMES)
    flags = ["--config_file", "candle.txt"]
    params = bind(*flags)
    assert params["train_data"] is params["test_data"] is None
    (warning,) = params.warnings
    assert warning.startswith("train_data, test_data (config file candle.txt): ")
    assert NT3.bind(params).warnings == params.warnings
    located = locate_files(NT3, bind(*flags, "--data_dir", str(files)))
    assert located.paths == {role: files / name for role, name in NAMES.items()}
    (tmp_path / "nt_train2.csv").touch()
    with pytest.raises(ParameterError, match="needs test_data"):
        bind(*flags)
    with pytest.raises(DataError, match=r"x\.csv"):
        bind("--data_dir", "empty", *flags, "--test_data", "x.csv")
    (tmp_path / "nt_test2.csv").touch()
    params = bind(*flags)
    assert (params["test_data"], params.warnings) == (str(tmp_path / "nt_test2.csv"), ())
    assert str(params.origin("test_data")) == "config file candle.txt, line 3"


def test_files_that_a_config_file_asks_for_without_naming_them_are_found_by_candles_names(tmp_path):
    (tmp_path / "p1b1.txt").write_text(
        "[Global_Params]\ntrain_data = 'P1B1.dev.train.csv'\ntest_data = 'P1B1.dev.test.csv'\n"
        "use_landmark_genes = True\n"
    )
    for name in ("P1B1.dev.train.csv", "P1B1.dev.test.csv", "lincs1000.tsv"):
        (tmp_path / name).touch()
    params = bind("--config_file", "p1b1.txt", benchmark=find_benchmark("p1b1"))
    assert params["landmark_data"] == str(tmp_path / "lincs1000.tsv")


@pytest.mark.parametrize("parent", ["", "cache/nt3"])  # the working directory, the data directory
def test_relative_names_are_looked_up_in_the_directory(tmp_path, parent):
    files, here, config = tmp_path / parent / "mine", tmp_path, tmp_path / "config.txt"
    files.mkdir(parents=True)
    for path in (files / "a.csv", files / "nt_test2.csv", here / "nt_test2.csv"):
        path.touch()
    config.write_text(
        "[Global_Params]\ntrain_data = 'a.csv'\ntest_data = 'nt_test2.csv'\ndata_dir = 'mine'\n"
    )
    params = bind("--config_file", str(config))
    assert params["train_data"] == str(files / "a.csv")
    assert params["test_data"] == str(files / "nt_test2.csv")
    assert str(params.origin("train_data")) == f"config file {config}, line 2"
    (files / "nt_test2.csv").unlink()
    assert bind("--config_file", str(config))["test_data"] == str(here / "nt_test2.csv")
    (files / "a.csv").unlink()
    with pytest.raises(DataError, match=rf"^a.csv: .* {here}/mine/ or .* or {here}/ or "):
        bind("--config_file", str(config))


TABLES = [(name, role) for name in list_benchmarks() for role in find_benchmark(name).layouts]
ALL_TABLES = {
    "p1b1": ["--use_landmark_genes", "True", "--landmark_data", "landmarks.tsv"],
    "p1b3": ["--cell_features", "all", "--drug_features", "all"],
}


@pytest.mark.parametrize(("name", "role"), TABLES)
def test_a_table_that_is_wrong_is_refused_before_a_run(small_data, tmp_path, name, role):
    benchmark = find_benchmark(name)
    directory = shutil.copytree(small_data(name), tmp_path / "data")
    (tmp_path / "landmarks.tsv").write_text("\tgdc\tname\n1\tg1\tone\n")
    flags = ["--data_dir", str(directory), *ALL_TABLES.get(name, [])]
    params = bind(*flags, benchmark=benchmark)
    if role == "validation":
        own = shutil.copy(params["test_data"], tmp_path / "own.csv")
        params = bind(*flags, "--val_data", str(own), benchmark=benchmark)
    benchmark.check_tables(params)
    path, layout = Path(params[benchmark.files[role]]), benchmark.layouts[role]
    text = path.read_text()
    wrong = {"compressed by bzip2": bz2.compress(text.encode())}
    if layout.separator in text:
        wrong["separated by vertical bars"] = text.replace(layout.separator, "|").encode()
    if layout.header and not layout.may_have_index:
        wrong["as that of an index"] = f"{layout.separator}{text}".encode()
    for problem, content in wrong.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=problem) as caught:
            benchmark.check_tables(params)
        assert caught.value.path == str(path)


def test_paths_that_are_too_long_together_do_not_exist():
    names = "/".join(["x" * 250] * 15)
    with pytest.raises(DataError, match="xxx"):
        bind("--data_dir", names, "--train_data", names, "--test_data", names)


def test_a_file_missing_from_the_directory_is_named(files):
    (files / "nt_test2.csv").unlink()
    with pytest.raises(DataError, match=r"nt_test2.csv: .*candle-p1 data fetch nt3"):
        bind("--data_dir", str(files))


@pytest.mark.parametrize(
    ("name", "flags", "files"),
    [
        ("p1b3", "", "expression descriptors response test_cells test_drugs"),
        ("p1b3", "--cell_features proteome categorical --drug_features noise",
         "proteome kinome response test_cells test_drugs"),
        ("p1b1", "", "train test"),
        ("p1b1", "--use_landmark_genes True", "train test landmarks"),
    ],
)  # fmt: skip
def test_only_the_files_that_a_run_reads_are_needed(name, flags, files):
    benchmark = find_benchmark(name)
    assert benchmark.needed_files(bind(*flags.split(), benchmark=benchmark)) == files.split()


def test_flags_of_a_scaling_mode():
    assert NT3.mode_flags("strong") == {"epochs": "384", "epochs_scaling": "strong"}
    assert NT3.mode_flags("weak") == {"epochs": "8", "epochs_scaling": "weak"}
    p1b3 = find_benchmark("p1b3")
    weak = {"epochs": "1", "epochs_scaling": "weak", "batch_scaling": "none"}
    assert p1b3.mode_flags("strong") == weak | {"epochs_scaling": "none", "batch_scaling": "cbrt"}
    assert p1b3.mode_flags("weak") == weak
    with pytest.raises(ParameterError, match="'fixed'"):
        NT3.mode_flags("fixed")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--dense 200 0 20", {"dense": [200, 20], "conv": [128, 20, 1, 128, 10, 1]}),
        ("--dense 0", {"dense": []}),
        ("--conv 4 5 1 0 0 0 8 5 1 --pool 1 2 3", {"conv": [4, 5, 1], "pool": [1]}),
        ("--conv 4 5 1 2 0 1", {"conv": [4, 5, 1], "pool": [1]}),
        ("--conv 0 0 0 --pool 10", {"conv": [], "pool": []}),
    ],
)
def test_layers_of_size_0_are_left_out_as_in_candle(flags, expected):
    params = bind(*flags.split())
    assert {name: params[name] for name in expected} == expected
    assert dict(NT3.bind(params)) == dict(params)
