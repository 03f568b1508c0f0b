import copy
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from candle_p1.errors import ParameterError
from candle_p1.parameters.catalog import PARAMETERS, role_of
from candle_p1.parameters.declaration import Declaration
from candle_p1.parameters.parameter import Origin, Parameter, Role
from candle_p1.parameters.parameter_set import EditableParameters

NT3_OWN = (
    Parameter("classes", int, 2, "number of classes", minimum=2),
    *(replace(each, needs_support=False) for each in PARAMETERS if each.name in ("conv", "pool")),
    Parameter("scaling", str, "maxabs", "scaling", choices=("maxabs", "minmax", "std", "none")),
    Parameter("min_logconc", float, -5, "a number that may be negative"),
)
DECLARED = (PARAMETERS, NT3_OWN)
CHOICES = {"size": ("full", "small"), "data_type": ("bf16", "f16", "f32", "f64")}
NT3 = Declaration(
    *DECLARED, program="nt3_baseline_keras2.py", description="NT3, 100%", choices=CHOICES
)
NEEDED = "[Global_Params]\nepochs=400\nbatch_size=20\nloss='mse'\noptimizer='sgd'\nmetrics='mse'\n"
MODEL_FILE = (
    NEEDED + "conv = [128, 20, 1, 128, 10, 1]\nlearning_rate = 0.001\n[Monitor_Params]\n"
    "timeout = 3600\n"
)
NEEDED_FLAGS = ["-e", "1", "-z", "1", "--loss=a", "--optimizer=b", "--metrics=c"]


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "nt3_default_model.txt"
    path.write_text(MODEL_FILE)
    return path


@pytest.fixture
def params(model_file):
    return NT3.parse([], model_file)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


# --- files and flags --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--epochs=8", "epochs", 8),
        ("-e=8", "epochs", 8),
        ("-e 8 --epochs 9", "epochs", 9),
        ("-lr 0.01", "learning_rate", 0.01),
        ("--learning_rate None", "learning_rate", None),
        ("-l -", "logfile", "-"),
        ("--conv 64 20 1 --epochs 8", "conv", [64, 20, 1]),
        ("--pool 10", "pool", [10]),
        ("--min_logconc -1e-3", "min_logconc", -0.001),
        ("--min_logconc=-.5", "min_logconc", -0.5),
        ("--run_id -5", "run_id", "-5"),
        ("--run_id=-x", "run_id", "-x"),
        ("-epochs 8", "epochs", 8),
        ("--epoch 8", "epochs", 8),  # epochs_scaling is not CANDLE's
        ("-v --epochs 8", "verbose", True),
        *[(f"--shuffle {word}", "shuffle", True) for word in ("TRUE", "t", "yes", "y", "1")],
        *[(f"-v {word}", "verbose", False) for word in ("False", "f", "no", "n", "0")],
    ],
)
def test_flags_set_parameters(model_file, argv, name, value):
    params = NT3.parse(argv.split(), model_file)
    assert params[name] == value
    assert type(params[name]) is type(value)
    assert params.origin(name).kind == "flag"


def test_a_config_file_is_found_in_the_working_directory_or_beside_the_model_file(
    model_file, tmp_path, monkeypatch
):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for path, epochs in (("both.txt", 1), ("beside.txt", 2), ("here/both.txt", 3)):
        (tmp_path / path).write_text(f"[Global_Params]\nepochs={epochs}\n")
    assert NT3.parse(["--config_file", "beside.txt"], model_file)["epochs"] == 2
    assert NT3.parse(["--config_file", "both.txt"], model_file)["epochs"] == 3


def test_flags_override_config_file_model_file_and_defaults(tmp_path):
    files = [tmp_path / "model.txt", tmp_path / "config.txt"]
    files[0].write_text(NEEDED + "val_steps = 1\ntest_steps = 1\ntrain_steps = 1\n")
    files[1].write_text("[Global_Params]\ntest_steps = 2\ntrain_steps = 2\n")
    params = NT3.parse(["--train_steps", "3", "--config_file", str(files[1])], files[0])
    for name, value, kind in (
        ("val_samples", 0, "default"),
        ("val_steps", 1, "model file"),
        ("test_steps", 2, "config file"),
        ("train_steps", 3, "flag"),
    ):
        assert (params[name], params.origin(name).kind) == (value, kind)


