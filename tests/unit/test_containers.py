"""The container definitions, checked without a container engine."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

DOCKERFILE = (ROOT / "containers/Dockerfile").read_text()
DEFINITION = (ROOT / "containers/candle_p1.def").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


def of_dockerfile(name):
    """Returns what follows an instruction of the Dockerfile wherever it occurs."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return re.findall(rf"^{name} +(.*)$", text, re.MULTILINE)


def definition():
    """Returns the stages of the Apptainer definition: headers and sections, arguments filled in."""
    stages = []
    for text in DEFINITION.split("Bootstrap: docker\n")[1:]:
        head, *sections = re.split(r"^%", text, flags=re.MULTILINE)
        stage = dict(line.split(": ") for line in head.splitlines() if line)
        for section in sections:
            name, _, body = section.partition("\n")
            stage[name] = re.sub(r"^    ", "", body, flags=re.MULTILINE)
        for line in stage["arguments"].split():
            name, _, value = line.partition("=")
            stage = {part: text.replace(f"{{{{ {name} }}}}", value) for part, text in stage.items()}
        stages.append(stage)
    return stages


BUILD, FINAL = definition()
SCRIPTS = [
    *of_dockerfile("RUN"),
    *(stage[part] for stage in (BUILD, FINAL) for part in stage if part in {"post", "test"}),
    *(FINAL[part] for part in ("environment", "runscript") if part in FINAL),
]


def test_both_copy_everything_that_the_set_up_reads():
    copied = [rest.split()[:-1] for rest in of_dockerfile("COPY") if "--from" not in rest]
    pairs = dict(line.split() for line in BUILD["files"].splitlines() if line)
    assert {name for names in copied for name in names} == set(pairs)
    for source, target in pairs.items():
        assert (ROOT / source).exists(), source
        assert target == f"/opt/candle_p1/{source}"
    read = re.search(r"^BUILT_FROM := (.+)$", MAKEFILE, re.MULTILINE)[1]
    names = re.findall(r"[\w./*]+", read.replace("$(wildcard", ""))
    names += re.findall(r'^readme = "(.+)"', PYPROJECT, re.MULTILINE)
    names += re.findall(r'^license-files = \["(.+)"\]', PYPROJECT, re.MULTILINE)
    assert len(names) > 5
    assert {name.split("/")[0] for name in names if name.strip(".*/")} <= set(pairs)
    assert "--from=build /opt/candle_p1 /opt/candle_p1" in of_dockerfile("COPY")
    assert FINAL["files from build"].split() == ["/opt/candle_p1", "/opt/candle_p1"]


def test_both_use_the_same_make_target_and_packages():
    made, packages = [], []
    for script in SCRIPTS:
        made += map(shlex.split, re.findall(r"(?:^|[\n&]) *make ([^\n&\\]+)", script))
        installed = re.findall(r"apt-get install ([^&;\n]+)", re.sub(r"\\\n", " ", script))
        packages += [{word for word in line.split() if word[0] not in "-$"} for line in installed]
    first, second = ([word.partition("=")[:2] for word in words] for words in made)
    assert first == second
    for name, is_variable in first:
        assert re.search(rf"^{name} :=" if is_variable else rf"^{name}:", MAKEFILE, re.MULTILINE)
    assert packages[:2] == packages[2:]
    assert {"g++", "make", "python3-venv"} <= packages[0]


def test_commands_and_variables_exist():
    assert of_dockerfile("CMD") == ['["candle-p1", "doctor"]']
    for path in re.findall(r"/opt/candle_p1/(benchmarks/\S+\.py)", DEFINITION):
        assert (ROOT / path).exists()
    sources = "".join(path.read_text() for path in (ROOT / "candle_p1").rglob("*.py"))
    for name in set(re.findall(r"\bCANDLE_[A-Z_]+(?=[= .])", DOCKERFILE + DEFINITION)):
        assert name in sources, name
    assert re.search(r"^version = \"(.+)\"$", PYPROJECT, re.MULTILINE)[1] in DEFINITION


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_has_nothing_to_say(script):
    command = ["shellcheck", "--shell=sh", "--exclude=SC2086", "-"]  # PACKAGES is several words
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
