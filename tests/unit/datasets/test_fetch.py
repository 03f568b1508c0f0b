import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from candle_p1 import cli
from candle_p1.benchmark import find_benchmark
from candle_p1.cli import data
from candle_p1.data.reader import file_sha256
from candle_p1.datasets import fetch as fetching
from candle_p1.datasets import synthetic
from candle_p1.datasets.download import Download, without_password
from candle_p1.datasets.fetch import FetchedFile
from candle_p1.datasets.synthetic import ensure
from candle_p1.errors import DataError
from tests.conftest import wait_until
from tests.unit.datasets.conftest import CONTENT, CUT, MAX_WAIT_S, NAME, OTHER, file, reply, sha256

DATE = "Tue, 01 Jan 2019 00:00:00 GMT"


def test_a_file_is_downloaded_recorded_and_not_downloaded_again(serve, get, monkeypatch):
    server = serve(file(Last_Modified=DATE))
    (fetched,) = get(server.url)
    assert get.content() == CONTENT
    url = f"{server.url}/{NAME}"
    assert fetched == FetchedFile(get.directory / NAME, len(CONTENT), sha256(CONTENT), url)
    recorded = json.loads((get.directory / "fetched.json").read_text())["files"][NAME]
    facts = {"sha256": sha256(CONTENT), "bytes": len(CONTENT), "url": url, "version": '"1"'}
    assert recorded == facts | {"time": recorded["time"]}
    assert get.left() == {NAME, "fetched.json"}
    assert get.progress[-1] == (NAME, len(CONTENT), len(CONTENT))
    monkeypatch.setattr(synthetic.filelock, "FileLock", None)  # it need not be writable
    assert [each.source for each in get(server.url)] == [None]
    assert len(server.requests) == 1


def busy(status, retry_after=None):
    answer = reply(b"", status=f"{status} Busy", Retry_After=retry_after)
    return [answer, answer, file()]


DATED = {"etag": None, "Last_Modified": DATE}
FIRST, DROPPED = file(), file(drop=CUT)