def test_values_may_be_written_in_all_forms_of_literals(tmp_path):
    forms = {
        "conv = [128, 20, 1,\r\n        # the second one\r\n        128, 10, 1]\r": [
            *(128, 20, 1, 128, 10, 1)
        ],
        "pool = 1, 10": [1, 10],
        "dense : 200": [200],
        "dropout = 0": 0.0,
        "timeout = 60.0  # seconds; CANDLE Supervisor writes it so": 60,
        "output_dir = 'a#b;c%d \\'quoted\\' é'": "a#b;c%d 'quoted' é",
        "logfile = None": None,
        "[DEFAULT]\nshuffle = True": True,
        "[Global_Params]\nverbose = True": True,
    }
    path = tmp_path / "model.txt"  # which begins as Windows editors write it
    path.write_bytes((NEEDED + "\n".join(forms)).encode("utf-8-sig"))
    params = NT3.parse([], path)
    names = [re.search(r"\w+(?= [=:])", form)[0] for form in forms]
    assert repr([params[name] for name in names]) == repr(list(forms.values()))


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("bach_size = 3", ["'bach_size'", "line 7", "'batch_size'"]),
        ("epochs = 9", ["'epochs'", "lines 2 and 7"]),
        ("[Other]\nepochs = 9", ["'epochs'", "lines 2 and 8"]),
        ("activation = relu  # the usual", ["line 7", "activation = 'relu'"]),
        ("train_data = 'open", ["train_data = 'open", "line 7"]),
        (r"train_data = 'C:\data'", [r"train_data = 'C:\data'", "line 7"]),
        ("train_steps = __import__('os').getpid()", ["train_steps = __import__", "line 7"]),
        ("train_steps =", ["train_steps = ", "line 7", "at least 0"]),
        ("train_steps = 1\n  val_steps = 2", ["1 val_steps = 2", "line 7", "indented"]),
        ("train_steps = True", ["train_steps = True", "line 7", "at least 0"]),
        ("train_steps = 1.5", ["train_steps = 1.5", "line 7"]),
        ("train_steps = 0x" + "f" * 5000, ["train_steps = ", "line 7"]),
        ("learning_rate = 0", ["learning_rate = 0", "line 7", "above 0"]),
        ("dropout = 1", ["dropout = 1", "line 7", "below 1"]),
        ("data_type = 'f8'", ["data_type = 'f8'", "line 7", "bf16, f16, f32, f64"]),
        ("conv = [1, [2], 3]", ["conv = [1, [2], 3]", "line 7", "at least 0"]),
        (f"conv = {[-1] * 100}", [f"conv = {str([-1] * 100)[:77]}...", "line 7"]),
        ("just words", ["line 7"]),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path, line, parts):
    path = tmp_path / "model.txt"
    path.write_text(NEEDED + line + "\nval_samples = 1\n")
    with pytest.raises(ParameterError, match=r"model file model\.txt") as error:
        NT3.parse([], path)
    assert [part for part in parts if part not in str(error.value)] == []


def test_files_that_cannot_be_read(tmp_path):
    binary, pipe, bare = (tmp_path / name for name in ("binary.txt", "pipe", "bare.txt"))
    os.mkfifo(pipe)
    binary.write_bytes(NEEDED.encode() + b"run_id = '\xff'\n")
    bare.write_text("# no section\nepochs = 8\n")
    with pytest.raises(ParameterError, match=r"bare\.txt, line 2: .*\[Global_Params\]"):
        NT3.parse([], bare)
    for path, problem in (
        (tmp_path / "missing.txt", "does not exist"),
        (tmp_path, "directory"),
        (binary, f"byte {len(NEEDED) + 10} "),
        (tmp_path / ("x" * 300), "File name too long"),
        (Path("nul\0"), "null byte"),
        (pipe, "pipe"),
    ):
        with pytest.raises(ParameterError, match=problem) as error:
            NT3.parse([], path)
        assert str(error.value).startswith(f"parameter file {path}: ")
        with pytest.raises(ParameterError, match=r"^(parameter file |config_file = )"):
            NT3.parse(["--config_file", str(path)])


