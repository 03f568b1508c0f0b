"""What a job that asked for GPUs does on nodes without them; no GPU is needed here."""

import os
import re
import sys
import threading
from types import SimpleNamespace

import pytest

from candle_p1.distributed import devices, gpus
from candle_p1.distributed.gpus import GpuRequest, Lack, check_gpus, requested_gpus, why_none
from candle_p1.errors import ParameterError, SetupError
from tests.unit.instrument.test_power_sources import Nvml, cuda
from tools.simulated import SimulatedJob

PER_NODE = "CANDLE_P1_GPUS_PER_NODE"
SLURM = "SLURM_GPUS_ON_NODE"


@pytest.mark.parametrize(
    ("indices", "environ", "asked"),
    [
        (None, {PER_NODE: "4"}, (4, f"{PER_NODE}=4")),
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


@pytest.mark.parametrize(
    ("backend", "environ", "there", "why"),
    [
        ("tensorflow", {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, [], "='NoDevFiles' hides"),
        ("tensorflow", {"ROCR_VISIBLE_DEVICES": ""}, ["kfd"], "_DEVICES='' hides all GPUs"),
        ("tensorflow", {"CUDA_VISIBLE_DEVICES": "0,1"}, [], "no /dev/nvidia0, no /dev/kfd"),
        ("tensorflow", {}, ["kfd"], "TensorFlow cannot use those that the system shows"),
        ("tensorflow", cuda(""), None, "(tensorflow-cpu 2.18.1); install candle-p1[gpu]"),
        ("jax", {}, None, "without a plug-in for GPUs"),
        ("jax", {"JAX_PLATFORMS": "cpu"}, [], "JAX_PLATFORMS=cpu excludes GPUs"),
        ("jax", {"JAX_PLATFORMS": "cuda,cpu"} | cuda(""), [], "hides all GPUs"),
    ],
)
def test_why_a_framework_finds_none(monkeypatch, backend, environ, there, why):
    """Of the devices in /dev; if these are None, the framework is one for CPUs."""
    test = SimpleNamespace(is_built_with_gpu_support=lambda: there is not None)
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(test=test))
    folder = SimpleNamespace(glob=lambda name: [n for n in there if n[:3] == name[:3]])
    monkeypatch.setattr(gpus, "Path", lambda path: folder)
    monkeypatch.setattr(gpus, "package_versions", lambda: {"tensorflow-cpu": "2.18.1"})
    monkeypatch.setattr(gpus, "find_spec", lambda name: None)
    monkeypatch.setattr(gpus, "entry_points", lambda group: [group] * (there is not None))
    lack = why_none(backend, environ)
    assert why in f"{lack.why}; {lack.fix}"


NAMED = "the job asked for GPUs (X=2), and ranks find none on "


@pytest.mark.parametrize(
    ("have", "asked", "message"),
    [
        ([1, 1, 1, 1, 1, 1], True, "no error"),
        ([0, 0, 0, 0, 0, 0], False, "no error"),  # a run on CPUs
        ([1, 1, 1, 0, 1, 1], True, f"{NAMED}node b: no driver. Fix: "),
        ([1, 1, 0, 0, 1, 1], False, "some ranks compute on GPUs, but others find none on node b"),
        (
            [0, 0, 0, 0, 0, 0],
            True,
            f"{NAMED}nodes a, c: it hides them; node b: no driver. Fix: show them; exclude it; to"
            " train on CPUs, set CANDLE_P1_GPUS_PER_NODE=0",
        ),
    ],
)
def test_nodes_without_gpus_are_named_by_an_error_of_all_ranks(monkeypatch, have, asked, message):
    hidden = Lack("it hides them", "show them")
    reasons = {"a": hidden, "b": Lack("no driver", "exclude it"), "c": hidden}
    this = threading.local()  # the simulated ranks are threads
    monkeypatch.setattr(gpus, "why_none", lambda backend: reasons[this.node])

    def work(comm):
        this.node = "abc"[comm.node]
        request = GpuRequest(2, "X=2") if asked else None
        try:
            check_gpus(comm, bool(have[comm.rank]), request, "tensorflow", this.node)
        except SetupError as error:
            return str(error) * error.agreed
        return "no error"

    (found,) = set(SimulatedJob(len(have), ranks_per_node=2).run(work))
    assert found.startswith(message)


def chosen_gpu(monkeypatch, num_there, local_rank, local_size, gpus=None, cards=None, shares=False):
    """Returns the GPU that JAX may see in one rank of a node with so many, and of which memory."""
    chosen = {}
    jax = SimpleNamespace(config=SimpleNamespace(update=chosen.__setitem__))
    monkeypatch.setitem(sys.modules, "jax", jax)
    monkeypatch.setattr(devices, "num_visible", lambda: num_there)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    # The others see what this one does, each by the name of its own card.
    monkeypatch.setattr(devices, "card_here", lambda gpus: cards and cards[local_rank])
    local = SimpleNamespace(allgather=lambda mine: [(mine[0], c) for c in cards or [mine[1]]])
    rank = SimpleNamespace(local_rank=local_rank, local_size=local_size, local=local)
    monkeypatch.setenv(devices.MEMORY_VARIABLE, "")  # so that it is removed afterwards
    monkeypatch.delenv(devices.MEMORY_VARIABLE)
    devices._choose_jax_gpu(rank, gpus, True, shares=shares)
    assert ("xla_gpu_deterministic_ops" in os.environ.get("XLA_FLAGS", "")) == bool(chosen)
    assert chosen.keys() in (set(), {"jax_cuda_visible_devices", "jax_rocm_visible_devices"})
    return next(iter(chosen.values()), None), os.environ.get(devices.MEMORY_VARIABLE)


OWN = {"cards": [f"gpu:{name}" for name in "abcd"]}
"""What the launcher gives each rank."""
SAME = {"cards": ["gpu:a"] * 2}


@pytest.mark.parametrize(
    ("num_there", "rank", "num_ranks", "options", "expected"),
    [
        *((4, rank, 4, {}, (str(rank), None)) for rank in range(4)),
        (1, 3, 4, OWN, ("0", None)),
        (1, 3, 4, {}, ("0", None)),  # without NVML
        (4, 1, 2, {"gpus": [1, 3]}, ("3", None)),
        (0, 0, 1, {"gpus": [0]}, (None, None)),  # which check_gpus explains
        (2, 0, 1, {"gpus": [2]}, "gpus [2]: this node has 2 GPUs"),
        (2, 0, 3, {}, "3 ranks on a node with 2 GPUs: "),
        (2, 0, 3, {}, "start 2 ranks on a node (--np 2"),
        (4, 0, 2, {"gpus": [3], "cards": ["gpu:d"] * 2}, "2 ranks on a node with 1 GPU: "),
        (1, 0, 2, SAME, "start 1 rank on a node"),
        (1, 0, 4, {"cards": ["gpu:a", "gpu:a", "gpu:b", "gpu:b"]}, "4 ranks on a node with 2 GPUs"),
        # Ranks that share a GPU divide its memory.
        (1, 1, 2, SAME | {"shares": True}, ("0", "0.375")),
        (2, 4, 5, {"shares": True}, ("0", "0.250")),
        (2, 1, 2, {"shares": True}, ("1", None)),
    ],
)
def test_jax_sees_the_gpu_of_its_rank_alone(
    monkeypatch, num_there, rank, num_ranks, options, expected
):
    if isinstance(expected, str):
        with pytest.raises((ParameterError, SetupError), match=re.escape(expected)):
            chosen_gpu(monkeypatch, num_there, rank, num_ranks, **options)
    else:
        assert chosen_gpu(monkeypatch, num_there, rank, num_ranks, **options) == expected


def test_nvml_tells_cards_apart(monkeypatch):
    def nvml(*names):
        found = Nvml(*({"uuid": name, "energy": 1000} for name in names))
        monkeypatch.setitem(sys.modules, "pynvml", found)
        return gpus.card_here()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert nvml("GPU-a", "GPU-b") == "gpu:GPU-a"
    assert nvml("GPU-b") == "gpu:GPU-b"  # the only one that this rank may use
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.card_here() is None


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        (["nvidia0", "nvidia1", "nvidiactl"], {}, 2),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, 1),
        (["nvidia0", "nvidia1"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
        (["nvidia0"], {"JAX_PLATFORMS": "cpu"}, 0),
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
