"""Turning the tables that people have into a benchmark's files.

What a table means is decided once, here, and said before anything is written: which way it lies,
which column names the samples, what their classes are, which samples are for testing. Where a table
can be understood in several ways, the error says what to pass.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.data.directory import IMPORT_NAME
from candle_p1.data.table import CsvLayout, repeated
from candle_p1.datasets.foreign import ForeignTable, ReadOptions, read_foreign
from candle_p1.datasets.registry import Progress, locked, partial_path, storing
from candle_p1.errors import DataError, ParameterError
from candle_p1.files import content_sha256, write_atomically

Matrix = NDArray[np.float32]
ENSEMBL = re.compile(r"ENS[A-Z]{0,4}G\d{6,}(\.\d+)?(_\w+)?")
GENE_COLUMNS = (
    *("gene", "genes", "gene_id", "geneid", "gene_name", "gene_symbol", "symbol", "hugo_symbol"),
    *("hgnc_symbol", "ensembl", "ensembl_id", "entrez_gene_id", "id_ref", "probe", "probe_id"),
)
"""What the column of genes is called in tables whose columns are samples."""
ANNOTATIONS = ("entrez_gene_id", "entrez", "start", "end", "length", "chromosome", "chr", "strand")
"""Columns of numbers that describe genes."""
SUMMARY = re.compile(r"N_(unmapped|multimapping|noFeature|ambiguous)|__\w+")
"""The rows of STAR's and HTSeq's counts that are no genes."""
SAMPLE_COLUMNS = ("id", "sample", "sample_id", "case", "case_id", "patient", "patient_id", "age")
"""Columns of numbers that describe samples."""
MIN_LEAK = 10
"""Of fewer samples, a feature may tell the classes apart by chance."""
VERSION = re.compile(r"\.\d+")
MAX_EXAMPLES = 3
UNKNOWN = "unknown"
"""The class of samples without labels, where the benchmark needs none."""
ROWS_PER_BLOCK = 16


@dataclass(frozen=True)
class ImportOptions:
    """How to understand a table, and what to do with it; most can be told from the table.

    Attributes:
        transpose: Whether columns are samples; None: no, unless it looks so, which is an error.
        id_column: The column that names the samples, or the genes if columns are samples.
        label: The column with the classes, in the table or in the file of labels.
        labels: Another table, with a row for each sample.
        group: The column whose values must not be on both sides of the split, such as patients.
        labels_id: The column that names the samples there; None: the one that fits.
        drop: Columns or genes that are no features.
        header_rows, name_row, decimal: See `candle_p1.datasets.foreign.ReadOptions`.
        duplicates: What to do with features of the same name: "error", "mean" or "first".
        missing: What to do with missing values: "error", "zero" or "mean", that of the feature in
            the training samples.
        unlabelled: What to do with samples without a label: "error" or "drop".
        log2: Whether to take log2(x + 1).
        test_fraction: The share of the samples to test on, where they have no table of their own.
        seed: Of the split.
    """

    transpose: bool | None = None
    id_column: str | None = None
    label: str | None = None
    labels: Path | None = None
    labels_id: str | None = None
    group: str | None = None
    drop: Sequence[str] = ()
    header_rows: int | None = None
    name_row: int = 1
    decimal: str | None = None
    duplicates: str = "error"
    missing: str = "error"
    unlabelled: str = "error"
    log2: bool = False
    test_fraction: float = 0.2
    seed: int = 2019


@dataclass
class Cohort:
    """Samples, as they were understood.

    Attributes:
        path: The table that they come from.
        ids: Their names.
        features: The names of the features.
        values: float32, shape (samples, features).
        labels: The name of each sample's class; None if none were asked for.
        groups: What each sample belongs to; None likewise.
        notes: What was understood, as clauses for the user.
    """

    path: Path
    ids: list[str]
    features: list[str]
    values: Matrix
    labels: list[str] | None = None
    groups: list[str] | None = None
    notes: list[str] = field(default_factory=list)

    def take(self, rows: NDArray[np.int64]) -> Cohort:
        """Returns some of the samples."""
        taken = [
            None if of_rows is None else [of_rows[i] for i in rows]
            for of_rows in (self.labels, self.groups)
        ]
        ids = [self.ids[i] for i in rows]
        return replace(self, ids=ids, values=self.values[rows], labels=taken[0], groups=taken[1])


def read_cohort(path: Path, options: ImportOptions) -> Cohort:
    """Returns the samples in a table, with unique names of samples and features.

    Raises:
        DataError: The table cannot be read, or it can be understood in several ways.
    """
    in_table = (options.label, options.group) if options.labels is None else ()
    table = read_foreign(
        path,
        ReadOptions(
            options.header_rows,
            options.name_row,
            options.decimal,
            text={name for name in (options.id_column, *in_table) if name},
            skipped=options.drop,
        ),
    )
    cohort = (_transposed if _lies_across(table, options) else _upright)(table, options)
    doubled = repeated(cohort.ids)
    if doubled:
        raise DataError(
            f"several samples are called {_examples(doubled)}: pass --id, which column names them",
            path,
        )
    dropped = {*table.skipped, *_name_features(cohort, options)}
    if unknown := [name for name in options.drop if name not in dropped]:
        raise DataError(f"there is no column or feature {unknown[0]!r} to drop", path)
    if options.labels is not None:
        cohort = _join_labels(cohort, options)
    if cohort.labels is not None:
        cohort = _labelled(cohort, options)
    _check_values(cohort, options)
    return cohort


def _lies_across(table: ForeignTable, options: ImportOptions) -> bool:
    """Whether the columns are samples.

    Raises:
        DataError: They seem to be, and nobody has said so.
    """
    if options.transpose is not None:
        return options.transpose
    if table.is_across is not None:
        return table.is_across
    name, first = _names_of_rows(table, options)
    sampled = (first or [])[:1000]
    num_genes = sum(bool(ENSEMBL.fullmatch(each)) for each in sampled)
    is_long = len(table) > max(1000, 3 * len(table.names))
    if 2 * num_genes > len(sampled) or name.strip().lower() in GENE_COLUMNS or is_long:
        raise DataError(
            f"its {len(table):,} rows seem to be genes ({_examples(sampled)}), so that its columns"
            " are samples: pass --transpose True if so, else --transpose False",
            table.path,
        )
    return False


def _names_of_rows(table: ForeignTable, options: ImportOptions) -> tuple[str, list[str] | None]:
    """Returns what names the rows, and its column's name: that asked for, the index, the first."""
    if options.id_column is not None:
        return options.id_column, _column(table, options.id_column)
    if table.index is not None:
        return "", table.index
    others = (options.label, options.group) if options.labels is None else ()
    return next(
        ((name, text) for name, text in table.text.items() if name not in others), ("", None)
    )


