import pytest


@pytest.fixture(autouse=True)
def no_machine_files_of_the_user(monkeypatch, tmp_path):
    monkeypatch.delenv("CANDLE_P1_MACHINES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
