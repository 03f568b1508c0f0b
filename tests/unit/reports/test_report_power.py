"""Power as the paper tells it: per GPU and per node, its change beside that of energy."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from candle_p1.reports.figures.power import MAX_LINES, power_caption, power_figure, read_measured

from candle_p1.records.power_file import write_traces
from candle_p1.records.power_trace import Channel, Trace
from candle_p1.records.record import read_record, write_record
from candle_p1.records.spread import Joules, Watts
from candle_p1.reports.compare import Side, compare
from candle_p1.reports.experiments import group
from candle_p1.reports.figures.lines import energy
from candle_p1.reports.frame import Run
from candle_p1.reports.sections import TOPICS, topic_table
from tests.planted_records import changed, plant, planted_record

NUM_GPUS, NUM_NODES = 12, 2


def gpus(power_w, total_s, **facts):
    """Returns a group of 12 GPUs whose powers average to power_w, from 11 W below to 11 W above."""
    watts = power_w + np.arange(-11.0, 12.0, 2.0)
    return {
        "kind": "measured",
        "num_samples": 10,
        "energy": Joules.over(watts * total_s).model_dump(),
        "power": Watts.over(watts).model_dump(),
        "label": "Tesla V100",
        "domain": "gpu",
        "source": "nvml",
        "reading": "energy",
        "resolution_s": 0.1,
        "counted": True,
        "num_devices": NUM_GPUS,
        "nodes": (0, NUM_NODES - 1),
        "phases": {},
    } | facts


def measured(record, power_w, **facts):
    """Returns a record of 12 GPUs on two nodes, of which each has this mean power."""
    total_s = record.total_s
    group = gpus(power_w, total_s, **facts)
    return changed(
        record,
        {
            "num_nodes": NUM_NODES,
            "energy.devices": [group],
            "energy.total_j": NUM_GPUS * power_w * total_s,
            "energy.mean_w": NUM_GPUS * power_w,
            "energy.power_hz": 1.0,
        },
    )


def rows_of(experiment, slug):
    (topic,) = [each for each in TOPICS if each.slug == slug]
    table = topic_table(experiment, topic, "nt3")
    return table, list(csv.DictReader(io.StringIO(table.to_csv())))


@pytest.fixture
def experiment():
    """The paper's method halves the time and raises the power of a GPU from 60 to 90 W."""
    records = (
        measured(planted_record("nt3", NUM_GPUS, loader=name, load_s=load_s, energy_j=1.0), power_w)
        for name, load_s, power_w in (("original", 21.5, 60.0), ("chunked", 2.0, 90.0))
    )
    (experiment,) = group([Run(i, record) for i, record in enumerate(records)])
    return experiment


def test_power_and_energy_are_per_gpu_and_per_node_and_the_rate_is_named(experiment):
    table, rows = rows_of(experiment, "power")
    for row, power_w in zip(rows, (60.0, 90.0), strict=True):
        total_s = float(row["energy per GPU (J)"]) / power_w
        assert float(row["mean power per GPU (W)"]) == power_w
        assert float(row["mean power per node, gpu (W)"]) == 6 * power_w
        assert float(row["energy per node, gpu (J)"]) == pytest.approx(6 * power_w * total_s)
    assert not {"energy (J)", "mean power (W)"} & {*table.headings}
    assert "at 1 Hz" in " ".join(table.notes)
    assert [note for note in table.notes if "nvidia-smi" in note]
    assert [note for note in table.notes if "Theta" in note]


def test_the_change_of_power_stands_beside_that_of_energy(experiment):
    _, rows = rows_of(experiment, "improvement")
    (row,) = [row for row in rows if row["quantity"] == "energy per GPU" and row["ranks"] != "12"]
    assert float(row["change of mean power per GPU (%)"]) == pytest.approx(50)
    (alone,) = [row for row in rows if row["quantity"] == "energy per GPU" and row["ranks"] == "12"]
    assert float(alone["improvement (%)"]) == pytest.approx(float(row["improvement (%)"]))
    assert not any(
        row["change of mean power per GPU (%)"]
        for row in rows
        if row["quantity"] != "energy per GPU"
    )


