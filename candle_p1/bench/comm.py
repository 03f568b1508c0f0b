"""Measures what ranks need to exchange arrays, by size, through every library that is installed.

The command either starts ranks on this machine, with a job for each transport, or is itself started
by a launcher on every rank, also on several nodes. Then all transports are measured in those
processes, one after the other.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from candle_p1.bench import comm_report, harness
from candle_p1.bench.comm_task import GRADIENT_BYTES, ONE_RANK, CommTask
from candle_p1.bench.harness import Job, Measured, choose_names, option
from candle_p1.bench.task import OtherEnvironment
from candle_p1.bench.transports import OPERATIONS, TRANSPORTS
from candle_p1.distributed.comm import connect
from candle_p1.distributed.launch_environment import launcher_variable
from candle_p1.errors import EXIT_CODE, CandleError, ParameterError
from candle_p1.files import write_atomically
from candle_p1.records.record import utc_now
from candle_p1.text import print_error

LARGE_BYTES, HUGE_BYTES = 1 << 22, 1 << 28
"""Sizes are each four times the one before, and from LARGE_BYTES on, where arrays leave the caches,
twice, because the bandwidth is fitted to those that are beyond all caches. From HUGE_BYTES on there
is also a size halfway to the next, for libraries that change below 512 MiB."""


@dataclass(kw_only=True)
class Comm(harness.Comparison):
    """Measure latency and bandwidth between ranks by message size, through MPI and each engine.

    Shows the times of allreduce, broadcast, allgather, reduce-scatter and point to point, with
    algorithm and bus bandwidth as nccl-tests define them; the allreduce of the gradients of the
    four benchmarks; how much of an allreduce is hidden behind computing; and the latency and
    bandwidth that are fitted to the times.

    Starts ranks on this machine, or is started on every rank by a launcher, such as srun.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench comm --np 2 --json comm.json --picture comm.svg",
        "candle-p1 bench comm --transport mpi --operations allreduce --max_bytes 4194304",
    )

    num_ranks: int | None = option(
        None,
        "Ranks to start on this machine (default: 2); omit it if a launcher starts this command"
        " on every rank, as on several nodes.",
        "--np",
        within=(1, 100_000),
    )
    transport: str | None = option(
        None,
        f"What to measure: {', '.join(TRANSPORTS)}; by default all that are installed and can"
        " connect the ranks.",
        metavar="NAME,NAME,...",
    )
    operations: str | None = option(
        None, f"The operations: {', '.join(OPERATIONS)}; by default all.", metavar="NAME,NAME,..."
    )
    min_bytes: int = option(
        4, "The smallest size; sizes grow fourfold, from 4 MiB on twofold.", within=(4, 1 << 40)
    )
    max_bytes: int = option(
        1 << 30,
        "The largest size, also of gradients; memory may limit it further.",
        within=(4, 1 << 40),
    )
    seconds: float = option(
        0.5,
        "How long to measure a size, unless its 95 % interval is within 5 % earlier.",
        within=(0.0, 3600.0, True),
    )
    no_overlap: bool = option(
        False, "Do not measure how much of an allreduce overlaps with computing."
    )
    compare_env: str | None = option(
        None,
        "Measure what is not installed here in the environment of this interpreter, such as one"
        " with JAX beside one with Horovod.",
        metavar="PYTHON",
    )
    picture: Path | None = option(
        None, "Draw times and bandwidths into this .png or .svg file.", is_file=True
    )

    @property
    def is_launched(self) -> bool:
        """Whether a launcher has started this command on every rank."""
        return self.num_ranks is None and launcher_variable() is not None

    @cached_property
    def other(self) -> Any:
        """The other environment."""
        return self.compare_env and OtherEnvironment.of(self.compare_env)

    @property
    def sizes(self) -> list[int]:
        """The sizes in bytes, close together where they are large."""
        if self.min_bytes > self.max_bytes:
            raise ParameterError(
                f"--min_bytes {self.min_bytes} is larger than --max_bytes {self.max_bytes}"
            )
        size, sizes = self.min_bytes, []
        while size <= self.max_bytes:
            sizes += [size] if size < HUGE_BYTES else [size, size * 3 // 2]
            size *= 4 if size < LARGE_BYTES else 2
        return self._within(sizes)

    def _within(self, sizes: Iterable[int]) -> list[int]:
        return [size for size in sizes if self.min_bytes <= size <= self.max_bytes]

    def task(self, *names: str) -> CommTask:
        """Returns what measures some transports."""
        named = ",".join(OPERATIONS) if self.operations is None else self.operations
        chosen = choose_names(named, OPERATIONS, "--operations")
        return CommTask(
            transports=names,
            operations=[name for name in OPERATIONS if name in chosen],
            sizes=self.sizes,
            gradients=self._within(GRADIENT_BYTES.values()),
            seconds=self.seconds,
            overlaps=not self.no_overlap,
        )

    def jobs(self) -> list[Job]:
        """Returns a job for each transport; the other environment has those of its engine."""
        num_ranks = self.num_ranks or 2
        if num_ranks == 1:
            raise ParameterError(f"--np 1: {ONE_RANK}")
        names = choose_transports(self.transport, one_process=self.is_launched)
        if self.is_launched:
            return [Job(", ".join(names), self.task(*names))]
        here = [Job(name, self.task(name), num_ranks) for name in names]
        there = [
            Job(name, self.task(name), num_ranks, other=self.other)
            for name, kind in (TRANSPORTS.items() if self.other else ())
            if kind.missing() and self.other.backend in kind.packages
        ]
        return [*here, *there]

    def prepare(self, progress: harness.Progress | None = None) -> list[str]:
        return [] if self.is_launched else super().prepare(progress)

    def measure(self, on_start: harness.OnStart) -> dict[str, Any] | None:
        """Measures; on ranks that a launcher has started, an error, which is printed, ends all."""
        if not self.is_launched:
            return super().measure(on_start)
        started, comm, (job,) = utc_now(), connect(), self.jobs()
        try:
            outcome = job.task.measure(comm)
            comm.barrier()
        except CandleError as error:
            if comm.rank == 0 or not error.agreed:
                print_error(error)
            if not error.agreed:
                comm.abort(EXIT_CODE)
            comm.end(EXIT_CODE)
        except Exception:
            traceback.print_exc()
            comm.abort(1)
        if comm.rank:
            return None
        return self.report(Measured([(job, [outcome])])) | harness.envelope(started)

    def report(self, measured: Measured) -> dict[str, Any]:
        """Returns what the jobs have measured, and the fit of every operation."""
        outcomes = [ranks[0] for _, ranks in measured]
        settings = {name: each for found in outcomes for name, each in found["settings"].items()}
        points = [point for found in outcomes for point in found["points"]]
        limit_bytes = min(found["limit_bytes"] for found in outcomes)
        wanted = {*self.sizes, *self._within(GRADIENT_BYTES.values())}
        missing = {n: kind.missing() for n, kind in TRANSPORTS.items() if n not in settings}
        return {
            "launched": self.is_launched,
            **{name: outcomes[0][name] for name in ("num_ranks", "num_nodes", "ranks_per_node")},
            "transports": {
                name: {"what": TRANSPORTS[name].what, **each} for name, each in settings.items()
            },
            "not_installed": {name: packages for name, packages in missing.items() if packages},
            "seconds": self.seconds,
            "limit_bytes": limit_bytes,
            "left_out_bytes": sorted(size for size in wanted if size > limit_bytes),
            "results": points,
            "overlaps": [each for found in outcomes for each in found["overlaps"]],
            "fits": comm_report.fits(points, outcomes[0]["num_ranks"]),
            "compare_env": self.compare_env,
        }

    def render(self, report: Mapping[str, Any]) -> Iterator[str | Table]:
        return comm_report.render(report)

    def draw(self, report: Mapping[str, Any]) -> Iterator[str]:
        if self.picture:
            drawn = comm_report.figure(report)
            is_png = self.picture.suffix == ".png"
            write_atomically(self.picture, drawn.png if is_png else drawn.svg)
            yield f"picture: {self.picture}"


def choose_transports(text: str | None, *, one_process: bool = False) -> list[str]:
    """Returns the transports of a comma-separated list; None: all that are installed.

    Horovod 0.28 can be started again, but crashes if its settings are set again
    (horovod::common::ParameterManager), so one process can measure one transport of each library.

    Raises:
        ParameterError: One of them is not known or not installed, or they cannot all be measured in
            one process where that is wanted.
    """
    names = [name for name, kind in TRANSPORTS.items() if not kind.missing()]
    if text is not None:
        names = choose_names(text, TRANSPORTS, "--transport")
    elif not names:
        raise ParameterError(
            "no communication library is installed: install candle-p1[cpu] or candle-p1[jax-mpi]"
        )
    for name in names:
        if lacks := ", ".join(TRANSPORTS[name].missing()):
            raise ParameterError(f"--transport {name}: not installed in this environment: {lacks}")
    if not one_process:
        return names
    of_libraries = {TRANSPORTS[name].packages: name for name in reversed(names)}
    possible = [name for name in names if name in of_libraries.values()]
    if text is not None and (more := [name for name in names if name not in possible]):
        raise ParameterError(
            f"--transport: {', '.join(more)}: the settings of Horovod cannot be changed within a"
            " process, and a launcher has started this one: measure them with a command each"
        )
    return possible


VERB = Comm
