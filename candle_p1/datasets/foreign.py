"""Reading the tables that people have, in many forms, as samples and features with names.

`read_samples` is for all who take tables of others. What is not clear is refused with what to pass.
"""

from __future__ import annotations

import lzma
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from candle_p1.data.table import repeated
from candle_p1.datasets.delimited import MISSING, NUMBER, Content, ReadOptions, read_delimited
from candle_p1.errors import DataError

FRAMES = {
    ".parquet": ("read_parquet", "readers"),
    ".pq": ("read_parquet", "readers"),
    ".feather": ("read_feather", "readers"),
    ".h5": ("read_hdf", "hdf5"),
    ".hdf5": ("read_hdf", "hdf5"),
}
"""The functions of pandas that read a format, and the extra of this package that they need."""
SHEETS = (".xlsx", ".xls", ".ods")
ENSEMBL = re.compile(r"(ENS[A-Z]{0,4}G\d{6,})(\.\d+)?(_\w+)?")
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
MAX_EXAMPLES = 3


@dataclass(frozen=True)
class SampleOptions:
    """How to understand a table; most can be told from it.

    Attributes:
        transpose: Whether columns are samples; None: no, unless it looks so, which is an error.
        id_column: The column that names the samples, or the genes if columns are samples.
        label: The column with the classes, in the table or in the file of labels.
        labels: Another table, with a row for each sample.
        labels_id: The column that names the samples there; None: the one that fits.
        group: The column, such as patients, whose values belong together.
        drop: Columns or genes that are no features.
        header_rows, name_row, decimal: See `candle_p1.datasets.delimited.ReadOptions`.
        duplicates: What to do with features of the same name: "error", "mean" or "first".
        missing: What to do with missing values: "error"; otherwise they are left as NaN.
        unlabelled: What to do with samples without a label: "error" or "drop".
        log2: Whether to take log2(x + 1).
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


@dataclass(frozen=True)
class SampleTable:
    """Samples, as they were understood.

    Attributes:
        path: The table that they come from.
        values: float32, a row for each sample and a column for each feature, both with unique names.
        about: The columns "label" and "group", of str, as far as they were asked for; same rows.
        notes: What was understood, as clauses for the user.
    """

    path: Path
    values: pd.DataFrame
    about: pd.DataFrame
    notes: list[str] = field(default_factory=list)

    def take(self, rows: Any) -> SampleTable:
        """Returns some of the samples, given by a boolean for each."""
        return replace(self, values=self.values[rows], about=self.about[rows])

    def with_features(self, features: Sequence[str], source: Path) -> SampleTable:
        """Returns the samples with the features that `source` has, in its order.

        Raises:
            DataError: Some are missing.
        """
        lacking = pd.Index(features).difference(self.values.columns, sort=False)
        if len(lacking):
            raise DataError(
                f"it lacks {len(lacking):,} of the {len(features):,} features of {source}, such as"
                f" {examples(lacking)}",
                self.path,
            )
        if list(features) == list(self.values.columns):
            return self
        note = f"its features are put in the order of {source.name}"
        return replace(self, values=self.values[list(features)], notes=[*self.notes, note])


def read_samples(
    path: Path,
    options: SampleOptions,
    wanted: Collection[str] = (),
    spelled: Callable[[str], str] = str,
) -> SampleTable:
    """Returns the samples in a table.

    Args:
        path: The file.
        options: How to understand it.
        wanted: The names of samples that should be in it, which show which way it lies and which
            column names them; empty: as the options say.
        spelled: How a sample's name is written.

    Raises:
        DataError: The table cannot be read, or it can be understood in several ways.
    """
    own = {"label": options.label, "group": options.group} if options.labels is None else {}
    own = {what: name for what, name in own.items() if name is not None}
    known = {*own.values(), *options.drop, *filter(None, [options.id_column])}
    form = (options.header_rows, options.name_row, options.decimal)
    content = read_content(path, ReadOptions(*form, text=known, names_first=bool(wanted)))
    names = {name: cells for name, cells in content.text.items() if name not in known}
    key = options.id_column or next(iter(names), None)
    is_across = content.is_across if options.transpose is None else options.transpose
    if wanted and is_across is None:
        columns = names | {"in the header": [*content.numbers.columns]}
        columns = {name: [*map(spelled, cells)] for name, cells in columns.items()}
        found, _ = naming_column(columns, wanted, path, "leave the others out by --drop")
        is_across = found not in names
        key = key if is_across else found
    cells = None if key is None else column_of(path, content, key)
    if is_across is None:
        _refuse_genes(path, key or "", cells or [], content.numbers)
    if is_across and own:
        problem = "where columns are samples, what they are needs a table: pass --labels FILE"
        raise DataError(problem, path)
    notes = [*content.notes]
    values = (_across if is_across else _upright)(path, content.numbers, key, cells, notes)
    if others := [name for name in names if name != key]:
        notes.append(f"columns of text that are left out: {examples(others)}")
    values.index = pd.Index([spelled(str(name)) for name in values.index])
    if doubled := repeated(values.index):
        problem = (
            f"several samples are called {examples(doubled)}: pass --id, which column names them"
        )
        raise DataError(problem, path)
    values = _named_features(path, values, content, options, notes)
    if options.labels is None:
        about = {what: column_of(path, content, name) for what, name in own.items()}
    else:
        about = _columns_beside(options.labels, values.index, path, options, notes)
    samples = SampleTable(path, values, pd.DataFrame(about, values.index, dtype=str), notes)
    return _checked(samples, options)


def read_content(path: Path, options: ReadOptions) -> Content:
    """Returns the table in a file, whose format its name tells.

    Raises:
        DataError: The file cannot be read, is no such table, or can be read in several ways.
    """
    suffix = path.suffix.lower()
    try:
        if suffix in FRAMES:
            return _from_frame(path, _read_frame(path, *FRAMES[suffix]), options)
        if suffix == ".h5ad":
            notes = ["its matrix X, with the columns of obs as text"]
            return _from_frame(path, _read_anndata(path), options)._replace(
                notes=notes, is_across=False
            )
        if suffix in SHEETS:
            problem = "this is a spreadsheet: save its sheet as CSV (UTF-8) and import that"
            raise DataError(problem, path)
        return read_delimited(path, options)
    except UnicodeDecodeError as error:
        problem = f"its text is not UTF-8 ({error.reason}): save or convert it as UTF-8"
        raise DataError(problem, path) from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it ends too early"
        raise DataError(f"the file cannot be read: {reason}", path) from error


def _read_frame(path: Path, function: str, extra: str) -> pd.DataFrame:
    try:
        frame = getattr(pd, function)(path)
    except ImportError as error:
        problem = f"reading it needs a package ({error}): pip install 'candle-p1[{extra}]'"
        raise DataError(problem, path) from error
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise DataError(f"pandas cannot read it: {error}", path) from error
    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"it holds a {type(frame).__name__}, not a table", path)
    return frame


def _from_frame(path: Path, frame: pd.DataFrame, options: ReadOptions) -> Content:
    """Returns what a DataFrame holds; its index names the rows unless it only counts them."""
    names = [
        " ".join(map(str, name if isinstance(name, tuple) else [name])) for name in frame.columns
    ]
    if "" in names:
        raise DataError("a column has no name: name it or remove it", path)
    counts = isinstance(frame.index, pd.RangeIndex) and frame.index.name is None
    text = {} if counts else {"": [*map(_text_of, frame.index)]}
    known = {*options.text, *names[: options.names_first and counts]}
    numbers = []
    for column, (name, kind) in enumerate(zip(names, frame.dtypes, strict=True)):
        is_known = options.is_text or name in known
        is_number = pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)
        if is_number and not is_known:
            numbers.append(column)
            continue
        if name in text:
            raise DataError(f"several columns of text are called {name!r}", path)
        text[name] = [*map(_text_of, frame.iloc[:, column])]
        found = [(bool(NUMBER.fullmatch(cell)), cell) for cell in text[name] if cell]
        if not is_known and {True, False} == {each for each, _ in found}:
            raise DataError(
                f"the column {name!r} holds both numbers and text, such as {min(found)[1]!r}:"
                f" correct it, or leave the column out (--drop {name})",
                path,
            )
    values = frame.iloc[:, numbers].to_numpy(np.float32, na_value=np.nan)
    return Content(pd.DataFrame(values, columns=[names[i] for i in numbers]), text)


def _text_of(value: Any) -> str:
    if not isinstance(value, (list, np.ndarray)) and pd.isna(value):
        return ""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    return "" if text in MISSING else text


def _read_anndata(path: Path) -> pd.DataFrame:
    """Returns the matrix X of an AnnData file (0.8 or later) with the columns of obs before it.

    Its format: https://anndata.readthedocs.io/en/stable/fileformat-prose.html
    """
    import h5py
    from scipy import sparse

    def column(node: Any) -> pd.Series[Any]:
        if isinstance(node, h5py.Dataset):
            return pd.Series((node.asstr() if h5py.check_string_dtype(node.dtype) else node)[:])
        if "categories" in node:
            codes = pd.Series(node["codes"][:])
            return codes.map(column(node["categories"]))
        return column(node["values"]).mask(node["mask"][:])

    try:
        with h5py.File(path) as file:
            about, matrix = file["obs"], file["X"]
            names = [file[each][file[each].attrs["_index"]].asstr()[:] for each in ("obs", "var")]
            if isinstance(matrix, h5py.Group):
                kind = {"csr_matrix": sparse.csr_matrix, "csc_matrix": sparse.csc_matrix}
                parts = (matrix[each][:] for each in ("data", "indices", "indptr"))
                form = kind[matrix.attrs["encoding-type"]]
                values = form(tuple(parts), shape=matrix.attrs["shape"]).toarray()
            else:
                values = matrix[:]
            columns = {
                name: column(about[name]).astype(object) for name in about.attrs["column-order"]
            }
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        problem = f"it is no AnnData file of version 0.8 or later with a matrix X ({error})"
        raise DataError(problem, path) from error
    frame = pd.DataFrame(values.astype(np.float32), columns=names[1])
    return pd.concat([pd.DataFrame(columns), frame], axis=1).set_axis(names[0])


def column_of(path: Path, content: Content, name: str) -> list[str]:
    """Returns a column of text; raises DataError if there is none of this name."""
    if name not in content.text:
        there = ", ".join(map(repr, content.text)) or "none"
        raise DataError(f"there is no column {name!r}; its columns of text are {there}", path)
    return content.text[name]


def naming_column(
    columns: Mapping[str, Sequence[str]], wanted: Collection[str], path: Path, remedy: str
) -> tuple[str, int]:
    """Returns the column that has the most of the wanted names, and how many.

    Raises:
        DataError: None has any, or several different ones have as many.
    """
    matched = {name: len(set(cells).intersection(wanted)) for name, cells in columns.items()}
    most = max(matched.values(), default=0)
    best, *others = [name for name, num in matched.items() if num == most] or [""]
    if not most:
        there = examples(next(iter(columns.values()), []))
        problem = f"no column has the names of the samples, such as {examples(wanted)}; its first one has {there}"
        raise DataError(problem, path)
    if any(columns[other] != columns[best] for other in others):
        problem = f"the columns {examples([best, *others])} name the samples equally well: {remedy}"
        raise DataError(problem, path)
    return best, most


def _refuse_genes(path: Path, name: str, names: Sequence[str], numbers: pd.DataFrame) -> None:
    """Raises DataError if the columns seem to be samples."""
    sampled = names[:1000]
    num_genes = sum(bool(ENSEMBL.fullmatch(each)) for each in sampled)
    is_long = len(numbers) > max(1000, 3 * numbers.shape[1])
    if 2 * num_genes > len(sampled) or name.strip().lower() in GENE_COLUMNS or is_long:
        raise DataError(
            f"its {len(numbers):,} rows seem to be genes ({examples(sampled)}), so that its columns"
            " are samples: pass --transpose True if so, else --transpose False",
            path,
        )


def _across(
    path: Path, numbers: pd.DataFrame, key: str | None, genes: list[str] | None, notes: list[str]
) -> pd.DataFrame:
    """Returns the values of a table whose columns are samples."""
    if genes is None:
        raise DataError("no column names the genes: pass --id COLUMN", path)
    if others := [name for name in numbers.columns if name.strip().lower() in ANNOTATIONS]:
        problem = f"{examples(others)} may describe the genes, not be samples: --drop them"
        raise DataError(problem, path)
    notes.append(f"columns are samples; genes are named by the column {key!r}")
    is_gene = [SUMMARY.fullmatch(gene) is None for gene in genes]
    if num_totals := is_gene.count(False):
        notes.append(f"{num_totals} rows of totals are left out (N_unmapped and alike)")
    return numbers.set_axis(genes)[is_gene].T


def _upright(
    path: Path, numbers: pd.DataFrame, key: str | None, names: list[str] | None, notes: list[str]
) -> pd.DataFrame:
    """Returns the values of a table whose rows are samples."""
    if others := [name for name in numbers.columns if name.strip().lower() in SAMPLE_COLUMNS]:
        problem = f"{examples(others)} would be features: pass --id or --drop for each"
        raise DataError(problem, path)
    if names is None:
        notes.append("nothing names the samples, so they are numbered")
        names = [f"{path.name}-{number}" for number in range(1, len(numbers) + 1)]
    else:
        notes.append(f"samples are named by the column {key!r}" if key else "samples are named")
    return numbers.set_axis(names)


def _named_features(
    path: Path, values: pd.DataFrame, content: Content, options: SampleOptions, notes: list[str]
) -> pd.DataFrame:
    """Returns the values without what is to be dropped, and with unique names of features.

    The versions of Ensembl's identifiers are taken off.
    """
    names = [str(name).strip() for name in values.columns]
    if "" in names:
        problem = f"feature {names.index('') + 1} has no name: name it or remove it"
        raise DataError(problem, path)
    matches = map(ENSEMBL.fullmatch, names)
    short = [
        f"{match[1]}{match[3] or ''}" if match else name
        for match, name in zip(matches, names, strict=True)
    ]
    if short != names:
        notes.append("the versions of Ensembl's identifiers are left out")
    for name in options.drop:
        if name not in {*content.text, *names, *short}:
            raise DataError(f"there is no column or feature {name!r} to drop", path)
    dropped = pd.Index(names).isin(options.drop) | pd.Index(short).isin(options.drop)
    values = values.set_axis(short, axis=1).loc[:, ~dropped]
    if values.empty:
        raise DataError("it has no columns of numbers, which would be the features", path)
    is_again = values.columns.duplicated()
    doubled = values.columns[is_again].unique()
    if not len(doubled):
        return values
    if options.duplicates == "error":
        raise DataError(
            f"{len(doubled):,} features occur more than once, such as {examples(doubled)}: pass"
            " --duplicates mean or --duplicates first",
            path,
        )
    is_mean = options.duplicates == "mean"
    what = "averaged" if is_mean else "represented by the first of each"
    notes.append(f"{len(doubled):,} features that occur more than once are {what}")
    if is_mean:
        return values.T.groupby(level=0, sort=False).mean().T
    return values.loc[:, ~is_again]


def _columns_beside(
    path: Path, ids: pd.Index[str], table: Path, options: SampleOptions, notes: list[str]
) -> dict[str, pd.Series[str]]:
    """Returns labels and groups from their own table, by the column that names the most samples."""
    content = read_content(path, ReadOptions(header_rows=1, is_text=True))
    columns = content.text
    if options.labels_id is not None:
        columns = {options.labels_id: column_of(path, content, options.labels_id)}
    key, num = naming_column(columns, ids, path, "pass --labels_id, which does")
    names = pd.Index(columns[key])
    for name in names[names.duplicated() & names.isin(ids)][:1]:
        raise DataError(f"there are several rows for the sample {name!r}", path)
    where = f"the column {key!r}" if key else "its first column"
    notes.append(f"{path.name}: {num:,} of {len(ids):,} samples found by {where}")
    asked = {"label": options.label, "group": options.group}
    return {
        what: pd.Series(column_of(path, content, name), names)[~names.duplicated()].reindex(
            ids, fill_value=""
        )
        for what, name in asked.items()
        if name is not None
    }


def _checked(samples: SampleTable, options: SampleOptions) -> SampleTable:
    """Returns the samples that have a label, in logarithms if asked for.

    Raises:
        DataError: Some have none; a feature is the label in disguise, constant in each class but
            apart; or there are values that no network can take.
    """
    path, labels = samples.path, samples.about.get("label")
    if labels is not None:
        if not (is_there := labels != "").all():
            num, lacking = int((~is_there).sum()), [*labels.index[~is_there]]
            if options.unlabelled == "error":
                raise DataError(
                    f"{num:,} of {len(labels):,} samples have no label, such as"
                    f" {examples(lacking)}: label them, or pass --unlabelled drop",
                    path,
                )
            samples.notes.append(f"{num:,} samples without a label are left out")
            samples = samples.take(is_there)
        of_classes = samples.values.groupby(samples.about["label"])
        low, high = of_classes.min(), of_classes.max()
        is_leak = (low == high).all() & (low != low.iloc[0]).any()
        if is_leak.any() and len(samples.values) >= MIN_LEAK:
            names = examples([*is_leak.index[is_leak]])
            raise DataError(f"{names} tells the class of every sample: --drop it", path)
    values = samples.values.to_numpy()
    _refuse(samples, np.isinf(values), "are infinite")
    if options.log2:
        _refuse(samples, values < 0, "are negative, so that log2(x + 1) makes no sense")
        samples = replace(samples, values=np.log2(samples.values + 1))
    if options.missing == "error":
        what = "are missing (--missing zero or mean fills them in)"
        _refuse(samples, np.isnan(values), what)
    return samples


def _refuse(samples: SampleTable, is_bad: NDArray[np.bool_], what: str) -> None:
    if is_bad.any():
        row, column = np.argwhere(is_bad)[0]
        raise DataError(
            f"{int(is_bad.sum()):,} values {what}, such as {samples.values.columns[column]!r} of"
            f" the sample {samples.values.index[row]!r}",
            samples.path,
        )


def examples(names: Collection[str]) -> str:
    """Returns some names, for a message."""
    shown = ", ".join(map(repr, islice(names, MAX_EXAMPLES)))
    return shown + ", …" * (len(names) > MAX_EXAMPLES)
