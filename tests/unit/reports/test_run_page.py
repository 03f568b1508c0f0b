"""The page of one run: what it shows of all ranks, and what it says where something is missing."""

from __future__ import annotations

import re

import numpy as np
import pytest
from candle_p1.reports.figures.run import phases_figure, phases_svg

from candle_p1.errors import DataError, RecordError
from candle_p1.figures import training_curves
from candle_p1.records.per_rank import PER_RANK_NAME
from candle_p1.records.power_file import write_traces
from candle_p1.records.power_trace import Channel, Trace
from candle_p1.records.record import read_record
from candle_p1.reports.frame import Run
from candle_p1.reports.writing import run_page
from tests.planted_records import changed, plant

POWER = {"energy.traces": ["power-0000.csv"]}
TRAINED = {"loss": 0.5, "val_loss": 0.6, "accuracy": 0.9, "val_accuracy": None}


@pytest.fixture
def run(tmp_path):
    path = plant(tmp_path, num_ranks=3, wait_s=1.0, trained=TRAINED, energy_j=5.0)
    return Run(path, read_record(path))


def with_power(run):
    channel = Channel("gpu0", "GPU 0", "gpu", "nvml", "power", 0.1)
    trace = Trace(channel, np.arange(5.0), 100 + np.arange(5.0), 1.0)
    write_traces(run.path.with_name("power-0000.csv"), [trace], 0, 0.0)
    return Run(run.path, changed(run.record, POWER))


def test_every_rank_and_phase_is_drawn_in_a_colour_of_its_own(run):
    (axes,) = phases_figure(run).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]
    colors = {bar.get_facecolor() for bar in axes.patches}
    assert len(colors) == len({"startup", "load", "wait", "train"})
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["startup, 3.00 s", "load, 2.00 s", "wait, 1.000 s", "train, 16.50 s"]


def test_power_is_drawn_only_where_it_was_measured(run):
    assert len(phases_figure(run).axes) == 1
    assert "power" not in run_page(run).split("figure>")[1]
    measured = with_power(run)
    figure = phases_figure(measured)
    assert len(figure.axes[1].lines) == 1
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "node 0: GPU 0"
    assert "GPU 0" in run_page(measured)
    absent = {"energy": {"kind": "absent", "reason": "no sensor"}}
    assert len(phases_figure(Run(run.path, changed(run.record, absent))).axes) == 1


def test_the_page_says_what_data_and_limits_the_run_had(run):
    page = run_page(run)
    assert page.index("synthetic") < page.index("<svg")
    assert page.count("<svg") == 2
    assert "limited" not in page
    content = {"parameters.train_steps": {"value": 2, "origin": "flag"}, "data.synthetic": False}
    content |= {"training.stopped": "early_stop", "plan.epochs_per_rank": 900}
    page = run_page(Run(run.path, changed(run.record, content)))
    assert " of 900 epochs: early_stop" in page
    assert "train_steps 2" in page[: page.index("<svg")]
    assert "synthetic" not in page[: page.index("<svg")]


def test_the_curves_show_training_and_validation(run, tmp_path):
    page = run_page(run)
    for text in ("loss", "accuracy", "training", "validation", "epoch"):
        assert re.search(rf">{text}</text>", page), text
    training_curves(tmp_path / "history.png", {"loss": [1.0]}, title="one epoch")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_named(run):
    measured = with_power(run)
    path = run.path.with_name("power-0000.csv")
    path.write_text("time")
    assert f"Not drawn: Phases: {path}" in run_page(measured)
    with pytest.raises(DataError, match="power-0000"):
        phases_svg(measured)
    raw = run.path.with_name(PER_RANK_NAME)
    raw.write_bytes(b"damaged")
    page = run_page(Run(run.path, run.record))
    assert PER_RANK_NAME in page
    assert page.count("<svg") == 1
    raw.unlink()
    with pytest.raises(RecordError, match="beside the record"):
        phases_svg(Run(run.path, run.record))


def test_a_run_that_failed_early_has_a_page(tmp_path):
    path = plant(tmp_path, num_ranks=2, status="failed")
    page = run_page(Run(path, read_record(path)))
    assert "failed" in page
    assert "<svg" not in page
