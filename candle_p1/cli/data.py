"""candle-p1 data: get the published files, or make synthetic ones instead."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from candle_p1.benchmark import Benchmark, find_benchmark, list_benchmarks
from candle_p1.cli.base import (
    Command,
    Group,
    benchmark_argument,
    complete_benchmark,
    json_option,
    write_json,
)
from candle_p1.data.cache import CacheSettings, clear_caches, list_caches
from candle_p1.datasets.registry import file_status
from candle_p1.datasets.synthetic import make, synthetic_sets
from candle_p1.errors import ParameterError
from candle_p1.parameters.catalog import MAX_SEED
from candle_p1.text import count
from candle_p1.training.screen import Screen

MIB = 2**20
SHOWN_DIGITS = 12
"""The digits of a SHA-256 that the table shows."""
PATH = click.Path(path_type=Path)
DEFAULT = "by default the benchmark's own in the data directory ($CANDLE_DATA_DIR)"


@click.group("data", cls=Group)
def command() -> None:
    """Get data sets: download the published files, or make synthetic ones."""


@command.command("make", cls=Command, examples=["candle-p1 data make nt3 --size small --out data"])
@benchmark_argument
@click.option(
    "--size",
    default="full",
    show_default=True,
    type=click.Choice(["full", "small"]),
    help="The published shape, or one with fewer features.",
)
@click.option("--out", "directory", required=True, type=PATH, help="The directory to write to.")
@click.option(
    "--seed",
    default=2019,
    show_default=True,
    type=click.IntRange(0, MAX_SEED),
    help="The same seed gives the same bytes.",
)
def make_command(benchmark: str, size: str, directory: Path, seed: int) -> None:
    """Write synthetic files with BENCHMARK's published layout, for runs without the real ones."""
    recipe = find_benchmark(benchmark).recipe
    if recipe is None:
        raise ParameterError(f"{benchmark} has no synthetic data")
    screen = Screen()
    with screen.making_data() as progress:
        manifest = make(recipe, size, directory, seed, progress)
    for name, facts in manifest.files.items():
        mib = facts["bytes"] / MIB
        screen.say(f"{manifest.directory / name}: {mib:.1f} MiB, synthetic, seed {seed}")


@command.command(
    "fetch",
    cls=Command,
    examples=[
        "candle-p1 data fetch nt3",
        "candle-p1 data fetch nt3 --data_url file:///mirror/nt3 --out data",
    ],
)
@benchmark_argument
@click.option("--out", "directory", type=PATH, help=f"The directory to write to; {DEFAULT}.")
@click.option(
    "--data_url",
    help="The directory to download from instead of CANDLE's: https://..., http://... or file:///....",
)
@click.option(
    "--retries",
    "num_retries",
    default=4,
    show_default=True,
    type=click.IntRange(min=0),
    help="Maximum consecutive retries.",
)
@click.option(
    "--min_rate",
    "min_kib_per_s",
    default=1,
    show_default=True,
    type=click.IntRange(min=0),
    help="Retry where less than this arrives, in KiB/s, over a minute.",
)
@click.option(
    "--unpack_limit",
    "unpack_limit_gib",
    type=click.IntRange(min=1),
    help="The size, in GiB, that the files of an archive may have together; by default 1 GiB or, if"
    " that is more, 100 times the size of the archive.",
)
def fetch_command(
    benchmark: str,
    directory: Path | None,
    data_url: str | None,
    num_retries: int,
    min_kib_per_s: int,
    unpack_limit_gib: int | None,
) -> None:
    """Download BENCHMARK's published files, or resume an interrupted download.

    Files that are already there are checked by their SHA-256 and not downloaded again. If CANDLE
    has not published a file's checksum, that of the first download is recorded, and later downloads
    must match it.
    """
    from candle_p1.datasets.fetch import fetch

    found = find_benchmark(benchmark)
    published = found.published
    url = published.url if data_url is None else data_url
    if url is None:
        raise ParameterError(
            f"{found.model_file} has no data_url: say where the files are with --data_url"
        )
    screen = Screen()
    with screen.making_data("downloading") as progress:
        files = fetch(
            found.name,
            list(dict.fromkeys(published.files.values())),
            url,
            directory or published.directory,
            progress=progress,
            notify=screen.warn,
            num_retries=num_retries,
            min_kib_per_s=min_kib_per_s,
            unpack_limit_bytes=unpack_limit_gib * 2**30 if unpack_limit_gib else None,
        )
    for file in files:
        origin = f"downloaded from {file.source}" if file.source else "was there already"
        screen.say(f"{file.path}: {file.file_bytes / MIB:.1f} MiB, sha256 {file.sha256}, {origin}")
        for path in file.unpacked:
            screen.say(f"{path}: from {file.path.name}")
    where = str(files[0].path.parent)
    screen.say_command(["candle-p1", "run", benchmark, "--data_dir", where], "train on them: ")


