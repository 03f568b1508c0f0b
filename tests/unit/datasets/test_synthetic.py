import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from candle_p1.data.directory import MANIFEST_NAME, Manifest, synthetic_facts
from candle_p1.datasets.synthetic import SyntheticFile, SyntheticRecipe, ensure, make
from candle_p1.errors import DataError, ParameterError


class Tiny(SyntheticRecipe):
    name, version, roles = "tiny", 1, {"train": "a.csv", "test": "b.csv"}

    def __init__(self):
        self.num_made = 0

    def files(self, size, seed):
        self.num_made += 1
        text = f"{size},{seed}\n".encode()
        return [SyntheticFile(name, 8, iter([text, text])) for name in self.roles.values()]


def test_the_manifest_describes_the_files(tmp_path):
    calls = []
    manifest = make(Tiny(), "small", tmp_path / "out", 7, lambda *call: calls.append(call))
    assert [call[0] for call in calls] == ["a.csv"] * 3 + ["b.csv"] * 3
    assert calls[2][1:] == (16, 16)
    path = tmp_path / "out/a.csv"
    assert manifest == Manifest.read(path.parent)
    assert manifest.files["a.csv"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / "out/b.csv").unlink()
    assert synthetic_facts(path) == manifest.files["a.csv"]
    path.write_text("cut\n")
    assert synthetic_facts(path) is None


def damaged(made_of=(), facts=()):
    made_of = {"name": "tiny", "size": "small", "seed": 1, "version": 1} | dict(made_of)
    facts = {"bytes": 1, "sha256": ""} | dict(facts)
    return json.dumps({"made_of": made_of, "files": {"a\0.csv": facts}})


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "{}", damaged({"seed": "1"}), damaged(facts={"bytes": "1"})]
)
def test_a_damaged_manifest_is_ignored(tmp_path, text):
    manifest = make(Tiny(), "small", tmp_path, 1)
    (tmp_path / MANIFEST_NAME).write_text(text)
    assert Manifest.read(tmp_path) is None
    assert synthetic_facts(tmp_path / "a.csv") is None
    assert manifest.whole
    (tmp_path / MANIFEST_NAME).write_text(damaged())
    assert not Manifest.read(tmp_path).whole  # there is no such file


def test_a_data_set_is_made_once_and_made_again_when_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "cache"))
    recipe = Tiny()
    manifest = ensure(recipe, "small", 1)
    assert ensure(recipe, "small", 1) == manifest
    assert recipe.num_made == 1
    (manifest.directory / "a.csv").write_text("cut")
    assert ensure(recipe, "small", 1) == manifest
    assert recipe.num_made == 2
    assert ensure(recipe, "small", 2).directory != manifest.directory
    assert tmp_path / "cache" in manifest.directory.parents


def test_other_files_are_never_overwritten(tmp_path):
    (tmp_path / "a.csv").write_text("precious\n")
    with pytest.raises(DataError, match=r"a\.csv.*--out"):
        make(Tiny(), "small", tmp_path, 1)
    assert (tmp_path / "a.csv").read_text() == "precious\n"


def test_an_interrupted_write_leaves_nothing_behind(tmp_path):
    class Interrupted(Tiny):
        def files(self, size, seed):
            def blocks():
                yield b"half"
                raise KeyboardInterrupt

            return [*super().files(size, seed)[:1], SyntheticFile("b.csv", 8, blocks())]

    with pytest.raises(KeyboardInterrupt):
        make(Interrupted(), "small", tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} <= {".lock"}
    os.mkfifo(tmp_path / ".a.csv.partial")
    assert make(Tiny(), "small", tmp_path, 1).whole


def test_an_unwritable_directory_and_an_unknown_size_are_errors(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="CANDLE_DATA_DIR"):
        make(Tiny(), "small", tmp_path / "file/below", 1)
    with pytest.raises(ParameterError, match="medium"):
        make(Tiny(), "medium", tmp_path, 1)


def test_only_one_of_several_jobs_makes_the_data(tmp_path):
    class Slow(Tiny):
        def files(self, size, seed):
            time.sleep(0.2)
            return super().files(size, seed)

    recipe = Slow()
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(make, recipe, "small", tmp_path, 1) for _ in range(4)]
    assert all(job.result().whole for job in jobs)
    assert recipe.num_made == 1
