"""The ready job scripts in ``jobs/``, which run the benchmarks as the paper did."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.cluster.job_request import JobRequest
from candle_p1.cluster.job_script import job_script
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.schedulers import scheduler_of
from candle_p1.errors import ParameterError
from candle_p1.scaling import share_epochs

if TYPE_CHECKING:
    from candle_p1.cluster.machine import Machine

MODES = ("strong", "weak")
WEAK_EPOCHS = 8
"""Epochs of each rank under weak scaling: the paper's section 6."""
EPOCHS = {"nt3": 384, "p1b1": 384, "p1b2": 768, "p1b3": 1}
"""Epochs under strong scaling: the paper's Table 1."""


def mode_flags(benchmark: str, mode: str) -> dict[str, str]:
    """Returns the flags of a benchmark under strong or weak scaling, as the paper ran it.

    P1B3 has one epoch, which every rank trains, and the batch size grows instead. The paper has no
    weak scaling of it; there the batch size of a rank stays.

    Raises:
        ParameterError: There is no such mode.
    """
    if mode not in MODES:
        raise ParameterError(f"mode {mode!r}: choose one of {', '.join(MODES)}")
    epochs = EPOCHS.get(benchmark)
    if epochs == 1:
        batch = "cbrt" if mode == "strong" else "none"
        scaling = "none" if mode == "strong" else "weak"
        return {"epochs": "1", "epochs_scaling": scaling, "batch_scaling": batch}
    if mode == "weak":
        return {"epochs": str(WEAK_EPOCHS), "epochs_scaling": "weak"}
    return {"epochs": str(epochs), "epochs_scaling": "strong"} if epochs else {}


class _Size(NamedTuple):
    """Nodes and minutes of a ready script."""

    num_nodes: int
    minutes: int


# The most GPUs or nodes that the paper reports: 384 under strong scaling (P1B1 at least 4 epochs on
# each: 96), 3,072 under weak scaling, and 384 of Theta's nodes; P1B3 with the 48 that were best.
# Where the paper ran nothing: 48 ranks, on which NT3 has the 8 epochs each that it needs.
READY = {
    ("summit", "strong"): {
        "nt3": _Size(64, 60),
        "p1b1": _Size(16, 60),
        "p1b2": _Size(64, 60),
        "p1b3": _Size(8, 120),
    },
    ("summit", "weak"): {
        "nt3": _Size(512, 60),
        "p1b1": _Size(512, 60),
        "p1b2": _Size(512, 60),
        "p1b3": _Size(8, 120),
    },
    ("theta", "strong"): {
        "nt3": _Size(384, 60),
        "p1b1": _Size(96, 180),
        "p1b2": _Size(384, 60),
        "p1b3": _Size(48, 180),
    },
    ("theta", "weak"): {
        "nt3": _Size(384, 240),
        "p1b1": _Size(384, 180),
        "p1b2": _Size(384, 180),
        "p1b3": _Size(48, 180),
    },
    ("slurm", "strong"): dict.fromkeys(EPOCHS, _Size(24, 120)),
    ("slurm", "weak"): dict.fromkeys(EPOCHS, _Size(24, 120)),
    ("pbs", "strong"): dict.fromkeys(EPOCHS, _Size(24, 120)),
    ("pbs", "weak"): dict.fromkeys(EPOCHS, _Size(24, 120)),
}
"""The sizes of the ready scripts, by machine and mode, then by benchmark."""


def paper_job(
    benchmark: str, machine: Machine, mode: str, num_nodes: int, minutes: int
) -> JobRequest:
    """Returns a benchmark's job under strong or weak scaling with files of the published size.

    Args:
        benchmark: nt3, p1b1, p1b2 or p1b3.
        machine: Where it runs.
        mode: One of MODES.
        num_nodes: Nodes.
        minutes: Time limit.

    Raises:
        ParameterError: The machine does not take it, or the epochs do not divide.
    """
    layout = Layout.on(machine, num_nodes)
    flags = mode_flags(benchmark, mode)
    epochs = int(flags["epochs"])
    _, share = share_epochs(epochs, layout.num_ranks, flags["epochs_scaling"])
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    name = f"{benchmark}_{mode}"
    job = JobRequest(
        machine=machine,
        layout=layout,
        name=name,
        program=f"benchmarks/{benchmark}/{benchmark}_baseline_keras2.py",
        flags=["--size", "full", *words],
        minutes=minutes,
        output=name,
    )
    scheduler = scheduler_of(job)
    project = f" {scheduler.project_option} PROJECT" if machine.project_required else ""
    each = f"{share} epoch{'s' * (share > 1)} on each rank"
    if share != epochs:
        each = f"{epochs} epochs, {each}"
    if benchmark == "p1b3" and mode == "weak":
        each += " (a run that the paper does not have)"
    path = f"jobs/{machine.name}/{name}{scheduler.suffix}"
    heading = [
        f"{benchmark.upper()}, {mode} scaling, {machine.title}: {num_nodes} nodes,"
        f" {layout.num_ranks} ranks.",
        f"{layout.explain()}; {each}.",
        f"Submit: {scheduler.submit[0]}{project} {path}",
    ]
    return replace(job, heading=heading)


def ready_scripts() -> dict[str, str]:
    """Returns the texts of the ready scripts, by their paths in the checkout."""
    scripts = {}
    for (machine_name, mode), sizes in READY.items():
        machine = load_machine(str(Path(__file__).parent / f"machines/{machine_name}.toml"))
        for benchmark, size in sizes.items():
            job = paper_job(benchmark, machine, mode, *size)
            replace(job, project="PROJECT").check()
            path = f"jobs/{machine_name}/{job.name}{scheduler_of(job).suffix}"
            scripts[path] = job_script(job)
    return scripts


def write_all(root: Path) -> list[Path]:
    """Writes the ready scripts below the top of a checkout; returns their paths."""
    written = []
    for name, text in ready_scripts().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)  # Cobalt runs what it is given
        written.append(path)
    return written