def _column(table: ForeignTable, name: str) -> list[str]:
    if name not in table.text:
        there = ", ".join(map(repr, table.text)) or "none"
        problem = f"there is no column {name!r}; its columns of text are {there}"
        raise DataError(problem, table.path)
    return table.text[name]


def _transposed(table: ForeignTable, options: ImportOptions) -> Cohort:
    name, genes = _names_of_rows(table, options)
    if genes is None:
        raise DataError("no column names the genes: pass --id COLUMN", table.path)
    if options.labels is None and (options.label or options.group):
        problem = "where columns are samples, what they are needs a table: pass --labels FILE"
        raise DataError(problem, table.path)
    others = [each for each in table.names if each.strip().lower() in ANNOTATIONS]
    if others:
        problem = f"{_examples(others)} may describe the genes, not be samples: --drop them"
        raise DataError(problem, table.path)
    notes = [*table.notes, f"columns are samples; genes are named by the column {name!r}"]
    notes += _left_out(table, {name})
    kept = [row for row, gene in enumerate(genes) if not SUMMARY.fullmatch(gene)]
    if len(kept) < len(genes):
        notes.append(f"{len(genes) - len(kept)} rows of totals are left out (N_unmapped and alike)")
    values = np.ascontiguousarray(table.values[kept].T)
    return Cohort(table.path, table.names, [genes[row] for row in kept], values, notes=notes)


def _upright(table: ForeignTable, options: ImportOptions) -> Cohort:
    name, ids = _names_of_rows(table, options)
    notes = [*table.notes]
    if ids is None:
        ids = [f"{table.path.name}-{number}" for number in range(1, len(table) + 1)]
        notes.append("nothing names the samples, so they are numbered")
    else:
        notes.append(f"samples are named by the column {name!r}" if name else "samples are named")
    in_table = options.labels is None
    labels = _column(table, options.label) if options.label and in_table else None
    groups = _column(table, options.group) if options.group and in_table else None
    used = {name, *((options.label, options.group) if in_table else ())}
    notes += _left_out(table, used)
    odd = [each for each in table.names if each.strip().lower() in SAMPLE_COLUMNS]
    if odd:
        problem = f"{_examples(odd)} would be features: pass --id or --drop for each"
        raise DataError(problem, table.path)
    cohort = Cohort(table.path, [*ids], table.names, table.values, labels, groups, notes)
    _check_leak(cohort)
    return cohort


