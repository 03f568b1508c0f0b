from __future__ import annotations

import pytest

from candle_p1.errors import ParameterError
from candle_p1.studies.study_file import find_study, list_studies, read_study

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
        ("title", "titel", ["'titel'", "'title'"]),
        ('title = "a study"', "", ["title"]),
        ("[sizes.small]\nranks = [1, 2]", "", ["sizes"]),
        ("ranks = [1, 2]", "rank = 1", ["sizes.small", "'rank'", "'ranks'"]),
        ("repeats = 2", "", ["sizes.small.repeats"]),
        ("repeats = 2", "repeats = 0", ["repeats is 0"]),
        ("[1, 2]", "[1, 1]", ["sizes.small.ranks"]),
        ("[1, 2]", "[]", ["sizes.small.ranks"]),
        ("[10, 20]", "10", ["vary.batch_size is 10"]),
        ("epochs = 8", "epochs = 1979-05-27", ["flags.epochs"]),
        ('["1", "5"]', "[1, '5']", ["environment.HOROVOD_LOG_LEVEL.0 is 1"]),
        ("batch_size = [10, 20]", "epochs = [1]", ["epochs", "flags", "vary"]),
        ("batch_size = [", "dropout = [0.1, ", ["dropout", "variant", "vary"]),
        ("batch_size = [", "rng_seed = [", ["rng_seed"]),
        ("dropout = 0.5", 'run_id = "a"', ["run_id"]),
        ("epochs = 8", 'timeline = "t.json"', ["key timeline"]),
        ('"dropped"', '"a b"', ["variants.0.name", "'a b'"]),
        ('name = "plain"', "epochs = 2", ["variants.1.name"]),
        ('"plain"', '"dropped"', ["'dropped'"]),
        ("[sizes.small]", '[sizes."a/b"]', ["sizes", "'a/b'"]),
        ("NCCL_DEBUG", "OMP_NUM_THREADS", ["OMP_NUM_THREADS", "threads"]),
        ("NCCL_DEBUG", "LANG", ["environment.LANG"]),
        ("LOG_LEVEL", "CYCLE_TIME", ["HOROVOD_CYCLE_TIME", 'averaging = "horovod" in flags']),
        ("title", "title = \n", ["not TOML"]),
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
    assert "\n" not in message


def test_the_path_of_a_benchmark_is_relative_to_the_file(read, tmp_path):
    named = [".", "./nt3", "../nt3", "/a/b", "nt3", "package.module"]
    here = [tmp_path, tmp_path / "nt3", tmp_path.parent / "nt3"]
    found = read(STUDY.replace('"nt3"', str(named))).benchmark
    assert found == [*map(str, here), *named[3:]]


def test_studies_are_found_by_name_and_by_path(tmp_path):
    assert "strong-nt3" in list_studies()
    assert find_study("strong-nt3").name == "strong-nt3"
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    assert find_study(str(path)).path == path
    with pytest.raises(ParameterError, match=r"'strong-nt' .*'strong-nt3'.*weak-nt3"):
        find_study("strong-nt")
    with pytest.raises(ParameterError, match=r"absent\.toml"):
        find_study("absent.toml")
    with pytest.raises(ParameterError, match=r"'smal' .*'small'"):
        find_study("strong-nt3").size("smal")