@command.command("info", cls=Command, examples=["candle-p1 data info nt3"])
@click.argument("benchmark", required=False, shell_complete=complete_benchmark)
@click.option("--data_dir", "directory", type=PATH, help=f"The directory to look in; {DEFAULT}.")
@json_option("the same, with complete checksums,")
def info_command(benchmark: str | None, directory: Path | None, json_file: Path | None) -> None:
    """Show which files BENCHMARK (by default, each one) has, and how to get the missing ones."""
    names = [benchmark] if benchmark else list_benchmarks()
    found = [_info(find_benchmark(name), directory) for name in names]
    for info in found:
        _show(info)
    write_json(json_file, {"benchmarks": found})


@command.command("cache", cls=Command, examples=["candle-p1 data cache --clear"])
@click.option(
    "--cache_dir",
    "directory",
    type=PATH,
    help="The directory; by default cache/ in the data directory ($CANDLE_DATA_DIR).",
)
@click.option("--clear", is_flag=True, help="Remove all of them.")
@json_option("the list")
def cache_command(directory: Path | None, clear: bool, json_file: Path | None) -> None:
    """Show the tables that the loader `cached` has stored, or remove them."""
    path = CacheSettings(directory).path
    caches = list(list_caches(path))
    if clear:
        clear_caches(path)
    screen = Screen()
    for cache in caches:
        source = cache.source["path"] if cache.source else "an unknown file"
        problem = f"; will be rebuilt: {cache.problem}" if cache.problem else ""
        screen.say(f"{cache.path}: {cache.num_bytes / MIB:.1f} MiB, from {source}{problem}")
    total_mib = sum(cache.num_bytes for cache in caches) / MIB
    where = "removed from" if clear else "in"
    screen.say(f"{count(len(caches), 'cached table')}, {total_mib:.1f} MiB, {where} {path}")
    shown = [asdict(cache) | {"path": str(cache.path)} for cache in caches]
    write_json(json_file, {"caches": shown, "cleared": clear})


def _info(benchmark: Benchmark, directory: Path | None) -> dict[str, Any]:
    """Returns the status of a benchmark's files, and the commands that get them."""
    published = benchmark.published
    where = (directory or published.directory).absolute()
    out = f" --out {shlex.quote(str(where))}" if directory else ""
    return {
        "name": benchmark.name,
        "title": benchmark.title,
        "directory": str(where),
        "data_url": published.url,
        "files": [
            {"role": role} | file_status(benchmark.name, name, where)
            for role, name in published.files.items()
        ],
        "synthetic_sets": [
            {"directory": str(each.directory), "whole": each.whole} | each.made_of
            for each in (synthetic_sets(benchmark.recipe) if benchmark.recipe else [])
        ],
        "fetch": f"candle-p1 data fetch {benchmark.argument}{out}"
        + ("" if published.url else " --data_url URL"),
        "make": f"candle-p1 data make {benchmark.argument} --size full --out DIR"
        if benchmark.recipe
        else None,
    }


def _show(info: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=info["title"])
    for column in ("file", "state", "MiB", "sha256"):
        table.add_column(column, justify="right" if column == "MiB" else "left")
    for file in info["files"]:
        downloaded = f", {file['partial_bytes'] / MIB:.1f} MiB downloaded"
        table.add_row(
            file["name"],
            file["state"] + downloaded * bool(file["partial_bytes"]),
            "" if file["file_bytes"] is None else f"{file['file_bytes'] / MIB:.1f}",
            f"{file['sha256'][:SHOWN_DIGITS]}... {file['sha256_source']}" if file["sha256"] else "",
        )
    sets = [
        f"synthetic, {each['size']}, seed {each['seed']}"
        f"{'' if each['whole'] else ', incomplete'}: {each['directory']}"
        for each in info["synthetic_sets"]
    ]
    screen = Screen()
    screen.say(table)
    for line in (
        f"in {info['directory']}",
        f"published at {info['data_url'] or 'no known URL'}",
        *sets,
    ):
        screen.say(line)
    screen.say_command(shlex.split(info["fetch"]), "to download: ")
    if info["make"]:
        screen.say_command(shlex.split(info["make"]), "to make synthetic files: ")