LIMITED = "dense conv pool batch_size epochs warmup_epochs learning_rate load_threads cache_limit"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--batch-size 3", "'--batch_size'"),
        ("-lr0.1", "'-lr'"),
        ("--epochs 3 -4", "'-4' "),
        ("--epochs", "-e/--epochs"),
        ("--conv --epochs 3", "--conv"),
        ("--epochs ten", "epochs = 'ten' (flag): must be an integer, at least 1 and at most "),
        ("--epochs None", "epochs = None (flag)"),
        ("--learning_rate nan", "learning_rate = nan (flag): must be a number, above 0 and "),
        ("--shuffle maybe", "shuffle = 'maybe' (flag): must be True or False"),
        ("--batch 20", "--batch_normalization, --batch_size"),
        ("--batch_scal linear", "'--batch_scaling'"),
        ("-epoch 3", "-epoch is not a flag"),
        ("--config_file=", "parameter file .: "),
        ("--conv 1 a", "conv = '1 a' (flag): must be a list of integers, each at least 0 and "),
        (f"--rng_seed {2**32}", f"at most {2**32 - 1}"),
        *((f"--{name} {10**17}", " at most ") for name in f"{LIMITED} stall_shutdown_s".split()),
        ("--output_dir ~nosuchuser", "output_dir = '~nosuchuser'"),
        (f"--train_data {'x/' * 2500}", "4095 bytes"),
        (f"--run_id {'é' * 128}", "255"),
        ("--activation re\0lu", "NUL"),
        ("--config_file caf\udce9.txt", "UTF-8"),
    ],
)
def test_mistakes_in_flags_are_named(model_file, flags, part):
    with pytest.raises(ParameterError) as error:
        NT3.parse(flags.split(" "), model_file)
    assert part in str(error.value)
    assert len(str(error.value)) < 400


def test_parameters_without_a_default_must_be_set():
    with pytest.raises(ParameterError, match=r"optimizer, metrics, batch_size.* --batch_size$"):
        NT3.parse(["--epochs", "8", "--loss", "mse"])
    with pytest.raises(ParameterError, match="loss, optimizer, metrics, epochs, batch_size"):
        NT3.bind({})


def test_help_shows_the_allowed_values_and_the_current_one(model_file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit, match="0"):
        NT3.parse(["--epochs", "-h"], model_file)
    shown = capsys.readouterr().out
    for part in (
        "usage: nt3_baseline_keras2.py ",
        "NT3, 100%",
        "[one of bf16, f16, f32, f64; default: 'f32']",
        "at most 10000000; default: 400 (model file nt3_default_model.txt, line 2)]",
        "--conv INT [INT ...]",
    ):
        assert part in shown
    assert all(f"--{parameter.name} " in shown for parameter in NT3.parameters.values())


# --- the frozen set ---------------------------------------------------------------------------


