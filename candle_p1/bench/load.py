"""Compares the loaders of a benchmark's files, as the paper's Tables 3 and 4 do.

The processes of a job import what the method needs, and meet at a barrier. A method has a job that
converts the files, if it loads others than the benchmark's (candle_p1.bench.formats, and caches);
one whose memory is sampled, which takes time, so that it is not timed; and one timed job for each
repeat. What is converted goes to a new directory beside the caches, which is removed at the end.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median, median_low
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import psutil

from candle_p1.bench import formats, harness
from candle_p1.bench.formats import FORMATS, ConvertedReader
from candle_p1.bench.harness import MB, MEMORY, Job, Measured, Result, megabytes, option
from candle_p1.bench.node_state import STATES, MemorySampler, peak_of_sum_bytes, prepare_files
from candle_p1.bench.task import BenchmarkTask, Outcome
from candle_p1.benchmark import find_benchmark
from candle_p1.data.loaders import READERS, installed_readers
from candle_p1.data.reader import FileSet, Reader, loading
from candle_p1.distributed.comm import (
    Communicator,
    SerialCommunicator,
    agree,
    attempt,
    on_first_rank,
)
from candle_p1.distributed.devices import NodeCores
from candle_p1.errors import ParameterError, SetupError
from candle_p1.figures import compared_times
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.reports.published import content, published_loading
from candle_p1.text import count

BASELINES = ("original", "chunked")  # the paper's methods
OURS = "parallel"  # what a conversion has to be faster than, too
CACHED = "cached"  # the method whose first load creates what later ones read
METHODS = (*READERS, *FORMATS)
WITH_FILES = (CACHED, *FORMATS)
PREPARATION = "preparation"  # the purpose of jobs that convert files
SAMPLE_CSV = "1,0.5,-2\n0,1e-3,12.25\n"
RANKED_S = 0.1  # where all methods take less, the ratios of their times are noise


@dataclass(frozen=True, kw_only=True)
class LoadTask(BenchmarkTask):
    """Loads the files of a benchmark once, as a run does."""

    own_flags: ClassVar[Mapping[str, str]] = {
        "loader": "use --methods",
        "load_threads": "use --threads",
        "stage_dir": "a cache is loaded from where it is made; see --cache_dir",
    }

    method: str
    directory: Path = Path()  # of what is converted
    converts: bool = False
    threads: int = 0  # its share of the cores
    samples_memory: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        loader = OURS if self.method in FORMATS else self.method
        own = {"loader": loader, "load_threads": self.threads}
        caches = {"cache_dir": str(self.directory), "stage_dir": None}
        return own | caches if self.method == CACHED else own

    def open_reader(
        self, params: ParameterSet, files: FileSet, comm: Communicator, threads: int
    ) -> Reader:
        how = loading(params, comm, threads)
        if self.method not in FORMATS:
            return Reader(files, how)
        return ConvertedReader(files, how, self.method, self.directory, self.converts)

    def measure(self, comm: Communicator) -> Outcome:
        benchmark, params, files = self.locate(comm)
        threads = bind_cores(comm, self.threads)
        _load_sample(params, comm, threads)
        reader = self.open_reader(params, files, comm, threads)
        sampler = MemorySampler() if self.samples_memory else None
        before = _bytes_read()
        comm.barrier()
        start = time.perf_counter()
        load = attempt(benchmark.load_data, reader, params)
        seconds = time.perf_counter() - start
        after = _bytes_read()
        agree(comm, load)
        if not reader.table_s:
            raise ParameterError(
                f"{benchmark.name} reads no table with reader.read, so there is nothing to compare"
            ).on_all_ranks()
        reader.digest()  # touches every value, so that memory-mapped files count as memory too
        samples = sampler.stop() if sampler else []
        return {
            "elapsed_s": seconds,
            **{name: after[name] - before[name] for name in after},
            "file_s": reader.table_s,
            "threads": threads,
            "matrix_bytes": reader.matrix_bytes,
            "checked": {str(files.paths[role]): each for role, each in reader.digests.items()},
            "memory": [(time_s, num - samples[0][1]) for time_s, num in samples],
            "reads": {role: log.since_zero() for role, log in reader.reads.items()},
        }


def bind_cores(comm: Communicator, threads: int) -> int:
    """Binds this rank to a core for each of its threads, if there are enough; collective.

    Unlike in a run, a rank that is alone has no more cores than threads, so that its time can be
    compared with that of several. Returns the threads: its share of the cores for 0.
    """
    cores = NodeCores.of(comm)
    num = threads or cores.threads(comm.local_rank)[0]
    mine = cores.own(comm.local_rank, num, os.environ)
    if comm.local_size == 1:
        mine = sorted(cores.of_ranks[0])
    if mine:
        os.sched_setaffinity(0, mine[:num])  # also of the threads that this one is going to start
    return num


def _load_sample(params: ParameterSet, comm: Communicator, threads: int) -> None:
    """Loads a few numbers as `params` say, so that imports are not timed later; collective."""
    directory = Path(sys.argv[1])
    path = directory / "sample.csv"
    on_first_rank(comm, path.write_text, SAMPLE_CSV)
    here = params.replace({"cache_dir": str(directory), "stage_dir": None})
    reader = Reader(FileSet.at({"sample": path}), loading(here, comm, threads))
    agree(comm, reader.read, "sample")


def _bytes_read() -> dict[str, int]:
    """Returns the bytes that this process has read by system calls, and from storage.

    Only the latter include pages of mapped files. {} if the kernel does not count.
    """
    if not hasattr(psutil.Process, "io_counters"):
        return {}
    counters = psutil.Process().io_counters()
    return {"bytes_read": counters.read_chars, "storage_bytes_read": counters.read_bytes}


def choose_methods(text: str | None) -> tuple[list[str], list[str]]:
    """Returns the methods of a comma-separated list: those that are installed, and the others.

    None selects all loaders that are installed.

    Raises:
        ParameterError: A method is unknown.
        SetupError: None is installed.
    """
    installed = installed_readers()
    names = installed if text is None else harness.choose_names(text, METHODS, "--methods")
    usable = [*installed, *filter(formats.is_installed, FORMATS)]
    if not set(names) & set(usable):
        raise SetupError(f"none of {', '.join(names)} is installed: install candle-p1[readers]")
    return [n for n in names if n in usable], [n for n in names if n not in usable]


@dataclass(kw_only=True)
class Load(harness.BenchmarkComparison):
    """Compare the loaders of BENCHMARK's files, as the paper's Tables 3 and 4 do.

    Every load is a separate job. Memory is measured in a job that is not timed. All methods must
    read the same values.
    """

    examples: ClassVar[Sequence[str]] = (
        "candle-p1 bench load nt3 --methods parallel,chunked",
        "candle-p1 bench load p1b3 --np 2 --drug_features all",
        "candle-p1 bench load nt3 --methods original,parallel,parquet,hdf5,npy,parallel-gz",
    )

    methods: str | None = option(
        None,
        f"The loaders (default: all installed); also {', '.join(FORMATS)}.",
        metavar="NAME,NAME,...",
        complete="loaders",
    )
    threads: int = option(
        0,
        "Threads of a rank, if the loader uses several; 0: its share of the cores.",
        within=(0, 1024),
    )
    num_repeats: int = harness.rounds_option(6, "Timed loads of each method", "--repeats")
    file_cache: str = option(
        "warm", "Read the files before every load, or drop them from the cache.", choices=STATES
    )
    picture: Path | None = option(None, "Draw the times into this PNG file.", is_file=True)

    directory: Path = field(default=Path(), init=False)

    def jobs(self) -> list[Job]:
        timed, first = [], []
        for method in choose_methods(self.methods)[0]:
            task = {"method": method, "threads": self.threads, "directory": self.directory / method}
            timed.append(self.job(method, LoadTask, **task))
            if method in WITH_FILES:
                num_ranks = self.num_ranks if method == CACHED else 1
                job = timed[-1].changed(PREPARATION, converts=True)
                first.append(replace(job, num_ranks=num_ranks))
        return [*first, *harness.sampled(timed), *harness.rounds(timed, self.num_repeats)]

    def measure(self, on_start: harness.OnStart) -> dict[str, Any] | None:
        methods, _ = choose_methods(self.methods)
        if not set(WITH_FILES).intersection(methods):
            return super().measure(on_start)
        params = find_benchmark(self.benchmark).read_parameters(self.flags)
        caches = loading(params, SerialCommunicator(), 1).cache.path
        caches.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="bench-", dir=caches) as name:
            self.directory = Path(name)
            return super().measure(on_start)

    def run(self, job: Job) -> list[Outcome]:
        def converted() -> list[Path]:
            found = job.task.directory.rglob("*") if job.variant in WITH_FILES else ()
            return [path for path in found if path.is_file()]

        prepare_files(self.file_cache, [*self.paths(), *converted()])
        outcomes = super().run(job)
        if job.purpose == PREPARATION:
            outcomes[0]["stored_bytes"] = sum(path.stat().st_size for path in converted())
        return outcomes

    def report(self, measured: Measured) -> dict[str, Any]:
        results = super().report(measured)["results"]
        medians = {result["method"]: result["median_s"] for result in results}
        for result in results:
            result["speedup"] = {
                name: medians[name] / result["median_s"] for name in BASELINES if name in medians
            }
            if result["convert_s"] is not None:
                result["pays_after"] = {
                    name: loads_to_pay(result["convert_s"], medians[name], result["median_s"])
                    for name in (BASELINES[0], OURS)
                    if name in medians
                }
        digests, num_bytes = measured[0][1][0]["checked"], self.file_bytes()
        files = {
            role: {"path": str(path), "file_bytes": num_bytes[role]}
            | {"values_sha256": digests.get(str(path))}
            for role, path in self.files.paths.items()
        }
        tables = published_tables(find_benchmark(self.benchmark).name)
        return {
            "files": files,
            "results": results,
            "not_installed": choose_methods(self.methods)[1],
            "jobs": [
                {"method": job.variant, "purpose": job.purpose, "repeat": job.round}
                | {"elapsed_s": harness.elapsed_s(ranks)}
                for job, ranks in measured
            ],
            "published": {"source": content()["sources"]["paper"], "tables": tables},
        }

    def result(self, variant: str, measured: Measured) -> Result:
        timed, (sampled,) = measured.of(variant), measured.of(variant, MEMORY)
        made = measured.of(variant, PREPARATION)
        memory = [rank["memory"] for rank in sampled]
        return {
            "method": variant,
            **harness.times(timed),
            "per_rank_s": [[rank["elapsed_s"] for rank in ranks] for ranks in timed],
            "per_file_median_s": {
                role: median(max(rank["file_s"][role] for rank in ranks) for ranks in timed)
                for role in timed[0][0]["file_s"]
            },
            "peak_rank_bytes": max((num for r in memory for _, num in r), default=None),
            "peak_bytes": peak_of_sum_bytes(memory),
            "threads": max(rank["threads"] for rank in sampled),
            "matrix_bytes": max(rank["matrix_bytes"] for rank in sampled),
            "bytes_read": _median_sum(timed, "bytes_read"),
            "storage_bytes_read": _median_sum(timed, "storage_bytes_read"),
            "file_bytes": sum(self.file_bytes().values()),
            "convert_s": harness.elapsed_s(made[0]) if made else None,
            "stored_bytes": made[0][0]["stored_bytes"] if made else None,
            "num_ranks": self.num_ranks,
            "file_cache": self.file_cache,
        }

    def render(self, report: harness.Report) -> harness.Parts:
        results, tables = report["results"], report["published"]["tables"]
        first, is_ranked = results[0], any(each["median_s"] >= RANKED_S for each in results)
        yield (
            f"{report['benchmark']}: loading {megabytes(first['file_bytes'])} MB,"
            f" {_conditions(first)}, {count(first['repeats'], 'repeat')}"
        )
        columns: dict[str, Any] = {
            "method": "method",
            "median\n(s)": "median_s",
            "{spread}\n(s)": harness.interval,
            "MB/s": lambda r: r["file_bytes"] / MB / r["median_s"],
        }
        for name in first["speedup"] if is_ranked and len(results) > 1 else ():
            columns[f"speed-up\nover {name}"] = lambda r, name=name: r["speedup"][name]
        times = harness.table(results, columns)
        for name in report["not_installed"]:
            times.add_row(name, "not installed")
        yield times
        if not is_ranked:
            yield (
                f"no method takes {RANKED_S} s: these files are too small to rank the methods;"
                " use --size full, or files of that size"
            )
        if made := [each for each in results if each["convert_s"] is not None]:
            yield "converting, once, and after how many loads it has paid"
            columns = {
                "method": "method",
                "converting\n(s)": "convert_s",
                "stored\n(MB, files)": lambda r: _of(r["stored_bytes"], r["file_bytes"]),
                "load\n(s)": "median_s",
            }
            for name in made[0]["pays_after"] if is_ranked else ():
                columns[f"pays against\n{name}"] = lambda r, name=name: (
                    r["pays_after"][name] or "never"
                )
            yield harness.table(made, columns)
        matrices = f"the matrices of a rank: {megabytes(first['matrix_bytes'])} MB"
        yield f"memory that loading adds, and bytes read by system calls; {matrices}"
        memory: harness.Columns = {
            "method": "method",
            "peak of a rank\n(MB, matrices)": lambda r: _of(
                r["peak_rank_bytes"], r["matrix_bytes"]
            ),
            "of the node\n(MB, matrices)": lambda r: _of(r["peak_bytes"], r["matrix_bytes"]),
            "read\n(MB, files)": lambda r: _of(r["bytes_read"], r["file_bytes"]),
            "from storage\n(MB)": ("storage_bytes_read", MB),
        }
        yield harness.table(results, memory)
        if rows := list(_file_rows(report, is_ranked)):
            yield "each file, in s"
            yield harness.table(rows, {name: name for name in rows[0]})
        yield from harness.remarks(report)
        if tables:
            yield f"published: {report['published']['source']}"
            for each in tables:
                yield f"  Table {each['table']}, {each['machine']}: {each['node']}"

    def draw(self, report: harness.Report) -> Iterator[str]:
        if not self.picture:
            return
        tables, first = report["published"]["tables"], report["results"][0]
        published = {
            f"{each['machine']} (Table {each['table']})": {
                name: sum(file[f"{name}_s"] for file in each["files"].values())
                for name in BASELINES
            }
            for each in tables
        }
        size = f"{megabytes(first['file_bytes'])} MB in {count(len(report['files']), 'file')}"
        kind = " of synthetic data" if report["synthetic"] else ""
        sizes = [str(file["file_mb"]) for file in tables[0]["files"].values()] if tables else []
        compared_times(
            self.picture,
            {result["method"]: result["repeats_s"] for result in report["results"]},
            published,
            title=f"{report['benchmark']}: loading {size}{kind},\n{_conditions(first)}",
            published_title=f"published, files of {' + '.join(sizes)} MB",
        )
        yield f"picture: {self.picture}"


VERB = Load


def loads_to_pay(convert_s: float, before_s: float, after_s: float) -> int | None:
    """Returns after how many loads converting has taken less time in all; None: after none."""
    return math.floor(convert_s / (before_s - after_s)) + 1 if after_s < before_s else None


def _median_sum(timed: Sequence[Sequence[Outcome]], name: str) -> int | None:
    jobs: list[list[Any]] = [[rank.get(name) for rank in ranks] for ranks in timed]
    return None if any(None in ranks for ranks in jobs) else median_low(map(sum, jobs))


def _of(num_bytes: int | None, of_bytes: int) -> str | None:
    text = megabytes(num_bytes)
    return text and f"{text}  {(num_bytes or 0) / of_bytes:5.2f}x"


def _conditions(result: Result) -> str:
    ranks, threads = count(result["num_ranks"], "rank"), count(result["threads"], "thread")
    return f"{ranks} with {threads} each, {result['file_cache']} file cache"


def _file_rows(report: harness.Report, is_ranked: bool) -> Iterator[dict[str, Any]]:
    medians = {each["method"]: each["per_file_median_s"] for each in report["results"]}
    if is_ranked and all(name in medians for name in BASELINES):
        for role, slow in medians["original"].items():
            fast, size = medians["chunked"][role], megabytes(report["files"][role]["file_bytes"])
            times = {"original": slow, "chunked": fast, "speed-up": slow / fast}
            yield {"machine": "this one", "file": role, "size": f"{size} MB", **times}
    for each in report["published"]["tables"]:
        for role, file in each["files"].items():
            slow, fast = file["original_s"], file["chunked_s"]
            times = {"original": f"{slow:.2f}", "chunked": f"{fast:.2f}", "speed-up": slow / fast}
            machine, size = f"{each['machine']} (published)", f"{file['file_mb']} MB"
            yield {"machine": machine, "file": role, "size": size, **times}


def published_tables(benchmark: str) -> list[dict[str, Any]]:
    """Returns the values of the paper's Tables 3 and 4 for a benchmark; [] if there are none."""
    tables: dict[int, dict[str, Any]] = {}
    for cell in published_loading(benchmark):
        facts = {"machine": cell.machine, "node": content()["machines"][cell.machine], "files": {}}
        table = tables.setdefault(cell.table, {"table": cell.table, **facts})
        file = table["files"].setdefault(cell.role, {"file_mb": cell.file_mb})
        file[f"{cell.loader}_s"] = cell.seconds
    return list(tables.values())
