"""The ready job scripts in ``jobs/``, which run the benchmarks as the paper did."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from candle_p1.benchmark import SCALING_MODES, JobSize, find_benchmark, list_benchmarks
from candle_p1.cluster.job_request import JobRequest
from candle_p1.cluster.job_script import job_script
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.schedulers import scheduler_of
from candle_p1.scaling import share_epochs
from candle_p1.text import count

if TYPE_CHECKING:
    from candle_p1.benchmark import Benchmark
    from candle_p1.cluster.machine import Machine

READY_MACHINES = ("summit", "theta", "slurm", "pbs")
"""The machines that have ready scripts."""
USUAL_SIZE = JobSize(24, 120)
"""The size of a ready script on machines that the paper does not cover."""


def job_flags(benchmark: Benchmark, machine: Machine, mode: str) -> dict[str, str]:
    """Returns the flags of a job: data of the published size, and the mode of scaling.

    Jobs of a scheduler use what users of a cluster do, Horovod's fusion of tensors and TensorFlow's
    fastest kernels; on this machine, runs repeat bit for bit.
    """
    at_scale = {} if machine.scheduler == "none" else {"deterministic": "False"}
    return {"size": "full"} | benchmark.mode_flags(mode) | at_scale


def paper_job(
    benchmark: Benchmark, machine: Machine, mode: str, num_nodes: int, minutes: int
) -> JobRequest:
    """Returns a benchmark's job under strong or weak scaling, with files of the published size.

    Args:
        benchmark: The benchmark.
        machine: Where it runs.
        mode: strong or weak.
        num_nodes: The number of nodes.
        minutes: The time limit, in minutes.

    Raises:
        ParameterError: The machine is too small, or the epochs do not divide among the ranks.
    """
    layout = Layout.on(machine, num_nodes)
    flags = job_flags(benchmark, machine, mode)
    epochs = int(flags["epochs"])
    _, share = share_epochs(epochs, layout.num_ranks, flags["epochs_scaling"])
    flag_argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
    name = f"{benchmark.name}_{mode}"
    job = JobRequest(
        machine=machine,
        layout=layout,
        name=name,
        program=f"benchmarks/{benchmark.name}/{benchmark.script.name}",
        flags=flag_argv,
        minutes=minutes,
        output=name,
    )
    scheduler = scheduler_of(job)
    project = f" {scheduler.project_option} PROJECT" if machine.project_required else ""
    each = f"{count(share, 'epoch')} on each rank"
    if share != epochs:
        each = f"{epochs} epochs, {each}"
    if mode not in benchmark.paper.modes:
        each += " (not a run of the paper)"
    path = f"jobs/{machine.name}/{name}{scheduler.suffix}"
    heading = [
        f"{benchmark.name.upper()}, {mode} scaling, {machine.title}: {num_nodes} nodes,"
        f" {layout.num_ranks} ranks.",
        f"{layout.explain()}; {each}.",
        f"Submit: {scheduler.submit[0]}{project} {path}",
    ]
    return replace(job, heading=heading)


def ready_scripts() -> dict[str, str]:
    """Returns the texts of the ready scripts, by path in the checkout."""
    scripts = {}
    benchmarks = [find_benchmark(name) for name in list_benchmarks()]
    for machine_name, mode in product(READY_MACHINES, SCALING_MODES):
        machine = load_machine(str(Path(__file__).parent / f"machines/{machine_name}.toml"))
        for benchmark in (each for each in benchmarks if each.paper.sizes):
            size = benchmark.paper.sizes.get((machine_name, mode), USUAL_SIZE)
            job = paper_job(benchmark, machine, mode, *size)
            replace(job, project="PROJECT").check()
            path = f"jobs/{machine_name}/{job.name}{scheduler_of(job).suffix}"
            scripts[path] = job_script(job)
    return scripts


def write_all(root: Path) -> list[Path]:
    """Writes the ready scripts of a checkout; returns their paths."""
    written = []
    for name, text in ready_scripts().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)  # Cobalt executes the script itself
        written.append(path)
    return written
