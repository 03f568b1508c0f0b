"""The page of a report in a browser: nothing is fetched, nothing fails, all of it can be read."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess

import pytest

from candle_p1.cli.report import command
from tests.planted_records import plant, plant_study

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
LIMIT_S = 60
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]

PROBE = """JSON.stringify({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  pictures: [...document.querySelectorAll('figure svg')].map(svg => {
    const box = svg.getBoundingClientRect();
    return {
      width: box.width, height: box.height,
      paths: svg.querySelectorAll('path').length,
      texts: svg.querySelectorAll('text').length,
      lost: [...svg.querySelectorAll('use')].filter(
        use => !svg.querySelector(use.getAttribute('xlink:href') || use.getAttribute('href'))
      ).length,
    };
  }),
  figures: document.querySelectorAll('figure').length,
  fontSize: parseFloat(getComputedStyle(document.body).fontSize),
  links: [...document.querySelectorAll('a[href^="#"]')].filter(
    a => !document.getElementById(decodeURIComponent(a.getAttribute('href').slice(1)))
  ).map(a => a.getAttribute('href')),
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
})"""


class Browser:
    """Headless Chromium, spoken to by its DevTools protocol over two pipes."""

    def __init__(self, profile):
        self._told, to_browser = os.pipe()
        from_browser, self._tells = os.pipe()
        self._out, self._in = os.fdopen(to_browser, "wb"), os.fdopen(from_browser, "rb")
        words = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        # The browser reads from descriptor 3 and writes to 4.
        script = f'exec 3<&{self._told} 4>&{self._tells}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(self._told, self._tells),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(self._told)
        os.close(self._tells)
        self.events = []
        self._number = 0
        self._session = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **params):
        """Returns a command's result; notes the events before it."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path):
        self("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression):
        return self("Runtime.evaluate", expression=expression)["result"]["value"]

    def screenshot(self, path, width, height):
        self.resize(width, height)
        image = self("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def resize(self, width, height):
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def close(self):
        self._out.close()
        self._in.close()
        self._process.terminate()
        self._process.wait(LIMIT_S)

    def _read(self):
        content = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        return json.loads(content)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    plant_study(directory, 3, (1, 2, 4), communication_s=0.2)
    plant(directory, "p1b1", 2, status="failed")
    (directory / "bad").mkdir()
    (directory / "bad/run.json").write_text("{")
    out = tmp_path_factory.mktemp("report") / "out"
    command.main([str(directory), "-o", str(out)], standalone_mode=False)
    return out / "index.html"


@pytest.fixture
def browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def of_kind(browser, *methods):
    return [event["params"] for event in browser.events if event.get("method") in methods]


@pytest.mark.parametrize("size", SIZES)
def test_the_page_can_be_read(page, browser, tmp_path, size):
    width, height = SIZES[size]
    browser.resize(width, height)
    browser.open(page)
    found = json.loads(browser.evaluate(PROBE))
    browser.screenshot(tmp_path / f"{size}.png", width, height)

    errors = of_kind(
        browser, "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"
    )
    assert errors == []
    requests = [each["request"]["url"] for each in of_kind(browser, "Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]

    assert found["overflow"] <= 0
    assert found["fontSize"] >= 14
    assert len(found["pictures"]) == found["figures"] >= 8
    for picture in found["pictures"]:
        assert picture["width"] > 0.8 * min(width, 480)
        assert picture["height"] > 100
        assert picture["paths"] > 10
        assert picture["texts"] > 5
        assert picture["lost"] == 0
    assert found["links"] == []
    assert len(set(found["ids"])) == len(found["ids"])
    assert (tmp_path / f"{size}.png").stat().st_size > 10_000


def test_the_page_needs_no_other_file(page):
    text = page.read_text()
    for word in ("<script", "http-equiv", "@import", 'src="', "<iframe", "<object"):
        assert word not in text
    assert 'href="http' not in text