def _check_leak(cohort: Cohort) -> None:
    """Raises DataError if a feature is the label in disguise: constant in each class, but apart."""
    labels = cohort.labels
    if labels is None or len(labels) < MIN_LEAK or not cohort.features:
        return
    kinds = np.array(labels)
    of_classes = [cohort.values[kinds == kind] for kind in sorted(set(labels))]
    low = np.stack([values.min(axis=0) for values in of_classes])
    high = np.stack([values.max(axis=0) for values in of_classes])
    is_leak = (low == high).all(axis=0) & (low != low[0]).any(axis=0)
    if is_leak.any():
        names = [cohort.features[column] for column in np.flatnonzero(is_leak)]
        problem = f"{_examples(names)} tells the class of every sample: --drop it"
        raise DataError(problem, cohort.path)


def _left_out(table: ForeignTable, used: Collection[str | None]) -> list[str]:
    others = [name for name in table.text if name not in used]
    return [f"columns of text that are left out: {_examples(others)}"] * bool(others)


def _name_features(cohort: Cohort, options: ImportOptions) -> list[str]:
    """Takes versions off Ensembl's identifiers, drops features, and merges those of one name.

    Returns what was dropped.
    """
    names = [name.strip() for name in cohort.features]
    if "" in names:
        problem = f"feature {names.index('') + 1} has no name: name it or remove it"
        raise DataError(problem, cohort.path)
    short = [VERSION.sub("", name, count=1) if ENSEMBL.fullmatch(name) else name for name in names]
    if short != names:
        cohort.notes.append("the versions of Ensembl's identifiers are left out")
    places: dict[str, list[int]] = {}
    for place, (name, long_name) in enumerate(zip(short, names, strict=True)):
        if name not in options.drop and long_name not in options.drop:
            places.setdefault(name, []).append(place)
    if not places:
        raise DataError("it has no columns of numbers, which would be the features", cohort.path)
    doubled = [name for name, of_name in places.items() if len(of_name) > 1]
    if doubled and options.duplicates == "error":
        raise DataError(
            f"{len(doubled):,} features occur more than once, such as {_examples(doubled)}: pass"
            " --duplicates mean or --duplicates first",
            cohort.path,
        )
    merged = cohort.values[:, [of_name[0] for of_name in places.values()]]
    if options.duplicates == "mean":
        for column, of_name in enumerate(places.values()):
            if len(of_name) > 1:
                merged[:, column] = _means(cohort.values[:, of_name], axis=1)
    if doubled:
        what = "averaged" if options.duplicates == "mean" else "represented by the first of each"
        cohort.notes.append(f"{len(doubled):,} features that occur more than once are {what}")
    cohort.features, cohort.values = [*places], merged
    return [name for name in options.drop if name in short or name in names]


def _means(values: Matrix, axis: int) -> Matrix:
    """Returns means without missing values; NaN where there are no others."""
    num = (~np.isnan(values)).sum(axis=axis)
    sums = np.nansum(values, axis=axis, dtype=np.float64)
    return np.where(num, sums / np.maximum(num, 1), np.nan).astype(np.float32)


def _join_labels(cohort: Cohort, options: ImportOptions) -> Cohort:
    """Takes labels and groups from their own table, by the column that names the most samples."""
    assert options.labels is not None
    table = read_foreign(options.labels, ReadOptions(header_rows=1, is_text=True))
    candidates = dict(table.text) | ({"": table.index} if table.index is not None else {})
    if options.labels_id is not None:
        candidates = {options.labels_id: _column(table, options.labels_id)}
    wanted = set(cohort.ids)
    matched = {name: len(wanted.intersection(column)) for name, column in candidates.items()}
    most = max(matched.values(), default=0)
    best, *others = [name for name, num in matched.items() if num == most] or [""]
    if not most:
        example = next(iter(candidates.values()), [])
        raise DataError(
            f"no column has the names of the samples in {cohort.path}, such as"
            f" {_examples(cohort.ids)}; its first one has {_examples(example)}",
            table.path,
        )
    if any(candidates[other] != candidates[best] for other in others):
        raise DataError(
            f"the columns {_examples([best, *others])} name the samples equally well: pass"
            " --labels_id, which does",
            table.path,
        )
    rows: dict[str, int] = {}
    for row, name in enumerate(candidates[best]):
        if name in wanted and name in rows:
            raise DataError(f"there are several rows for the sample {name!r}", table.path)
        rows[name] = row
    cohort.notes.append(
        f"{table.path.name}: {matched[best]:,} of {len(cohort.ids):,} samples found by"
        f" {f'the column {best!r}' if best else 'its first column'}"
    )

    def of_samples(name: str | None) -> list[str] | None:
        if name is None:
            return None
        column = _column(table, name)
        return [column[rows[each]] if each in rows else "" for each in cohort.ids]

    cohort = replace(cohort, labels=of_samples(options.label), groups=of_samples(options.group))
    _check_leak(cohort)
    return cohort