@pytest.mark.parametrize(
    ("answers", "outcome", "asked_for", "waits_s"),
    [
        ([DROPPED, file(drop=CUT // 2), FIRST], CONTENT, [None, '"1"', '"1"'], [1, 2]),
        ([file(drop=CUT, **DATED), file(**DATED)], CONTENT, [None, DATE], [1]),
        # It cannot be resumed: no ranges, nothing or too little to tell versions by, another file.
        ([file(drop=CUT, ranges=False), file(ranges=False)], CONTENT, [None, '"1"'], [1]),
        ([file(drop=CUT, etag=None), file(etag=None)], CONTENT, [None] * 2, [1]),
        ([file(drop=CUT, etag='W/"1"'), file(etag='W/"1"')], CONTENT, [None] * 2, [1]),
        ([DROPPED, file(OTHER, etag='"2"')], OTHER, [None, '"1"'], [1]),
        ([DROPPED, file(b"short", honours=False)], b"short", [None, '"1"', None], None),
        # Attempts bring no new bytes, or are refused.
        ([file(ranges=False, drop=CUT)], "a.csv", [None, '"1"', '"1"'], [1, 2]),
        ([reply(b"", status="404 No")], "404", [None], []),
        ([reply(Content_Type="text/html; charset=utf-8")], "web page", [None], []),
        ([reply(Content_Encoding="gzip")], "gzip", [None], []),
        ([reply(length=False)], "how long", [None], []),
        *((busy(status), CONTENT, [None] * 3, [1, 2]) for status in (408, 429, 500)),
        (busy(503, "7"), CONTENT, [None] * 3, [7, 7]),
        (busy(503, "86400"), CONTENT, [None] * 3, [60, 60]),
    ],
)
def test_answers_are_resumed_repeated_or_refused(serve, get, answers, outcome, asked_for, waits_s):
    server = serve(*answers)
    if isinstance(outcome, str):
        with pytest.raises(DataError, match=outcome):
            get(server.url)
        assert NAME not in get.left()
    else:
        get(server.url)
        assert get.content() == outcome
        assert get.left() == {NAME, "fetched.json"}
    assert server.header("If-Range") == asked_for
    starts = [int(words[6:-1]) for words in server.header("Range") if words]
    assert len(starts) == len(asked_for) - asked_for.count(None)
    assert all(0 < start <= CUT * 2 for start in starts)
    assert starts == sorted({*starts}) or outcome == "a.csv"
    assert get.waits == waits_s or waits_s is None
    assert all(f"{wait_s} s" in said for wait_s, said in zip(waits_s or (), get.said, strict=False))


def test_a_complete_partial_file_is_finished_and_that_of_another_url_is_not_used(serve, get):
    server = get.interrupted(serve, file())
    (get.directory / f".{NAME}.partial").write_bytes(CONTENT)
    get(server.url)
    assert get.content() == CONTENT
    assert server.header("Range") == [None, f"bytes={len(CONTENT) - 1}-"]
    (get.directory / NAME).unlink()
    (get.directory / "fetched.json").unlink()
    server = get.interrupted(serve, file(OTHER))
    get(f"{server.url}/mirror")
    assert get.content() == OTHER
    assert server.header("Range") == [None, None]


@pytest.fixture
def known(monkeypatch):
    """Publishes the sum of a.csv, and that of b.csv."""
    contents = {NAME: CONTENT, "b.csv": OTHER}
    sums = {name: {"bytes": len(c), "sha256": sha256(c)} for name, c in contents.items()}
    monkeypatch.setattr(fetching, "published_sums", lambda: {"known": sums})


def test_a_file_with_a_wrong_checksum_is_removed_and_good_files_stay(serve, get, known):
    wrong = OTHER[:-1] + b"x"
    server = serve(file(), paths={"/b.csv": [file(wrong), file(OTHER)]})
    with pytest.raises(DataError, match=rf"b\.csv.*{sha256(wrong)}"):
        get(server.url, NAME, "b.csv", benchmark="known")
    assert get.left() == {NAME, "fetched.json"}
    get(server.url, NAME, "b.csv", benchmark="known")
    assert (get.content(), (get.directory / "b.csv").read_bytes()) == (CONTENT, OTHER)
    assert len(server.requests) == 3


def test_a_file_spliced_by_a_faulty_server_is_removed(serve, get, known):
    server = get.interrupted(serve, file(OTHER, honours=False), benchmark="known")
    with pytest.raises(DataError, match=sha256(CONTENT)):
        get(server.url, benchmark="known")
    assert get.left() == set()


def test_a_redirect_is_followed_and_later_downloads_must_match_the_first(serve, get):
    there = reply(b"", status="302 Found", Location="/elsewhere/a.csv")
    server = serve(file(), file(OTHER), file(), paths={f"/{NAME}": [there]})
    get(server.url)
    (get.directory / NAME).unlink()
    with pytest.raises(DataError, match=r"fetched\.json"):
        get(server.url)
    assert not (get.directory / NAME).exists()
    get(server.url)
    assert get.content() == CONTENT


def test_a_file_copied_by_hand_is_checked_and_left_alone(get, known):
    get.directory.mkdir()
    (get.directory / NAME).write_bytes(b"mine")
    with pytest.raises(DataError, match=sha256(b"mine")):
        get("http://127.0.0.1:1", benchmark="known")
    assert fetching.file_status("known", NAME, get.directory)["state"] == "wrong size"
    assert get("http://127.0.0.1:1")[0].sha256 == sha256(b"mine")


def test_synthetic_files_are_not_accepted_as_published_ones(get, small_data):
    with pytest.raises(DataError, match="synthetic"):
        get("file:///x", "nt_train2.csv", benchmark="nt3", directory=small_data("nt3"))


def test_files_are_fetched_from_a_local_directory(get, tmp_path):
    source = tmp_path / "the mirror"
    source.mkdir()
    (source / "a b.csv").write_bytes(CONTENT)
    (fetched,) = get(source.as_uri(), "a b.csv")
    assert fetched.path.read_bytes() == CONTENT
    assert fetched.source == f"{source.as_uri()}/a%20b.csv"
    with pytest.raises(DataError, match=r"c\.csv"):
        get(f"{source.as_uri()}/", "c.csv")


def test_a_password_is_neither_recorded_nor_shown(serve, get):
    server = serve(file(), reply(b"", status="404 No"))
    url = server.url.replace("http://", "http://me:secret@")
    get(url)
    assert "secret" not in (get.directory / "fetched.json").read_text()
    with pytest.raises(DataError) as refused:
        get(url, "b.csv")
    assert "secret" not in str(refused.value)
    assert server.header("Authorization")[0]
    assert without_password("http://me:x@y.org:80/a") == "http://y.org:80/a"


def test_a_directory_that_cannot_be_written_and_a_full_disk_are_errors(serve, get, monkeypatch):
    server = serve(file())
    get.directory.mkdir()
    (get.directory / "file").write_text("")
    with pytest.raises(DataError, match=r"file/data.*--out"):
        get(server.url, directory=get.directory / "file" / "data")

    def stop(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Download, "_receive", stop)
        with pytest.raises(DataError, match="No space left on device"):
            get(server.url)
    get(server.url)
    assert get.content() == CONTENT


@pytest.mark.parametrize("text", ["[" * 100_000, "KEY: 5"])
def test_remembered_checksums_that_are_damaged_are_computed_again(tmp_path, monkeypatch, text):
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path))
    (tmp_path / NAME).write_bytes(CONTENT)
    file_sha256(tmp_path / NAME)
    memory = tmp_path / "digests.json"
    memory.write_text(text.replace("KEY", memory.read_text().rpartition(":")[0]))
    assert file_sha256(tmp_path / NAME) == sha256(CONTENT)


def test_without_a_network_the_message_says_what_to_do(get):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    where = f"{NAME}: .*{url}/{NAME}.*refused.*{get.directory} .*--data_url.*data make"
    with pytest.raises(DataError, match=where):
        get(url)


def test_one_of_two_processes_downloads_and_the_other_waits(serve, get):
    gate, told = threading.Event(), []

    def tell(text):
        told.append(text)
        gate.set()

    server = serve(file(gate=gate))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(get, server.url)
        wait_until(lambda: server.requests, MAX_WAIT_S)
        second = pool.submit(get, server.url, notify=tell)
    assert (first.result()[0].source, second.result()[0].source) == (f"{server.url}/{NAME}", None)
    assert "another process" in told[0]
    assert get.content() == CONTENT
    assert len(server.requests) == 1


def invoke(*words):
    words = ["data", *map(str, words)]
    return CliRunner().invoke(cli.cli, words, catch_exceptions=False).stdout


def info(*words):
    return json.loads(invoke("info", "nt3", *words, "--json", "-"))["benchmarks"][0]


def test_commands_show_what_is_there_and_what_they_do(environment, serve, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("CANDLE_DATA_DIR", str(tmp_path / "cache"))
    train_name, test_name = "nt_train2.csv", "nt_test2.csv"
    answers = {f"/{train_name}": [file()], f"/{test_name}": [file(OTHER, drop=CUT), file(OTHER)]}
    server, directory = serve(paths=answers), tmp_path / "cache" / "nt3"
    fetch = ("fetch", "nt3", "--data_url", server.url)
    with pytest.raises(DataError):
        invoke(*fetch, "--retries", 0)
    found = info()
    train, test = found["files"]
    assert (train["role"], train["name"], train["state"]) == ("train", train_name, "real")
    assert (train["sha256"], train["sha256_source"]) == (sha256(CONTENT), "recorded")
    assert (test["state"], test["file_bytes"], test["sha256"]) == ("absent", None, None)
    assert 0 < test["partial_bytes"] <= CUT
    assert (found["fetch"], found["directory"]) == ("candle-p1 data fetch nt3", str(directory))
    shown = invoke(*fetch)
    for words in ("was there already", f"downloading {test_name}, 0.2 MiB", "downloaded from"):
        assert shown.count(words) == 1
    assert shown.splitlines()[-1] == f"train on them: candle-p1 run nt3 --data_dir {directory}"
    assert invoke(*fetch).count("was there already") == 2
    (directory / test_name).unlink()
    made = ensure(find_benchmark("nt3").recipe, "small", 7)
    monkeypatch.setattr(data, "list_benchmarks", lambda: ["nt3"])
    shown = invoke("info")
    for words in (
        *(f"in {directory}\n", found["data_url"], "real", "absent"),
        f"synthetic, small, seed 7: {made.directory}\n",
        "candle-p1 data make nt3 --size full --out DIR",
    ):
        assert words in shown
    found = info("--data_dir", made.directory)
    assert {each["state"] for each in found["files"]} == {"synthetic"}
    assert found["fetch"] == f"candle-p1 data fetch nt3 --out {made.directory}"


def test_requests_is_not_loaded_before_it_is_needed():
    program = "import sys, candle_p1.train, candle_p1.cli.data, candle_p1.datasets.fetch"
    program += "; raise SystemExit(bool(sys.modules.keys() & {'requests', 'urllib3'}))"
    subprocess.run([sys.executable, "-c", program], check=True)
