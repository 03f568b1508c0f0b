"""Job scripts: one request, one script. And the ready ones in ``jobs/``, as the paper ran them.

A script is thin: directives, what is particular to the machine, and the launch line. All else is in
``common/job_env.sh``, which it reads. It takes the number of nodes from the job it runs in, so the
same script runs at another size: ``bsub -nnodes 8 jobs/summit/nt3_strong.lsf``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from candle_p1.cluster.launchers import launch_words
from candle_p1.cluster.layout import Layout, count_of
from candle_p1.cluster.machine import load_machine
from candle_p1.cluster.schedulers import WARNING_S, find_scheduler
from candle_p1.errors import ParameterError
from candle_p1.scaling import share_epochs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from candle_p1.cluster.machine import Machine
    from candle_p1.cluster.schedulers import Scheduler

MODES = ("strong", "weak")
WEAK_EPOCHS = 8
"""Epochs of each rank under weak scaling: the paper's section 6."""
EPOCHS = {"nt3": 384, "p1b1": 384, "p1b2": 768, "p1b3": 1}
"""Epochs under strong scaling: the paper's Table 1."""


@dataclass(frozen=True)
class JobRequest:
    """A job.

    Attributes:
        machine: Where it runs.
        layout: Its nodes and ranks.
        name: What the scheduler calls it.
        program: The script of the benchmark; a relative path starts at the checkout's top.
        flags: Flags of the benchmark.
        minutes: Its time limit, in minutes.
        output: Path of the file for its output, without the ending that the scheduler adds.
        project: What it is charged to.
        queue: Its queue; None is the machine's.
        root: The checkout; None is the directory that the job is submitted from.
        venv: The virtual environment, where it is not .venv of the checkout.
        heading: What the script says about itself, in lines.
        environment: Environment variables of this job's own.
        study_script: Where the script of a run of a study will lie; None of any other job. Such a
            script takes flags and nodes from the study alone, and says there if it fails early.
    """

    machine: Machine
    layout: Layout
    name: str
    program: str
    flags: Sequence[str]
    minutes: int
    output: str
    project: str | None = None
    queue: str | None = None
    root: str | None = None
    venv: str | None = None
    heading: Sequence[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=dict)
    study_script: str | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The machine's scheduler."""
        return find_scheduler(self.machine.scheduler)

    def check(self) -> None:
        """Makes sure that the machine takes such a job.

        Raises:
            ParameterError: It does not: no project, too few nodes, too much time, or a path or a
                name that the scheduler would read as several words.
        """
        machine, nodes = self.machine, self.layout.num_nodes
        if machine.project_required and self.project is None:
            raise ParameterError(
                f"{machine.name} charges jobs to a project: name yours by --project, or in"
                " $CANDLE_P1_PROJECT"
            )
        for value in (self.name, self.output, self.project or "", self.queue or ""):
            if value.split() not in ([], [value]):
                raise ParameterError(f"{value!r} holds a blank, which no scheduler's directive may")
        if self.minutes < 1:
            raise ParameterError(f"time {self.minutes}: a job takes a minute or more")
        if self.queue is not None and self.queue != machine.queue:
            return
        if nodes < machine.min_nodes:
            raise ParameterError(
                f"{count_of(nodes, 'node')}: the queue {machine.queue} of {machine.name} takes"
                f" {machine.min_nodes} or more; choose another one by --queue"
            )
        longest = machine.longest_minutes(nodes)
        if longest is not None and self.minutes > longest:
            raise ParameterError(
                f"{self.minutes} minutes on {count_of(nodes, 'node')}: {machine.name} gives"
                f" {longest} at most to jobs of that size; take less --time, or another --queue"
            )

    def write(self) -> str:
        """Returns the text of the script. Without a project, the submit command has to name it.

        Raises:
            ParameterError: The machine's launcher or scheduler is unknown.
        """
        machine = self.machine
        root = '"${CANDLE_P1_ROOT:-$PWD}"' if self.root is None else shlex.quote(self.root)
        layout = self.layout.in_script([*machine.environment, *self.environment])
        words = launch_words(machine.launcher, layout, machine.launcher_options)
        program = [self.program, *self.flags]
        lines = [
            "#!/bin/bash",
            *(f"# {' '.join(line.split())}" for line in self.heading),
            *self.scheduler.lines(self),
            "set -euo pipefail",
            *self.scheduler.preamble,
            "",
            f"export CANDLE_P1_ROOT={root}",
            f"export CANDLE_P1_MACHINE={shlex.quote(machine.name)}",
            f"export RANKS_PER_NODE={self.layout.ranks_per_node}",
        ]
        if machine.local_storage is not None:
            lines.append(f'export LOCAL_STORAGE="{machine.local_storage}"')
        lines += [
            "# shellcheck source=common/job_env.sh",
            'source "$CANDLE_P1_ROOT/common/job_env.sh"',
        ]
        lines += self._of_study()
        if self.venv is not None:
            lines.append(f"job_default CANDLE_P1_VENV {shlex.quote(self.venv)}")
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        if self.layout.threads_per_rank is not None:
            lines.append(f"job_default OMP_NUM_THREADS {self.layout.threads_per_rank}")
        lines += [
            f"job_default {name} {shlex.quote(value)}"
            for name, value in machine.environment.items()
        ]
        if machine.modules:
            lines.append(f"job_modules {shlex.join(machine.modules)}")
        lines += machine.setup
        if not self.scheduler.sends_warning:
            lines.append(f"job_limit {self.minutes} {WARNING_S}")
        lines += ["job_prepare", ""]
        lines += _fold(["job_launcher", *map(_in_quotes, words)])
        lines += _fold(["job_run", *map(shlex.quote, program)])
        return "\n".join(lines) + "\n"

    def _of_study(self) -> list[str]:
        """Returns the lines that a run of a study needs besides."""
        if self.study_script is None:
            return []
        lines = [
            "unset CANDLE_P1_DATA_DIR CANDLE_P1_STAGE CANDLE_P1_FLAGS # the study's flags alone",
            f"export CANDLE_P1_NODES={self.layout.num_nodes}",
            f"export JOB_SCRIPT={shlex.quote(self.study_script)}",
        ]
        if self.scheduler.waits_for_success:
            lines.append("trap 'exit 0' EXIT # or the next job never starts; the record says more")
        return lines


_WIDTH = 98
"""Characters of a line of a script, without the mark of its continuation."""


def _in_quotes(word: str) -> str:
    """Returns a word of a launch line, whose variables bash is to fill in."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def _fold(words: Sequence[str]) -> list[str]:
    """Returns a command as lines of bash, folded before options."""
    groups = [words[0]]
    for word in words[1:]:
        if word.startswith(("-", '"-')):
            groups.append(word)
        else:
            groups[-1] += f" {word}"
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + len(group) >= _WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {group}")
        else:
            lines[-1] += f" {group}"
    return lines


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
    scheduler = job.scheduler
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
            path = f"jobs/{machine_name}/{job.name}{job.scheduler.suffix}"
            scripts[path] = job.write()
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