def _labelled(cohort: Cohort, options: ImportOptions) -> Cohort:
    """Returns the samples that have a label."""
    assert cohort.labels is not None
    lacking = [name for name, label in zip(cohort.ids, cohort.labels, strict=True) if not label]
    if not lacking:
        return cohort
    if options.unlabelled == "error":
        raise DataError(
            f"{len(lacking):,} of {len(cohort.ids):,} samples have no label, such as"
            f" {_examples(lacking)}: label them, or pass --unlabelled drop",
            cohort.path,
        )
    cohort.notes.append(f"{len(lacking):,} samples without a label are left out")
    return cohort.take(np.flatnonzero([bool(label) for label in cohort.labels]))


def _check_values(cohort: Cohort, options: ImportOptions) -> None:
    """Takes logarithms; raises DataError for values that no network can take."""

    def refuse(is_bad: NDArray[np.bool_], what: str) -> None:
        if is_bad.any():
            row, column = np.argwhere(is_bad)[0]
            raise DataError(
                f"{int(is_bad.sum()):,} values {what}, such as {cohort.features[column]!r} of the"
                f" sample {cohort.ids[row]!r}",
                cohort.path,
            )

    refuse(np.isinf(cohort.values), "are infinite")
    if options.log2:
        refuse(cohort.values < 0, "are negative, so that log2(x + 1) makes no sense")
        np.log2(cohort.values + 1, out=cohort.values)
    if options.missing == "error":
        refuse(np.isnan(cohort.values), "are missing (--missing zero or mean fills them in)")


def aligned(test: Cohort, train: Cohort) -> Cohort:
    """Returns test samples with the training samples' features, in their order.

    Raises:
        DataError: Some are missing, or a sample is on both sides.
    """
    for here, there in ((test.ids, train.ids), (test.groups or [], train.groups or [])):
        if both := sorted(set(here).intersection(there)):
            problem = f"{_examples(both)} are in {train.path}, too: test on others"
            raise DataError(problem, test.path)
    place = {name: i for i, name in enumerate(test.features)}
    lacking = [name for name in train.features if name not in place]
    if lacking:
        raise DataError(
            f"it lacks {len(lacking):,} of the {len(train.features):,} features of {train.path},"
            f" such as {_examples(lacking)}",
            test.path,
        )
    columns = [place[name] for name in train.features]
    if columns != [*range(len(test.features))]:
        test.notes.append(f"its features are put in the order of {train.path.name}")
        test = replace(test, features=train.features, values=test.values[:, columns])
    return test


def split(cohort: Cohort, options: ImportOptions) -> tuple[Cohort, Cohort]:
    """Returns training and test samples: classes in equal shares, no group on both sides.

    Raises:
        DataError: There are too few samples or groups of a class.
    """
    from sklearn.model_selection import StratifiedShuffleSplit

    labels = cohort.labels or [UNKNOWN] * len(cohort.ids)
    units = cohort.groups or cohort.ids
    of_units: dict[str, Counter[str]] = {}
    for unit, label in zip(units, labels, strict=True):
        of_units.setdefault(unit, Counter())[label] += 1
    kinds = [counts.most_common(1)[0][0] for counts in of_units.values()]
    what = repr(options.group) if cohort.groups else "sample"
    few = [kind for kind, num in Counter(kinds).items() if num < 2]
    if few:
        raise DataError(f"there is only one {what} of the class {_examples(few)}", cohort.path)
    splitter = StratifiedShuffleSplit(1, test_size=options.test_fraction, random_state=options.seed)
    try:
        chosen = next(iter(splitter.split(np.zeros(len(kinds)), kinds)))[1]
    except ValueError as error:
        raise DataError(f"the samples cannot be split: {error}", cohort.path) from error
    names = [*of_units]
    tested = {names[unit] for unit in chosen}
    is_test = np.array([unit in tested for unit in units])
    train, test = (cohort.take(np.flatnonzero(which)) for which in (~is_test, is_test))
    lacking = set(labels).difference(test.labels or labels) | set(labels).difference(
        train.labels or labels
    )
    if lacking:
        raise DataError(
            f"the class {_examples(sorted(lacking))} would not be on both sides: pass another"
            " --seed or --test_fraction, or --test_table",
            cohort.path,
        )
    return train, test


