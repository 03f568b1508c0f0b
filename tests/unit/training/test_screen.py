import fcntl
import os
import pty
import struct
import termios
from contextlib import suppress

import pytest

from candle_p1.distributed.launch_environment import TERMINAL_VARIABLE
from candle_p1.records.summary import details
from candle_p1.records.tables import as_cells
from candle_p1.records.types import ParameterValue
from candle_p1.training import screen as screen_module
from candle_p1.training.screen import Screen
from tests.planted_records import planted_record

RECORD = planted_record(
    num_ranks=2, load_s=4.0, startup_s=2.0, wait_s=1.0, epochs_per_rank=1, epoch_s=0.25,
    first_step_s=0.75, quality={"accuracy": 0.975, "loss": None}, naive={"accuracy": 0.5},
)  # fmt: skip


@pytest.fixture(autouse=True)
def plain_output(monkeypatch):
    monkeypatch.delenv(TERMINAL_VARIABLE, raising=False)


def train(screen):
    screen.begin_training(2, 10)
    screen.show_step(4)
    screen.show_epoch(0, {"accuracy": 0.75, "loss": 0.5, "val_loss": 0.25, "learning_rate": 0.1})
    screen.show_step(5)
    screen.end_training()


def test_a_log_has_a_line_per_epoch_and_more_after_a_long_silence(capsys, monkeypatch):
    of_epoch = "epoch 1/2  loss 0.5000 (0.2500)  accuracy 0.7500"
    train(Screen())
    assert capsys.readouterr().out.splitlines() == [of_epoch]
    monkeypatch.setattr(screen_module, "QUIET_S", -1.0)
    train(Screen())
    of_steps = ["epoch 1/2  step 4/10", "epoch 2/2  step 5/10"]
    assert capsys.readouterr().out.splitlines() == [of_steps[0], of_epoch, of_steps[1]]


@pytest.mark.parametrize(
    ("names", "shown"),
    [("accuracy mae loss", "loss accuracy mae"), ("accuracy mae f1 loss", "loss accuracy")],
)
def test_a_line_of_an_epoch_has_what_fits_80_columns(capsys, names, shown):
    screen, values = Screen(), dict.fromkeys(names.split(), 0.51234567)
    screen.begin_training(20, 10)
    screen.show_epoch(0, values | {f"val_{name}": 0.0512345 for name in values})
    screen.end_training()
    metrics = "".join(f"  {name} 0.5123 (0.0512)" for name in shown.split())
    is_cut = len(shown) < len(names)
    assert capsys.readouterr().out == "epoch  1/20" + metrics + " ..." * is_cut + "\n"


def test_under_a_launcher_the_bar_goes_to_the_users_terminal(capfd, monkeypatch):
    terminal, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("4H", 50, 120, 0, 0))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv(TERMINAL_VARIABLE, os.ttyname(device))
    screen = Screen()
    train(screen)
    screen.close()
    os.set_blocking(terminal, False)
    output = ""
    with suppress(BlockingIOError):
        while True:
            output += os.read(terminal, 4096).decode(errors="replace")
    assert "training" in output
    assert "10/20" in output or "15/20" in output
    assert "loss 0.5" in output
    assert capfd.readouterr().out == ""


def test_other_ranks_are_silent(capsys, tmp_path):
    screen = Screen(rank=1)
    train(screen)
    screen.warn("x")
    screen.show_result(RECORD, tmp_path)
    assert capsys.readouterr().out == ""


def test_the_result_shows_times_quality_and_the_next_command(capsys, tmp_path):
    Screen().show_result(RECORD, tmp_path / "run.json")
    output = capsys.readouterr().out
    for shown in ("50% load", "0.9750", "0.5000", "1,600.0", f"show {os.path.relpath(tmp_path)}"):
        assert shown in output


def test_only_what_the_user_set_is_listed():
    origins = "default", "flag", "model file m.txt", "config file c.txt, line 1", "program"
    parameters = {f"p{i}": ParameterValue(value=i, origin=each) for i, each in enumerate(origins)}
    *parts, table = details(RECORD.model_copy(update={"parameters": parameters}))
    assert "set: p1 1, p3 3, p4 4" in parts
    assert [name for name, *_ in as_cells(table)[1]] == ["p1", "p3", "p4"]
