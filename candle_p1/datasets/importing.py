"""Turning the tables that people have into a benchmark's files.

What a table means is decided once, and said before anything is written. How samples are read is the
business of `candle_p1.datasets.foreign`.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from candle_p1.data.directory import IMPORT_NAME, Importable, storing
from candle_p1.data.folds import divisions, kinds_of_groups
from candle_p1.data.names import place_features
from candle_p1.data.table import CsvLayout
from candle_p1.datasets.delimited import TextForm
from candle_p1.datasets.foreign import Cohort, SampleOptions, read_cohort, read_content
from candle_p1.datasets.synthetic import (
    MAX_SCALED,
    Progress,
    SyntheticFile,
    format_rows,
    locked,
    write_files,
)
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import content_sha256, write_atomically
from candle_p1.text import examples

MIN_LEAK, MIN_LEAK_OF_CLASS = 10, 3
"""Of fewer samples, a feature may tell the classes apart by chance."""
UNKNOWN = "unknown"
"""The class of samples without labels, where the benchmark needs none."""
ROWS_PER_BLOCK = 16
DECIMALS = 6
"""After which numbers in tables mostly end."""
FIELD_BYTES = 8
"""About how long a field of the files is."""


@dataclass(frozen=True)
class ImportOptions(SampleOptions):
    """How to understand tables, and what to do with them.

    Attributes:
        missing: What to do with missing values: "error", "zero" or "mean" (of the training samples,
            or of a table of features); None: leave them to the benchmark.
        test_fraction: The share of the samples to test on, where they have no table of their own.
        seed: Of the split.
    """

    test_fraction: float = 0.2
    seed: int = 2019


class ImportTarget(NamedTuple):
    """What a benchmark's files look like: its name; by role, layouts and names of files."""

    benchmark: str
    layouts: Mapping[str, CsvLayout]
    files: Mapping[str, str]
    importable: Importable


class Part(NamedTuple):
    """The content of a file: columns of text by name, and columns of numbers, float32."""

    text: Mapping[str, Iterable[str]]
    values: pd.DataFrame


class Imported(NamedTuple):
    """What is to be written.

    Attributes:
        target: What the files look like.
        parts: Their content, by role.
        facts: What ``import.json`` says of it.
        sources: The tables that it comes from.
        options: How they were understood.
        notes: What was understood, as clauses for the user.
    """

    target: ImportTarget
    parts: Mapping[str, Part]
    facts: Mapping[str, Any]
    sources: Sequence[Path]
    options: ImportOptions
    notes: Sequence[str]

    def flags(self) -> list[str]:
        """Returns the flags of a run that uses the tables of features."""
        importable, flags = self.target.importable, []
        companions = [companion for _, companion in importable.pairs]
        for key, (flag, without) in importable.flags.items():
            roles = [role for role, its_key in importable.features.items() if its_key == key]
            given = [role for role in roles if role in self.parts and role not in companions]
            flags += [f"--{flag}", *(given or [without])]
        return flags


