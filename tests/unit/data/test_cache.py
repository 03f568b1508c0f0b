import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import filelock
import numpy as np
import pytest
from click.testing import CliRunner

from candle_p1.cli import cli
from candle_p1.data import cache
from candle_p1.data.cache import list_caches, read_cached
from candle_p1.data.source import CacheSettings, Loading
from candle_p1.data.table import CsvLayout
from candle_p1.errors import CandleError, DataError
from tools.simulated import SimulatedJob

LAYOUT = CsvLayout(header=True, text_columns=("name",))
TEXT = "name,a,b\nx,1,2\ny,3,4.5\nx,-1,0\n"
CONTENT = ["a", "b"], [("x", 1, 2), ("y", 3, 4.5), ("x", -1, 0)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(TEXT)
    return path


@pytest.fixture
def read(source, tmp_path):
    """Reads a file through its cache; returns the table and the messages."""

    def read(path=source, layout=LAYOUT, directory=tmp_path / "cache", **settings):
        notes = []
        loading = Loading(cache=CacheSettings(directory, **settings), notify=notes.append)
        return read_cached(path, layout, loading), notes

    return read


@pytest.fixture
def made(read, tmp_path):
    """The file of a cache that has been made."""
    read()
    (path,) = (tmp_path / "cache").glob("*.table")
    return path


@pytest.fixture
def other(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text(TEXT)
    return other


def content_of(table):
    """Returns what is in a table: the columns, and the rows with the text first."""
    rows = zip(table.text["name"].values(), table.values.tolist(), strict=True)
    return table.columns, [(name, *row) for name, row in rows]


def flip_first(path):
    path.write_bytes(b"x" + path.read_bytes()[1:])


def test_the_second_load_gives_the_same_table_and_leaves_the_cache(read, made):
    before = made.stat().st_ino
    table, notes = read()
    assert content_of(table) == CONTENT
    assert notes == []
    table.values[:] = 0  # a private copy
    read(layout=CsvLayout(header=True, text_columns=("name", "a")))  # has a cache of its own
    assert content_of(read()[0]) == CONTENT
    assert made.stat().st_ino == before
    assert len(list(made.parent.glob("*.table"))) == 2


def test_a_cache_of_what_is_refused_by_now_is_not_used(read, source, monkeypatch):
    source.write_text("0,1,2\n3,4,5\n")
    with monkeypatch.context() as older:
        older.setattr("candle_p1.data.source.check_first_line", lambda *_: None)
        read(layout=CsvLayout())
    with pytest.raises(DataError, match="line 1: the line counts"):
        read(layout=CsvLayout())


def rewrite(source, text, *, same_time=False):
    time_ns = source.stat().st_mtime_ns if same_time else 1
    source.write_text(text)
    os.utime(source, ns=(time_ns, time_ns))


def truncated(num_bytes):
    return lambda made, source: made.write_bytes(made.read_bytes()[:num_bytes])


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda made, source: rewrite(source, TEXT + "z,0,0\n"), "size"),
        (lambda made, source: rewrite(source, TEXT), "modified"),
        (lambda made, source: rewrite(source, TEXT.replace(".5", ".6"), same_time=True), "content"),
        (lambda made, source: (made.unlink(), os.mkfifo(made)), "is not a file"),
        *((truncated(num_bytes), "is truncated") for num_bytes in (0, 39, -1)),
        (lambda made, _: made.write_bytes(made.read_bytes()[:-1] + b"1"), "version"),
        (lambda made, _: made.write_bytes(made.read_bytes()[1:]), "size that its header says"),
    ],
)
def test_a_cache_that_is_outdated_or_damaged_is_made_again(read, made, source, harm, reason):
    harm(made, source)
    assert all(reason in (each.problem or reason) for each in list_caches(made.parent))
    table, (note,) = read()
    assert reason in note
    rows = [f"{name},{a:g},{b:g}\n" for name, a, b in content_of(table)[1]]
    assert "".join(rows) == source.read_text().partition("\n")[2]
    assert next(list_caches(made.parent)).problem is None
    assert read()[1] == []


def test_a_flipped_byte_is_noticed(read, made):
    content = made.read_bytes()
    places = np.random.default_rng(0).choice(len(content), 60, replace=False)
    for place in [0, 16, 32, 39, 40, len(content) - 1, *places]:
        flipped = bytearray(content)
        flipped[place] ^= 1
        made.write_bytes(flipped)
        table, notes = read()
        assert content_of(table) == CONTENT
        assert len(notes) == 1, place
        assert made.read_bytes() == content


