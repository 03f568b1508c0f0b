"""The page of a report in a browser: nothing is fetched, nothing fails, all of it can be read."""

import base64
import json
import re
import shutil
import subprocess

import pytest

from candle_p1.cli.results import report_command
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

FRAME = """<script>onmessage = event => { document.title = event.data }</script>
<iframe src="probed.html" style="border: 0; width: WIDTHpx; height: HEIGHTpx"></iframe>"""
"""A window of the browser cannot be as narrow as a phone, but a frame can."""

PROBE = """
const lost = svg => [...svg.querySelectorAll('use')].filter(
  use => !svg.querySelector(use.getAttribute('xlink:href') || use.getAttribute('href'))).length;
const found = {
  width: document.documentElement.clientWidth,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  pictures: [...document.querySelectorAll('figure svg')].map(svg => ({
    width: svg.getBoundingClientRect().width, height: svg.getBoundingClientRect().height,
    paths: svg.querySelectorAll('path').length, texts: svg.querySelectorAll('text').length,
    lost: lost(svg),
  })),
  figures: document.querySelectorAll('figure').length,
  fontSize: parseFloat(getComputedStyle(document.body).fontSize),
  links: [...document.querySelectorAll('a[href^="#"]')].map(a => a.getAttribute('href').slice(1)),
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
  fetched: performance.getEntriesByType('resource').map(e => e.name),
};
parent.postMessage('FOUND' + btoa(JSON.stringify(found)) + 'END', '*');
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    plant_study(directory, 3, (1, 2, 4), communication_s=0.2)
    plant(directory, "p1b1", 2, status="failed")
    (directory / "bad").mkdir()
    (directory / "bad/run.json").write_text("{")
    out = tmp_path_factory.mktemp("report") / "out"
    report_command.main([str(directory), "-o", str(out)], standalone_mode=False)
    return out / "index.html"


def probed(page, width, height):
    """Returns what a script at the end of the page finds where it is as wide and high as this."""
    script = f"<script>addEventListener('load', () => {{ {PROBE} }})</script></body>"
    copy, frame = page.with_name("probed.html"), page.with_name("frame.html")
    copy.write_text(page.read_text().replace("</body>", script))
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("HEIGHT", str(height)))
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += ["--dump-dom", "--virtual-time-budget=20000", frame.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return json.loads(base64.b64decode(re.search("FOUND(.*?)END", done.stdout)[1]))


@pytest.mark.parametrize("size", SIZES)
def test_the_page_can_be_read(page, size):
    width, height = SIZES[size]
    found = probed(page, width, height)
    assert found["width"] == width
    assert found["overflow"] <= 0
    assert found["fetched"] == []
    assert found["fontSize"] >= 14
    assert len(found["pictures"]) == found["figures"] >= 4
    for picture in found["pictures"]:
        assert picture["width"] > 0.8 * min(width, 480)
        assert picture["height"] > 100
        assert picture["paths"] > 10
        assert picture["texts"] > 5
        assert picture["lost"] == 0
    assert set(found["links"]) <= set(found["ids"])
    assert len(set(found["ids"])) == len(found["ids"])
