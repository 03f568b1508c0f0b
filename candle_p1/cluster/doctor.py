"""The doctor: checks of this installation, without a job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from candle_p1.benchmark_folders import list_benchmarks, search_path
from candle_p1.cluster import checks
from candle_p1.cluster.checks import Finding, Needs, NodeFacts
from candle_p1.cluster.launchers import find_mpirun, mpirun_version
from candle_p1.data.directory import data_directory
from candle_p1.distributed.backend import ENGINES
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.distributed.mpi_library import MpiLibrary, start_alone
from candle_p1.errors import SetupError
from candle_p1.records import environment


def examine() -> Iterator[Finding]:
    """Yields findings about this installation; some of them take seconds."""
    facts = [NodeFacts(**checks.find_software(with_mpi=True) | {"mpi": _mpi_alone()})]
    needs = Needs(data=Needs.output)
    for check in FOR_RANKS:
        yield from check(facts, needs)
    for check in OF_MACHINE:  # none of which keeps ranks from training
        yield from (replace(finding, fatal=False) for finding in check(facts, needs))


def _mpi_alone() -> MpiLibrary | None:
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return start_alone() if launcher_variable() is None else None
    return None


def _check_threads(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    why = "MPI does not start here, or this is a rank; the preflight does it in jobs"
    mpi = facts[0].mpi
    yield Finding("MPI threads", mpi.thread_level if mpi else f"not examined: {why}")


def _check_launcher(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    library = facts[0].mpi_library
    fix = checks.INSTALL_MPI.format(ENGINES[facts[0].engine].extras[0])
    try:
        version = mpirun_version(path := find_mpirun())
    except (OSError, SetupError, subprocess.SubprocessError) as error:
        yield Finding("launcher", "not usable", str(error), fix, fatal=True)
        return
    is_other = library is not None and ("Open MPI" in library) != ("Open MPI" in version)
    problem = f"it cannot start ranks of {library}, which mpi4py uses" if is_other else None
    yield Finding("launcher", f"{version} ({path})", problem, fix, fatal=is_other)


def _check_horovod(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    built_with = ", ".join(name for name, has in facts[0].horovod.items() if has)
    if built_with:
        what = f"built with {built_with}; its horovodrun does not start Open MPI 5: use mpirun"
        yield Finding("Horovod", what)


def _check_gpus(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    names, lack = facts[0].gpus, facts[0].gpu_lack
    for finding in checks.check_gpus(facts, needs):
        value = f"{len(names)} x {names[0]}" if names else f"none: {lack.why if lack else ''}"
        yield replace(finding, value=value)


def _check_machine(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    yield from (Finding(name, facts[0].packages[name]) for name in ("numpy", "pandas"))
    yield Finding("cores", f"{len(environment.available_cores())} x {environment.cpu_model()}")
    memory_gib = environment.memory_limit_bytes() / checks.GIB
    problem = "full-size data sets need more" if memory_gib < needs.memory_gib else None
    yield Finding("memory", f"{memory_gib:.1f} GiB", problem, "use --size small on this machine")


def _check_data(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    try:
        space = {"data": checks.free_space(data_directory())}
    except SetupError as error:
        what, _, fix = str(error).partition(": ")
        yield Finding("data", "none", what, fix)
    else:
        yield from checks.check_space([replace(facts[0], space=space)], needs)


def _check_benchmarks(facts: Sequence[NodeFacts], needs: Needs) -> Iterator[Finding]:
    found = list_benchmarks()
    problem = None if found else f"none in {', '.join(map(str, search_path()))}"
    fix = "set CANDLE_BENCHMARKS_PATH to the directory benchmarks of a checkout"
    yield Finding("benchmarks", ", ".join(found) or "none", problem, fix)


FOR_RANKS: Sequence[checks.Check] = (
    *(checks.check_engine, checks.check_packages, checks.check_mpi),
    *(_check_threads, _check_launcher, _check_horovod),
)
OF_MACHINE: Sequence[checks.Check] = (_check_gpus, _check_machine, _check_data, _check_benchmarks)
