from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise

import filelock
import numpy as np
import pytest
import xxhash
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from candle_p1.cli import cli
from candle_p1.data import cache, cache_file, cache_stage
from candle_p1.data.cache import CacheSettings, list_caches, read_cached
from candle_p1.data.cache_read import shares_of_nodes
from candle_p1.data.table import CsvLayout
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError

LAYOUT = CsvLayout(header=True, text_columns=("name",))
TEXT = "name,a,b\nx,1,2\ny,3,4.5\nx,-1,0\n"


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
        settings = CacheSettings(directory, **settings)
        table = read_cached(path, layout, SerialCommunicator(), settings, notify=notes.append)
        return table, notes

    return read


def test_a_cache_of_what_is_refused_by_now_is_not_used(read, source, monkeypatch):
    source.write_text("0,1,2\n3,4,5\n")
    with monkeypatch.context() as older:
        older.setattr("candle_p1.data.source.wrong_first_line", lambda *_: None)
        read(layout=CsvLayout())
    with pytest.raises(DataError, match="line 1: the line counts"):
        read(layout=CsvLayout())


@pytest.fixture
def parsed(monkeypatch):
    """Has an element for each time that the text was parsed."""
    calls = []
    parse = cache.read_together
    monkeypatch.setattr(cache, "read_together", lambda *a, **k: calls.append(1) or parse(*a, **k))
    return calls


def only_cache(tmp_path):
    (path,) = (tmp_path / "cache").glob("*.table")
    return path


def same(table, other):
    assert table.sha256() == other.sha256()
    assert table.columns == other.columns
    assert table.values.tobytes() == other.values.tobytes()
    assert table.text["name"].values() == other.text["name"].values()


def test_the_second_load_gives_the_same_table_without_parsing(read, parsed):
    first, notes = read()
    second, more = read()
    same(first, second)
    assert (len(parsed), notes, more) == (1, [], [])
    second.values[:] = 0  # a private copy
    same(first, read()[0])


def test_a_flipped_byte_is_noticed(read, parsed, tmp_path):
    first, _ = read()
    path = only_cache(tmp_path)
    content = path.read_bytes()
    places = np.random.default_rng(0).choice(len(content), 60, replace=False)
    for place in [0, 16, 32, 40, len(content) - 1, *places]:
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        parsed.clear()
        table, notes = read()
        same(first, table)
        assert len(parsed) == 1, place
        assert len(notes) == 1
        assert path.read_bytes() == content


@pytest.mark.parametrize("num_bytes", [0, 10, 39, 60, 4095, 4096, -1])
def test_a_truncated_cache_is_rebuilt(read, parsed, tmp_path, num_bytes):
    first, _ = read()
    path = only_cache(tmp_path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    table, notes = read()
    same(first, table)
    assert (len(parsed), len(notes)) == (2, 1)


@pytest.mark.parametrize(
    ("text", "same_time", "reason"),
    [
        (TEXT + "z,0,0\n", False, "size"),
        (TEXT, False, "modified"),
        (TEXT.replace("4.5", "5.5"), True, "content"),
    ],
)
def test_a_changed_source_is_read_again(read, parsed, source, text, same_time, reason):
    read()
    time_ns = source.stat().st_mtime_ns if same_time else 1
    source.write_text(text)
    os.utime(source, ns=(time_ns, time_ns))
    table, notes = read()
    assert len(parsed) == 2
    assert reason in notes[0]
    rows = [row.split(",") for row in text.split()[1:]]
    assert table.text["name"].values() == [name for name, *_ in rows]
    assert table.values.tolist() == [[float(a), float(b)] for _, a, b in rows]


def test_each_layout_has_its_own_cache(read, tmp_path):
    for layout in (LAYOUT, CsvLayout(header=True, text_columns=("name", "a")), LAYOUT):
        read(layout=layout)
    assert len(list((tmp_path / "cache").glob("*.table"))) == 2


def test_the_limit_removes_the_least_recently_used_cache(read, tmp_path):
    read()
    first = only_cache(tmp_path)
    os.utime(first, (1, 1))
    other = tmp_path / "other.csv"
    other.write_text(TEXT)
    _, notes = read(other, limit_bytes=first.stat().st_size + 10)
    assert not first.exists()
    assert only_cache(tmp_path).name.startswith("other.csv")
    assert str(first) in notes[0]


def test_what_does_not_fit_beside_the_caches_of_a_run_is_not_cached(read, source, tmp_path):
    read()
    first = only_cache(tmp_path)
    other = tmp_path / "other.csv"
    other.write_text(TEXT)
    same(read(other, limit_bytes=10)[0], read()[0])
    assert only_cache(tmp_path) == first
    settings = CacheSettings(tmp_path / "cache", limit_bytes=first.stat().st_size + 10)
    notes = []
    for path in (source, other):  # of one run, which would remove the first again and again
        read_cached(path, LAYOUT, SerialCommunicator(), settings, notify=notes.append)
    assert only_cache(tmp_path) == first
    (note,) = notes
    assert f"{other} (" in note
    assert "is not cached: the limit for all caches (cache_limit)" in note


def test_a_copy_on_the_node_is_used_and_repaired(read, parsed, tmp_path):
    first, _ = read(stage_directory=tmp_path / "node")
    same(first, read(stage_directory=tmp_path / "node")[0])
    (copy,) = (tmp_path / "node").glob("*.table")
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    table, notes = read(stage_directory=tmp_path / "node")
    same(first, table)
    assert "digest" in notes[0]
    same(first, read(stage_directory=tmp_path / "node")[0])
    assert copy.read_bytes() == only_cache(tmp_path).read_bytes()


@pytest.mark.parametrize("succeeds", [True, False])
def test_a_copy_that_another_job_is_making_is_waited_for(read, tmp_path, monkeypatch, succeeds):
    first, _ = read()
    copy = tmp_path / "node" / only_cache(tmp_path).name
    copy.parent.mkdir()
    send, sent, found = cache_stage._send, threading.Event(), []

    def send_and_say(*arguments):
        problem = send(*arguments)
        sent.set()
        return problem

    monkeypatch.setattr(cache_stage, "_send", send_and_say)
    with filelock.FileLock(copy.with_suffix(".lock")):
        job = threading.Thread(target=lambda: found.append(read(stage_directory=copy.parent)[0]))
        job.start()
        # It does not hold up the other nodes of its job.
        assert sent.wait(60)
        assert not copy.exists()
        if succeeds:
            shutil.copyfile(only_cache(tmp_path), copy)
            other = copy.stat().st_ino
    job.join(60)
    same(first, found[0])
    assert copy.read_bytes() == only_cache(tmp_path).read_bytes()
    if succeeds:
        assert copy.stat().st_ino == other
    assert sorted(path.suffix for path in copy.parent.iterdir()) == [".lock", ".table"]


def test_a_full_disk_of_a_node_is_an_error_and_leaves_nothing(read, tmp_path, monkeypatch):
    read()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(DataError, match=r"node/table.*No space left on device"):
        read(stage_directory=tmp_path / "node")
    assert [path.suffix for path in (tmp_path / "node").iterdir()] == [".lock"]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 99), st.integers(1, 30))