def test_replace_returns_a_changed_set(params):
    changed = params.replace({"epochs": 8, "batch_size": 20, "dense": [5]})
    assert (changed["epochs"], changed["dense"], params["epochs"]) == (8, [5], 400)
    assert changed.origin("epochs") == Origin("program")
    assert changed.origin("batch_size") == params.origin("batch_size")
    derived = params.replace({"base_lr": 0.5}, source="learning_rate")
    assert str(derived.origin("base_lr")) == f"{params.origin('learning_rate')}, learning_rate"
    params["conv"].append(7)
    assert params["conv"] == [128, 20, 1, 128, 10, 1]
    with pytest.raises(ParameterError, match=r"^3 \(program\)"):
        params.replace({3: 8})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("epochs", np.int64(8), 8),
        ("learning_rate", np.float32(0.5), 0.5),
        ("shuffle", np.bool_(False), False),
        ("dense", np.array([3, 4]), [3, 4]),
        ("activation", np.str_("elu"), "elu"),
        *(("train_bool", one, True) for one in (1, 1.0)),
        *(("train_bool", zero, False) for zero in (0, np.int64(0))),
        *(("train_bool", other, None) for other in (2, -1, "1", [1])),
        ("data_type", np.float32, None),
    ],
)
def test_programs_may_set_numpy_values_and_write_booleans_as_1_and_0(params, name, value, expected):
    if expected is None:
        with pytest.raises(ParameterError, match=re.escape(f"{name} = {value!r} (program): ")):
            params.replace({name: value})
    else:
        assert repr(params.replace({name: value})[name]) == repr(expected)


def test_written_files_say_where_values_come_from(params):
    text = params.replace({"run_id": "x\n'y'"}).to_text()
    assert "\nconv = [128, 20, 1, 128, 10, 1]  # model file nt3_default_model.txt, line 7\n" in text
    assert "\nrun_id = \"x\\n'y'\"  # program\n" in text


# --- drivers ----------------------------------------------------------------------------------


def test_a_driver_changes_the_dictionary(params):
    edited = EditableParameters(params)
    edited["epochs"] = 8
    edited["conv"] = [64, 20, 1]
    bound = NT3.bind(edited)
    assert dict(bound) == dict(params) | {"epochs": 8, "conv": [64, 20, 1]}
    assert bound.origin("epochs") == Origin("program")
    assert params["conv"] == [128, 20, 1, 128, 10, 1]
    copies = [edited.copy(), copy.deepcopy(edited), pickle.loads(pickle.dumps(edited))]
    for each in (*copies, EditableParameters(params) | {"epochs": 8, "conv": [64, 20, 1]}):
        assert NT3.bind(each) == bound
        assert NT3.bind(each).origin("batch_size") == params.origin("batch_size")
    assert Declaration(*DECLARED, choices=CHOICES).bind(bound) is bound


def test_a_driver_makes_a_mistake(params):
    edited = EditableParameters(params)
    with pytest.raises(ParameterError, match=r"'epoch' \(program\).*'epochs'"):
        NT3.bind(edited | {"epoch": 8})
    del edited["timeout"]
    with pytest.raises(ParameterError, match="timeout"):
        NT3.bind(edited)
    for handed in (params, EditableParameters(params)):
        with pytest.raises(ParameterError, match="p1b1"):
            Declaration(PARAMETERS, program="p1b1.py").bind(handed)


def test_a_plain_dictionary_overrides_the_defaults(params):
    given_values = {"epochs": 8, "batch_size": 20, "loss": "mse", "optimizer": "sgd"}
    bound = NT3.bind(given_values | {"metrics": "mse", "verbose": False})
    assert bound["epochs"] == 8
    assert str(bound.origin("epochs")) == "program"
    assert str(bound.origin("rng_seed")) == str(bound.origin("verbose")) == "default"


def test_keys_of_candle_that_are_not_used_cause_a_warning(model_file, params):
    edited = EditableParameters(params)
    edited.update(clr_mode="trng1", reduce_lr=1, locally_connected=True)
    bound = NT3.bind(edited)
    assert set(bound) == set(params)
    (warning,) = bound.warnings
    assert warning.endswith(": locally_connected, clr_mode, reduce_lr (program)")
    assert NT3.bind(edited | dict(bound)).warnings == NT3.bind(bound).warnings == bound.warnings
    with model_file.open("a") as file:
        file.write("lstm_size = [5]\nlatent_dim = anything\nshuffle = True\n")
    read = NT3.parse(["--clr_flag", "--task_list", "0", "1"], model_file)
    assert dict(read) == dict(params) | {"shuffle": True}
    (warning,) = read.warnings
    assert warning.endswith(
        f": shuffle, lstm_size, latent_dim (model file {model_file.name}), clr_flag,"
        " task_list (flag)"
    )
    assert bound.replace({"epochs": 9}).warnings == bound.warnings


