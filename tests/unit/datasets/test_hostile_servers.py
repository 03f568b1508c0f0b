"""Downloads from servers that break the rules of HTTP, or keep them to do harm."""

import io
import os
import re
import shutil
import time

import pytest
import requests

from candle_p1.datasets import download
from candle_p1.datasets import fetch as fetching
from candle_p1.errors import DataError, ParameterError
from tests.unit.datasets.conftest import CONTENT, NAME, reply

# urllib3 and requests leave it to Python to close a socket whose server has sent nonsense.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PART = {"status": "206 Partial Content", "ETag": '"1"'}
REDIRECT = {"content": b"", "status": "302 Found"}
LOCATIONS = (
    *("file:///etc/passwd", "http://[", "http://me:secret@127.0.0.1:99999/", "http://a..b/"),
    *("\xff\xfe", "/" + NAME),
)


@pytest.mark.parametrize(
    "answer",
    [
        reply(b""),
        reply(b"", length=False),
        *(reply(length=False, Content_Length=n) for n in ("-5", "9" * 5000, "\xb2", "10, 20")),
        reply(length=False, Content_Length=len(CONTENT) + 1),
        reply(b"zz\r\n", length=False, Transfer_Encoding="chunked"),
        reply(b"5\r\nab", length=False, Transfer_Encoding="chunked"),
        *(reply(**PART, Content_Range=words) for words in ("", "bytes 5-9/10", "bytes 0-\xb2/9")),
        *(reply(**REDIRECT, Location=words) for words in LOCATIONS),
        b"",
        b"HTTP/1.1 999999999999999999999999 x\r\n\r\n",
        b"HTTP/1.1 200 " + b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        reply(status="404 \x1b[2Jgone"),
        reply(status="503 busy", Retry_After="9" * 5000),
        reply(status="503 busy", Retry_After="\xb2"),
    ],
)
def test_an_unusable_answer_is_one_message_and_leaves_nothing(serve, get, answer):
    with pytest.raises(DataError) as refused:
        get(serve(answer).url)
    assert "secret" not in str(refused.value)
    assert get.left() == set()


def test_a_redirect_from_https_to_http_is_refused(serve, get, monkeypatch):
    server = serve(reply())
    there = server.url

    class Adapter(requests.adapters.HTTPAdapter):
        def send(self, request, **_):
            response = requests.Response()
            response.status_code, response.url, response.request = 302, request.url, request
            response.headers["Location"], response.raw = there, io.BytesIO()
            return response

    session = requests.Session()
    session.mount("https://", Adapter())
    monkeypatch.setattr(requests, "Session", lambda: session)
    with pytest.raises(DataError, match=there):
        get("https://127.0.0.1")
    assert not server.requests


@pytest.mark.parametrize(
    ("etag", "range_"),
    [
        ('"2"', f"bytes 49999-{len(CONTENT) - 1}/{len(CONTENT)}"),
        ('"1"', f"bytes 40000-{len(CONTENT) - 1}/{len(CONTENT)}"),
    ],
)
def test_parts_of_different_versions_are_not_joined(serve, get, monkeypatch, etag, range_):
    monkeypatch.setattr(download, "BLOCK_BYTES", 50_000)
    cut = reply(CONTENT[:50_000], length=False, Content_Length=len(CONTENT), ETag='"1"')
    part = reply(b"x" * 50_000, status="206 Partial Content", ETag=etag, Content_Range=range_)
    server = serve(cut, part, reply(ETag='"2"'))
    get(server.url, num_retries=3)
    assert get.content() == CONTENT
    assert server.header("Range") == [None, "bytes=49999-", None]