def fill_missing_values(train: Cohort, test: Cohort, how: str) -> None:
    """Replaces missing values by zero or by the mean of the feature's training values.

    Raises:
        DataError: A feature has no value in any training sample.
    """
    gaps = [np.isnan(cohort.values) for cohort in (train, test)]
    num = sum(int(gap.sum()) for gap in gaps)
    if not num:
        return
    fill = np.zeros(len(train.features), np.float32)
    if how == "mean":
        empty = gaps[0].all(axis=0)
        if empty.any():
            names = [train.features[i] for i in np.flatnonzero(empty)]
            problem = f"no training sample has a value of {_examples(names)}: drop it (--drop)"
            raise DataError(problem, train.path)
        fill = _means(train.values, axis=0)
    for cohort, gap in zip((train, test), gaps, strict=True):
        np.copyto(cohort.values, np.broadcast_to(fill, gap.shape), where=gap)
    train.notes.append(f"{num:,} missing values are filled in by {how}")


@dataclass(frozen=True)
class ImportTarget:
    """What a benchmark's files look like.

    Attributes:
        benchmark: Its name.
        layout: The layout of both files: either a class number and no header, or
            ``case_id,cancer_type,<features>``.
        files: Their names, by role: train and test.
        needs_labels: Whether samples need classes.
        class_parameter: The parameter that is the number of classes; None: it follows the files.
    """

    benchmark: str
    layout: CsvLayout
    files: Mapping[str, str]
    needs_labels: bool
    class_parameter: str | None = None


@dataclass(frozen=True)
class ImportedSet:
    """What is to be written.

    Attributes:
        target: What the files look like.
        train: The training samples.
        test: The test samples.
        classes: The names of the classes; a sample's number is the place of its class.
        options: How the tables were understood.
        notes: What was understood, as clauses for the user.
    """

    target: ImportTarget
    train: Cohort
    test: Cohort
    classes: list[str]
    options: ImportOptions
    notes: list[str]

    def counts(self) -> dict[str, tuple[int, int]]:
        """Returns how many training and test samples each class has."""
        train, test = (Counter(_labels(cohort)) for cohort in (self.train, self.test))
        return {name: (train[name], test[name]) for name in self.classes}


def understand(
    target: ImportTarget, table: Path, test_table: Path | None, options: ImportOptions
) -> ImportedSet:
    """Reads the tables and decides what goes where; nothing is written.

    Raises:
        DataError: A table cannot be used; the message says what to pass.
        ParameterError: Options contradict each other.
    """
    if target.needs_labels and options.label is None:
        raise ParameterError(
            f"{target.benchmark} needs the class of each sample: pass --label COLUMN, and --labels"
            " FILE if it is in another table"
        )
    if options.labels is not None and (options.label or options.group) is None:
        raise ParameterError("--labels needs --label COLUMN or --group COLUMN")
    cohort = read_cohort(table, options)
    if test_table is None:
        train, test = split(cohort, options)
    else:
        train, test = cohort, aligned(read_cohort(test_table, options), cohort)
    notes = [*cohort.notes, *(f"{test.path.name}: {note}" for note in test.notes if test_table)]
    before = len(train.notes)
    fill_missing_values(train, test, options.missing)
    notes += train.notes[before:]
    # Where files name the classes, the benchmark numbers them in the order of their names.
    order = str if target.layout.header else _order
    classes = sorted(set(_labels(train)), key=order)
    unknown = sorted(set(_labels(test)).difference(classes))
    if unknown:
        raise DataError(f"no training sample has the class {_examples(unknown)}", test.path)
    if target.needs_labels and len(classes) < 2:
        raise DataError(f"all samples have the class {classes[0]!r}", train.path)
    return ImportedSet(target, train, test, classes, options, notes)


