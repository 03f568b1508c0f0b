"""The doctor: checks of this installation, without a job."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
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
    fact = NodeFacts(**checks.find_software(with_mpi=True) | {"mpi": _mpi_alone()})
    needs = Needs(data=Needs.output)
    for check in (checks.check_engine, checks.check_packages, checks.check_mpi):
        yield from check([fact], needs)
    why = "MPI does not start here, or this is a rank; in jobs, the preflight does this"
    yield Finding("MPI threads", fact.mpi.thread_level if fact.mpi else f"not examined: {why}")
    yield _launcher(fact)
    if built_with := ", ".join(name for name, has in fact.horovod.items() if has):
        what = f"built with {built_with}; its horovodrun does not start Open MPI 5: use mpirun"
        yield Finding("Horovod", what)
    names, lack = fact.gpus, fact.gpu_lack
    for finding in checks.check_gpus([fact], needs):
        value = f"{len(names)} x {names[0]}" if names else f"none: {lack.why if lack else ''}"
        yield replace(finding, value=value, fatal=False)
    yield from (Finding(name, fact.packages[name]) for name in ("numpy", "pandas"))
    yield Finding("cores", f"{len(environment.available_cores())} x {environment.cpu_model()}")
    memory_gib = environment.memory_limit_bytes() / checks.GIB
    problem = "full-size data sets need more" if memory_gib < needs.memory_gib else None
    yield Finding("memory", f"{memory_gib:.1f} GiB", problem, "use --size small on this machine")
    try:
        space = {"data": checks.free_space(data_directory())}
    except SetupError as error:
        what, _, fix = str(error).partition(": ")
        yield Finding("data", "none", what, fix)
    else:
        found = checks.check_space([replace(fact, space=space)], needs)
        yield from (replace(finding, fatal=False) for finding in found)
    benchmarks = list_benchmarks()
    problem = None if benchmarks else f"none in {', '.join(map(str, search_path()))}"
    fix = "set CANDLE_BENCHMARKS_PATH to the directory benchmarks of a checkout"
    yield Finding("benchmarks", ", ".join(benchmarks) or "none", problem, fix)


def _mpi_alone() -> MpiLibrary | None:
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        return start_alone() if launcher_variable() is None else None
    return None


def _launcher(fact: NodeFacts) -> Finding:
    library, fix = fact.mpi_library, checks.INSTALL_MPI.format(ENGINES[fact.engine].extras[0])
    try:
        version = mpirun_version(path := find_mpirun())
    except (OSError, SetupError, subprocess.SubprocessError) as error:
        return Finding("launcher", "not usable", str(error), fix, fatal=True)
    is_other = library is not None and ("Open MPI" in library) != ("Open MPI" in version)
    problem = f"it cannot start ranks of {library}, which mpi4py uses" if is_other else None
    return Finding("launcher", f"{version} ({path})", problem, fix, fatal=is_other)
