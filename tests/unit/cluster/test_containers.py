"""The container definitions, checked without a container engine."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

DOCKERFILE = (ROOT / "containers/Dockerfile").read_text()
DEFINITION = (ROOT / "containers/candle_p1.def").read_text()
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
SECTIONS = {"arguments", "environment", "files", "help", "labels", "post", "runscript", "test"}


def dockerfile():
    """Returns the instructions of the Dockerfile, as pairs of name and rest."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def definition():
    """Returns the stages of the Apptainer definition: their headers and sections."""
    stages = []
    for text in DEFINITION.split("Bootstrap: docker\n")[1:]:
        head, *sections = re.split(r"^%", text, flags=re.MULTILINE)
        stage = dict(line.split(": ") for line in head.splitlines() if line)
        for section in sections:
            name, _, body = section.partition("\n")
            assert name not in stage
            stage[name] = re.sub(r"^    ", "", body, flags=re.MULTILINE)
        stages.append(stage)
    return stages


def arguments(stage):
    return dict(line.split("=", 1) for line in stage["arguments"].split())


def filled_in(stage, name):
    """Returns a section or header of a stage, with the default values of its arguments."""
    values = arguments(stage)
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], stage[name])


def runs():
    return [rest for name, rest in dockerfile() if name == "RUN"]


def shell_parts():
    """Yields all pieces of shell in both files."""
    yield from (pytest.param(rest, id=f"Dockerfile-{i}") for i, rest in enumerate(runs()))
    for stage in definition():
        for section in ("post", "environment", "runscript", "test"):
            if section in stage:
                yield pytest.param(filled_in(stage, section), id=f"{stage['Stage']}-{section}")


def packages(script):
    """Returns the packages that a piece of shell installs, without those in an argument."""
    lines = re.split(r"\n|&&", re.sub(r"\\\n", " ", script))
    (line,) = (line for line in lines if "apt-get install" in line)
    words = line.split()[line.split().index("install") + 1 :]
    return {word for word in words if word[0] not in "-$"}


def test_instructions_and_sections_are_known():
    names = [name for name, _ in dockerfile()]
    assert set(names) <= INSTRUCTIONS
    assert (names[0], names[2]) == ("ARG", "FROM")
    assert [stage["Stage"] for stage in definition()] == ["build", "final"]
    for stage in definition():
        assert {name.split()[0] for name in stage} <= SECTIONS | {"From", "Stage"}


def bases():
    arguments = dict(
        rest.split("=", 1) for name, rest in dockerfile() if name == "ARG" and "=" in rest
    )
    for name, rest in dockerfile():
        if name == "FROM":
            yield arguments[re.match(r"\$\{(\w+)\}", rest)[1]]
    for stage in definition():
        yield filled_in(stage, "From")
    yield from re.findall(r"BASE=(\S+)", DOCKERFILE + DEFINITION)


@pytest.mark.parametrize("base", sorted(set(bases()) - {"${BUILD_BASE}", "${BASE}"}))
def test_base_images_are_pinned_and_name_no_registry(base):
    found = re.fullmatch(r"(?:([a-z0-9.:-]+)/)?([a-z0-9-]+):([a-z0-9.-]+)", base)
    assert found, base
    owner, _, tag = found.groups()
    assert "." not in (owner or "")
    assert re.search(r"\d+\.\d+", tag)


@pytest.mark.parametrize("text", [DOCKERFILE, DEFINITION], ids=["Dockerfile", "candle_p1.def"])
def test_no_host_is_named(text):
    assert "://" not in text
    assert not re.search(r"\b[\w-]+\.(io|com|org|net|gov|edu)\b", text)
    assert "--index-url" not in text


def test_what_is_copied_exists():
    copied = []
    for name, rest in dockerfile():
        words = rest.split()
        if name == "COPY" and not words[0].startswith("--from"):
            copied += words[:-1]
            assert len(words) == 2 or words[-1].endswith("/")
    pairs = [line.split() for line in definition()[0]["files"].splitlines() if line]
    for source, target in pairs:
        assert target == f"/opt/candle_p1/{source}"
    assert {source for source, _ in pairs} == set(copied)
    for source in copied:
        assert (ROOT / source).exists(), source


