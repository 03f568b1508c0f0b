import pytest


@pytest.fixture(autouse=True)
def no_machine_files_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("CANDLE_P1_MACHINES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def scheduler(monkeypatch, tmp_path):
    """Puts a command into $PATH that prints a text, in which "$number" counts from 11.

    Returns a function that returns the arguments of all its calls.
    """

    def scheduler(name, prints="$number", code=0, refuses_after=100):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'#!/bin/bash\nnumber=$((11 + $(cat "{tmp_path}/number" 2>/dev/null || echo 0)))\n'
            f"((number - 11 < {refuses_after})) || {{ echo too many >&2; exit 1; }}\n"
            f'echo "$@" >>"{tmp_path}/argv"\necho $((number - 10)) >"{tmp_path}/number"\n'
            f'echo "{prints}"\nexit {code}\n'
        )
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
        return lambda: (tmp_path / "argv").read_text().split()

    return scheduler