def test_a_figure_shows_power_per_gpu_and_per_node(experiment):
    titles = [axes.get_title() for axes in energy(experiment, experiment.series).axes]
    assert titles == [
        "energy per GPU",
        "mean power per GPU",
        "energy per node, gpu",
        "mean power per node, gpu",
    ]


@pytest.mark.parametrize(
    ("facts", "gpu_w"),
    [
        ({}, 60.0),
        ({"counted": False}, 60.0),  # in a node's own sensor
        ({"kind": "absent", "reasons": ["it was lost"]}, None),
        ({"domain": "cpu"}, None),
    ],
)
def test_a_mean_over_gpus_needs_all_of_them(facts, gpu_w):
    run = Run(None, measured(planted_record("nt3", 12, energy_j=1.0), 60.0, **facts))
    assert run["power_per_gpu_w"] == gpu_w
    assert run["power_per_node_w"] == 360.0
    assert Run(None, planted_record("nt3", 12))["energy_per_node_j"] is None


def test_a_superchips_module_has_no_power_per_gpu():
    record = measured(planted_record("nt3", 12, energy_j=1.0), 600.0, domain="module")
    groups = [*record.energy.devices, gpus(600.0, record.total_s, source="cray", counted=False)]
    assert Run(None, changed(record, {"energy.devices": groups}))["power_per_gpu_w"] is None


def test_a_comparison_has_the_power_per_gpu_too():
    record = planted_record("nt3", NUM_GPUS, energy_j=1.0)
    a, b = (
        Side(name, (Run(None, measured(record, watts)),))
        for name, watts in (("a", 60.0), ("b", 90.0))
    )
    (pairing,) = compare(a, b).pairings
    rows = {row.quantity.name: row for row in pairing.rows}
    assert rows["power_per_gpu_w"].change.value == pytest.approx(1.5)
    assert rows["energy_per_gpu_j"].change.value == pytest.approx(1.5)


def with_traces(path, num_nodes=1, num_gpus=2):
    """Adds readings to a planted record, the first GPU at 50 W and each other one 10 W above."""
    run = Run(path, read_record(path))
    times_s = np.arange(0.0, run["total_s"], 0.5)
    channels = [Channel("node", "node", "node", "cray", "power")]
    channels += [Channel(f"gpu{i}", f"GPU {i}", "gpu", "nvml", "power") for i in range(num_gpus)]
    traces = [
        Trace(channel, times_s, np.full_like(times_s, 40 + 10 * i), 0.5)
        for i, channel in enumerate(channels)
    ]
    names = [f"power-{node:04d}.csv" for node in range(num_nodes)]
    for node, name in enumerate(names):
        write_traces(path.with_name(name), traces, node, 0.0)
    record = changed(run.record, {"energy.traces": names, "num_nodes": num_nodes})
    write_record(path, changed(record, {"energy.power_hz": 2.0}))
    return Run(path, read_record(path))


def test_power_over_time_is_of_one_node_and_one_above_the_other(tmp_path):
    slow = with_traces(plant(tmp_path, num_ranks=4, load_s=20.0, energy_j=1.0), num_nodes=2)
    fast = with_traces(plant(tmp_path, num_ranks=4, load_s=2.0, energy_j=1.0), num_nodes=2)
    slow.path.with_name("power-0001.csv").write_text("is not read")
    runs = [read_measured(name, run) for name, run in (("original", slow), ("chunked", fast))]
    figure = power_figure(runs)
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() == (0, slow["total_s"])
    assert first.get_ylim() == second.get_ylim()
    assert first.get_title(loc="left") == "original, 4 ranks, node 0 of 2"
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["node 0: GPU 0", "node 0: GPU 1", "node 0: node"]
    assert [line.get_ydata()[0] for line in first.lines] == [50, 60, 40]
    assert "at 2 Hz" in power_caption(runs)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert boxes
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
        assert not any(axes._left_title.get_window_extent().overlaps(box) for box in boxes)


def test_more_devices_than_can_be_told_apart_are_counted(tmp_path):
    run = with_traces(plant(tmp_path, num_ranks=2, energy_j=1.0), num_gpus=MAX_LINES + 2)
    each = read_measured("all", run)
    assert len(power_figure([each]).axes[0].lines) == MAX_LINES
    assert "3 further devices" in power_caption([each])