def test_a_cache_that_another_job_removes_is_made_again(read, made, monkeypatch):
    check = cache.read_header

    def check_and_remove(*arguments):
        found = check(*arguments)
        made.unlink()
        monkeypatch.setattr(cache, "read_header", check)
        return found

    monkeypatch.setattr(cache, "read_header", check_and_remove)
    assert content_of(read()[0]) == CONTENT
    assert made.exists()


def test_the_limit_removes_the_least_recently_used_cache(read, made, other, tmp_path):
    os.utime(made, (1, 1))
    (tmp_path / "third.csv").write_text(TEXT)
    read(tmp_path / "third.csv")
    _, (note,) = read(other, limit_bytes=2 * made.stat().st_size + 10)
    names = {path.name.partition(".")[0] for path in made.parent.glob("*.table")}
    assert names == {"third", "other"}
    assert str(made) in note


def test_what_does_not_fit_beside_the_caches_of_a_run_is_not_cached(made, source, other):
    settings = CacheSettings(made.parent, limit_bytes=made.stat().st_size + 10)
    notes = []
    for path in (source, other):  # of one run, which would remove the first again and again
        loading = Loading(cache=settings, notify=notes.append)
        assert content_of(read_cached(path, LAYOUT, loading)) == CONTENT
    assert list(made.parent.glob("*.table")) == [made]
    (note,) = notes
    assert str(other) in note
    assert "cache_limit" in note


def test_a_copy_on_the_node_is_used_and_repaired(read, made, tmp_path):
    node = {"stage_directory": tmp_path / "node"}
    read(**node)
    (copy,) = (tmp_path / "node").glob("*.table")
    before = copy.stat().st_ino
    assert content_of(read(**node)[0]) == CONTENT
    assert copy.stat().st_ino == before
    flip_first(copy)
    table, (note,) = read(**node)
    assert content_of(table) == CONTENT
    assert "digest" in note
    read(**node)
    assert copy.read_bytes() == made.read_bytes()


def test_a_copy_that_another_job_is_making_is_waited_for(read, made, monkeypatch):
    copy = made.parent.parent / "node" / made.name
    copy.parent.mkdir()
    has_read, read_content = threading.Event(), cache.read_content

    def read_and_say(*arguments, **named):
        table = read_content(*arguments, **named)
        has_read.set()
        return table

    monkeypatch.setattr(cache, "read_content", read_and_say)
    with ThreadPoolExecutor(1) as pool, filelock.FileLock(copy.with_suffix(".lock")):
        job = pool.submit(read, stage_directory=copy.parent)
        assert has_read.wait(60)  # before it waits, together with the other nodes of its job
        assert not copy.exists()
        shutil.copyfile(made, copy)
        before = copy.stat().st_ino
    assert content_of(job.result()[0]) == CONTENT
    assert copy.stat().st_ino == before


def full_disk(*_, **options):
    raise OSError(28, "No space left on device")


def test_a_copy_that_cannot_be_made_ends_the_load_on_all_ranks(source, made, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full_disk)

    def read(comm):
        stage = tmp_path / ("node" if comm.node else "first")
        settings = CacheSettings(made.parent, stage_directory=stage)
        with pytest.raises(CandleError, match="No space left"):
            read_cached(source, LAYOUT, Loading(comm=comm, cache=settings))

    SimulatedJob(4, 2).run(read)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_directory_that_cannot_be_written_is_an_error(read, source):
    with pytest.raises(DataError, match="--cache_dir"):
        read(directory=source / "cache")


def test_caches_are_listed_and_removed(made, source):
    options = ["data", "cache", "--cache_dir", str(made.parent)]
    (made.parent / ".x.table.partial").write_text("")
    shown = CliRunner().invoke(cli, options)
    assert shown.exit_code == 0
    assert str(made) in shown.output
    (listed,) = list_caches(made.parent)
    assert (listed.problem, listed.source["path"]) == (None, str(source))
    cleared = json.loads(CliRunner().invoke(cli, [*options, "--clear", "--json", "-"]).stdout)
    assert len(cleared["caches"]) == 1
    assert [path.suffix for path in made.parent.iterdir()] == [".lock"]


def test_one_of_several_jobs_makes_the_cache_which_has_its_name_only_when_complete(
    read, tmp_path, monkeypatch
):
    calls, seen, parse, fsync = [], [], cache.read_opened, os.fsync

    def parse_slowly(*arguments):
        calls.append(time.sleep(0.2))
        return parse(*arguments)

    def look(file):
        fsync(file)
        seen.append(sorted(path.suffix for path in (tmp_path / "cache").iterdir()))

    monkeypatch.setattr(cache, "read_opened", parse_slowly)
    monkeypatch.setattr(os, "fsync", look)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(read) for _ in range(4)]
    assert all(content_of(job.result()[0]) == CONTENT for job in jobs)
    assert len(calls) == 1
    assert seen == [[".lock", ".partial"]]
