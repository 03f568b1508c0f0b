"""What is recorded about files, whichever way a benchmark reads them."""

from __future__ import annotations

import os

import numpy as np
import pytest

from candle_p1.data.reader import FileSet, Reader
from candle_p1.errors import DataError


@pytest.fixture
def reader(monkeypatch, tmp_path):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "data"))
    np.save(tmp_path / "one.npy", np.arange(6, dtype="f4").reshape(2, 3))
    np.savez(tmp_path / "two.npz", a=np.arange(3))
    (tmp_path / "three.csv").write_text("1,2\n")
    names = {"npy": "one.npy", "npz": "two.npz", "csv": "three.csv", "unread": "one.npy"}
    return Reader(FileSet.of({role: tmp_path / name for role, name in names.items()}))


def test_all_files_of_a_run_are_described(reader):
    reader.read("csv")
    assert reader.load("npy", np.load).shape == (2, 3)
    with reader.load("npz", np.load) as arrays:
        assert arrays["a"].tolist() == [0, 1, 2]
    reader.digest()
    described = reader.describe()
    assert list(described) == ["npy", "npz", "csv", "unread"]
    assert all(facts["file_bytes"] and len(facts["sha256"]) == 64 for facts in described.values())
    assert {role: facts["num_rows"] for role, facts in described.items()} == {
        "npy": 2,
        "npz": None,
        "csv": 1,
        "unread": None,
    }
    assert set(reader.digests) == {"npy", "csv"}
    assert set(reader.load_s) == {"npy", "npz", "csv"}
    assert set(reader.table_s) == {"csv"}
    assert reader.matrix_bytes == 24 + 8


def digest_of(reader, content):
    reader.load("npy", lambda path: content)
    reader.digest()
    return reader.digests.get("npy")


def test_the_digest_covers_all_arrays_in_memory_and_their_shapes(reader):
    zeros = np.zeros((2, 3))
    same = [zeros, [np.asfortranarray(zeros)], {"x": zeros}]
    assert len({digest_of(reader, each) for each in same}) == 1
    other = [zeros.T, zeros.astype("f4"), (zeros, zeros), zeros + 1, np.array(["a", "b"])]
    assert len({digest_of(reader, each) for each in [zeros, *other]}) == 6


def test_what_is_not_in_memory_has_no_digest(reader):
    assert digest_of(reader, "text") is None
    mapped = reader.load("npy", lambda path: np.load(path, mmap_mode="r"))
    reader.digest()
    assert isinstance(mapped, np.memmap)
    assert reader.digests == {}


@pytest.mark.parametrize("content", [b"", b"not an array", b"\x93NUMPY\x01"])
def test_a_file_that_cannot_be_loaded_is_named(reader, content):
    path = reader.files.paths["npy"]
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        reader.load("npy", np.load)
    assert caught.value.path == str(path)


def test_a_pipe_is_refused_and_not_waited_for(reader):
    path = reader.files.paths["npy"]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="a pipe"):
        reader.load("npy", np.load)
