"""Jobs: what is requested, whether the machine accepts it, and the text of the script.

A script consists of directives, settings of the machine and the command that starts the ranks; all
else is in ``common/job_env.sh``, which it sources. The number of nodes comes from the job that the
script runs in, so the same script runs at another size:
``bsub -nnodes 8 jobs/summit/nt3_strong.lsf``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from candle_p1.benchmark import Benchmark
from candle_p1.cluster.launchers import launch_argv
from candle_p1.cluster.machine import Layout, Machine, fill_in
from candle_p1.cluster.schedulers import Scheduler, find_scheduler, warning_s
from candle_p1.distributed.gpus import GPUS_VARIABLE
from candle_p1.errors import ParameterError
from candle_p1.files import expand_user
from candle_p1.text import count

_NODE = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NODES_OF_SLURM = rf"{_NODE}(\[[0-9,-]+\][A-Za-z0-9._-]*)*"
"""Also several names, as in "n[1-3,7]"."""
_WIDTH = 98
"""Characters of a line of a script, without the continuation mark."""
PASSED_ON = (
    *("CANDLE_*", "CUDA_*", "FI_*", "HOROVOD_*", "KERAS_*", "KMP_*", "MPICH_*", "NCCL_*", "OMP_*"),
    *("OMPI_*", "PALS_*", "PMI*", "SLURM*", "TF_*"),
)
"""Variables that ranks need, for a container's runtime that passes on only what it is told to."""
OF_DIRECTORIES = ("output_dir", "data_dir", "ckpt_directory", "stage_dir")
"""Parameters that name directories."""


@dataclass(frozen=True)
class JobOptions:
    """What a user chooses about all jobs of a command, whatever they run."""

    project: str | None = None  # The project to charge
    queue: str | None = None  # The queue; None takes the machine's default
    exclude: Sequence[str] = ()  # Names of nodes that jobs must not use
    container: str | None = None  # The image of a container in which the ranks run
    staged: str | None = None  # The archive that jobs copy to their nodes (see staging)


NO_OPTIONS = JobOptions()