def test_everything_that_the_set_up_reads_is_copied():
    copied = {line.split()[0] for line in definition()[0]["files"].splitlines() if line}
    makefile = (ROOT / "Makefile").read_text()
    read = re.search(r"^BUILT_FROM := (.+)$", makefile, re.MULTILINE)[1]
    names = re.findall(r"[\w./*]+", read.replace("$(wildcard", ""))
    pyproject = (ROOT / "pyproject.toml").read_text()
    names += re.findall(r'^readme = "(.+)"', pyproject, re.MULTILINE)
    names += re.findall(r'^license-files = \["(.+)"\]', pyproject, re.MULTILINE)
    assert len(names) > 5
    assert {name.split("/")[0] for name in names if name.strip(".*/")} <= copied


def test_the_final_stage_copies_the_result_of_the_build_stage():
    (copy,) = (rest for name, rest in dockerfile() if name == "COPY" and "--from" in rest)
    assert copy.split() == ["--from=build", "/opt/candle_p1", "/opt/candle_p1"]
    assert "FROM ${BUILD_BASE} AS build" in DOCKERFILE
    assert ("WORKDIR", "/opt/candle_p1") in dockerfile()
    build, final = definition()
    assert final["files from build"].split() == ["/opt/candle_p1", "/opt/candle_p1"]
    assert "cd /opt/candle_p1\n" in build["post"]


def make_commands():
    for text in (*runs(), *(filled_in(stage, "post") for stage in definition())):
        yield from re.findall(r"(?:^|[\n&]) *make ([^\n&\\]+)", text)


def test_both_use_the_same_make_target():
    first, second = (shlex.split(command) for command in make_commands())
    makefile = (ROOT / "Makefile").read_text()
    for words in (first, second):
        (target,) = (word for word in words if "=" not in word)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
        for name in (word.split("=")[0] for word in words if "=" in word):
            assert re.search(rf"^{name} :=", makefile, re.MULTILINE)
    values = arguments(definition()[0])
    plain = [re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], word) for word in first]
    assert plain == second
    assert "ARG GPU=0" in DOCKERFILE
    assert "ARG MPI=wheel" in DOCKERFILE


def test_both_install_the_same_packages():
    ours = [packages(rest) for rest in runs() if "apt-get" in rest]
    theirs = [packages(filled_in(stage, "post")) for stage in definition()]
    assert ours == theirs
    assert {"g++", "make", "python3-venv"} <= ours[0]
    assert ours[1] == {"ca-certificates", "python3"}


def test_the_image_does_not_run_as_root():
    users = [rest for name, rest in dockerfile() if name == "USER"]
    assert users[-1] == "candle"
    assert any(f"useradd --create-home --uid 1000 {users[-1]}" in rest for rest in runs())


def test_commands_and_variables_exist():
    pyproject = (ROOT / "pyproject.toml").read_text()
    scripts = pyproject.split("[project.scripts]")[1].split("[")[0]
    assert re.search(r"^candle-p1 = ", scripts, re.MULTILINE)
    assert ("CMD", '["candle-p1", "doctor"]') in dockerfile()
    for path in re.findall(r"/opt/candle_p1/(benchmarks/\S+\.py)", DEFINITION):
        assert (ROOT / path).exists()
    sources = "".join(path.read_text() for path in (ROOT / "candle_p1").rglob("*.py"))
    for name in set(re.findall(r"\bCANDLE_[A-Z_]+(?=[= .])", DOCKERFILE + DEFINITION)):
        assert name in sources, name
    assert re.search(r"^version = \"(.+)\"$", pyproject, re.MULTILINE)[1] in DEFINITION


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", list(shell_parts()))
def test_shellcheck_has_nothing_to_say(script):
    assert "{{" not in script
    command = ["shellcheck", "--shell=sh", "--exclude=SC2086", "-"]  # PACKAGES is several words
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