def write_import(
    imported: ImportedSet, directory: Path, progress: Progress | None = None
) -> list[Path]:
    """Writes a benchmark's files and ``import.json``; returns the files.

    Raises:
        DataError: The directory cannot be written to, or has other files with these names.
    """
    directory = directory.absolute()
    names = imported.target.files
    there = [name for name in (*names.values(), IMPORT_NAME) if (directory / name).exists()]
    if there:
        problem = f"{', '.join(there)} would be replaced: remove them, or name another --out"
        raise DataError(problem, directory)
    cohorts = {"train": imported.train, "test": imported.test}
    with storing(directory, "name a directory with enough space by --out"), locked(directory):
        partial = {role: partial_path(directory, name) for role, name in names.items()}
        try:
            for role, path in partial.items():
                _write(cohorts[role], imported, path, names[role], progress)
            files = {
                names[role]: {"bytes": path.stat().st_size, "sha256": content_sha256(path)}
                for role, path in partial.items()
            }
            for role, path in partial.items():
                path.replace(directory / names[role])
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
        content = json.dumps(_manifest(imported) | {"files": files}, indent=1) + "\n"
        write_atomically(directory / IMPORT_NAME, content)
    return [directory / name for name in names.values()]


def _manifest(imported: ImportedSet) -> dict[str, Any]:
    target, options = imported.target, asdict(imported.options)
    sources = [imported.train.path, imported.test.path, imported.options.labels]
    parameters = {target.class_parameter: len(imported.classes)} if target.class_parameter else {}
    return {
        "benchmark": target.benchmark,
        "sources": {
            str(path.absolute()): {"bytes": path.stat().st_size, "sha256": content_sha256(path)}
            for path in filter(None, sources)
        },
        "options": options | {"labels": str(options["labels"] or "") or None},
        "notes": imported.notes,
        "parameters": parameters,
        "classes": imported.classes,
        "counts": {
            name: {"train": train, "test": test}
            for name, (train, test) in imported.counts().items()
        },
        "features": imported.train.features,
        "samples": {"train": imported.train.ids, "test": imported.test.ids},
    }


def _write(
    cohort: Cohort, imported: ImportedSet, path: Path, name: str, progress: Progress | None
) -> None:
    num_rows, done = len(cohort.ids), 0
    with path.open("wb") as file:
        for block in _lines(cohort, imported):
            file.write(block)
            done += ROWS_PER_BLOCK
            if progress and num_rows:
                size = file.tell()
                progress(name, size, max(size, size * num_rows // min(done, num_rows)))


def _lines(cohort: Cohort, imported: ImportedSet) -> Iterator[bytes]:
    """Yields the lines of a file, some at a time."""
    layout, labels = imported.target.layout, _labels(cohort)
    if layout.header:
        yield _fields([*layout.text_columns, *cohort.features]).encode()
        prefixes = [_fields(pair).rstrip("\n") for pair in zip(cohort.ids, labels, strict=True)]
    else:
        prefixes = [str(imported.classes.index(label)) for label in labels]
    for start in range(0, len(prefixes), ROWS_PER_BLOCK):
        rows = slice(start, start + ROWS_PER_BLOCK)
        lines = zip(prefixes[rows], cohort.values[rows], strict=True)
        yield "".join(f"{prefix},{_digits(row)}\n" for prefix, row in lines).encode()


def _digits(row: NDArray[np.float32]) -> str:
    """Returns numbers with 6 significant digits if float32 needs no more, else with 9."""
    numbers = tuple(row.tolist())
    short = ",".join(["%.6g"] * len(numbers)) % numbers
    if np.array_equal(np.fromstring(short, np.float32, sep=","), row):
        return short
    return ",".join(["%.9g"] * len(numbers)) % numbers


def _fields(row: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(row)
    return line.getvalue()


def _labels(cohort: Cohort) -> list[str]:
    return cohort.labels if cohort.labels is not None else [UNKNOWN] * len(cohort.ids)


def _order(name: str) -> tuple[float, str]:
    """Sorts numbers as numbers, before other names."""
    is_number = name.replace(".", "", 1).isdecimal()
    return float(name) if is_number else float("inf"), name


def _examples(names: Collection[str]) -> str:
    """Returns some names, for a message."""
    shown = ", ".join(map(repr, islice(names, MAX_EXAMPLES)))
    return shown + ", …" * (len(names) > MAX_EXAMPLES)
