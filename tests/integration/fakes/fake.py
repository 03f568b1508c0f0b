"""What the fakes of launchers and schedulers share.

A fake accepts only the options in the command's documentation, checks that the request fits the
machine, and does the work on this one. $CANDLE_P1_NODE distinguishes the simulated nodes.
$FAKE_MAX_RANKS limits the number of ranks that start; the fake then prints a note. A
scheduler that gets SIGUSR1 warns its job that the time limit is near.
"""

import argparse
import os
import shlex
import signal
import subprocess
from pathlib import Path

from candle_p1.cluster.launchers import mpirun


class Options(argparse.ArgumentParser):
    """Options of a command, whose name begins all error messages."""

    def __init__(self, name):
        super().__init__(prog=name, allow_abbrev=False, add_help=False)

    def refuse(self, problem):
        self.exit(255, f"{self.prog} (fake): {problem}\n")

    def error(self, message):
        self.refuse(message)


def directives(script, prefix):
    """Returns the arguments in the directives of a scheduler, at the start of a script."""
    argv = []
    for line in Path(script).read_text().splitlines():
        if line.startswith(prefix + " "):
            argv += shlex.split(line[len(prefix) :])
        elif not line.startswith("#"):
            break
    return argv


def set_options(parser, argv):
    """Returns the options that are set, without defaults: the command line overrides directives."""
    found = vars(parser.parse_args(argv))
    return {name: value for name, value in found.items() if value is not None}


def minutes(parser, text):
    hours, _, rest = text.rpartition(":")
    if not rest.isdigit() or (hours and not hours.isdigit()):
        parser.refuse(f"no time limit: {text}")
    return int(hours or 0) * 60 + int(rest)


def start_ranks(name, num_ranks, per_node, hosts, settings, command):
    """Becomes mpirun, and replaces its variables for the ranks by those in `settings`.

    These are bash assignments that may use RANK, LOCAL, SIZE and HERE: the rank, the local rank,
    and the numbers of ranks in total and on the node.
    """
    most = int(os.environ.get("FAKE_MAX_RANKS", num_ranks))
    if most < num_ranks:
        print(f"{name} (fake): starts {most} of {num_ranks} ranks", flush=True)
    # Otherwise mpirun would ask the scheduler for nodes. The ranks get these variables back.
    of_scheduler = {name: os.environ.pop(name) for name in set(os.environ) if _is_schedulers(name)}
    settings += "".join(f" {name}={shlex.quote(value)}" for name, value in of_scheduler.items())
    wrapper = (
        f"HOSTS=({shlex.join(hosts)}); RANK=$OMPI_COMM_WORLD_RANK; SIZE=$OMPI_COMM_WORLD_SIZE;"
        f" FIRST=$((RANK / {per_node} * {per_node})); LOCAL=$((RANK - FIRST));"
        f" HERE=$((SIZE - FIRST < {per_node} ? SIZE - FIRST : {per_node}));"
        " unset ${!OMPI_COMM_WORLD_*};"
        f' export CANDLE_P1_NODE=${{HOSTS[RANK / {per_node}]}} {settings}; exec "$@"'
    )
    launch = mpirun(min(most, num_ranks), ["bash", "-c", wrapper, name, *command])
    os.execvp(launch.command[0], launch.command)


def _is_schedulers(name):
    return name.startswith(("COBALT_", "LSB_", "LS_"))


def run_job(script, environment, output, error=None, warns=True):
    """Runs a job to its end.

    Args:
        script: The script.
        environment: Its environment.
        output: File for its output.
        error: File for its errors; None is the same file.
        warns: Whether the scheduler warns a job, with SIGURG to all its processes.
    """
    with Path(output).open("w") as out, Path(error or os.devnull).open("w") as err:
        job = subprocess.Popen(
            [str(script)] if os.access(script, os.X_OK) else ["bash", str(script)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err if error else subprocess.STDOUT,
            start_new_session=True,
        )
        if warns:
            signal.signal(signal.SIGUSR1, lambda *_: os.killpg(job.pid, signal.SIGURG))
        try:
            job.wait()
        finally:
            if job.returncode is None:
                os.killpg(job.pid, signal.SIGKILL)
    return job.returncode
