"""candle-p1 data: get the published files, make synthetic ones, or import tables of one's own."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from candle_p1.benchmark import Benchmark, find_benchmark, list_benchmarks
from candle_p1.cli import base
from candle_p1.data.cache import clear_caches, list_caches
from candle_p1.data.source import CacheSettings
from candle_p1.datasets.fetch import file_status
from candle_p1.datasets.synthetic import make, synthetic_sets
from candle_p1.errors import ParameterError
from candle_p1.options import FiniteRange
from candle_p1.parameters.catalog import MAX_SEED
from candle_p1.text import count
from candle_p1.training.screen import Screen

MIB = 2**20
DEFAULT = "by default the benchmark's own in the data directory ($CANDLE_DATA_DIR)"


@click.group("data", cls=base.Group)
def data_command() -> None:
    """Get data sets: import your own, download the published files, or make synthetic ones."""


@data_command.command(
    "make", cls=base.Command, examples=["candle-p1 data make nt3 --size small --out data"]
)
@base.benchmark_argument
@base.option(
    "--size", "The published shape, or one with fewer features.", ["full", "small"], default="full"
)
@base.option("--out", "The directory to write to.", base.PATH, name="directory", required=True)
@base.number_option("--seed", "The same seed gives the same bytes.", 2019, least=0, most=MAX_SEED)
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


@data_command.command(
    "fetch",
    cls=base.Command,
    examples=[
        "candle-p1 data fetch nt3",
        "candle-p1 data fetch nt3 --data_url file:///mirror/nt3 --out data",
    ],
)
@base.benchmark_argument
@base.option("--out", f"The directory to write to; {DEFAULT}.", base.PATH, name="directory")
@base.option(
    "--data_url",
    "The directory to download from instead of CANDLE's: https://..., http://... or file:///....",
)
@base.number_option("--retries", "Maximum consecutive retries.", 4, name="num_retries", least=0)
@base.number_option(
    "--min_rate",
    "Retry a download that is slower than this over a minute, in KiB/s.",
    1,
    least=0,
    name="min_kib_per_s",
)
@base.number_option(
    "--unpack_limit",
    "Maximum size of what an archive unpacks to, in GiB; by default 1 GiB, or 100 times the size of"
    " the archive if that is more.",
    name="unpack_limit_gib",
)
def fetch_command(
    benchmark: str,
    directory: Path | None,
    data_url: str | None,
    unpack_limit_gib: int | None,
    **limits: int,
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
            unpack_limit_bytes=unpack_limit_gib * 2**30 if unpack_limit_gib else None,
            **limits,
        )
    for file in files:
        origin = f"downloaded from {file.source}" if file.source else "was there already"
        screen.say(f"{file.path}: {file.file_bytes / MIB:.1f} MiB, sha256 {file.sha256}, {origin}")
        for path in file.unpacked:
            screen.say(f"{path}: from {file.path.name}")
    where = str(files[0].path.parent)
    screen.say_command(["candle-p1", "run", benchmark, "--data_dir", where], "train on them: ")


def _pairs(context: click.Context, option: click.Parameter, given: Sequence[str]) -> dict[str, str]:
    """Returns what options of the form KEY=VALUE say."""
    if wrong := [each for each in given if not all(each.partition("="))]:
        raise click.BadParameter(f"{wrong[0]!r} is not of the form {option.metavar}")
    return dict(each.split("=", 1) for each in given)


table_options = base.together(
    base.option("--label", "The column with the classes."),
    base.option("--labels", "Another table that has this column.", base.PATH),
    base.option(
        "--labels_id", "The column of --labels with the samples' names; default: detected."
    ),
    base.option(
        "--id", "The column with the samples' names (transposed: the genes').", name="id_column"
    ),
    base.option("--transpose", "Whether columns are samples, instead of rows.", bool),
    base.option("--drop", "A column or gene to omit; may be repeated.", multiple=True),
    base.option(
        "--duplicates",
        "How to treat genes that occur more than once.",
        ["error", "mean", "first"],
        default="error",
    ),
    base.option(
        "--log2",
        "Whether to take log2(x + 1), for P1B3 of the cell lines' features; default: False, or for"
        " new samples what the import did.",
        bool,
    ),
    base.number_option("--header_rows", "The number of header rows; default: detected."),
    base.number_option("--name_row", "The header row that has the genes' names.", 1),
    base.option("--decimal", "The decimal mark; default: detected.", [".", ","]),
)
"""How to read a user's table."""


