"""A server whose every answer is decided by the test, and the fetching of a file from it."""

import gc
import hashlib
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from candle_p1.datasets import download
from candle_p1.datasets.fetch import fetch
from candle_p1.errors import DataError

NAME = "a.csv"
CONTENT = bytes(i * i % 251 for i in range(200_000))
OTHER = CONTENT[::-1]
CUT = 100_000
"""Where connections are dropped."""
MAX_WAIT_S = 60


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def reply(content=CONTENT, status="200 OK", length=True, **headers):
    """Returns an answer; underscores in the headers' names stand for hyphens."""
    lines = [f"HTTP/1.1 {status}", "Connection: close"]
    lines += [f"Content-Length: {len(content)}"] if length else []
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def file(content=CONTENT, drop=None, ranges=True, honours=True, gate=None, etag='"1"', **options):
    """Returns an answer as servers of files give it; `honours` If-Range or does not.

    The connection is dropped after some bytes, or held at a gate after half of them.
    """

    def answer(connection, request):
        asked = dict(line.split(": ", 1) for line in request.splitlines()[1:] if ": " in line)
        validators = (etag, options.get("Last_Modified"))
        start, facts = 0, {"ETag": etag} | options
        if ranges and "Range" in asked and (not honours or asked.get("If-Range") in validators):
            start = int(asked["Range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                connection.sendall(reply(b"", "416 Range Not Satisfiable"))
                return
            range_ = f"bytes {start}-{len(content) - 1}/{len(content)}"
            facts |= {"status": "206 Partial Content", "Content_Range": range_}
        body = content[start:]
        head = reply(body, **facts)[: -len(body)]
        half = len(body) // 2 if gate else 0
        connection.sendall(head + body[:half])
        if gate:
            gate.wait(MAX_WAIT_S)
        connection.sendall(body[half:drop])

    return answer


class Server:
    """Answers each connection with the next of some answers; the last one is repeated.

    An answer is the bytes to send, or a function that is called with the connection and the text
    of the request. `paths` has the answers of single paths.
    """

    def __init__(self, *answers, paths=None):
        self.paths = {None: list(answers)} | {path: list(a) for path, a in (paths or {}).items()}
        self.requests = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.closed = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with suppress(OSError):  # until it is closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection, suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(4096)
            self.requests.append(request.decode())
            answers = self.paths.get(request.split()[1].decode()) or self.paths[None]
            answer = answers[0] if len(answers) == 1 else answers.pop(0)
            if isinstance(answer, bytes):
                connection.sendall(answer)
            else:
                answer(connection, request.decode())

    def drip(self, connection, before, block, pause_s):
        """Sends one small block after the other until the test ends."""
        connection.sendall(before)
        while not self.closed.wait(pause_s):
            connection.sendall(block)

    def header(self, name):
        """Returns a header's value in each request; None where it has none."""
        found = [request.partition(f"{name}: ")[2].split("\r\n")[0] for request in self.requests]
        return [value or None for value in found]

    def close(self):
        self.closed.set()
        self._listener.close()


@pytest.fixture(scope="module", autouse=True)
def forgotten_sockets():
    yield
    gc.collect()


@pytest.fixture
def serve():
    servers = []

    def serve(*answers, **paths):
        servers.append(Server(*answers, **paths))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def get(environment, tmp_path, monkeypatch):
    """Fetches a.csv, or another name, into tmp_path/data; records waits, messages and progress."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    clock = SimpleNamespace(sleep=lambda s: get.waits.append(s), monotonic=time.monotonic)
    monkeypatch.setattr(download, "time", clock)

    def get(url, *names, benchmark="none", directory=None, **options):
        options = {"num_retries": 2, "notify": get.said.append} | options
        options["progress"] = lambda *facts: get.progress.append(facts)
        return fetch(benchmark, names or [NAME], url, directory or get.directory, **options)

    def interrupted(serve, *more, **options):
        """Returns a server that has dropped a connection, and how it goes on."""
        server = serve(file(drop=CUT), *more)
        with pytest.raises(DataError):
            get(server.url, num_retries=0, **options)
        return server

    get.directory, get.waits, get.said, get.progress = tmp_path / "data", [], [], []
    get.content = lambda: (get.directory / NAME).read_bytes()
    get.left = lambda: {path.name for path in get.directory.iterdir()} - {".lock"}
    get.interrupted = interrupted
    return get