def understand_samples(
    target: ImportTarget, table: Path, test_table: Path | None, options: ImportOptions
) -> Imported:
    """Reads tables of samples and decides what goes where; nothing is written.

    Raises:
        DataError: A table cannot be used; the message says what to pass.
        ParameterError: Options contradict each other.
    """
    importable, layout = target.importable, target.layouts["train"]
    if importable.needs_labels and options.label is None:
        raise ParameterError(
            f"{target.benchmark} needs the class of each sample: pass --label COLUMN, and --labels"
            " FILE if it is in another table"
        )
    if options.labels is not None and (options.label or options.group) is None:
        raise ParameterError("--labels needs --label COLUMN or --group COLUMN")

    def read(path: Path) -> Cohort:
        samples = read_cohort(path, options)
        label = samples.about.get("label", UNKNOWN)
        return replace(samples, about=samples.about.assign(label=label))

    train = read(table)
    _refuse_leak(train)
    notes = [*train.notes]
    if test_table is None:
        train, test = _split(train, options)
    else:
        test = _beside(read(test_table), train)
        notes += [f"{test_table.name}: {note}" for note in test.notes]
    sides = {"train": train, "test": test}
    means = train.frame.mean() if options.missing == "mean" else None
    values = {role: _filled(side, means) for role, side in sides.items()}
    num_filled = sum(int(side.frame.isna().to_numpy().sum()) for side in sides.values())
    if num_filled and means is not None:
        notes.append(f"{num_filled:,} missing values are filled in by mean")
    labels = {role: side.about["label"] for role, side in sides.items()}

    # Where files name the classes, the benchmark numbers them in the order of their names.
    # Where it numbers them, their names may be numbers, which come first, in their order.
    def order(name: str) -> tuple[float, str]:
        is_number = not layout.header and name.replace(".", "", 1).isdecimal()
        return float(name) if is_number else float("inf"), name

    classes = sorted(labels["train"].unique(), key=order)
    if unknown := sorted(set(labels["test"]).difference(classes)):
        raise DataError(f"no training sample has the class {examples(unknown)}", test.path)
    if importable.needs_labels and len(classes) < 2:
        raise DataError(f"all samples have the class {classes[0]!r}", table)
    counts = {
        each: {role: int((of_role == each).sum()) for role, of_role in labels.items()}
        for each in classes
    }
    features, (first, *_) = [*train.frame.columns], train.frame.index
    shown = ", ".join(f"{value:g}" for value in values["train"].iloc[0, :4])
    notes.append(
        f"{len(train.frame):,} samples to train on and {len(test.frame):,} to test on,"
        f" {len(features):,} features ({', '.join(features[:3])}, …); {first} begins with {shown}"
    )
    for name, of_class in counts.items():
        notes.append(
            f"class {name}: {of_class['train']:,} to train on, {of_class['test']:,} to test on"
        )
    numbers = {name: str(number) for number, name in enumerate(classes)}
    parts = {
        role: Part(
            dict(zip(layout.text_columns, (values[role].index, of_role), strict=True))
            if layout.header
            else {"": of_role.map(numbers)},
            values[role],
        )
        for role, of_role in labels.items()
    }
    number = importable.class_parameter
    facts = {
        "parameters": {number: len(classes)} if number else {},
        "classes": classes,
        "counts": counts,
        "features": features,
        "samples": {role: [*of_role.index] for role, of_role in values.items()},
    }
    if "group" in train.about:
        facts["groups"] = {role: [*side.about["group"]] for role, side in sides.items()}
    sources = [path for path in (table, test_table, options.labels) if path]
    return Imported(target, parts, facts, sources, options, notes)


def _refuse_leak(samples: Cohort) -> None:
    """Raises DataError if a feature is the class in disguise: constant in each, but apart."""
    of_classes = samples.frame.groupby(samples.about["label"])
    low, high, num = of_classes.min(), of_classes.max(), of_classes.size()
    is_leak = (low == high).all() & (low != low.iloc[0]).any()
    if is_leak.any() and num.sum() >= MIN_LEAK and num.min() >= MIN_LEAK_OF_CLASS:
        names = examples(is_leak.index[is_leak])
        raise DataError(
            f"{names} reveals the class of every sample: omit it with --drop", samples.path
        )


def _filled(samples: Cohort, means: pd.Series[float] | None) -> pd.DataFrame:
    """Returns the values, the missing ones replaced by means if there are any.

    Raises:
        DataError: A feature has no mean.
    """
    if means is None:
        return samples.frame
    if (empty := means.index[means.isna()]).size:
        problem = f"no training sample has a value of {examples(empty)}: drop it (--drop)"
        raise DataError(problem, samples.path)
    return samples.frame.fillna(means)


def _beside(test: Cohort, train: Cohort) -> Cohort:
    """Returns test samples with the features of the training samples, in their order.

    Raises:
        DataError: Some are missing, or a sample or group is on both sides.
    """
    units = [(side.frame.index, side.about.get("group", ())) for side in (test, train)]
    for here, there in zip(*units, strict=True):
        if both := sorted(set(here).intersection(there)):
            problem = f"{examples(both)} are in {train.path}, too: test on others"
            raise DataError(problem, test.path)
    wanted = [*train.frame.columns]
    columns, notes = place_features(wanted, [*test.frame.columns], test.path)
    frame = test.frame if columns is None else test.frame.iloc[:, columns]
    return replace(test, frame=frame, notes=[*test.notes, *notes])