@data_command.command(
    "import",
    cls=base.Command,
    examples=[
        "candle-p1 data import nt3 cohort.csv --label tissue --out own",
        "candle-p1 data import p1b2 counts.tsv.gz --transpose True --labels clinical.tsv"
        " --label type --group patient --log2 True --out own",
        "candle-p1 data import p1b3 responses.csv --features expression=rna.csv"
        " --features descriptors=drugs.csv --column GROWTH=viability --out own",
    ],
)
@base.benchmark_argument
@click.argument("table", type=base.PATH)
@base.option("--out", "The directory to write to.", base.PATH, name="directory", required=True)
@base.option("--test_table", "Another table, with the samples to test on.", base.PATH)
@base.option(
    "--test_fraction",
    "Without --test_table, the share of each class to test on.",
    FiniteRange(0, 1, min_open=True, max_open=True),
    default=0.2,
)
@base.option(
    "--group", "The column, such as patients, whose values are kept on one side of the split."
)
@base.number_option("--seed", "The seed of the split.", 2019, least=0, most=MAX_SEED)
@base.option(
    "--missing",
    "How to treat missing values: by default as an error, but P1B3 replaces them itself. The"
    " mean is that of the gene's training samples.",
    ["error", "zero", "mean"],
)
@base.option(
    "--unlabelled",
    "How to treat samples without a label, or incomplete responses.",
    ["error", "drop"],
    default="error",
)
@table_options
@base.option(
    "--features",
    "For P1B3, a table of features: expression, mirna, proteome, kinome, descriptors or latent;"
    " may be repeated.",
    multiple=True,
    callback=_pairs,
    metavar="ROLE=FILE",
)
@base.option(
    "--column",
    "For P1B3, the name that NSC, CELLNAME, LOG_CONCENTRATION or GROWTH has in TABLE.",
    name="columns",
    multiple=True,
    callback=_pairs,
    metavar="NAME=COLUMN",
)
@base.option("--dry_run", "Only show how the tables are interpreted.", is_flag=True)
def import_command(
    benchmark: str,
    table: Path,
    directory: Path,
    test_table: Path | None,
    features: dict[str, str],
    columns: dict[str, str],
    dry_run: bool,
    **options: Any,
) -> None:
    """Convert TABLE, with your own samples, into the files of BENCHMARK.

    TABLE is text (CSV, TSV or similar, also .gz, .bz2, .xz or .zst), Parquet, Feather, HDF5 written
    by pandas, or AnnData (.h5ad). Its rows are samples, and its columns of numbers are features,
    unless --transpose says otherwise. For P1B3, it has the responses. The command shows how it
    interprets the table.
    """
    from candle_p1.datasets import importing

    found, screen = find_benchmark(benchmark), Screen()
    if found.importable is None:
        raise ParameterError(f"{benchmark} cannot import tables")
    is_joined = bool(found.importable.features)
    of_others: dict[str, Any] = {"--features": features, "--column": columns}
    if is_joined:
        names = ("label", "labels", "labels_id", "id_column", "group")
        of_others = {f"--{name.removesuffix('_column')}": options[name] for name in names}
        of_others["--test_table"] = test_table
    for flag, given in of_others.items():
        if given:
            raise ParameterError(f"{flag} does not apply to {benchmark}: omit it")
    target = importing.ImportTarget(
        found.name, found.layouts, found.published.files, found.importable
    )
    options["missing"] = options["missing"] or (None if is_joined else "error")
    chosen = importing.ImportOptions(**options)
    if is_joined:
        tables = {role: Path(path) for role, path in features.items()}
        imported = importing.understand_responses(target, table, tables, columns, chosen)
    else:
        imported = importing.understand_samples(target, table, test_table, chosen)
    for note in imported.notes:
        screen.say(note)
    if dry_run:
        return
    with screen.making_data("writing") as progress:
        paths = importing.write_import(imported, directory, progress)
    for path in paths:
        screen.say(f"{path}: {path.stat().st_size / MIB:.1f} MiB")
    run = ["candle-p1", "run", benchmark, "--data_dir", str(paths[0].parent)]
    screen.say_command([*run, *imported.flags()], "train on them: ")


@data_command.command("info", cls=base.Command, examples=["candle-p1 data info nt3"])
@click.argument("benchmark", required=False, shell_complete=base.complete_benchmark)
@base.option("--data_dir", f"The directory to look in; {DEFAULT}.", base.PATH, name="directory")
@base.json_option("the same, with complete checksums,")
def info_command(benchmark: str | None, directory: Path | None, json_file: Path | None) -> None:
    """Show which files BENCHMARK (by default, each one) has, and how to get the missing ones."""
    names = [benchmark] if benchmark else list_benchmarks()
    found = [_info(find_benchmark(name), directory) for name in names]
    for info in found:
        _show(info)
    base.write_json(json_file, {"benchmarks": found})


@data_command.command("cache", cls=base.Command, examples=["candle-p1 data cache --clear"])
@base.option(
    "--cache_dir",
    "The directory; by default cache/ in the data directory ($CANDLE_DATA_DIR).",
    base.PATH,
    name="directory",
)
@base.option("--clear", "Remove all of them.", is_flag=True)
@base.json_option("the list")
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
    base.write_json(json_file, {"caches": shown, "cleared": clear})


def _info(benchmark: Benchmark, directory: Path | None) -> dict[str, Any]:
    published, recipe = benchmark.published, benchmark.recipe
    where = (directory or published.directory).absolute()
    fetch = f"candle-p1 data fetch {benchmark.argument}"
    fetch += f" --out {shlex.quote(str(where))}" * bool(directory)
    make = f"candle-p1 data make {benchmark.argument} --size full --out DIR"
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
            for each in (synthetic_sets(recipe) if recipe else [])
        ],
        "fetch": fetch + " --data_url URL" * (not published.url),
        "make": make if recipe else None,
    }


def _show(info: dict[str, Any]) -> None:
    screen = Screen()
    screen.say(info["title"])
    for file in info["files"]:
        facts = [file["state"]]
        if file["file_bytes"] is not None:
            facts.append(f"{file['file_bytes'] / MIB:.1f} MiB")
        if file["partial_bytes"]:
            facts.append(f"{file['partial_bytes'] / MIB:.1f} MiB downloaded")
        if file["sha256"]:
            facts.append(f"sha256 {file['sha256'][:12]}... {file['sha256_source']}")
        screen.say(f"{file['name']}: {', '.join(facts)}")
    screen.say(f"in {info['directory']}")
    screen.say(f"published at {info['data_url'] or 'no known URL'}")
    for each in info["synthetic_sets"]:
        whole = ", incomplete" * (not each["whole"])
        screen.say(f"synthetic, {each['size']}, seed {each['seed']}{whole}: {each['directory']}")
    for command_line, what in ((info["fetch"], "download"), (info["make"], "make synthetic files")):
        if command_line:
            screen.say_command(shlex.split(command_line), f"to {what}: ")