def test_what_asks_for_nothing_causes_no_warning(model_file):
    flags = (
        "--clr_flag False --recurrent_dropout 0 --noise_factor 0 --lstm_size None --tsne false"
        " --one_hot_dtrep True --workers 1 --feature_subsample 0 --locally_connected False"
    )
    assert NT3.parse(flags.split(), model_file).warnings == ()


@pytest.mark.parametrize(
    ("old", "name", "value"), [("save", "save_path", "there"), ("tb", "tensorboard", True)]
)
def test_candles_earlier_names_are_read(params, tmp_path, old, name, value):
    path = tmp_path / "old.txt"
    line = f"{old} = {value!r}\n"
    path.write_text(NEEDED + line)
    read = NT3.parse([], path)
    assert (read[name], str(read.origin(name))) == (value, "model file old.txt, line 7")
    assert NT3.parse([f"--{old}", str(value)], path)[name] == value
    edited = EditableParameters(params)
    edited[old] = value
    assert NT3.bind(edited)[name] == value
    path.write_text(f"{NEEDED}{line}{name} = {value!r}\n")
    with pytest.raises(ParameterError, match=rf"'{name}' .* lines 7 and 8"):
        NT3.parse([], path)
    if NT3.parameters[name].optional:  # as in what Supervisor writes
        for lines in (f"{name} = None\n{line}", f"{line}{name} = None\n"):
            path.write_text(NEEDED + lines)
            assert NT3.parse([], path)[name] == value
    own = Declaration(PARAMETERS, [Parameter(old, str, "its own", "")], choices=CHOICES)
    assert own.parse([*NEEDED_FLAGS, f"--{old}", "x"])[old] == "x"


def test_parameters_of_candle_supervisor_are_accepted(params):
    assert params["perf_top"] == params["perf_nvidia"] == "0"  # what its runner compares with
    edited = EditableParameters(params)
    edited |= {"framework": "keras", "instance_directory": "X101/run", "timeout": 3600.0}
    edited |= {"perf_top": "0", "pre_module": "before"}
    bound = NT3.bind(edited)
    assert bound["framework"] == "keras"
    assert bound.origin("timeout").kind == "model file"  # 3600.0 is what it was


# --- declarations -----------------------------------------------------------------------------


def test_a_later_declaration_replaces_an_earlier_one_and_keeps_its_flag():
    declaration = Declaration(PARAMETERS, [Parameter("epochs", int, 7, "epochs")])
    assert declaration.parse(NEEDED_FLAGS[2:])["epochs"] == 7
    assert declaration.parse([*NEEDED_FLAGS[2:], "-e", "9"])["epochs"] == 9
    assert declaration.parameters["epochs"].group == "training"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Parameter("two words", int, 1, ""),
        lambda: Parameter("values", list, None, ""),
        lambda: Parameter("level", int, 1, "", short=("-1",)),
        lambda: Parameter("level", int, 0, "", minimum=1),
        lambda: Declaration([Parameter("help", int, 1, "")]),
        lambda: Declaration(PARAMETERS, choices={"lodaer": ("chunked",)}),
        lambda: Declaration(PARAMETERS, choices={"loader": ("chunked",)}),
        lambda: Declaration([Parameter("height", int, 1, "", short=("-h",))]),
    ],
)
def test_invalid_declarations(make):
    with pytest.raises((ValueError, TypeError, ParameterError)):
        make()


def test_the_role_of_a_parameter_is_known_by_its_name():
    assert {parameter.role for parameter in PARAMETERS} == set(Role)
    assert role_of("loader") is Role.SPEED
    assert role_of("expression_data") is Role.PLACE  # a benchmark's own
    assert role_of("classes") is Role.LEARNING
    of_checkpoints = [name for name in NT3.parameters if name.startswith("ckpt_")]
    for name in (*of_checkpoints, "save_model", "cp", "save_best_model"):
        assert role_of(name) not in (Role.LEARNING, Role.SEED), name


