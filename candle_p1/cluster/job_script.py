"""Job scripts: directives, settings of the machine, and the command that starts the ranks.

Everything else is in ``common/job_env.sh``, which a script sources. The number of nodes comes from
the job that the script runs in, so the same script runs at another size:
``bsub -nnodes 8 jobs/summit/nt3_strong.lsf``.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from candle_p1.cluster.containers import container_argv
from candle_p1.cluster.launchers import launch_argv
from candle_p1.cluster.schedulers import scheduler_of, warning_s
from candle_p1.distributed.gpus import GPUS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.cluster.job_request import JobRequest

_WIDTH = 98
"""Characters of a line of a script, without the continuation mark."""


def job_script(job: JobRequest) -> str:
    """Returns the text of a job's script.

    Raises:
        ParameterError: The machine's launcher or scheduler is unknown.
    """
    machine, scheduler = job.machine, scheduler_of(job)
    root = '"${CANDLE_P1_ROOT:-$PWD}"' if job.root is None else shlex.quote(job.root)
    lines = [
        "#!/bin/bash",
        *(f"# {' '.join(line.split())}" for line in job.heading),
        *scheduler.lines(job),
        "set -euo pipefail",
        *scheduler.preamble,
        "",
        f"export CANDLE_P1_ROOT={root}",
        f"export CANDLE_P1_MACHINE={shlex.quote(machine.name)}",
        f"export RANKS_PER_NODE={job.layout.ranks_per_node}",
    ]
    if machine.local_storage is not None:
        lines.append(f'export LOCAL_STORAGE="{machine.local_storage}"')
    lines += [
        "# shellcheck source=common/job_env.sh",
        'source "$CANDLE_P1_ROOT/common/job_env.sh"',
    ]
    if job.study_script is not None:
        lines += [
            "unset CANDLE_P1_STAGE CANDLE_P1_FLAGS # the study alone sets flags",
            f"export CANDLE_P1_NODES={job.layout.num_nodes}",
            f"export JOB_SCRIPT={shlex.quote(job.study_script)}",
        ]
        if scheduler.waits_for_success and job.chain_directory is None:
            lines.append("trap 'exit 0' EXIT # the next job waits for success")
    if job.chain_directory is not None:
        always = " 0 # the next job waits for success" if scheduler.waits_for_success else ""
        lines.append(f"job_chain {shlex.quote(job.chain_directory)}{always}")
    if job.exclude and scheduler.leaves_out:
        lines.append(f"job_exclude {job.layout.num_nodes} {shlex.join(job.exclude)}")
    if job.venv is not None and job.container is None:
        lines.append(f"job_default CANDLE_P1_VENV {shlex.quote(job.venv)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    if job.layout.threads_per_rank is not None:
        lines.append(f"job_default OMP_NUM_THREADS {job.layout.threads_per_rank}")
    num_gpus = job.layout.ranks_per_node * job.layout.gpus_per_rank
    if num_gpus:
        lines.append(f"job_default {GPUS_VARIABLE} {num_gpus}")
    lines += [
        f"job_default {name} {_in_quotes(value)}" for name, value in machine.environment.items()
    ]
    if machine.modules:
        lines.append(f"job_modules {shlex.join(machine.modules)}")
    lines += machine.setup
    if job.container is not None:
        lines += machine.container.setup
        lines += _fold(["job_container", *map(_in_quotes, container_argv(job))])
    if scheduler.sends_warning:
        lines.append(f"job_warning {warning_s(job.minutes)}")
    else:
        lines.append(f"job_limit {job.minutes} {warning_s(job.minutes)}")
    lines += ["job_prepare", ""]
    variables = [*machine.environment, *job.environment, "CANDLE_P1_SAVE_S"]
    if job.layout.threads_per_rank is not None:
        variables.append("OMP_NUM_THREADS")
    if num_gpus:
        variables.append(GPUS_VARIABLE)
    if job.staged is not None:
        variables.append("PYTHONPATH")
    argv = launch_argv(machine.launcher, job.layout, variables)
    lines += _fold(["job_launcher", *map(_in_quotes, [*argv, *machine.launcher_options])])
    if job.staged is not None:
        lines.append(f"job_stage_env {shlex.quote(job.staged)}")
    lines += _fold(["job_run", *map(shlex.quote, [job.program, *job.flags])])
    return "\n".join(lines) + "\n"


def _in_quotes(word: str) -> str:
    """Returns an argument, quoted so that bash expands its variables."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def _fold(argv: Sequence[str]) -> list[str]:
    """Returns a command as lines of bash, folded before options."""
    groups = [argv[0]]
    for word in argv[1:]:
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
