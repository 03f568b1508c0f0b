from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.data.reader import file_sha256
from candle_p1.datasets import download, registry
from candle_p1.datasets.download import ResumingDownloader as Downloader
from candle_p1.datasets.download import without_password
from candle_p1.datasets.fetch import fetch
from candle_p1.datasets.registry import file_status
from candle_p1.errors import DataError
from tests.conftest import wait_until

CONTENT = bytes(i * i % 251 for i in range(1_000_000))
OTHER = CONTENT[::-1]
NAME = "a.csv"
MAX_WAIT_S = 60


@dataclass
class Served:
    """A file of the server, and how requests for it are answered, one after the other."""

    content: bytes = CONTENT
    etag: str | None = '"1"'
    last_modified: str | None = None
    ranges: bool = True
    honours_if_range: bool = True
    length: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    # Per request: after how many bytes the connection is dropped; None sends all.
    drops: list[int | None] = field(default_factory=list)
    # Statuses that are answered first, one per request.
    statuses: list[int] = field(default_factory=list)
    # The connection is held here after half of the bytes.
    gate: threading.Event | None = None


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.requests.append((self.path, dict(self.headers)))
        served = self.server.files.get(self.path)
        if served is None:
            self.send_error(404)
        elif served.statuses:
            self.send_headers(served.statuses.pop(0), served.headers)
        else:
            with suppress(ConnectionError):
                self.send_content(served)

    def send_headers(self, status, headers, content_bytes=0):
        self.send_response(status)
        for header in headers.items():
            self.send_header(*header)
        if content_bytes is not None:
            self.send_header("Content-Length", str(content_bytes))
        self.end_headers()

    def send_content(self, served):
        content = served.content
        validator = self.headers.get("If-Range")
        fits = not served.honours_if_range or validator in (served.etag, served.last_modified)
        start, status = 0, 200
        headers = {"ETag": served.etag, "Last-Modified": served.last_modified}
        headers = {name: value for name, value in headers.items() if value} | served.headers
        if served.ranges and "Range" in self.headers and fits:
            start, status = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")), 206
            if start >= len(content):
                self.send_headers(416, {})
                return
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_headers(status, headers, len(content) - start if served.length else None)
        body = content[start:]
        drop = served.drops.pop(0) if served.drops else None
        if served.gate:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            served.gate.wait(MAX_WAIT_S)
            body = body[len(body) // 2 :]
        self.wfile.write(body[:drop])


class Server(ThreadingHTTPServer):
    """Serves `files`, by path, and records the `requests`: (path, headers)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requests = {}, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def serve(self, path=f"/{NAME}", **options):
        self.files[path] = Served(**options)
        return self.files[path]

    def ranges(self):
        return [headers.get("Range") for _, headers in self.requests]


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        for served in server.files.values():
            if served.gate:
                served.gate.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def surroundings(environment, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("CANDLE_BENCHMARKS_PATH", raising=False)


@pytest.fixture
def get(server, tmp_path, monkeypatch):
    """Fetches a.csv, or other names, into tmp_path/data; records waits, messages and progress."""

    def get(*names, url=None, directory=tmp_path / "data", benchmark="none", num_retries=2):
        return fetch(
            benchmark,
            names or [NAME],
            url or server.url,
            directory,
            progress=lambda *facts: get.progress.append(facts),
            notify=get.said.append,
            num_retries=num_retries,
        )

    def interrupted(**options):
        server.serve(drops=[500_000])
        with pytest.raises(DataError):
            get(num_retries=0, **options)

    get.waits, get.said, get.progress, get.directory = [], [], [], tmp_path / "data"
    clock = SimpleNamespace(sleep=get.waits.append, monotonic=time.monotonic)
    monkeypatch.setattr(download, "time", clock)
    get.interrupted, get.content = interrupted, lambda: (get.directory / NAME).read_bytes()
    return get


def visible(directory):
    return {path.name for path in directory.iterdir() if path.name != ".lock"}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_downloaded_recorded_and_not_downloaded_again(server, get):
    server.serve(last_modified="Tue, 01 Jan 2019 00:00:00 GMT")
    (file,) = get()
    path = get.directory / NAME
    assert path.read_bytes() == CONTENT
    assert (file.path, file.file_bytes, file.sha256) == (path, len(CONTENT), sha256(CONTENT))
    assert file.source == f"{server.url}/{NAME}"
    recorded = json.loads((get.directory / "fetched.json").read_text())["files"][NAME]
    assert recorded.pop("time").startswith("20")
    assert recorded == {
        "sha256": sha256(CONTENT),
        "bytes": len(CONTENT),
        "url": file.source,
        "etag": '"1"',
        "last_modified": "Tue, 01 Jan 2019 00:00:00 GMT",
    }
    assert visible(get.directory) == {NAME, "fetched.json"}
    assert get.progress[-1] == (NAME, len(CONTENT), len(CONTENT))
    assert [file.source for file in get()] == [None]
    assert len(server.requests) == 1
    plain = get.directory.parent / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("validator", [{}, {"etag": None, "last_modified": "yesterday"}])
def test_a_broken_download_is_resumed_by_range(server, get, validator):
    server.serve(drops=[500_000, 250_000], **validator)
    get()
    assert get.content() == CONTENT
    starts = [0] + [int(words[6:-1]) for words in server.ranges()[1:]]
    assert len(starts) == 3
    assert 0 == starts[0] < starts[1] <= 500_000 < starts[1] + 250_000 >= starts[2] > starts[1]
    assert server.requests[1][1]["If-Range"] == validator.get("last_modified", '"1"')
    assert get.waits == [1.0, 1.0]  # both attempts brought bytes
    assert "1 s" in get.said[0]
    assert visible(get.directory) == {NAME, "fetched.json"}


@pytest.mark.parametrize(
    "server_is",
    [
        {"ranges": False},  # answers 200 to a request with Range
        {"etag": None},  # sends nothing that identifies a version
        {"etag": 'W/"1"'},  # only a weak validator
    ],
)
def test_a_download_that_cannot_be_resumed_starts_from_zero(server, get, server_is):
    server.serve(drops=[500_000], **server_is)
    get()
    assert get.content() == CONTENT
    assert [words is not None for words in server.ranges()] == [False, "ranges" in server_is]


@pytest.mark.parametrize(
    ("then", "has_range"),
    [
        ({"content": OTHER, "etag": '"2"'}, [False, True]),
        ({"content": b"short", "honours_if_range": False}, [False, True, False]),
    ],
)
def test_a_file_that_has_changed_is_downloaded_whole(server, get, then, has_range):
    get.interrupted()
    assert (get.directory / f".{NAME}.partial").stat().st_size > 0
    server.serve(**then)
    get()
    assert get.content() == then["content"]
    assert [words is not None for words in server.ranges()] == has_range
    assert server.requests[1][1]["If-Range"] == '"1"'


@pytest.mark.parametrize("version_file_is", ["of another URL", "damaged"])
def test_a_partial_file_of_unknown_version_is_not_resumed(server, get, version_file_is):
    get.interrupted()
    server.serve(f"/mirror/{NAME}", content=OTHER)
    if version_file_is == "damaged":
        (get.directory / f".{NAME}.partial.json").write_text("{")
    get(url=f"{server.url}/mirror/" if version_file_is == "of another URL" else None)
    assert get.content() == (CONTENT if version_file_is == "damaged" else OTHER)
    assert server.ranges() == [None, None]


def test_a_complete_partial_file_is_finished(server, get):
    get.interrupted()
    (get.directory / f".{NAME}.partial").write_bytes(CONTENT)
    get()
    assert get.content() == CONTENT
    assert server.ranges() == [None, f"bytes={len(CONTENT) - 1}-"]


def test_retries_end_when_no_attempt_brings_new_bytes(server, get):
    server.serve(ranges=False, drops=[500_000] * 4)
    with pytest.raises(DataError, match=r"a\.csv"):
        get(num_retries=3)
    assert get.waits == [1.0, 2.0, 4.0]
    assert not (get.directory / NAME).exists()


def test_a_file_of_unknown_length_is_downloaded(server, get):
    server.serve(length=False)
    get()
    assert get.content() == CONTENT
    assert get.progress[-1] == (NAME, len(CONTENT), 0)


@pytest.mark.parametrize(
    "answer",
    [
        *({"statuses": [status]} for status in (404, 403, 410)),
        {"headers": {"Content-Type": "text/html; charset=utf-8"}},
        {"headers": {"Content-Encoding": "gzip"}},
    ],
)
def test_a_refusal_or_another_kind_of_answer_is_not_retried(server, get, answer):
    server.serve(**answer)
    with pytest.raises(DataError, match=str(answer.get("statuses", [NAME])[0])):
        get()
    assert len(server.requests) == 1
    assert visible(get.directory) == set()


@pytest.mark.parametrize(
    ("status", "headers", "waits_s"),
    [
        *((status, {}, [1.0, 2.0]) for status in (408, 429, 500, 503)),
        (503, {"Retry-After": "7"}, [7.0, 7.0]),
        (503, {"Retry-After": "86400"}, [60.0, 60.0]),
    ],
)
def test_temporary_errors_are_retried_after_a_wait(server, get, status, headers, waits_s):
    server.serve(statuses=[status, status], headers=headers)
    get()
    assert len(server.requests) == 3
    assert get.waits == waits_s


def test_a_redirect_is_followed(server, get):
    server.serve(statuses=[302], headers={"Location": f"/elsewhere/{NAME}"})
    server.serve(f"/elsewhere/{NAME}", drops=[500_000])
    get()
    assert get.content() == CONTENT
    server.serve("/b.csv", statuses=[302], headers={"Location": "file:///etc/passwd"})
    with pytest.raises(DataError):
        get("b.csv")
    assert not (get.directory / "b.csv").exists()


@pytest.fixture
def known(monkeypatch):
    """Publishes the sum of a.csv, and that of b.csv."""
    files = {
        NAME: {"bytes": len(CONTENT), "sha256": sha256(CONTENT)},
        "b.csv": {"bytes": len(OTHER), "sha256": sha256(OTHER)},
    }
    monkeypatch.setattr(registry, "published_sums", lambda: {"known": files})


def test_a_file_with_a_wrong_checksum_is_removed_and_good_files_stay(server, get, known):
    server.serve()
    server.serve("/b.csv", content=OTHER[:-1] + b"x")
    with pytest.raises(DataError, match=r"b\.csv") as refused:
        get(NAME, "b.csv", benchmark="known")
    assert sha256(OTHER) in str(refused.value)
    assert sha256(OTHER[:-1] + b"x") in str(refused.value)
    assert visible(get.directory) == {NAME, "fetched.json"}
    assert get.content() == CONTENT
    server.serve("/b.csv", content=OTHER)
    get(NAME, "b.csv", benchmark="known")
    assert (get.directory / "b.csv").read_bytes() == OTHER
    assert [path for path, _ in server.requests] == ["/a.csv", "/b.csv", "/b.csv"]


def test_a_file_spliced_by_a_faulty_server_is_removed(server, get, known):
    get.interrupted(benchmark="known")
    server.serve(content=OTHER, honours_if_range=False)
    with pytest.raises(DataError, match=sha256(CONTENT)):
        get(benchmark="known")
    assert visible(get.directory) == set()


def test_later_downloads_must_match_the_first(server, get):
    server.serve()
    get()
    (get.directory / NAME).unlink()
    server.serve(content=OTHER)
    with pytest.raises(DataError, match=r"fetched\.json"):
        get()
    assert not (get.directory / NAME).exists()
    server.serve()
    get()
    assert get.content() == CONTENT


def test_a_file_copied_by_hand_is_checked_and_left_alone(server, get, known):
    get.directory.mkdir()
    (get.directory / NAME).write_bytes(b"mine")
    with pytest.raises(DataError, match=sha256(b"mine")):
        get(benchmark="known")
    assert get.content() == b"mine"
    assert get(benchmark="no published sum")[0].sha256 == sha256(b"mine")
    assert server.requests == []


def test_synthetic_files_are_not_accepted_as_published_ones(get, small_data):
    with pytest.raises(DataError, match="synthetic"):
        get("nt_train2.csv", benchmark="nt3", directory=small_data("nt3"))


def test_files_are_fetched_from_a_local_directory(server, get, tmp_path):
    source = tmp_path / "the mirror"
    source.mkdir()
    (source / "a b.csv").write_bytes(CONTENT)
    (file,) = get("a b.csv", url=source.as_uri())
    assert file.path.read_bytes() == CONTENT
    assert file.source == f"{source.as_uri()}/a%20b.csv"
    with pytest.raises(DataError, match=r"c\.csv"):
        get("c.csv", url=f"{source.as_uri()}/")


def test_a_password_is_neither_recorded_nor_shown(server, get):
    server.serve()
    url = server.url.replace("http://", "http://me:secret@")
    get(url=url)
    assert "secret" not in (get.directory / "fetched.json").read_text()
    with pytest.raises(DataError) as refused:
        get("b.csv", url=url)
    assert "secret" not in str(refused.value)
    assert server.requests[0][1]["Authorization"]
    assert without_password("http://me:x@y.org:80/a") == "http://y.org:80/a"


def test_a_directory_that_cannot_be_written_is_an_error(server, get, tmp_path):
    server.serve()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/data") as refused:
        get(directory=tmp_path / "file" / "data")
    assert "--out" in str(refused.value)


def test_a_full_disk_does_not_spoil_the_next_attempt(server, get, monkeypatch):
    server.serve()

    def stop(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Downloader, "_write", stop)
        with pytest.raises(DataError, match="No space left on device"):
            get()
    assert NAME not in visible(get.directory)
    get()
    assert get.content() == CONTENT


def test_a_complete_directory_need_not_be_writable(server, get, monkeypatch):
    server.serve()
    get()
    monkeypatch.setattr(registry.filelock, "FileLock", None)
    assert get()[0].sha256 == sha256(CONTENT)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "1", "KEY: 5"])
def test_remembered_checksums_that_are_damaged_are_computed_again(tmp_path, monkeypatch, text):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path))
    (tmp_path / NAME).write_bytes(CONTENT)
    assert file_sha256(tmp_path / NAME) == sha256(CONTENT)
    memory = tmp_path / "digests.json"
    (key,) = json.loads(memory.read_text())
    memory.write_text(json.dumps({key: 5}) if text == "KEY: 5" else text)
    assert file_sha256(tmp_path / NAME) == sha256(CONTENT)


# What a user sees.


def command(*words):
    return [sys.executable, "-m", "candle_p1.cli", *map(str, words)]


def closed_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_without_a_network_the_message_says_what_to_do(execute, tmp_path):
    url = f"http://127.0.0.1:{closed_port()}"
    code, output = execute(
        command("data", "fetch", "nt3", "--out", "data", "--data_url", url, "--retries", 0)
    )
    assert code == 2
    (line,) = output.splitlines()
    assert line.startswith("error: nt_train2.csv: ")
    for words in (
        f"{url}/nt_train2.csv",
        "Connection refused",
        "nt_train2.csv, nt_test2.csv into",
        str(tmp_path / "data"),
        "--data_url",
        "candle-p1 data make nt3 --size full --out DIR",
    ):
        assert words in line


@pytest.mark.parametrize(
    "options",
    [
        ["--data_url", "http://["],
        ["--data_url", ""],
        ["--data_url", "http://x.org:99999/"],
        ["--data_url", "file:///nowhere", "--out", "x" * 5000],
        ["--min_rate", "nan"],
        ["--min_rate", "-1"],
        ["--unpack_limit", "0"],
        ["--unpack_limit", "1e308"],
    ],
)
def test_a_bad_option_is_one_message(environment, monkeypatch, capsys, options):
    monkeypatch.setattr(sys, "argv", ["candle-p1", "data", "fetch", "nt3", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert len(re.findall("^error: ", capsys.readouterr().err, flags=re.MULTILINE | re.I)) == 1


BENCHMARK = """
from candle_p1.benchmark import Benchmark

class Fake(Benchmark):
    name = "fake"
    title = "A benchmark with files"
    files = {"train": "train_data", "test": "test_data"}
    load_data = preprocess = build_model = None

BENCHMARK = Fake()
"""


@pytest.fixture
def fake(tmp_path, monkeypatch, server):
    """A benchmark elsewhere, whose files are on the server and data in tmp_path/cache."""
    folder = tmp_path / "benchmarks" / "fake"
    folder.mkdir(parents=True)
    (folder / "fake.py").write_text(BENCHMARK)
    (folder / "fake_default_model.txt").write_text(
        "[Global_Params]\nmodel_name = 'fake'\n"
        f"data_url = '{server.url}'\ntrain_data = 'a.csv'\ntest_data = 'b.csv'\n"
        "loss = 'mse'\noptimizer = 'sgd'\nmetrics = 'mse'\nepochs = 1\nbatch_size = 1\n"
    )
    monkeypatch.setenv("CANDLE_BENCHMARKS_PATH", str(folder.parent))
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "cache"))
    server.serve()
    server.serve("/b.csv", content=OTHER)
    return tmp_path / "cache" / "fake"


@pytest.mark.extended
def test_an_external_benchmark_is_fetched_from_its_own_url(fake, execute):
    code, output = execute(command("data", "fetch", "fake"))
    assert code == 0, output
    assert (fake / "a.csv").read_bytes() == CONTENT
    assert (fake / "b.csv").read_bytes() == OTHER
    assert "downloading a.csv, 1.0 MiB" in output
    assert output.splitlines()[-1] == f"train on them: candle-p1 run fake --data_dir {fake}"
    code, output = execute(command("data", "fetch", "fake"))
    assert output.count("was there already") == 2


@pytest.mark.extended
def test_one_of_two_processes_downloads_and_the_other_waits(fake, server, start):
    gate = threading.Event()
    server.files["/a.csv"].gate = gate
    first = start(command("data", "fetch", "fake"))
    wait_until(lambda: server.requests, MAX_WAIT_S)
    second = start(command("data", "fetch", "fake"), env=os.environ | {"PYTHONUNBUFFERED": "1"})
    waiting = second.stdout.readline()
    gate.set()
    assert "another process is writing to" in waiting
    outputs = [process.communicate(timeout=MAX_WAIT_S)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert outputs[0].count("downloaded from") == 2
    assert outputs[1].count("was there already") == 2
    assert sorted(path for path, _ in server.requests) == ["/a.csv", "/b.csv"]


@pytest.mark.extended
def test_the_download_of_a_killed_process_is_resumed(fake, server, start, execute):
    served = server.files["/a.csv"]
    served.gate = threading.Event()
    killed = start(command("data", "fetch", "fake"))
    partial = fake / ".a.csv.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 0, MAX_WAIT_S)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    left_bytes = partial.stat().st_size
    assert {path.name for path in fake.iterdir()} == {
        ".lock",
        ".fetching",
        ".a.csv.partial",
        ".a.csv.partial.json",
    }
    served.gate.set()
    served.gate = None
    code, output = execute(command("data", "fetch", "fake"))
    assert code == 0, output
    assert (fake / "a.csv").read_bytes() == CONTENT
    assert server.ranges()[1] == f"bytes={left_bytes}-"


def invoke(*words):
    return CliRunner().invoke(cli.cli, [str(word) for word in words], catch_exceptions=False)


def test_info_shows_which_files_are_there(fake, server):
    server.files["/b.csv"].drops = [500_000]
    with pytest.raises(DataError):
        invoke("data", "fetch", "fake", "--retries", 0)
    (info,) = json.loads(invoke("data", "info", "fake", "--json", "-").stdout)["benchmarks"]
    train, test = info["files"]
    assert (train["role"], train["name"], train["state"]) == ("train", "a.csv", "real")
    assert (train["sha256"], train["sha256_source"]) == (sha256(CONTENT), "recorded")
    assert (test["state"], test["file_bytes"], test["sha256"]) == ("absent", None, None)
    assert 0 < test["partial_bytes"] <= 500_000
    assert (info["data_url"], info["directory"]) == (server.url, str(fake))
    assert (info["fetch"], info["make"]) == ("candle-p1 data fetch fake", None)
    shown = invoke("data", "info", "fake").stdout
    for words in ("A benchmark with files", f"in {fake}\n", server.url, "real", "absent, 0."):
        assert words in shown


def test_info_shows_every_benchmark_and_its_synthetic_data_sets(fake, monkeypatch):
    from candle_p1.benchmark import find_benchmark
    from candle_p1.cli import data
    from candle_p1.datasets.synthetic import ensure

    made = ensure(find_benchmark("nt3").recipe, "small", 7)
    assert "fake" in data.list_benchmarks()
    monkeypatch.setattr(data, "list_benchmarks", lambda: ["fake", "nt3"])
    shown = invoke("data", "info").stdout
    assert "A benchmark with files" in shown
    assert f"synthetic, small, seed 7: {made.directory}\n" in shown
    assert "candle-p1 data make nt3 --size full --out DIR" in shown
    (info,) = json.loads(
        invoke("data", "info", "nt3", "--json", "-", "--data_dir", made.directory).stdout
    )["benchmarks"]
    assert {file["state"] for file in info["files"]} == {"synthetic"}
    assert info["fetch"] == f"candle-p1 data fetch nt3 --out {made.directory}"


def test_a_wrong_size_is_noticed_without_reading_the_file(get, known):
    get.directory.mkdir()
    (get.directory / NAME).write_bytes(CONTENT[:-1])
    (get.directory / "b.csv").write_bytes(OTHER)
    assert file_status("known", NAME, get.directory)["state"] == "wrong size"
    assert file_status("known", "b.csv", get.directory)["state"] == "real"


def test_published_checksums_are_well_formed():
    for benchmark, files in registry.published_sums().items():
        assert benchmark == "p1b2"
        for facts in files.values():
            assert facts["bytes"] > 0
            assert len(bytes.fromhex(facts["sha256"])) == 32


def test_requests_is_not_loaded_before_it_is_needed():
    from tests.unit.test_imports import modules_after

    statement = "import candle_p1.train, candle_p1.cli.data, candle_p1.datasets.fetch"
    assert not modules_after(statement) & {"requests", "urllib3"}