@dataclass(frozen=True)
class JobRequest:
    """A job: where it runs, for how long, and what it executes."""

    machine: Machine  # Where it runs
    layout: Layout  # Its nodes and ranks
    name: str  # Its name in the scheduler
    program: str  # The script of the benchmark; relative paths start at the top of the checkout
    flags: Sequence[str]  # Flags of the benchmark
    minutes: int  # Its time limit, in minutes
    output: str  # Path of the output file, without the suffix that the scheduler adds
    options: JobOptions = NO_OPTIONS  # What the user chooses
    root: str | None = None  # The checkout; None is the directory from which the job is submitted
    venv: str | None = None  # The virtual environment; None is .venv of the checkout
    heading: Sequence[str] = ()  # Comment lines at the top of the script
    environment: Mapping[str, str] = field(default_factory=dict)  # Variables of this job alone
    # The path of the script, if the job is a run of a study. Such a script takes flags and
    # nodes from the study alone, and renames itself if it fails early.
    study_script: str | None = None
    # The directory of the record, if the job is one of several that continue the run in it
    # (see candle_p1.cluster.chain).
    chain_directory: str | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of its machine."""
        return find_scheduler(self.machine.scheduler)

    @property
    def num_nodes(self) -> int:
        """The number of nodes that it requests, with spares for those that its script excludes."""
        return self.layout.num_nodes + self._num_spare

    @property
    def _num_spare(self) -> int:
        return len(self.options.exclude) if self.scheduler.excludes_in_script else 0

    def check(self) -> None:
        """Raises ParameterError if the machine does not accept the job.

        There is no project, too few nodes, too much time, or a path or name that the scheduler
        would not take for one.
        """
        machine, nodes, options = self.machine, self.num_nodes, self.options
        self._check_exclude()
        if machine.project_required and options.project is None:
            raise ParameterError(
                f"{machine.name} charges jobs to a project: set it with --project or"
                " $CANDLE_P1_PROJECT"
            )
        if machine.num_nodes is not None and nodes > machine.num_nodes:
            spares = f", including {count(self._num_spare, 'spare')} for excluded ones"
            raise ParameterError(
                f"{count(nodes, 'node')}{spares * bool(self._num_spare)}: a job on {machine.name}"
                f" can have at most {machine.num_nodes:,}"
            )
        for value in (self.name, self.output, options.project or "", options.queue or ""):
            if value.split() not in ([], [value]):
                raise ParameterError(f"{value!r}: a scheduler's directives cannot contain blanks")
        if self.minutes < 1:
            raise ParameterError(f"time limit {self.minutes}: a job needs at least a minute")
        self._check_queue()

    def _check_exclude(self) -> None:
        pattern = _NODES_OF_SLURM if self.machine.scheduler == "slurm" else _NODE
        can_exclude = self.scheduler.exclude or self.scheduler.excludes_in_script
        for name in self.options.exclude:
            if not can_exclude or not re.fullmatch(pattern, name):
                impossible = f"jobs on {self.machine.name} cannot exclude nodes"
                why = "this is not the name of a node" if can_exclude else impossible
                raise ParameterError(f"--exclude {name}: {why}")

    def _check_queue(self) -> None:
        machine, nodes = self.machine, self.num_nodes
        queue = self.options.queue or machine.queue
        name = f"the queue {queue} of {machine.name}" if queue else machine.name

        def takes(queue: str | None) -> bool:
            fewest, most, _ = machine.limits(queue, nodes)
            return fewest <= nodes <= (most or nodes)

        fewest, most, longest = machine.limits(queue, nodes)
        if not takes(queue):
            others = filter(takes, filter(None, (*machine.queues, machine.queue)))
            hint = " or ".join(others)
            hint = f": {hint} would take them" if hint else ""
            limits = f"{fewest} to {most:,}" if most else f"{fewest} or more"
            raise ParameterError(
                f"{count(nodes, 'node')}: {name} takes {limits}; choose another --queue{hint}"
            )
        if longest is not None and self.minutes > longest:
            raise ParameterError(
                f"{self.minutes} minutes on {count(nodes, 'node')}: {name} limits such jobs to"
                f" {longest} minutes; choose a shorter --time or another --queue"
            )

    def directives(self, further: Sequence[str] = ()) -> list[str]:
        """Returns the directives, and further options, as lines of the script."""
        scheduler, machine, values = self.scheduler, self.machine, self._values()
        if not scheduler.prefix:
            return []
        queue_option = machine.queue_option or scheduler.queue_option
        first = (f"{scheduler.project_option} {{project}}", f"{queue_option} {{queue}}")
        options = fill_in([*first, *scheduler.directives], values) + machine.directives
        if self.options.exclude and scheduler.exclude:
            options.append(scheduler.exclude.format_map(values))
        return [
            f"{scheduler.prefix} "
            + (option.replace(" ", scheduler.separator, 1) if option[:2] == "--" else option)
            for option in (*options, *further)
        ]

    def _values(self) -> dict[str, object]:
        layout, (hours, minutes) = self.layout, divmod(self.minutes, 60)
        warning, excluded = warning_s(self.minutes), self.options.exclude
        cores, threads = layout.cores_per_rank or 1, layout.threads_per_rank
        # PBS sets OMP_NUM_THREADS to ompthreads, which is by default ncpus: the CPUs of all ranks.
        chunk = {"mpiprocs": layout.ranks_per_node, "ompthreads": threads or 0}
        if self.machine.shared_nodes:
            chunk["ompthreads"] = threads or cores
            chunk["ncpus"] = cores * layout.cpus_per_core * layout.ranks_per_node
            chunk["ngpus"] = layout.gpus_per_node
        return {
            "project": self.options.project,
            "queue": self.options.queue or self.machine.queue,
            "name": self.name,
            "nodes": self.num_nodes,
            "ranks_per_node": layout.ranks_per_node,
            "cpus_per_rank": layout.cpus_per_rank,
            "gpus_per_node": layout.gpus_per_node or None,
            "chunk": "".join(f":{name}={number}" for name, number in chunk.items() if number),
            "minutes": self.minutes,
            "hours_minutes": f"{hours}:{minutes:02d}",
            "time": f"{hours:02d}:{minutes:02d}:00",
            "output": self.output,
            "warning_s": warning,
            "warning_minutes": ceil(warning / 60),
            "excluded": ",".join(excluded),
            "unlike_excluded": " && ".join(f"hname!='{name}'" for name in excluded),
        }

    def script(self) -> str:
        """Returns the text of the job's script.

        Raises ParameterError if the machine's launcher or scheduler is unknown.
        """
        machine, layout, staged = self.machine, self.layout, self.options.staged
        variables = [*machine.environment, *self.environment, "CANDLE_P1_SAVE_S"]
        variables += ["OMP_NUM_THREADS"] * (layout.threads_per_rank is not None)
        variables += [GPUS_VARIABLE] * (layout.gpus_per_node > 0)
        variables += ["PYTHONPATH"] * (staged is not None)
        launch = launch_argv(machine.launcher, layout, variables) + machine.launcher_options
        return render(
            "job.sh.jinja",
            job=self,
            machine=machine,
            layout=layout,
            options=self.options,
            scheduler=self.scheduler,
            warning_s=warning_s(self.minutes),
            gpus_variable=GPUS_VARIABLE,
            container_argv=container_argv(self),
            launch_argv=launch,
        )


def job_flags(benchmark: Benchmark, machine: Machine, mode: str) -> dict[str, str]:
    """Returns the flags of a job: data of the published size, and the mode of scaling.

    Jobs of a scheduler use what users of a cluster do, Horovod's fusion of tensors and TensorFlow's
    fastest kernels; on this machine, runs repeat bit for bit.
    """
    at_scale = {} if machine.scheduler == "none" else {"deterministic": "False"}
    return {"size": "full"} | benchmark.mode_flags(mode) | at_scale


def render(template: str, **values: Any) -> str:
    """Returns the text of a script from a template."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # words of bash, which the filters below quote
    )
    environment.filters |= {"quote": shlex.quote, "quote_word": _in_quotes, "fold": _fold}
    return environment.get_template(template).render(values)


