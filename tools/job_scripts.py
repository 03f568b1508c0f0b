"""Writes the ready job scripts in ``jobs/``, which run the benchmarks as the paper did.

``make job-scripts``. A test checks that they are up to date.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from candle_p1.benchmark import SCALING_MODES, Benchmark, JobSize, find_benchmark, list_benchmarks
from candle_p1.cluster import machine as machines
from candle_p1.cluster.job import JobOptions, JobRequest, job_flags
from candle_p1.cluster.machine import Layout, Machine, load_machine
from candle_p1.scaling import share_epochs
from candle_p1.text import count

MACHINES = Path(machines.__file__).parent / "machines"
OF_THE_PAPER = ("summit", "theta")
"""The machines that have a script for each benchmark and mode of scaling."""
EXAMPLES = ("slurm", "pbs")
"""The machines that have one script, of NT3 under strong scaling."""
USUAL_SIZE = JobSize(24, 120)
"""The size of a ready script on machines that the paper does not cover."""


def paper_job(
    benchmark: Benchmark, machine: Machine, mode: str, num_nodes: int, minutes: int
) -> JobRequest:
    """Returns a benchmark's job under strong or weak scaling, with files of the published size.

    Raises:
        ParameterError: The machine is too small, or the epochs do not divide among the ranks.
    """
    layout = Layout.on(machine, num_nodes)
    flags = job_flags(benchmark, machine, mode)
    epochs = int(flags["epochs"])
    _, share = share_epochs(epochs, layout.num_ranks, flags["epochs_scaling"])
    name = f"{benchmark.name}_{mode}"
    job = JobRequest(
        machine=machine,
        layout=layout,
        name=name,
        program=f"benchmarks/{benchmark.name}/{benchmark.script.name}",
        flags=[word for flag, value in flags.items() for word in (f"--{flag}", value)],
        minutes=minutes,
        output=name,
    )
    project = f" {job.scheduler.project_option} PROJECT" if machine.project_required else ""
    each = f"{count(share, 'epoch')} on each rank"
    if share != epochs:
        each = f"{epochs} epochs, {each}"
    if mode not in benchmark.paper.modes:
        each += " (not a run of the paper)"
    heading = [
        f"{benchmark.name.upper()}, {mode} scaling, {machine.title}: {num_nodes} nodes,"
        f" {layout.num_ranks} ranks.",
        f"{layout.explain()}; {each}.",
        f"Submit: {job.scheduler.submit[0]}{project} {_path(job)}",
    ]
    return replace(job, heading=heading)


def ready_scripts() -> dict[str, str]:
    """Returns the texts of the ready scripts, by path in the checkout."""
    benchmarks = [find_benchmark(name) for name in list_benchmarks()]
    wanted = [
        (name, mode, benchmark)
        for name in OF_THE_PAPER
        for mode in SCALING_MODES
        for benchmark in benchmarks
        if benchmark.paper.sizes
    ] + [(name, "strong", find_benchmark("nt3")) for name in EXAMPLES]
    scripts = {}
    for name, mode, benchmark in wanted:
        where = load_machine(str(MACHINES / f"{name}.toml"))
        size = benchmark.paper.sizes.get((name, mode), USUAL_SIZE)
        job = paper_job(benchmark, where, mode, *size)
        replace(job, options=JobOptions(project="PROJECT")).check()
        scripts[_path(job)] = job.script()
    return scripts


def write_all(root: Path) -> None:
    """Writes the ready scripts of a checkout."""
    for name, text in ready_scripts().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)  # Cobalt executes the script itself


def _path(job: JobRequest) -> str:
    return f"jobs/{job.machine.name}/{job.name}{job.scheduler.suffix}"


if __name__ == "__main__":
    write_all(Path())
