"""candle-p1 submit: writes a job script for a machine and hands it to the machine's scheduler."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from candle_p1.benchmark import find_benchmark
from candle_p1.errors import ParameterError, SetupError
from candle_p1.files import write_atomically
from candle_p1.instrument.screen import Screen
from candle_p1.machines.jobs import MODES, JobRequest, mode_flags
from candle_p1.machines.layout import Layout
from candle_p1.machines.machine import load_machine
from candle_p1.records import RECORD_NAME
from candle_p1.scaling import share_epochs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.params import ParameterSet

GIVEN = ("flag", "config file")
"""Origins of a parameter that the user has chosen for this job."""
MAX_NUMBERED_JOBS = 1000


@click.command("submit")
@click.argument("benchmark")
@click.option(
    "--machine",
    "machine_name",
    metavar="NAME|FILE.toml",
    required=True,
    help="Machine: summit, theta, frontier, perlmutter, polaris, aurora, slurm, pbs, local, or"
    " a file that describes one.",
)
@click.option(
    "--nodes",
    "num_nodes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of nodes.",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(min=1),
    help="Ranks on each node; by default the machine's usual number.",
)
@click.option(
    "--time",
    "time_limit",
    metavar="MINUTES|H:MM",
    help="Time limit of the job; by default the machine's, an hour where it does not say.",
)
@click.option("--project", envvar="CANDLE_P1_PROJECT", help="Project that the job is charged to.")
@click.option("--queue", help="Queue (Slurm: partition or QOS); by default the machine's.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    default="strong",
    show_default=True,
    help="Scaling as the paper ran it: ranks share the benchmark's epochs, or train 8 each.",
)
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(
    benchmark: str,
    machine_name: str,
    num_nodes: int,
    ranks_per_node: int | None,
    time_limit: str | None,
    project: str | None,
    queue: str | None,
    mode: str,
    dry_run: bool,
    flags: tuple[str, ...],
) -> None:
    """Submit the training of BENCHMARK (a name, or a folder's path) as a batch job.

    Data are of the published size unless flags say otherwise. Flags after "--" go to the
    benchmark: candle-p1 submit nt3 --machine slurm --nodes 2 -- --epochs 16. The script is kept
    beside the record.
    """
    chosen = find_benchmark(benchmark)
    machine = load_machine(machine_name)
    layout = Layout.on(machine, num_nodes, ranks_per_node)
    added = _added_flags(chosen.declaration.parse(flags, chosen.model_file), chosen.name, mode)
    params = chosen.declaration.parse([*added, *flags], chosen.model_file)
    _, share = share_epochs(
        params["epochs"], layout.num_ranks, params["epochs_scaling"], params["data_parallel"]
    )
    directory, place = _run_directory(chosen.name, params)
    root = _checkout()
    job = JobRequest(
        machine=machine,
        layout=layout,
        name=f"{chosen.name}_{mode}",
        program=str(chosen.script),
        flags=[*added, *flags, *place],
        minutes=machine.minutes if time_limit is None else read_minutes(time_limit),
        output=str(directory / "job"),
        project=project,
        queue=queue,
        root=str(root),
        venv=None
        if Path(sys.prefix) == root / ".venv" or sys.prefix == sys.base_prefix
        else sys.prefix,
        heading=[
            f"{chosen.title}: {layout.num_ranks} ranks on {machine.title}.",
            f"{layout.explain()}; epochs of each rank: {share}.",
        ],
    )
    job.check()
    text = job.write()
    script = directory / f"job{job.scheduler.suffix}"
    submit = job.scheduler.submit_command(script)
    if dry_run:
        click.echo(f"$ {shlex.join(submit)}", err=True)
        click.echo(text, nl=False)
        return
    _keep(script, text)
    screen = Screen()
    screen.say(f"$ {shlex.join(submit)}")
    if machine.scheduler == "none":
        raise click.exceptions.Exit(subprocess.run(submit, check=False).returncode)
    screen.say(f"job {job.scheduler.read_job_id(_output(submit, machine.name))}, kept in {script}")


def read_minutes(text: str) -> int:
    """Returns a time limit in minutes, from "90", "1:30" (hours) or "1:30:00".

    Raises:
        ParameterError: It is none of these.
    """
    parts = text.split(":")
    if len(parts) > 3 or not all(re.fullmatch(r"\d+", part) for part in parts):
        raise ParameterError(f"--time {text}: give minutes, H:MM or H:MM:SS")
    if len(parts) == 1:
        return int(parts[0])
    hours, minutes, seconds = (int(part) for part in [*parts, "0"][:3])
    return hours * 60 + minutes + (seconds > 0)


def _added_flags(params: ParameterSet, benchmark: str, mode: str) -> list[str]:
    """Returns the flags of the mode, and the published size, where the user has not chosen."""
    wanted = {"size": "full"} | mode_flags(benchmark, mode)
    if params.origin("data_parallel").kind in GIVEN:
        wanted.pop("epochs_scaling", None)  # follows from it
    return [
        word
        for name, value in wanted.items()
        if params.origin(name).kind not in GIVEN
        for word in (f"--{name}", value)
    ]


def _run_directory(name: str, params: ParameterSet) -> tuple[Path, list[str]]:
    """Returns where the record of the job will be, and the flags that make sure of it.

    Jobs that name no run are numbered JOB000, JOB001 and so on: a run that starts meanwhile, and
    takes the next free RUN000, cannot take the place of a job that waits.

    Raises:
        ParameterError: A record or a script is there already.
    """
    output_dir = params["output_dir"] or f"output/{name}"
    base = Path(output_dir).expanduser().absolute()
    if output_dir == ".":
        directory, flags = base, ["--output_dir", "."]
    else:
        experiment = base / params["experiment_id"]
        if params.origin("run_id").kind in GIVEN:
            directory = experiment / params["run_id"]
        else:
            numbered = (experiment / f"JOB{i:03d}" for i in range(MAX_NUMBERED_JOBS))
            directory = next(path for path in numbered if not path.exists())
        flags = ["--output_dir", str(base), "--run_id", directory.name]
    if (directory / RECORD_NAME).exists() or any(directory.glob("job.*")):
        raise ParameterError(
            f"{directory} already belongs to a run: choose another --run_id, --experiment_id or"
            " --output_dir"
        )
    return directory, flags


def _keep(script: Path, text: str) -> None:
    """Writes the script, which Cobalt requires to be executable."""
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.open("x").close()  # claimed: two jobs never share a directory
        write_atomically(script, text)
        script.chmod(0o755)
    except OSError as error:
        raise ParameterError(f"output_dir: cannot write {script}: {error.strerror}") from error


def _checkout() -> Path:
    """Returns the checkout this package runs from, which the script reads common/job_env.sh of."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "common/job_env.sh").is_file():
        raise SetupError(
            f"{root} holds no common/job_env.sh, which job scripts need: install this package from"
            " a checkout, in place (make setup)"
        )
    return root


def _output(command: Sequence[str], machine: str) -> str:
    """Returns what the submit command prints.

    Raises:
        SetupError: There is no such command, or it failed.
    """
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SetupError(
            f"{command[0]}, which takes jobs of {machine}, is not in $PATH: submit where it is, or"
            " write the script alone with --dry-run"
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise SetupError(f"{shlex.join(command)} ended with {done.returncode}: {said}")
    return done.stdout
