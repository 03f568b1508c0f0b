from __future__ import annotations

import re

import pytest

from candle_p1.errors import ParameterError
from candle_p1.studies.library import find_study, list_studies
from candle_p1.studies.study_file import read_study

STUDY = """
title = "a study"
benchmark = "nt3"
repeats = 2
minutes = 5
flags = { epochs = 8, loader = "chunked" }
vary.batch_size = [10, 20]
environment = { HOROVOD_CYCLE_TIME = ["1", "5"], NCCL_DEBUG = "WARN" }

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


def test_what_a_file_says(read):
    study = read(STUDY)
    assert (study.name, study.title, study.benchmarks) == ("mine", "a study", ["nt3"])
    assert (study.shows, study.seed) == ([], 2019)
    name, size = study.size()
    assert name == "small"
    assert (size.ranks, size.repeats, size.minutes, size.threads) == ([1, 2], 2, 5, [])
    assert size.flags == {"epochs": 8, "loader": "chunked"}
    assert size.vary == {"batch_size": [10, 20]}
    assert size.environment == {"HOROVOD_CYCLE_TIME": ["1", "5"], "NCCL_DEBUG": ["WARN"]}
    assert [(variant.name, variant.flags) for variant in size.variants] == [
        ("dropped", {"dropout": 0.5}),
        ("plain", {}),
    ]
    assert size.varied == {"batch_size", "dropout"}


def test_a_size_goes_over_its_study(read):
    study = read(
        STUDY
        + """
[sizes.other]
ranks = [4]
repeats = 1
minutes = 9
threads = [1, 2]
flags = { batch_size = 40, epochs = 4 }
vary.loader = ["dask", "arrow"]
environment = { NCCL_DEBUG = "INFO" }
variants = [{ name = "all", dropout = 0.25 }]
"""
    )
    size = study.sizes["other"]
    assert (size.ranks, size.repeats, size.minutes, size.threads) == ([4], 1, 9, [1, 2])
    assert size.flags == {"batch_size": 40, "epochs": 4}  # fixed here, and varied elsewhere
    assert size.vary == {"loader": ["dask", "arrow"]}  # the other way round
    assert size.environment == {"HOROVOD_CYCLE_TIME": ["1", "5"], "NCCL_DEBUG": ["INFO"]}
    assert [variant.name for variant in size.variants] == ["all"]
    assert study.sizes["small"].vary == {"batch_size": [10, 20]}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("title", "titel", "there is no key 'titel' (did you mean 'title'?)"),
        ('title = "a study"', "", "title is missing"),
        ('benchmark = "nt3"', "", "benchmark is missing"),
        ("[sizes.small]\nranks = [1, 2]", "", "sizes is missing"),
        ("ranks = [1, 2]", "rank = 1", "no key 'sizes.small.rank' (did you mean 'sizes.small.ra"),
        ("ranks = [1, 2]", "", "sizes.small.ranks is missing"),
        ("repeats = 2", "", "sizes.small.repeats is missing"),
        ("minutes = 5", "", "sizes.small.minutes is missing"),
        ("repeats = 2", "repeats = 0", "repeats is 0; it has to be a whole number above 0"),
        ("minutes = 5", "minutes = 2.5", "minutes is 2.5; it has to be a whole number above 0"),
        ("repeats = 2", "repeats = true", "repeats is True; it has to be a whole number above 0"),
        ("[1, 2]", "[1, 1]", "sizes.small.ranks is [1, 1]; it has to be a list of different whole"),
        ("[1, 2]", "[]", "sizes.small.ranks is []; it has to be a list of different whole"),
        ("[1, 2]", "2", "sizes.small.ranks is 2; it has to be a list of different whole numbers"),
        ("ranks = [1, 2]", "ranks = [1]\nthreads = 0", "sizes.small.threads is 0; it has to be a"),
        ("[10, 20]", "[]", "each with the list of its different values"),
        ("[10, 20]", "10", "each with the list of its different values"),
        ("[10, 20]", "[10, 10]", "each with the list of its different values"),
        ("epochs = 8", "epochs = 1979-05-27", "it has to be a table of parameters"),
        ('["1", "5"]', "[1, 5]", "it has to be a table of texts, or of lists of different texts"),
        ("batch_size = [10, 20]", "epochs = [1]", "epochs stands in flags and in vary; keep one"),
        ("batch_size = [", "dropout = [0.1, ", "dropout is set by a variant and stands in vary"),
        ("batch_size = [", "rng_seed = [", "rng_seed cannot be varied: repeat i of a run adds i"),
        ("dropout = 0.5", "rng_seed = 5", "rng_seed cannot be varied"),
        ("dropout = 0.5", 'run_id = "a"', "run_id is each run's own, and set by the study"),
        ("epochs = 8", 'output_dir = "a"', "output_dir is each run's own, and set by the study"),
        ('"dropped"', '"a b"', "variant 1, name 'a b': it stands in paths; give it letters"),
        ('name = "plain"', "epochs = 2", "variant 2, name None: it stands in paths"),
        ('"plain"', '"dropped"', "two variants are named 'dropped'"),
        ("[[variants]]\nname", "[variants.a]\nname", "it has to be tables [[variants]] of a name"),
        ("[sizes.small]", '[sizes."a/b"]', "size 'a/b': it stands in paths"),
        ("NCCL_DEBUG", "OMP_NUM_THREADS", "OMP_NUM_THREADS is what threads sets; write threads"),
        ("NCCL_DEBUG", "LANG", "environment.LANG would not stand in a run's record, which notes"),
        ('benchmark = "nt3"', 'benchmark = ["nt3", "nt3"]', "or a list of different ones"),
        ("title", "title = \n", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_key(read, tmp_path, old, new, problem):
    assert old in STUDY
    with pytest.raises(ParameterError, match=re.escape(problem)) as raised:
        read(STUDY.replace(old, new, 1) if old != "[[variants]]\nname" else _one_table())
    assert str(raised.value).startswith(f"{tmp_path}/mine.toml")
    assert "\n" not in str(raised.value)


def _one_table():
    return STUDY[: STUDY.index("[[variants]]")] + "[variants.a]\ndropout = 0.5\n[sizes.small]\n"


def test_studies_are_found_by_name_and_by_path(tmp_path):
    assert "strong-nt3" in list_studies()
    assert find_study("strong-nt3").name == "strong-nt3"
    path = tmp_path / "mine.toml"
    path.write_text(STUDY)
    assert find_study(str(path)).path == path
    with pytest.raises(ParameterError, match=r"'strong-nt' .did you mean 'strong-nt3'.*weak-nt3"):
        find_study("strong-nt")
    with pytest.raises(ParameterError, match=r"absent\.toml: there is no such file"):
        find_study("absent.toml")


def test_a_size_that_is_not_there(read):
    with pytest.raises(ParameterError, match=r"mine has no size 'smal' .did you mean 'small'"):
        read(STUDY).size("smal")
