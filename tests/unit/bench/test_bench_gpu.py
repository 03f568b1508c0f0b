import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from candle_p1.bench import gpu, harness
from candle_p1.bench.gpu import DETERMINISTIC, Gpu
from candle_p1.bench.gpu_task import OURS, OURS_PLAIN, PLAIN, PRECISIONS, energies, open_sampler
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError, SetupError
from tests.conftest import ROOT
from tests.expected import check_expected
from tests.unit.bench.test_bench_reports import shown

DEVICE = {
    **{"kind": "NVIDIA H100", "platform": "cuda 12090", "driver": "570.1"},
    **{"num_devices": 4, "memory_bytes": 60 << 30},
    "flops_per_s": {"float32": 50e12, "tf32": 400e12, "bfloat16": 800e12},
    **{"copy_bytes_per_s": 3e12, "upload_bytes_per_s": 50e9},
}
OUTCOME = {
    **{"steps_s": [0.010, 0.011, 0.013], "steps_per_epoch": 56, "batch_size": 20},
    **{"flops": 1e12, "optimizer_bytes": 3_000_000_000, "prepared_s": 20.0, "first_step_s": 8.0},
    **{"step_energies_j": {"energy": 5.0, "power": 4.5}, "no_energy": {}},
}


@pytest.fixture
def measure(monkeypatch):
    """Measures with jobs whose outcomes a function of the task and the variant returns.

    A job ends where that function raises an error.
    """

    def measure(outcome_of, **conditions):
        jobs, lines, reports = [], [], []

        def run(task, num_ranks, name, limit_s=None):
            jobs.append((task, num_ranks))
            for number, variant in enumerate(task.variants):
                ranks = [outcome_of(task, variant)] * num_ranks
                text = json.dumps({"variant": variant, "ranks": ranks})
                Path(task.directory, f"{number}.json").write_text(text)

        monkeypatch.setattr(harness, "run", lambda *_: [DEVICE])
        monkeypatch.setattr(gpu, "run", run)
        monkeypatch.setattr(gpu, "on_this_machine", lambda *_: SimpleNamespace(notes=[]))
        monkeypatch.setattr(gpu, "find_spec", lambda name: True)
        monkeypatch.setattr(gpu, "locate_files", lambda *_: None)
        comparison = Gpu(benchmarks=("nt3",), **conditions)
        comparison.on_result = lambda line, report: (lines.append(line), reports.append(report))
        assert comparison.prepare() == []
        report = comparison.measure(lambda *progress: None)
        return SimpleNamespace(report=report, jobs=jobs, lines=lines, reports=reports)

    return measure


def by_precision(task, variant):
    """Plain Keras takes twice as long, and deterministic kernels three times."""
    factor = {"float32": 4.0, "tf32": 2.0, "bfloat16": 1.0}[task.precision]
    factor *= 3 if task.deterministic else {PLAIN: 2}.get(variant, 1)
    return OUTCOME | {"steps_s": [factor * seconds for seconds in OUTCOME["steps_s"]]}


def test_the_first_round_starts_cold_and_all_gpus_train_together(measure):
    caches = []

    def outcome(task, variant):
        caches.append((task.cache_dir, variant))
        return OUTCOME | {"first_step_s": 2.0 if caches[-1] in caches[:-1] else 30.0}

    done = measure(outcome, num_rounds=3)
    assert [num_ranks for _, num_ranks in done.jobs[:5]] == [1] * 4 + [4]
    several = next(each for each in done.report["results"] if each["num_ranks"] == 4)
    assert several["samples_per_s"] == pytest.approx(4 * 20 / 0.011)
    assert all(each["first_steps_s"] == [30.0, 2.0, 2.0] for each in done.report["results"])


