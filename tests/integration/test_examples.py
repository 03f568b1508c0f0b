"""The models in examples/, beyond the commands of their pages."""

import re

import pytest

from tests.conftest import ROOT
from tests.documentation import text_of

PAGE = "docs/add-a-benchmark.md"
EXCERPT = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("size", "sizes"),
    [("small", [4, 8, 16, 32, 64, 128]), ("theta", [64, 128, 256, 512, 1024, 2048])],
)
def test_the_study_has_the_batch_sizes_of_the_report(size, sizes):
    from candle_p1.studies.study_file import find_study

    folder = ROOT / "examples/mnist"
    study = find_study(str(folder / "mnist_batch_size.toml"))
    assert study.benchmark == [str(folder)]
    assert study.size(size)[1].vary["batch_size"] == sizes


def test_code_on_the_page_is_that_of_the_files_it_names():
    """Parts of files are quoted exactly; whole files are written and run by another test."""
    text, start, num_parts = text_of(PAGE), 0, 0
    for block in EXCERPT.finditer(text):
        *_, source = re.findall(r"`([\w/.]+\.py)`", text[start : block.start()])
        start = block.end()
        if source.startswith("blobs/"):
            continue
        assert block[1] in text_of(source), f"{source} does not contain\n{block[1]}"
        num_parts += 1
    assert num_parts == 7
