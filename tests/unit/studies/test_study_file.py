import pytest

from candle_p1.errors import ParameterError
from candle_p1.studies.study_file import find_study, read_study

STUDY = """
title = "a study"
benchmark = "nt3"
repeats = 2
minutes = 5
flags = { epochs = 8, loader = "chunked" }
vary.batch_size = [10, 20]
environment = { HOROVOD_LOG_LEVEL = ["1", "5"], NCCL_DEBUG = "WARN" }

[[variants]]
name = "dropped"
dropout = 0.5

[[variants]]
name = "plain"

[sizes.small]
ranks = [1, 2]
"""


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return read_study(path)

    return read


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        ("ranks = [1, 2]", "rank = 1", ["sizes.small", "'rank'", "'ranks'"]),
        ("repeats = 2", "", ["sizes.small.repeats"]),
        ("[1, 2]", "[1, 1]", ["sizes.small.ranks"]),
        ("[1, 2]", "[]", ["sizes.small.ranks"]),
        ("epochs = 8", "epochs = 1979-05-27", ["flags.epochs"]),
        ("batch_size = [10, 20]", "epochs = [1]", ["epochs", "flags", "vary"]),
        ("batch_size = [", "dropout = [0.1, ", ["dropout", "variant", "vary"]),
        ("batch_size = [", "rng_seed = [", ["rng_seed"]),
        ("dropout = 0.5", 'run_id = "a"', ["run_id"]),
        ("epochs = 8", 'timeline = "t.json"', ["key timeline"]),
        ('"dropped"', '"a b"', ["variants.0.name", "'a b'"]),
        ('"plain"', '"dropped"', ["'dropped'"]),
        ("NCCL_DEBUG", "OMP_NUM_THREADS", ["OMP_NUM_THREADS", "threads"]),
        ("NCCL_DEBUG", "LANG", ["environment.LANG"]),
        ("LOG_LEVEL", "CYCLE_TIME", ["HOROVOD_CYCLE_TIME", 'averaging = "horovod" in flags']),
        ("title", 'path = "x"\ntitle', ["'path'"]),
        ("epochs = 8", "help = true", ["help"]),
        ("epochs = 8", 'optimizer = "-x"', ["'-'"]),
        ("[10, 20]", str(list(range(1001))), ["1000"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_key(read, tmp_path, old, new, keys):
    assert old in STUDY
    with pytest.raises(ParameterError) as raised:
        read(STUDY.replace(old, new, 1))
    message = str(raised.value)
    assert message.startswith(f"{tmp_path}/mine.toml: ")
    assert all(key in message for key in keys)


def test_the_path_of_a_benchmark_is_relative_to_the_file(read, tmp_path):
    named = [".", "../nt3", "/a/b", "nt3", "package.module"]
    found = read(STUDY.replace('"nt3"', str(named))).benchmark
    assert found == [str(tmp_path), str(tmp_path.parent / "nt3"), *named[2:]]


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("strong-nt", None, "'strong-nt' .*'strong-nt3'.*weak-nt3"),
        ("absent.toml", None, r"absent\.toml"),
        ("strong-nt3", "smal", "'smal' .*'small'"),
    ],
)
def test_what_there_is_not_is_named(name, size, message):
    with pytest.raises(ParameterError, match=message):
        find_study(name).size(size)
