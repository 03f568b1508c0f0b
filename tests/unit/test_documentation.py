import posixpath
import re

import click
import pytest
import yaml

from candle_p1 import cli
from candle_p1.benchmark import find_benchmark
from candle_p1.parameters.catalog import KNOWN
from candle_p1.toml_file import tomllib
from tests.conftest import ROOT
from tests.documentation import LEAVES, PAGES, anchors, commands, links, text_of

EXAMPLES = [str(path) for path in (ROOT / "examples").iterdir() if path.is_dir()]
WHERE = re.compile(r"(?:.*/)?candle-p1")
SCRIPT = re.compile(r"(?:.*/)?(\w+)_baseline_keras2\.py")
STAND_FOR = {"BENCHMARK": "nt3", "X": "nt3", "NAME": "strong-nt3", "blobs": "nt3", "./blobs": "nt3"}
"""What names in examples are replaced by."""
OTHER_PROGRAMS = {
    "--", "--help", "--allow-run-as-root", "--constraint", "--contain", "--cpu-bind", "--exclusive",
    "--extra", "--gpu-bind", "--group", "--mem", "--mpi", "--network", "--profile", "--shm-size",
}  # fmt: skip
PREFLIGHT = {"--clock_s", "--disk_gib", "--file", "--memory_gib", "--shm_gib"}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        if target.startswith("docs/reference/"):  # generated; `make docs` checks these links
            continue
        if not (ROOT / target).exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def command_of(words):
    """Returns the command of the command line that words name, and the words after its name."""
    command = cli.cli
    while isinstance(command, click.Group) and words and words[0] != "--help":
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
    return command, words


def check_command(words, complete):
    """Asserts that a command line is accepted, as far as this can be known without running it."""
    command, arguments = command_of([STAND_FOR.get(word, word) for word in words])
    if isinstance(command, click.Group):
        return
    try:
        context = command.make_context(command.name, list(arguments))
    except click.exceptions.Exit:  # --help
        return
    except click.MissingParameter:
        assert not complete
        return
    values = context.params
    flags = list(values.get("flags", ()))
    if flags and "benchmark" in values:
        check_flags(values["benchmark"], flags)
    if machine := values.get("machine"):
        known = {path.stem for path in (ROOT / "candle_p1/cluster/machines").iterdir()}
        assert machine in known or machine.endswith(".toml")
    study = values.get("study") or (values.get("name") if words[0] == "study" else None)
    if study:
        assert study.endswith(".toml") or (ROOT / f"common/studies/{study}.toml").exists()


def check_flags(name, flags):
    benchmark = find_benchmark(name)
    if "--help" not in flags:
        benchmark.declaration.parse(flags, benchmark.model_file)


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_commands_are_accepted(page):
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of("Makefile"), re.MULTILINE))
    for words, in_block in commands(page):
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        scripts = [place for place, word in enumerate(words) if SCRIPT.fullmatch(word)]
        try:
            if words and WHERE.fullmatch(words[0]):
                check_command(words[1:], complete=in_block)
            elif words[:1] == ["make"]:
                assert all(word in targets or "=" in word for word in words[1:])
            elif scripts and words[scripts[0] - 1] == "python":
                name = SCRIPT.fullmatch(words[scripts[0]])[1]
                check_flags(STAND_FOR.get(name, name), words[scripts[0] + 1 :])
        except Exception as error:
            raise AssertionError(f"{page}: {' '.join(words)}: {error}") from error


def test_every_command_is_documented():
    documented = "\n".join(" ".join(text_of(page).split()) for page in PAGES)
    missing = [path for path in LEAVES if f"candle-p1 {' '.join(path)}" not in documented]
    assert missing == []


def test_flags_in_sentences_exist():
    known = {option for leaf in LEAVES.values() for each in leaf.params for option in each.opts}
    for name in ("nt3", "p1b1", "p1b2", "p1b3", *EXAMPLES):
        known |= {f"--{parameter}" for parameter in find_benchmark(name).declaration.parameters}
    known |= {f"--{name}" for name in (*KNOWN, "conf", "epoch", "tb")}  # CANDLE's
    named = {
        (page, word.partition("=")[0])
        for page in PAGES
        for words, in_block in commands(page)
        if not in_block and words[0].startswith("--")
        for word in words
        if word.startswith("--")
    }
    known |= OTHER_PROGRAMS | PREFLIGHT
    assert [(page, flag) for page, flag in named if flag not in known] == []


def test_the_citation_is_that_of_the_project():
    citation = yaml.safe_load(text_of("CITATION.cff"))
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    for key in ("version", "license"):
        assert citation[key] == project[key]
    assert {"cff-version", "type", "title", "authors", "references"} <= citation.keys()