@pytest.mark.parametrize("encoding", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
def test_a_server_that_sends_byte_by_byte_is_given_up(serve, get, monkeypatch, encoding):
    monkeypatch.setattr(download, "SLOW_S", 0.3)
    before = f"HTTP/1.1 200 OK\r\n{encoding}\r\n\r\n".encode()
    block = b"1\r\nx\r\n" if "chunked" in encoding else b"x"
    server = serve(lambda connection, _: server.drip(connection, before, block, 0.01))
    with pytest.raises(DataError, match=r"too slow over 0\.3 s"):
        get(server.url, min_kib_per_s=100)
    assert NAME not in get.left()


def test_a_server_that_stays_silent_is_given_up(serve, get, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUTS_S", (1, 0.1))
    server = serve(lambda *_: server.closed.wait(5))
    with pytest.raises(DataError, match="timed out"):
        get(server.url)


def test_a_slow_server_is_waited_for_if_the_limit_says_so(serve, get, monkeypatch):
    monkeypatch.setattr(download, "SLOW_S", 0.1)
    head, rest = reply()[:-1000], CONTENT[-1000:]

    def slowly(connection, _):
        connection.sendall(head)
        for byte in range(0, len(rest), 100):
            time.sleep(0.05)
            connection.sendall(rest[byte : byte + 100])

    get(serve(slowly).url, min_kib_per_s=0)
    assert get.content() == CONTENT


def test_an_endless_file_is_not_downloaded_beyond_its_known_size(serve, get, monkeypatch):
    facts = {"sha256": "0" * 64, "bytes": 1000}
    monkeypatch.setattr(fetching, "published_sums", lambda: {"none": {NAME: facts}})
    head = b"HTTP/1.1 200 OK\r\nETag: 1\r\nContent-Length: 9000000\r\n\r\n"
    server = serve(lambda c, _: server.drip(c, head, bytes(100_000), 0))
    with pytest.raises(DataError, match="1000 bytes"):
        get(server.url)
    assert get.left() == set()


@pytest.mark.parametrize("state", ["", "URL\n", "URL\n1\n2", "URL\nx\r\nEvil: y", "URL\n\u4e00"])
def test_a_damaged_state_of_a_download_is_not_used(serve, get, state):
    server = serve(reply())
    get.directory.mkdir()
    (get.directory / f".{NAME}.partial").write_bytes(b"x" * 1000)
    text = state.replace("URL", f"{server.url}/{NAME}").encode()
    (get.directory / f".{NAME}.partial.version").write_bytes(text)
    get(server.url)
    assert get.content() == CONTENT
    assert server.header("Range") == [None]


RECORD = '{"files": {"a.csv": {"sha256": "%s", "bytes": 1, "time": ""}}}'


@pytest.mark.parametrize("text", ["[" * 100_000, '{"files": []}', RECORD % "\\u001b[2J", None])
def test_a_damaged_record_of_downloads_is_one_message(serve, get, text):
    path = get.directory / "fetched.json"
    get.directory.mkdir()
    path.mkdir() if text is None else path.write_text(text)  # a directory cannot be read
    with pytest.raises(DataError, match=r"fetched\.json"):
        get(serve(reply()).url)


BAD_URLS = """http://me:sec@x.org:99999/ http://me:sec/sec@x.org/ /data ftp://x.org/a http://
http://x.org/?a file:///a#b http://[ http://x.org:0/ http://x.org:a/ http://me@/ file://host/x"""
BAD_PLACES = [
    *(
        (url, NAME, ParameterError, "data_url")
        for url in ("", "http://x.org/\0", *BAD_URLS.split())
    ),
    *((f"file:///{path}", NAME, DataError, NAME) for path in ("x" * 5000, "a%00b", "dev/zero")),
    *(
        ("file:///tmp", name, ParameterError, re.escape(repr(name)))
        for name in ("../a", "", "..", "b/a", "fetched.json", "a\x1b[2J.csv")
    ),
]


@pytest.mark.parametrize(("url", "name", "error", "match"), BAD_PLACES)
def test_a_bad_url_or_name_of_a_file_is_one_message(get, url, name, error, match):
    with pytest.raises(error, match=match) as refused:
        get(url, name)
    assert "sec" not in str(refused.value)  # the password


def test_a_pipe_for_the_partial_file_is_replaced(serve, get, tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT)
    for url in (serve(reply()).url, tmp_path.as_uri()):
        get.directory.mkdir()
        os.mkfifo(get.directory / f".{NAME}.partial")
        get(url)
        assert get.content() == CONTENT
        shutil.rmtree(get.directory)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_not_a_file_is_neither_read_nor_replaced(serve, get, make):
    get.directory.mkdir()
    make(get.directory / NAME)
    with pytest.raises(DataError, match=NAME):
        get(serve(reply()).url)
    assert get.left() == {NAME}