def _in_quotes(word: str) -> str:
    return f'"{word}"' if "$" in word else shlex.quote(word)


def _fold(words: Iterable[str], command: str) -> str:
    """Returns a command as lines of bash, folded before options."""
    lines = [command]
    for group in re.split(r"\0(?=\"?-)", "\0".join(["", *words])):
        text = group.replace("\0", " ").strip()
        if len(lines[-1]) + len(text) >= _WIDTH and text.startswith(("-", '"-')):
            lines += [f"  {text}"]
        elif text:
            lines[-1] += f" {text}"
    return " \\\n".join(lines)


RUNTIMES = {
    # Apptainer and Singularity pass on the environment and the home directory.
    "apptainer": ("exec {options} {binds} {image}", "--bind {0}"),
    "singularity": ("exec {options} {binds} {image}", "--bind {0}"),
    # NERSC's Podman for several nodes.
    "podman-hpc": (
        "run --rm {options} --workdir $PWD --volume $HOME:$HOME {binds} {passed_on} {image}",
        "--volume {0}:{0}",
    ),
    # NERSC's Shifter passes on the environment and the site's file systems.
    "shifter": ("--image={image} {options}", ""),
}
"""The arguments of a container's runtime before the command that it runs, by its name.

The second of each is what makes a directory visible, under its own path. Bash expands "$". The
image has Python and this package (see containers/).
"""
OF_FILES = ("apptainer", "singularity")
"""The runtimes whose images are files, unless their names are URIs."""


def find_image(machine: Machine, image: str) -> str:
    """Returns an image as the machine's runtime takes it: a file by its absolute path.

    Raises ParameterError if there is no such file, or no such runtime.
    """
    runtime = machine.container.runtime
    if runtime not in RUNTIMES:
        raise ParameterError(
            f"{machine.name}: container.runtime {runtime!r}: choose one of {', '.join(RUNTIMES)}"
        )
    if runtime not in OF_FILES or "://" in image:
        return image
    path = expand_user(image).absolute()
    if not path.exists():
        raise ParameterError(
            f"--container {image}: {runtime}, which {machine.name} uses, finds no such image; name"
            " a file, or a URI such as docker://NAME"
        )
    return str(path)


def container_argv(job: JobRequest) -> list[str]:
    """Returns the command line that runs a job's commands in its container; empty without one."""
    image, container = job.options.container, job.machine.container
    if image is None:
        return []
    directories = ["$PWD", "${CANDLE_DATA_DIR:-$PWD}", str(Path(job.program).parent)]
    for name, value in zip(job.flags, job.flags[1:], strict=False):
        if name.removeprefix("--") in OF_DIRECTORIES and value.startswith("/"):
            directories.append(value)
    form, bind = RUNTIMES[container.runtime]
    bound = [path for path in dict.fromkeys(directories) if path != "."]
    words = {
        "{options}": container.options,
        "{binds}": [word.format(path) for path in bound for word in bind.split()],
        "{passed_on}": [word for name in PASSED_ON for word in ("--env", name)],
    }
    arguments = [each for word in form.split() for each in words.get(word, [word])]
    return [container.runtime, *(word.replace("{image}", image) for word in arguments)]
