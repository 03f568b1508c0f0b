"""What is recorded about files, whichever way a benchmark reads them."""

import os
import subprocess
import time

import numpy as np
import pytest

from candle_p1.data.reader import FileSet, Reader, describe_together
from candle_p1.datasets.fetch import file_status
from candle_p1.datasets.synthetic import SyntheticFile, SyntheticRecipe, make
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError


@pytest.fixture(autouse=True)
def data_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def reader(tmp_path):
    np.save(tmp_path / "one.npy", np.arange(6, dtype="f4").reshape(2, 3))
    np.savez(tmp_path / "two.npz", a=np.arange(3))
    (tmp_path / "three.csv").write_text("1,2\n")
    names = {"npy": "one.npy", "npz": "two.npz", "csv": "three.csv", "unread": "one.npy"}
    return Reader(FileSet.at({role: tmp_path / name for role, name in names.items()}))


def test_all_files_of_a_run_are_described_with_the_times_of_the_ranks(reader):
    start_s = time.perf_counter()
    reader.read("csv")
    assert reader.load("npy", np.load).shape == (2, 3)
    with reader.load("npz", np.load) as arrays:
        assert arrays["a"].tolist() == [0, 1, 2]
    reader.digest()
    described = describe_together(reader, SerialCommunicator(), start_s)
    assert list(described) == ["npy", "npz", "csv", "unread"]
    assert all(facts["file_bytes"] and len(facts["sha256"]) == 64 for facts in described.values())
    assert [facts["num_rows"] for facts in described.values()] == [2, None, 1, None]
    assert set(reader.digests) == {"npy", "csv"}
    assert set(reader.table_s) == {"csv"}
    assert reader.matrix_bytes == 24 + 8
    loads = {
        role: facts["load"].values.tolist() for role, facts in described.items() if "load" in facts
    }
    assert loads == {role: [reader.load_s[role]] for role in ("npy", "npz", "csv")}
    assert [role for role, facts in described.items() if "reading" in facts] == ["csv"]
    reading = described["csv"]["reading"]
    assert reading.read.values.tolist() == [len("1,2\n")]
    assert 0 < reading.begin.min_s <= reading.end.max_s < time.perf_counter() - start_s


def test_the_digest_covers_all_arrays_in_memory_and_their_shapes(reader):
    def digest_of(content):
        reader.load("npy", lambda path: content)
        reader.digest()
        return reader.digests.pop("npy", None)

    zeros = np.zeros((2, 3))
    same = [zeros, [np.asfortranarray(zeros)], {"x": zeros}]
    assert len({digest_of(each) for each in same}) == 1
    other = [zeros.T, zeros.astype("f4"), (zeros, zeros), zeros + 1, np.array(["a", "b"])]
    assert len({digest_of(each) for each in [zeros, *other]}) == 6
    assert digest_of(np.load(reader.files.paths["npy"], mmap_mode="r")) is None


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01", None])
def test_a_file_that_cannot_be_loaded_is_named(reader, content):
    path = reader.files.paths["npy"]
    path.unlink()
    os.mkfifo(path) if content is None else path.write_bytes(content)  # a pipe is not waited for
    with pytest.raises(DataError) as caught:
        reader.load("npy", np.load)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("is_replaced", [True, False])
def test_no_digest_is_recorded_of_a_file_that_was_not_read(reader, is_replaced):
    path = reader.files.paths["csv"]
    reader.read("csv")
    path.unlink()
    if is_replaced:
        path.write_text("3,4\n")
    described = reader.describe()
    assert [role for role, facts in described.items() if facts["sha256"] is None] == ["csv"]
    assert reader.warnings[0].startswith(f"{path}: it was changed after it was read")


def test_a_file_that_changes_while_it_is_loaded_is_refused(reader):
    with pytest.raises(DataError, match=r"one\.npy: the file was changed while it was read"):
        reader.load("npy", lambda path: path.write_text("changed"))


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "frames"
    directory.mkdir()
    for i in (10, 2, 1):
        np.save(directory / f"{i:02}.npy", np.full(i, i))
    (directory / "notes.txt").write_text("not an array")
    (directory / ".hidden.npy").write_text("not an array")
    return directory


def test_a_role_may_have_many_files(directory):
    reader = Reader(FileSet.at({"train": directory}))
    loaded = reader.load_each("train", np.load, "*.npy")
    assert [array.tolist() for array in loaded] == [[1], [2, 2], [10] * 10]
    reader.digest()
    assert len(reader.digests["train"]) == 64
    assert list(reader.sizes["train"]) == ["01.npy", "02.npy", "10.npy"]
    (facts,) = reader.describe().values()
    assert facts["num_files"] == 4
    assert facts["file_bytes"] == sum(path.stat().st_size for path in directory.glob("[!.]*"))
    command = "LC_ALL=C sha256sum * | sha256sum"
    printed = subprocess.check_output(command, cwd=directory, shell=True, text=True)
    assert printed.split()[0] == facts["sha256"]


@pytest.mark.parametrize(
    ("role", "pattern", "named"),
    [("file", "*", "01.npy"), ("train", "*.npz", "frames"), ("train", "*", "notes.txt")],
)
def test_what_is_wrong_in_a_directory_is_named(directory, role, pattern, named):
    reader = Reader(FileSet.at({"train": directory, "file": directory / "01.npy"}))
    with pytest.raises(DataError) as caught:
        reader.load_each(role, np.load, pattern)
    assert caught.value.path.endswith(named)


class ManyFiles(SyntheticRecipe):
    name = "many"
    version = 1
    roles = {"train": "frames", "test": "test.bin"}  # noqa: RUF012

    def files(self, size, seed):
        names = ["frames/a.bin", "frames/b.bin", "test.bin"]
        return [SyntheticFile(name, 1, iter([name.encode()])) for name in names]


def test_a_directory_of_synthetic_files_is_known_to_be_synthetic(tmp_path):
    made = make(ManyFiles(), "small", tmp_path / "made", 1)
    frames = made.directory / "frames"
    files = FileSet.at({"train": frames})
    assert files.synthetic
    reader = Reader(files)
    (facts,) = reader.describe().values()
    assert reader.load_each("train", lambda path: path.name) == ["a.bin", "b.bin"]
    status = file_status("many", "frames", made.directory)
    assert (status["state"], status["file_bytes"]) == ("synthetic", facts["file_bytes"])
    assert status["sha256"] == facts["sha256"]
    (frames / "a.bin").write_bytes(b"others, of the same size"[: len("frames/a.bin")])
    assert Reader(FileSet.at({"train": frames})).describe()["train"]["sha256"] != facts["sha256"]
    (frames / "c.bin").write_bytes(b"added")
    with_more = FileSet.at({"train": frames})
    assert with_more.synthetic
    assert Reader(with_more).describe()["train"]["sha256"] != facts["sha256"]
    (frames / "a.bin").unlink()
    assert not made.whole
    single = made.directory / "test.bin"
    assert FileSet.at({"test": single}).synthetic
    single.write_bytes(b"a file of another size")
    assert not FileSet.at({"test": single}).synthetic
