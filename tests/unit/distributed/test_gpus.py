"""What a job that asked for GPUs does on nodes without them; no GPU is needed here."""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace

import pytest

from candle_p1.distributed import devices, gpus
from candle_p1.distributed.gpus import GpuRequest, Lack, check_gpus, requested_gpus, why_none
from candle_p1.errors import ParameterError, SetupError
from tools.simulated import SimulatedJob

PER_NODE = "CANDLE_P1_GPUS_PER_NODE"
SLURM = "SLURM_GPUS_ON_NODE"


@pytest.mark.parametrize(
    ("indices", "environ", "asked"),
    [
        (None, {PER_NODE: "4"}, (4, f"{PER_NODE}=4")),
        (None, {SLURM: "8"}, (8, f"{SLURM}=8")),
        (None, {PER_NODE: "2", SLURM: "8"}, (2, f"{PER_NODE}=2")),
        ([0, 2], {PER_NODE: "0"}, (3, "--gpus 0 2")),
        (None, {}, None),
        ([], {PER_NODE: "0", SLURM: "8"}, None),
        (None, {SLURM: "unknown"}, None),
    ],
)
def test_a_job_asks_by_flag_variable_or_scheduler_or_not_at_all(indices, environ, asked):
    request = requested_gpus(indices, environ)
    assert (request and (request.num, request.origin)) == asked


def tensorflow(*, with_gpus):
    test = SimpleNamespace(is_built_with_gpu_support=lambda: with_gpus)
    return SimpleNamespace(test=test)


@pytest.fixture
def has_support(monkeypatch):
    """TensorFlow with support for GPUs, on a node whose devices are those that a test names."""
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow(with_gpus=True))

    def has_devices(*names):
        found = SimpleNamespace(glob=lambda pattern: [n for n in names if n[:3] == pattern[:3]])
        monkeypatch.setattr(gpus, "Path", lambda path: found)

    return has_devices


@pytest.mark.parametrize(
    ("environ", "there", "why"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, [], "CUDA_VISIBLE_DEVICES='NoDevFiles' hides"),
        ({"ROCR_VISIBLE_DEVICES": ""}, ["kfd"], "ROCR_VISIBLE_DEVICES='' hides all GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, [], "no /dev/nvidia0, no /dev/kfd"),
        ({}, ["kfd"], "TensorFlow cannot use those that the system shows"),
    ],
)
def test_why_tensorflow_finds_none(has_support, environ, there, why):
    has_support(*there)
    assert why in why_none("tensorflow", environ).why


def test_an_installation_without_support_for_gpus_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow(with_gpus=False))
    monkeypatch.setattr(gpus, "package_versions", lambda: {"tensorflow-cpu": "2.18.1"})
    lack = why_none("tensorflow", {"CUDA_VISIBLE_DEVICES": ""})
    assert "without support for GPUs (tensorflow-cpu 2.18.1)" in lack.why
    assert "candle-p1[gpu]" in lack.fix


def test_jax_without_a_plug_in_or_told_to_use_cpus(monkeypatch):
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    monkeypatch.setattr(gpus, "entry_points", lambda group: ())
    assert "without a plug-in for GPUs" in why_none("jax", {}).why
    monkeypatch.setattr(gpus, "find_spec", lambda name: name)
    assert "JAX_PLATFORMS=cpu excludes GPUs" in why_none("jax", {"JAX_PLATFORMS": "cpu"}).why
    hidden = {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": ""}
    assert "hides all GPUs" in why_none("jax", hidden).why


def errors_of(have, request, monkeypatch):
    """Returns what each rank raises; `have` says which have a GPU, two of them on each node."""
    reasons = {"a": Lack("it hides them", "show them"), "b": Lack("no driver", "exclude it")}
    reasons["c"] = reasons["a"]
    this = threading.local()  # the simulated ranks are threads

    def work(comm):
        this.node = "abc"[comm.node]
        try:
            check_gpus(comm, have[comm.rank], request, "tensorflow", this.node)
        except SetupError as error:
            return str(error) if error.agreed else None
        return None

    monkeypatch.setattr(gpus, "why_none", lambda backend: reasons[this.node])
    return SimulatedJob(len(have), ranks_per_node=2).run(work)


def test_the_nodes_without_gpus_are_named_by_the_same_error_on_all_ranks(monkeypatch):
    request = GpuRequest(2, "X=2")
    assert errors_of([True] * 6, request, monkeypatch) == [None] * 6
    assert errors_of([False] * 6, None, monkeypatch) == [None] * 6  # a run on CPUs
    (message,) = set(errors_of([False] * 6, request, monkeypatch))
    assert message == (
        "the job asked for GPUs (X=2), and ranks find none on nodes a, c: it hides them; node b:"
        " no driver. Fix: show them; exclude it; to train on CPUs, set CANDLE_P1_GPUS_PER_NODE=0"
    )
    (message,) = set(errors_of([True, True, True, False, True, True], request, monkeypatch))
    assert "ranks find none on node b: no driver" in message
    (message,) = set(errors_of([True, True, False, False, True, True], None, monkeypatch))
    assert message.startswith("some ranks compute on GPUs, but others find none on node b")


def chosen_gpu(monkeypatch, num_there, local_rank, local_size, gpus=None):
    """Returns the GPU that JAX may see in one rank of a node with so many."""
    chosen = {}
    jax = SimpleNamespace(config=SimpleNamespace(update=chosen.__setitem__))
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setattr(devices, "num_visible", lambda: num_there)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    rank = SimpleNamespace(local_rank=local_rank, local_size=local_size)
    devices._choose_jax_gpu(rank, gpus, True)
    assert ("xla_gpu_deterministic_ops" in os.environ.get("XLA_FLAGS", "")) == bool(chosen)
    assert chosen.keys() in (set(), {"jax_cuda_visible_devices", "jax_rocm_visible_devices"})
    return next(iter(chosen.values()), None)


def test_jax_sees_the_gpu_of_its_rank_alone(monkeypatch):
    assert [chosen_gpu(monkeypatch, 4, rank, 4) for rank in range(4)] == ["0", "1", "2", "3"]
    assert chosen_gpu(monkeypatch, 1, 3, 4) == "0"  # the launcher gives each rank its own
    assert chosen_gpu(monkeypatch, 4, 1, 2, gpus=[1, 3]) == "3"
    assert chosen_gpu(monkeypatch, 0, 0, 1, gpus=[0]) is None  # which check_gpus explains
    with pytest.raises(ParameterError, match=r"gpus \[2\]: this node has 2 GPUs"):
        chosen_gpu(monkeypatch, 2, 0, 1, gpus=[2])
    with pytest.raises(SetupError, match="3 ranks on a node with 2 GPUs"):
        chosen_gpu(monkeypatch, 2, 0, 3)


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        (["nvidia0", "nvidia1", "nvidiactl"], {}, 2),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, 1),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, 1),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (["nvidia0"], {"JAX_PLATFORMS": "cpu"}, 0),
        ([], {}, 0),
    ],
)
def test_gpus_are_counted_before_jax_looks_for_them(
    monkeypatch, tmp_path, files, environ, expected
):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "Path", lambda path: tmp_path if path == "/dev" else tmp_path / "no")
    monkeypatch.setattr(gpus, "entry_points", lambda group: ["a plug-in"])
    assert gpus.num_visible(environ) == expected


def test_a_jax_that_finds_nothing_it_may_use_is_an_error(monkeypatch):
    def devices():
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(local_devices=devices))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(SetupError, match=r"JAX_PLATFORMS=cuda: Unknown backend cuda.*unset"):
        gpus.visible_gpus("jax")