def test_nodes_share_the_units_of_a_file(sizes, begin, num_nodes):
    ends = (begin + np.cumsum(sizes)).tolist()
    units = list(zip([begin, *ends[:-1]], ends, strict=True))
    shares = shares_of_nodes(units, num_nodes)
    assert len(shares) == num_nodes
    assert shares[0][0] == 0
    assert shares[-1][1] == sum(sizes)
    assert all(last == first for (_, last), (first, _) in pairwise(shares))
    assert {begin + start for start, _ in shares} <= {start for start, _ in units} | {ends[-1]}


def test_a_directory_that_cannot_be_written_is_an_error(read, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--cache_dir"):
        read(directory=tmp_path / "file/cache")


def rewrite_header(path, changes):
    """Changes the header of a cache and makes its digest right again."""
    content = path.read_bytes()
    num_bytes = cache_file.FIXED.unpack_from(content)[2]
    start = cache_file._first_byte(num_bytes)
    text = changes
    if not isinstance(changes, str):
        header = json.loads(content[cache_file.FIXED.size : cache_file.FIXED.size + num_bytes])
        text = json.dumps(changes(header))
    text = text.encode()
    fixed = cache_file.FIXED.pack(cache_file.MAGIC, xxhash.xxh3_128_digest(text), len(text))
    padding = bytes(cache_file._first_byte(len(text)) - len(fixed) - len(text))
    path.write_bytes(fixed + text + padding + content[start:])


@pytest.mark.parametrize(
    "changes",
    [
        "[" * 100_000,
        "[]",
        "1",
        "",
        "{}",
        *(
            lambda header, changes=changes: header | changes
            for changes in (
                {"source": []},
                {"source": {}},
                {"shape": 5},
                {"shape": ["3", 2]},
                {"shape": [-3, -2]},
                {"shape": [2**70, 2**70]},
                {"shape": [2, 3]},
                {"shape": [1.5, 4]},
                {"columns": ["a"]},
                {"columns": "ab"},
                {"text": {"name": "xy"}},
                {"text": {"name": ["x"]}},
                {"text": {"name": []}},
                {"slabs_xxh3": []},
                {"slabs_xxh3": ["0", "0", "0"]},
                {"slabs_xxh3": [1, 2]},
            )
        ),
        lambda header: header | {"source": header["source"] | {"path": "a\0"}},
        lambda header: header | {"source": header["source"] | {"path": 5}},
        lambda header: header | {"source": {"path": header["source"]["path"]}},
        lambda header: {key: header[key] for key in ("source", "shape")},
    ],
)
def test_a_cache_that_describes_no_table_is_rebuilt(read, parsed, tmp_path, changes):
    first, _ = read()
    path = only_cache(tmp_path)
    rewrite_header(path, changes)
    list(list_caches(path.parent))
    table, notes = read()
    same(first, table)
    assert (len(parsed), len(notes)) == (2, 1)
    assert next(list_caches(path.parent)).problem is None


@pytest.mark.parametrize("num_header_bytes", [2**63, 2**64 - 1, 10**9])
def test_a_header_that_claims_to_be_huge_is_not_read(read, parsed, tmp_path, num_header_bytes):
    first, _ = read()
    path = only_cache(tmp_path)
    content = path.read_bytes()
    magic, digest, _ = cache_file.FIXED.unpack_from(content)
    fixed = cache_file.FIXED.pack(magic, digest, num_header_bytes)
    path.write_bytes(fixed + content[len(fixed) :])
    same(first, read()[0])
    assert len(parsed) == 2


def test_a_cache_of_another_version_is_rebuilt(read, tmp_path):
    first, _ = read()
    path = only_cache(tmp_path)
    path.write_bytes(b"CANDLEP1 cache 2" + path.read_bytes()[16:])
    table, notes = read()
    same(first, table)
    assert "version" in notes[0]


def test_a_pipe_in_the_place_of_a_cache_is_replaced(read, tmp_path):
    first, _ = read()
    path = only_cache(tmp_path)
    path.unlink()
    os.mkfifo(path)
    same(first, read()[0])
    assert path.is_file()


def test_a_cache_that_another_job_removes_is_made_again(read, parsed, tmp_path, monkeypatch):
    first, _ = read()
    path, check = only_cache(tmp_path), cache.check_header

    def check_and_remove(*arguments):
        found = check(*arguments)
        path.unlink()
        monkeypatch.setattr(cache, "check_header", check)
        return found

    monkeypatch.setattr(cache, "check_header", check_and_remove)
    same(first, read()[0])
    assert len(parsed) == 2


def test_caches_are_listed_with_their_problems(read, source, tmp_path):
    read()
    (listed,) = list_caches(tmp_path / "cache")
    assert listed.problem is None
    assert listed.source["path"] == str(source)
    source.write_text(TEXT + "z,0,0\n")
    assert "size" in next(list_caches(tmp_path / "cache")).problem
    listed.path.write_text("junk")
    assert "truncated" in next(list_caches(tmp_path / "cache")).problem


def test_the_command_lists_and_removes_caches(read, tmp_path):
    read()
    directory = str(tmp_path / "cache")
    (tmp_path / "cache/.x.table.partial").write_text("")
    shown = CliRunner().invoke(cli, ["data", "cache", "--cache_dir", directory])
    assert shown.exit_code == 0
    assert str(only_cache(tmp_path)) in shown.output
    assert "1 cached table, " in shown.output
    options = ["--cache_dir", directory, "--clear", "--json", "-"]
    cleared = json.loads(CliRunner().invoke(cli, ["data", "cache", *options]).stdout)
    assert len(cleared["caches"]) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def read_once(path, directory):
    calls = []
    parse = cache.read_together
    cache.read_together = lambda *a, **k: calls.append(1) or parse(*a, **k)
    table = read_cached(path, LAYOUT, SerialCommunicator(), CacheSettings(directory))
    return len(calls), table.sha256()


@pytest.mark.extended
def test_only_one_of_eight_processes_makes_the_cache(source, tmp_path):
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        readers = [pool.submit(read_once, source, tmp_path / "cache") for _ in range(8)]
        found = [reader.result(timeout=120) for reader in readers]
    assert sum(num for num, _ in found) == 1
    assert len({digest for _, digest in found}) == 1


def write_forever(source, directory, ready):
    ready.set()
    while True:
        read_cached(source, CsvLayout(), SerialCommunicator(), CacheSettings(directory))
        for path in directory.glob("*.table"):
            path.unlink()


@pytest.mark.extended
def test_killing_a_writer_leaves_no_partial_cache(read, tmp_path):
    source, directory = tmp_path / "big.csv", tmp_path / "cache"
    row = ",".join(["1.5"] * 2000) + "\n"
    source.write_text(row * 500)
    context = multiprocessing.get_context("spawn")
    for delay in np.linspace(0.01, 0.2, 8):
        ready = context.Event()
        process = context.Process(target=write_forever, args=(source, directory, ready))
        process.start()
        ready.wait()
        time.sleep(delay)
        process.kill()
        process.join()
        for cached in list_caches(directory):
            assert cached.problem is None
        table, notes = read(source, CsvLayout())
        assert notes == []
        assert table.values.shape == (500, 2000)
        assert (table.values == np.float32(1.5)).all()