def _split(samples: Cohort, options: ImportOptions) -> tuple[Cohort, Cohort]:
    """Returns training and test samples: classes in equal shares, no group on both sides.

    Raises:
        DataError: There are too few samples or groups of a class.
    """
    from sklearn.model_selection import StratifiedShuffleSplit

    path, labels = samples.path, samples.about["label"]
    groups = samples.about.get("group", pd.Series(labels.index, labels.index))
    kinds = kinds_of_groups(labels, groups)
    if few := [name for name, num in Counter(kinds).items() if num < 2]:
        what = repr(options.group) if options.group else "sample"
        raise DataError(f"there is only one {what} of the class {examples(few)}", path)
    splitter = StratifiedShuffleSplit(1, test_size=options.test_fraction, random_state=options.seed)
    try:
        (is_test,) = divisions(splitter, kinds, groups)
    except ValueError as error:
        raise DataError(f"the samples cannot be split: {error}", path) from error
    train, test = samples.take(~is_test), samples.take(is_test)
    if lacking := set(train.about["label"]).symmetric_difference(test.about["label"]):
        raise DataError(
            f"the class {examples(sorted(lacking))} would not be on both sides: pass another"
            " --seed or --test_fraction, or --test_table",
            path,
        )
    return train, test


def understand_responses(
    target: ImportTarget,
    table: Path,
    features: Mapping[str, Path],
    columns: Mapping[str, str],
    options: ImportOptions,
) -> Imported:
    """Reads responses and the features of what they name; nothing is written.

    Args:
        target: What the files look like.
        table: The responses.
        features: Tables of features, by role.
        columns: What the columns of the responses are called there, by the benchmark's names.
        options: How to understand the tables.

    Raises:
        DataError: A table cannot be used; the message says what to pass.
        ParameterError: A role or a column is unknown, or a table is missing.
    """
    importable, key_names = target.importable, target.layouts["response"].text_columns
    names = {name: name for name in (*key_names, *importable.quantities)}
    for flag, given, known in (
        ("--column", columns, names),
        ("--features", features, importable.features),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ParameterError(f"{flag} {unknown[0]}: choose from {', '.join(known)}")
    for pair in importable.pairs:
        if len(features.keys() & set(pair)) == 1:
            problem = f"{' and '.join(pair)} are used together: pass --features for both"
            raise ParameterError(problem)
    names |= columns
    keys, values, notes = _read_responses(target, table, names, options)
    parts = {"response": Part({key: keys[key] for key in key_names}, values)}
    usable, not_dropped = {key: set(keys[key]) for key in key_names}, {*options.drop}
    for role, path in features.items():
        key = importable.features[role]
        reading = replace(options, log2=options.log2 and key in importable.levels)
        wanted = [*dict.fromkeys(keys[key])]
        found = read_cohort(path, reading, wanted, _spelling(key, importable))
        here = found.frame.index
        content = _filled(found, found.frame.mean() if options.missing == "mean" else None)
        parts[role] = Part({target.layouts[role].text_columns[0]: here}, content)
        usable[key] &= {*here}
        not_dropped &= {*found.not_dropped}
        lacking, idle = [*pd.Index(wanted).difference(here)], [*here.difference(wanted)]
        num_rows = int(keys[key].isin(lacking).sum())
        notes += [
            *(f"{path.name}: {note}" for note in found.notes),
            f"{path.name}: {content.shape[1]:,} features of {len(wanted) - len(lacking):,} of the"
            f" {len(wanted):,} names in {names[key]}"
            + f"; none of {examples(lacking)}, in {num_rows:,} responses" * bool(lacking)
            + f"; {len(idle):,} other rows have no responses ({examples(idle)})" * bool(idle),
        ]
    for name in not_dropped:
        raise DataError(f"no table of features has {name!r} to drop", table)
    random, reserved = np.random.default_rng(options.seed), {}
    for role, key in importable.reserved.items():
        if len(usable[key]) < 2:
            raise DataError(f"fewer than 2 names in {names[key]} are in all tables", table)
        num = max(1, round(len(usable[key]) * options.test_fraction))
        chosen = sorted(random.permutation(sorted(usable[key]))[:num].tolist())
        parts[role], reserved[role] = Part({key: chosen}, pd.DataFrame(index=chosen)), chosen
        notes.append(f"{num:,} names in {names[key]} are reserved for testing: {examples(chosen)}")
    facts = {"parameters": {}, "columns": names, "reserved": reserved}
    return Imported(target, parts, facts, [table, *features.values()], options, notes)


def _read_responses(
    target: ImportTarget, table: Path, names: Mapping[str, str], options: ImportOptions
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Returns the columns with names, those with numbers, and notes.

    Raises:
        DataError: A column is missing, has gaps, or does not seem to mean what it should.
    """
    key_names, quantities = target.layouts["response"].text_columns, target.importable.quantities
    form = TextForm(options.header_rows, options.name_row, options.decimal)
    are_text = [names[key] for key in key_names]
    content = read_content(table, form, lambda _, name: name in are_text)
    for name, there in names.items():
        found, what = (content.text, "text") if name in key_names else (content.numbers, "numbers")
        if there not in found:
            problem = f"there is no column {there!r} of {what}, but {', '.join(map(repr, found))}:"
            raise DataError(f"{problem} pass --column {name}=COLUMN", table)
    keys = pd.DataFrame({key: content.text[names[key]] for key in key_names})
    values = pd.DataFrame({name: content.numbers[names[name]] for name in quantities})
    notes = [*content.notes]
    is_whole = values.notna().all(axis=1) & (keys != "").all(axis=1)
    if not is_whole.all():
        problem = f"{int((~is_whole).sum()):,} of {len(values):,} responses lack a name or a number"
        if options.unlabelled == "error":
            where = f"the first in row {int(is_whole.argmin()) + 1} of the data"
            raise DataError(f"{problem}, {where}: correct them, or pass --unlabelled drop", table)
        notes.append(f"{problem} and are left out")
        keys, values = keys[is_whole], values[is_whole]
    for name, quantity in quantities.items():
        span = f"{names[name]}, from {values[name].min():g} to {values[name].max():g},"
        if not quantity.is_plausible(values[name].to_numpy()):
            raise DataError(f"{span} does not seem to be {quantity.meaning}: convert it", table)
        notes.append(f"{span} is {quantity.meaning}")
    for key in key_names:
        keys[key] = keys[key].map(_spelling(key, target.importable))
    return keys, values, notes


def _spelling(key: str, importable: Importable) -> Callable[[str], str]:
    return (lambda name: name.replace(".", ":")) if key in importable.levels else str


def write_import(
    imported: Imported, directory: Path, progress: Progress | None = None
) -> list[Path]:
    """Writes a benchmark's files and ``import.json``; returns the files.

    Raises:
        DataError: The directory cannot be written to, or has other files with these names.
    """
    directory, target = directory.absolute(), imported.target
    names = [target.files[role] for role in imported.parts]
    there = [name for name in (*names, IMPORT_NAME) if (directory / name).exists()]
    if there:
        problem = f"{', '.join(there)} would be replaced: remove them, or name another --out"
        raise DataError(problem, directory)
    facts = {
        "benchmark": target.benchmark,
        "sources": {
            str(path.absolute()): {"bytes": path.stat().st_size, "sha256": content_sha256(path)}
            for path in imported.sources
        },
        "options": asdict(imported.options),
        "notes": imported.notes,
        **imported.facts,
    }
    files = [
        SyntheticFile(target.files[role], FIELD_BYTES * part.values.size, _rows(part, layout))
        for role, part in imported.parts.items()
        for layout in [target.layouts[role]]
    ]
    with storing(directory, "name a directory with enough space by --out"), locked(directory):
        facts["files"] = write_files(directory, files, progress)
        content = json.dumps(facts, indent=1, default=str) + "\n"
        write_atomically(directory / IMPORT_NAME, content)
    return [directory / name for name in names]


def _rows(part: Part, layout: CsvLayout) -> Iterator[bytes]:
    """Yields the content of a file, some rows at a time, with the digits that float32 needs."""
    separator, values = layout.separator, part.values.to_numpy(np.float32)

    def line(cells: Iterable[str]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=separator, lineterminator="").writerow(cells)
        return text.getvalue().encode()

    if layout.header:
        yield line([*part.text, *part.values.columns]) + b"\n"
    prefixes = [line(cells) for cells in zip(*part.text.values(), strict=True)]
    options: Any = {"separator": separator.encode(), "strip_zeros": True, "missing": b"nan"}
    for start in range(0, len(values), ROWS_PER_BLOCK):
        block = slice(start, start + ROWS_PER_BLOCK)
        rows, rounded = values[block], np.round(values[block].astype(np.float64), DECIMALS)
        is_small = np.nan_to_num(np.abs(rounded)).max(initial=0) * 10**DECIMALS <= MAX_SCALED
        if is_small and np.array_equal(rounded.astype(np.float32), rows, equal_nan=True):
            yield format_rows(prefixes[block], rounded, decimals=DECIMALS, **options)
            continue
        for prefix, row in zip(prefixes[block], rows.tolist(), strict=True):
            fields = ",%.9g" * len(row) % tuple(row)
            yield prefix + fields.replace(",", separator).encode() + b"\n"
