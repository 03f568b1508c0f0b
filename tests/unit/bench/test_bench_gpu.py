from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from candle_p1.bench import gpu, harness
from candle_p1.bench.gpu import OURS, PLAIN, Gpu
from candle_p1.bench.gpu_task import PRECISIONS, DeviceTask, energies, open_sampler
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import SetupError

DEVICE = {
    **{"kind": "NVIDIA H100", "platform": "cuda 12090", "driver": "570.1"},
    **{"num_devices": 4, "memory_bytes": 60 << 30},
    "flops_per_s": {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12},
    **{"copy_bytes_per_s": 3e12, "upload_bytes_per_s": 50e9},
}
OUTCOME = {
    **{"steps_s": [0.010, 0.011, 0.013], "steps_per_epoch": 56, "batch_size": 20},
    **{"flops": 1e12, "optimizer_bytes": 3_000_000_000, "prepared_s": 20.0, "first_step_s": 8.0},
    **{"step_energies_j": {"energy": 5.0, "power": 4.5}, "no_energy": None},
}


@pytest.fixture
def measure(monkeypatch):
    """Measures with jobs whose outcomes a function of the task returns."""

    def measure(outcome_of, **conditions):
        jobs = []

        def run(task, num_ranks, *_):
            jobs.append((task, num_ranks))
            return [DEVICE] if type(task) is DeviceTask else [outcome_of(task)] * num_ranks

        monkeypatch.setattr(harness, "run", run)
        monkeypatch.setattr(gpu, "on_this_machine", lambda *_: SimpleNamespace(notes=[]))
        monkeypatch.setattr(gpu, "find_spec", lambda name: True)
        monkeypatch.setattr(gpu, "locate_files", lambda *_: None)
        comparison = Gpu(benchmarks=("nt3",), **conditions)
        assert comparison.prepare() == []
        return comparison.measure(lambda *progress: None), jobs[1:]

    return measure


def by_precision(task):
    """Plain Keras takes twice as long."""
    factor = {"float32": 4.0, "tf32": 2.0, "bfloat16": 1.0}[task.precision]
    factor *= 2 if task.inputs == "arrays" else 1
    return OUTCOME | {"steps_s": [factor * seconds for seconds in OUTCOME["steps_s"]]}


def test_every_precision_is_compared_with_plain_keras(measure):
    report, jobs = measure(by_precision, num_ranks=1)
    in_order = [(name, each) for name in PRECISIONS for each in ("samples", "arrays")]
    assert [(t.precision, t.inputs) for t, _ in jobs] == [*in_order, *reversed(in_order)]
    ours, plain, *_, best, _ = report["results"]
    assert (ours["variant"], plain["variant"], best["precision"]) == (OURS, PLAIN, "bfloat16")
    assert [each["step_s"] for each in (ours, plain)] == pytest.approx([4 * 0.011, 8 * 0.011])
    assert (ours["epoch_s"], ours["samples_per_s"]) == pytest.approx((56 * 0.044, 20 / 0.044))
    assert ours["epoch_energies_j"] == {"energy": 280.0, "power": 252.0}
    # The bound has the rate of its precision.
    bounds_s = [each["bound_s"] for each in report["results"][::2]]
    assert bounds_s == pytest.approx([1e12 / rate + 1e-3 for rate in (50e12, 400e12, 800e12)])
    for task, _ in jobs:
        products = task.environment["JAX_DEFAULT_MATMUL_PRECISION"]
        assert (task.settings["data_type"], products) == PRECISIONS[task.precision]


def test_the_first_round_starts_cold_and_all_gpus_train_together(measure):
    caches = []

    def outcome(task):
        caches.append(task.cache_dir)
        return OUTCOME | {"first_step_s": 2.0 if task.cache_dir in caches[:-1] else 30.0}

    report, jobs = measure(outcome, num_rounds=3)
    assert [num_ranks for _, num_ranks in jobs[:7]] == [1] * 6 + [4]
    assert report["results"][-1]["samples_per_s"] == pytest.approx(4 * 20 / 0.011)
    for result in report["results"]:
        assert (result["cold_start_s"], result["warm_start_s"]) == (50.0, 22.0)
        assert result["first_steps_s"] == [30.0, 2.0, 2.0]


WITHOUT = {"flops": None, "step_energies_j": {}, "no_energy": "no sensor"}
ON_CPU = {"num_rounds": 1, "device": "cpu"}


@pytest.mark.parametrize(
    ("changes", "options", "words", "last_cells"),
    [
        ({"steps_s": [0.044]}, {}, ["NVIDIA H100, 4 devices", "400 TFLOP/s"], ["2.10", "1.00"]),
        (WITHOUT, ON_CPU, ["MEASURED ON CPUs", "absent (no sensor)"], ["-", "-", "1.00"]),
    ],
)
def test_the_tables_show_what_was_measured(measure, printed, changes, options, words, last_cells):
    report, jobs = measure(lambda task: OUTCOME | changes, **options)
    assert ("JAX_PLATFORMS" in jobs[0][0].environment) == (options == ON_CPU)
    shown = printed(Gpu().render(report))
    assert all(each in shown for each in words)
    rows = map(str.split, shown.splitlines())
    first = next(row for row in rows if row[:3] == ["nt3,", OURS, "float32"])
    assert first[-len(last_cells) :] == last_cells


def test_without_jax_there_is_one_message(monkeypatch):
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="ENGINE=jax GPU=1"):
        Gpu().prepare()


@pytest.fixture
def nvml(monkeypatch):
    """Two cards, of which the counters grow by 30 J and the power is 310 W at each reading."""
    counts = {"GPU-0": 1_000_000, "GPU-1": 5_000_000}

    def count(card):
        counts[card] += 30_000
        return counts[card]

    found = SimpleNamespace(
        NVML_DEVICE_MIG_DISABLE=0,
        NVMLError=OSError,
        NVMLError_NoPermission=PermissionError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: f"GPU-{index}",
        nvmlDeviceGetUUID=str,
        nvmlDeviceGetName=lambda card: "NVIDIA H100",
        nvmlDeviceGetTotalEnergyConsumption=count,
        nvmlDeviceGetPowerUsage=lambda card: 310_000,
        nvmlDeviceGetMigMode=lambda card: (0, 0),
    )
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return found


def sampled(num_samples):
    """The energies between the first and the last of some samples, one a second."""
    sampler, _ = open_sampler(SerialCommunicator())
    for second in range(num_samples):
        sampler._clock = lambda second=second: float(second)
        sampler.sample()
    return energies(sampler.traces(), 0.0, num_samples - 1.0)


def test_counter_and_power_are_read_at_the_same_time(nvml):
    found, reason = sampled(21)
    assert reason is None
    assert found == pytest.approx({"energy": 20 * 30.0, "power": 20 * 310.0})
    assert sampled(2)[0] == {}
    assert "--seconds" in sampled(2)[1]
    nvml.nvmlDeviceGetTotalEnergyConsumption = os.readlink  # raises NVMLError
    assert set(sampled(21)[0]) == {"power"}
