"""Power as the paper tells it: per GPU and per node, its change beside that of energy."""

import csv
import io

import numpy as np
import pytest

from candle_p1.records.rank_stats import Joules, Watts
from candle_p1.reports.frame import Run
from candle_p1.reports.report import topic_table
from candle_p1.reports.statistics import contents
from tests.planted_records import changed, experiment_of, planted_record

NUM_GPUS, NUM_NODES = 12, 2


def gpus(power_w, total_s, **facts):
    """Returns a group of 12 GPUs whose powers average to power_w, from 11 W below to 11 W above."""
    watts = power_w + np.arange(-11.0, 12.0, 2.0)
    found = {"kind": "measured", "num_samples": 10, "power": Watts.over(watts).model_dump()}
    found |= {"energy": Joules.over(watts * total_s).model_dump(), "phases": {}}
    found |= {"label": "Tesla V100", "domain": "gpu", "source": "nvml", "reading": "energy"}
    found |= {"resolution_s": 0.1, "counted": True}
    return found | {"num_devices": NUM_GPUS, "nodes": (0, NUM_NODES - 1)} | facts


def measured(record, power_w, **facts):
    """Returns a record of 12 GPUs on two nodes, of which each has this mean power."""
    total_s, watts = record.total_s, NUM_GPUS * power_w
    energy = {"total_j": watts * total_s, "mean_w": watts, "power_hz": 1.0}
    energy["devices"] = [gpus(power_w, total_s, **facts)]
    places = {f"energy.{name}": value for name, value in energy.items()}
    return changed(record, places | {"num_nodes": NUM_NODES})


def rows_of(experiment, slug):
    (topic,) = [each for each in contents()["topics"] if each["slug"] == slug]
    table = topic_table(experiment, topic)
    return table, list(csv.DictReader(io.StringIO(table.to_csv())))


@pytest.fixture
def experiment():
    """The paper's method halves the time and raises the power of a GPU from 60 to 90 W."""
    records = (
        measured(planted_record("nt3", NUM_GPUS, loader=name, load_s=load_s, energy_j=1.0), power_w)
        for name, load_s, power_w in (("original", 21.5, 60.0), ("chunked", 2.0, 90.0))
    )
    return experiment_of(*records)


def test_power_and_energy_are_per_gpu_and_per_node_and_the_rate_is_named(experiment):
    table, rows = rows_of(experiment, "power")
    for row, power_w in zip(rows, (60.0, 90.0), strict=True):
        total_s = float(row["energy per GPU (J)"]) / power_w
        assert float(row["mean power per GPU (W)"]) == power_w
        assert float(row["mean power per node, gpu (W)"]) == 6 * power_w
        assert float(row["energy per node, gpu (J)"]) == pytest.approx(6 * power_w * total_s)
    assert not {"energy (J)", "mean power (W)"} & {*table.headings}
    assert "at 1 Hz" in " ".join(table.notes)


def test_the_change_of_power_stands_beside_that_of_energy(experiment):
    _, rows = rows_of(experiment, "improvement")
    (over_all, alone) = (row for row in rows if row["quantity"] == "energy per GPU")
    assert float(over_all["change of mean power per GPU (%)"]) == pytest.approx(50)
    assert over_all["improvement (%)"] == alone["improvement (%)"]
    others = [row for row in rows if row["quantity"] != "energy per GPU"]
    assert {row["change of mean power per GPU (%)"] for row in others} == {""}


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
