"""The container definitions, as far as they can be checked without a container engine."""

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
SECTIONS = {
    *("arguments", "environment", "files", "help", "labels", "post", "runscript", "test"),
}


def dockerfile():
    """Returns the instructions of the Dockerfile, as (name, rest)."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def definition():
    """Returns the stages of the Apptainer definition: its header and its sections, as text."""
    stages, section = [], None
    for line in DEFINITION.splitlines():
        header = re.match(r"(Bootstrap|From|Stage): (.+)", line)
        if header and header[1] == "Bootstrap":
            stages.append({})
            section = None
        if header:
            stages[-1][header[1]] = header[2]
        elif line.startswith("%"):
            section = line[1:]
            assert section not in stages[-1]
            stages[-1][section] = ""
        elif section:
            stages[-1][section] += line.removeprefix("    ") + "\n"
        else:
            assert not line.strip(), line
    return stages


def arguments(stage):
    return dict(line.split("=", 1) for line in stage["arguments"].split())


def filled_in(stage, name):
    """Returns a section or header of a stage, with the stage's arguments' default values."""
    values = arguments(stage)
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: values[found[1]], stage[name])


def runs():
    return [rest for name, rest in dockerfile() if name == "RUN"]


def shell_parts():
    """Yields every piece of shell in both, with where it is."""
    for place, rest in enumerate(runs()):
        yield pytest.param(rest, id=f"Dockerfile-RUN-{place}")
    for stage in definition():
        for section in ("post", "environment", "runscript", "test"):
            if section in stage:
                place = f"{stage['Stage']}-{section}"
                yield pytest.param(filled_in(stage, section), id=place)


def packages(script):
    """Returns what a piece of shell has apt-get install, without what an argument may add."""
    lines = re.split(r"\n|&&", re.sub(r"\\\n", " ", script))
    (line,) = (line for line in lines if "apt-get install" in line)
    words = line.split()[line.split().index("install") + 1 :]
    return {word for word in words if word[0] not in "-$"}


def test_instructions_and_sections_are_known():
    names = [name for name, _ in dockerfile()]
    assert set(names) <= INSTRUCTIONS
    assert names[0] == "ARG"
    assert names[2] == "FROM"
    stages = definition()
    assert [stage["Stage"] for stage in stages] == ["build", "final"]
    assert all(stage["Bootstrap"] == "docker" for stage in stages)
    headers = {"Bootstrap", "From", "Stage"}
    for stage in stages:
        assert {name.split()[0] for name in stage} - headers <= SECTIONS


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


def test_all_that_the_set_up_reads_is_copied():
    copied = {line.split()[0] for line in definition()[0]["files"].splitlines() if line}
    makefile = (ROOT / "Makefile").read_text()
    read = re.search(r"^BUILT_FROM := (.+)$", makefile, re.MULTILINE)[1]
    names = re.findall(r"[\w./*]+", read.replace("$(wildcard", ""))
    pyproject = (ROOT / "pyproject.toml").read_text()
    names += re.findall(r'^readme = "(.+)"', pyproject, re.MULTILINE)
    names += re.findall(r'^license-files = \["(.+)"\]', pyproject, re.MULTILINE)
    assert len(names) > 5
    assert {name.split("/")[0] for name in names if name.strip(".*/")} <= copied


def test_the_final_stage_takes_what_the_build_stage_made():
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


def test_both_are_set_up_by_the_same_make_target():
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


def test_it_does_not_run_as_root():
    users = [rest for name, rest in dockerfile() if name == "USER"]
    assert users[-1] == "candle"
    assert any(f"useradd --create-home --uid 1000 {users[-1]}" in rest for rest in runs())


def test_it_runs_commands_and_settings_that_exist():
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


@pytest.mark.parametrize("script", list(shell_parts()))
@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_shell_parts_are_shell(script, shell):
    done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "{{" not in script


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", list(shell_parts()))
def test_shellcheck_has_nothing_to_say(script):
    command = ["shellcheck", "--shell=sh", "--exclude=SC2086", "-"]  # PACKAGES is several words
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