def test_a_budget_that_is_used_up_leaves_what_was_measured(measure, printed, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(gpu, "time", SimpleNamespace(time=lambda: now_s[0]))

    def outcome(task, variant):
        assert task.deadline == 1100.0
        now_s[0] += 40.0
        if now_s[0] > 1100.0:
            raise SetupError("nt3, tf32: ended after the 100 s that were left for it")
        return OUTCOME

    done = measure(outcome, budget=100.0, num_ranks=1, num_rounds=1)
    assert [each["variant"] for each in done.report["results"]] == [OURS, OURS_PLAIN]
    assert len(done.jobs) == 1
    shown = printed(Gpu().render(done.report))
    assert "not measured: nt3, tf32: ended after the 100 s" in shown
    assert "not measured: nt3, float32: the budget of 100 s was used up" in shown


def test_a_job_that_fails_is_told_and_the_others_are_measured(measure, printed):
    def outcome(task, variant):
        if variant == PLAIN:
            raise RuntimeError("the job ended with code 1:\nRESOURCE_EXHAUSTED: out of memory")
        return OUTCOME

    done = measure(outcome, num_ranks=1, num_rounds=1)
    assert "not measured: nt3, tf32: RESOURCE_EXHAUSTED" in printed(Gpu().render(done.report))
    assert {each["variant"] for each in done.report["results"]} == {OURS, OURS_PLAIN, DETERMINISTIC}

    def fail(task, variant):
        raise SetupError("no memory")

    with pytest.raises(SetupError, match="nothing was measured: no memory"):
        measure(fail)


OF_TORCH = {
    **{"benchmark": "nt3", "precision": "tf32", "variant": "eager", "batch_size": 20},
    **{"step_s": 0.022, "range_s": [0.02, 0.03], "first_steps_s": [1.5]},
}
PEER = {"peer": "PyTorch 2.11.0", "device": "NVIDIA H100", "results": [OF_TORCH]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[1", "Expecting ',' delimiter"),
        (json.dumps(PEER | {"results": [OF_TORCH | {"step_s": -1}]}), "results.0.step_s: Input"),
    ],
)
def test_a_file_that_is_no_peers_is_refused(measure, tmp_path, content, why):
    (tmp_path / "peer.json").write_text(content)
    with pytest.raises(DataError, match=f"peer.json: this is not what tools/torch_peer.*{why}"):
        measure(lambda *_: OUTCOME, peer=tmp_path / "peer.json")


WITHOUT = {
    "flops": None,
    "step_energies_j": {},
    "no_energy": {"energy": "no sensor", "power": "no sensor"},
}
CASES = {
    "all precisions": (by_precision, {"num_ranks": 1}),
    "several devices": (lambda *_: OUTCOME, {"num_rounds": 1}),
    "on CPUs": (lambda *_: OUTCOME | WITHOUT, {"num_rounds": 1, "device": "cpu"}),
    "a peer": (lambda *_: OUTCOME, {"num_rounds": 1, "num_ranks": 1, "peer": "peer.json"}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_measured_is_reported_and_shown(name, measure, monkeypatch, tmp_path):
    """tests/files/bench_gpu.txt has jobs, lines as they came, report, and what shows it."""
    monkeypatch.chdir(tmp_path)
    Path("peer.json").write_text(json.dumps(PEER))
    outcome_of, options = CASES[name]
    peer = {"peer": Path(options["peer"])} if "peer" in options else {}
    done = measure(outcome_of, **options | peer)
    kinds = (f"{t.precision}, {t.variants}, {t.deterministic}, {num}" for t, num in done.jobs)
    rows = [json.dumps(each) for key in ("results", "absent") for each in done.report[key]]
    found = map(shown, Gpu().render(done.report | {"machine": {"packages": {"jax": "0.10"}}}))
    text = "\n".join([*kinds, *done.lines, *rows, *found])
    check_expected(ROOT / "tests/files/bench_gpu.txt", name, text, CASES)
    # Each result was told when it came, with a report of those before.
    assert [len(report["results"]) for report in done.reports[:3]] == [1, 2, 3][:3] or peer
    for task, _ in done.jobs:
        products = task.environment["JAX_DEFAULT_MATMUL_PRECISION"]
        assert (task.settings["data_type"], products) == PRECISIONS[task.precision]
        assert task.settings["deterministic"] == task.deterministic
        assert ("JAX_PLATFORMS" in task.environment) == (name == "on CPUs")


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
    found, reasons = sampled(21)
    assert reasons == {}
    assert found == pytest.approx({"energy": 20 * 30.0, "power": 20 * 310.0})
    found, reasons = sampled(3)  # enough for the counter, but the power is the mean of a second
    assert (set(found), set(reasons)) == ({"energy"}, {"power"})
    assert "2 s are too short for a sensor that needs 3 s: raise --seconds" in reasons["power"]
    nvml.nvmlDeviceGetTotalEnergyConsumption = os.readlink  # raises NVMLError
    assert set(sampled(21)[0]) == {"power"}
    assert "No such file" in sampled(21)[1]["energy"]
