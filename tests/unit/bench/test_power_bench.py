from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from candle_p1.bench import power, power_show
from candle_p1.bench.power import PowerComparison, overhead, readings
from candle_p1.bench.power_job import PowerOutcome, Window
from candle_p1.bench.power_worker import _energies_j, _simulate
from candle_p1.data.reader import FileSet
from candle_p1.errors import ParameterError
from candle_p1.instrument.power.replay import ReplaySource
from candle_p1.records.power_trace import Channel, Trace

GPU = "gpu:GPU-1"


def windows(num_rounds, slower=1.005, ratio=1.01, step_s=0.1):
    """Returns windows in the order of a job; in the sampled ones steps are slower."""
    found = []
    for k in range(2 * num_rounds):
        drift = 1 + 0.001 * k
        if k % 4 in (0, 3):
            energies_j = {GPU: {"counter": 3000.0, "power": 3000.0 * ratio}}
            seconds = 100 * step_s * slower * drift
            found.append(Window(True, 100, seconds, 0.002, 101, energies_j))
        else:
            found.append(Window(False, 100, 100 * step_s * drift))
    return found


OUTCOME = PowerOutcome(
    windows(6), {"nvml": 2}, {"rapl": "no powercap"}, {GPU: "H100"}, "H100", "jax", 8
)
NO_GPU = replace(
    OUTCOME,
    windows=[replace(window, energies_j={}) for window in OUTCOME.windows],
    sources={"replay": 4},
    gpus={},
    device="cpu",
)


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Compares with a job that has measured an outcome."""

    def compare(outcome, **conditions):
        monkeypatch.setattr(power, "run", lambda job, num_ranks: [asdict(outcome)])
        (tmp_path / "train.csv").write_text("1,2\n")
        return PowerComparison("nt3", [], **conditions).measure(
            FileSet.of({"train": tmp_path / "train.csv"})
        )

    return compare


@pytest.mark.parametrize(("ratio", "within"), [(1.02, True), (0.96, False)])
def test_the_energies_of_a_gpu_are_compared(ratio, within):
    (found,) = readings(replace(OUTCOME, windows=windows(6, ratio=ratio)))
    assert found["median_ratio"] == pytest.approx(ratio)
    assert found["within"] is within
    assert len(found["values_ratio"]) == 6


def test_a_gpu_that_lacks_a_reading_in_one_window_is_not_compared():
    first = replace(OUTCOME.windows[0], energies_j={GPU: {"counter": 3000.0, "power": None}})
    (found,) = readings(replace(OUTCOME, windows=[first, *OUTCOME.windows[1:]]))
    assert "absent" in found["reason"]
    assert "median_ratio" not in found


@pytest.mark.parametrize(("slower", "within"), [(1.005, True), (1.05, False)])
def test_the_overhead_is_that_of_rounds_and_not_of_a_drift(slower, within):
    found = overhead(replace(OUTCOME, windows=windows(6, slower)))
    assert found["median_slower"] == pytest.approx(slower - 1, abs=2e-3)
    assert found["within"] is within


def test_noise_that_hides_the_overhead_gives_no_verdict():
    noisy = [
        replace(window, seconds=window.seconds * (1 + 0.05 * (k % 3)))
        for k, window in enumerate(windows(6))
    ]
    assert overhead(replace(OUTCOME, windows=noisy))["within"] is None


@pytest.mark.parametrize("outcome", [OUTCOME, NO_GPU])
def test_the_report_can_be_shown_and_written(compare, outcome):
    report = compare(outcome)
    json.dumps(report, allow_nan=False)
    shown = list(power_show.parts(report))
    lines = "\n".join(part for part in shown if isinstance(part, str))
    assert "+0.5" in lines
    assert "within 1%" in lines
    assert "not measured: rapl: no powercap" in lines
    if outcome is OUTCOME:
        assert f"{GPU}: integrated power against the energy counter: within 3%" in lines
    else:
        assert "energy counter against integrated power: not measured" in lines
        assert "a simulated recording, for there is no sensor" in lines


def test_few_rounds_and_short_windows_are_told(compare):
    report = compare(replace(OUTCOME, windows=windows(2)), num_rounds=2, window_s=5.0)
    lines = [part for part in power_show.parts(report) if isinstance(part, str)]
    assert any("fewer than 6" in line for line in lines)
    assert not any("against the energy counter: " in line for line in lines)
    assert PowerComparison("nt3", [], window_s=5.0).notes
    assert not PowerComparison("nt3", []).notes


def test_it_is_one_process(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(ParameterError, match="without a launcher"):
        PowerComparison("nt3", []).locate_files()


def test_the_worker_takes_both_energies_of_nvidia_gpus():
    times_s = np.arange(0, 101) / 10
    counter = Channel(GPU, "H100", "gpu", "nvml", "energy")
    traces = [
        Trace(counter, times_s, 300 * times_s, 0.1),
        Trace(replace(counter, reading="power"), times_s, np.full(101, 303.0), 0.1),
        Trace(replace(counter, device="package-0", source="rapl"), times_s, times_s, 0.1),
    ]
    ((device, energies_j),) = _energies_j(traces, 0.0, 10.0)
    assert device == GPU
    assert energies_j == {"counter": pytest.approx(3000), "power": pytest.approx(3030)}


def test_the_recording_of_a_machine_without_sensors_can_be_replayed(tmp_path):
    _simulate(tmp_path / "recording.csv", 60.0)
    source = ReplaySource(tmp_path / "recording.csv")
    source.start()
    assert list(source.sample()) == [300.0] * 4