# --- properties -------------------------------------------------------------------------------

strings = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
strings |= st.text("'\"#;%\\\n\r\t=[]: aé", max_size=8)
values = {
    "text": st.none() | strings,
    "words": st.lists(strings, max_size=3),
    "numbers": st.none() | st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=5),
    "num": st.integers(-(2**63), 2**63 - 1),
    "is_set": st.booleans(),
}
ANY = Declaration(
    [
        Parameter("text", str, None, ""),
        Parameter("words", str, [], "", many=True),
        Parameter("numbers", float, None, "", many=True),
        Parameter("num", int, 0, ""),
        Parameter("is_set", bool, False, ""),
    ]
)


@given(st.fixed_dictionaries({}, optional=values), st.text())
@example({"text": ""}, "\n'\"#\r\0")
def test_any_set_is_read_back_as_it_was_written(scratch, values, file):
    written = ANY.bind(values).with_settings({"num": (-1, Origin("config file", file, 1))})
    (scratch / "final_params.txt").write_text(written.to_text(), encoding="utf-8")
    read = ANY.parse([], scratch / "final_params.txt")
    assert repr(read) == repr(written)
    assert {read.origin(name).kind for name in read} == {"model file"}


fragments = st.sampled_from(
    ["epochs", "conv", "run_id", "None", "1e999", "0x", *"[]=:#;'\"\\-(),{1"]
)
fragments |= st.sampled_from(["\n", "[s]\n", " ", "\t", "\ufeff", "\x85", "\0", "True", "\\d"])
texts = st.text() | st.lists(fragments | st.text(max_size=3), max_size=30).map("".join)


@given(st.binary() | texts.map(lambda text: text.encode(errors="replace")))
@example(b"[s]\nconv = " + b"(" * 10_000)
@example(b"[s]\nconv = " + b"[" * 150 + b"]" * 150)
@example(b"[s]\nrun_id = '" + b"x" * 100_000)
@example(b"[s]\n\n  continued\nepochs = 1")
@example(b"[s]\nepochs = 1\n[]\n")
def test_any_file_is_read_or_refused(scratch, content):
    path = scratch / "any.txt"
    path.write_bytes(content)
    try:
        settings = NT3.read_file(path, "model file")
    except ParameterError:
        return
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    for name, (value, origin) in settings.items():
        assert NT3.parameters[name].check(value, origin) == value
        assert lines[origin.line - 1].startswith(name)


arguments = st.sampled_from(
    [f"--{name}" for name in ("epochs", "conv", "run_id", "shuffle", "min_logconc", "epochs=3")]
    + ["-e", "-lr", "-l", "-", "--", "-5", "-.5", "-1e-3", "-lr0.1", "-e=", "", "=", "None", "a b"]
)


@given(st.lists(arguments | st.text(max_size=4).filter(lambda word: word != "-h"), max_size=8))
def test_any_flags_are_read_or_refused(argv):
    try:
        assert NT3.parse([*argv, *NEEDED_FLAGS])["epochs"] == 1
    except ParameterError:
        return


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()


@given(
    st.sampled_from(list(NT3.parameters.values())),
    st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner)),
)
def test_any_value_is_converted_as_declared_or_refused(parameter, value):
    refusal = re.escape(f"{parameter.name} = ") + r".* \(program\): must be "
    try:
        checked = parameter.check(value, Origin("program"))
    except ParameterError:
        with pytest.raises(ParameterError, match=refusal):
            parameter.check(value, Origin("program"))
        return
    if checked is None:
        assert parameter.optional
        return
    assert all(type(each) is parameter.type for each in (checked if parameter.many else [checked]))
    assert parameter.check(checked, Origin("program")) == checked
