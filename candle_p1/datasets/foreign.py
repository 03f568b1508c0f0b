"""Reading the tables that people have, in many forms, as samples and features with names.

`read_cohort` is for all who take tables of others. What is not clear is refused with what to pass.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from candle_p1.data.names import ENSEMBL, without_version
from candle_p1.data.table import repeated
from candle_p1.datasets.delimited import MISSING, NUMBER, Content, Delimited, IsText, TextForm
from candle_p1.errors import DataError
from candle_p1.text import examples

SHEETS = (".xlsx", ".xls", ".ods")
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

Names: TypeAlias = "Sequence[str] | pd.Index[Any]"


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
        header_rows, name_row, decimal: See `candle_p1.datasets.delimited.TextForm`.
        duplicates: What to do with features of the same name: "error", "mean" or "first".
        missing: What to do with missing values: "error", or "zero"; otherwise they are left as NaN.
        unlabelled: What to do with samples without a label: "error" or "drop".
        log2: Whether to take log2(x + 1); None: no, or, of new samples, as the import did.
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
    missing: str | None = "error"
    unlabelled: str = "error"
    log2: bool | None = None

    @property
    def asked(self) -> dict[str, str]:
        """The columns of labels and groups that are given."""
        given = {"label": self.label, "group": self.group}
        return {what: name for what, name in given.items() if name is not None}


@dataclass(frozen=True)
class Cohort:
    """Samples, as they were understood.

    Attributes:
        path: The table that they come from.
        frame: float32, a row for each sample, a column for each feature, with unique names.
        about: The columns "label" and "group", of str, as far as they were asked for; same rows.
        notes: What was understood, as clauses for the user.
        not_dropped: What was to be dropped, but is not there.
    """

    path: Path
    frame: pd.DataFrame
    about: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    not_dropped: Collection[str] = ()

    def take(self, rows: pd.Series[bool]) -> Cohort:
        """Returns some of the samples."""
        return replace(self, frame=self.frame[rows], about=self.about[rows])


def read_cohort(
    path: Path,
    options: SampleOptions,
    wanted: Sequence[str] = (),
    spelled: Callable[[str], str] = str,
) -> Cohort:
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
    return _Reading(path, options).read(wanted, spelled)


def read_content(path: Path, form: TextForm, is_text: IsText) -> Content:
    """Returns the table in a file, whose format its name tells; see `Delimited`."""
    suffix = path.suffix.lower()
    try:
        if suffix in SHEETS:
            problem = "this is a spreadsheet: save its sheet as CSV (UTF-8) and import that"
            raise DataError(problem, path)
        if suffix not in FRAMES:
            return Delimited(path, form, is_text).read()
        read, extra = FRAMES[suffix]
        try:
            frame = read(path)
        except ImportError as error:
            problem = f"reading it needs a package ({error}): pip install 'candle-p1[{extra}]'"
            raise DataError(problem, path) from error
        except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
            what = "AnnData file of version 0.8 or later" if suffix == ".h5ad" else f"{suffix} file"
            raise DataError(f"it is no {what} with a table: {error}", path) from error
        if not isinstance(frame, pd.DataFrame):
            raise DataError(f"it holds a {type(frame).__name__}, not a table", path)
        content = _from_frame(path, frame, is_text)
        if suffix == ".h5ad":
            notes = ["its matrix X, with the columns of obs as text"]
            content = content._replace(notes=notes, is_across=False)
        return content
    except UnicodeDecodeError as error:
        problem = f"its text is not UTF-8 ({error.reason}): save or convert it as UTF-8"
        raise DataError(problem, path) from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "it ends too early"
        raise DataError(f"the file cannot be read: {reason}", path) from error


@dataclass
class _Reading:
    """The reading of a table of samples, or of the labels beside it."""

    path: Path
    options: SampleOptions
    notes: list[str] = field(default_factory=list)

    def read(self, wanted: Sequence[str], spelled: Callable[[str], str]) -> Cohort:
        """Returns the samples; see `read_cohort`."""
        options, notes = self.options, self.notes
        form = TextForm(options.header_rows, options.name_row, options.decimal)
        own = {} if options.labels else options.asked
        known = {*own.values(), *options.drop, *filter(None, [options.id_column])}
        self.content = content = read_content(
            self.path, form, lambda place, name: name in known or (bool(wanted) and place == 0)
        )
        notes += content.notes
        names = {name: cells for name, cells in content.text.items() if name not in known}
        key = options.id_column or next(iter(names), None)
        is_across = content.is_across if options.transpose is None else options.transpose
        if wanted and is_across is None:
            columns = names | {"in the header": [*content.numbers.columns]}
            columns = {name: [*map(spelled, cells)] for name, cells in columns.items()}
            found, _ = self.naming_column(columns, wanted, "leave the others out by --drop")
            is_across = found not in names
            key = key if is_across else found
        cells = None if key is None else self.column(key)
        if is_across is None:
            self.refuse_genes(key or "", cells or [])
        if is_across and own:
            raise self.error(
                "where columns are samples, what they are needs a table: pass --labels FILE"
            )
        values = self.across(key, cells) if is_across else self.upright(key, cells)
        if others := [name for name in names if name != key]:
            notes.append(f"columns of text that are left out: {examples(others)}")
        values.index = pd.Index([spelled(str(name)) for name in values.index])
        if doubled := repeated(values.index):
            problem = f"several samples are called {examples(doubled)}: pass --id, which column"
            raise self.error(f"{problem} names them")
        values, not_dropped = self.named_features(values)
        if not_dropped and not wanted:
            raise self.error(f"there is no column or feature {not_dropped[0]!r} to drop")
        columns = {what: self.column(name) for what, name in own.items()}
        about = pd.DataFrame(columns, values.index)
        if options.labels:
            about = _Reading(options.labels, options, notes).about(values.index)
        samples = self.labelled(Cohort(self.path, values, about, notes, not_dropped))
        if num := int((samples.about.get("group", pd.Series()) == "").sum()):
            problem = f"{num:,} samples have no {options.group!r}: fill it in, or leave them out"
            raise self.error(problem)
        return self.checked(samples)

    def error(self, problem: str) -> DataError:
        return DataError(problem, self.path)

    def column(self, name: str) -> list[str]:
        """Returns a column of text."""
        text = self.content.text
        if name not in text:
            there = ", ".join(map(repr, text)) or "none"
            raise self.error(f"there is no column {name!r}; its columns of text are {there}")
        return text[name]

    def naming_column(
        self, columns: Mapping[str, list[str]], wanted: Names, remedy: str
    ) -> tuple[str, int]:
        """Returns the column that has the most of the wanted names, and how many."""
        matched = {name: len(set(cells).intersection(wanted)) for name, cells in columns.items()}
        most = max(matched.values(), default=0)
        best, *others = [name for name, num in matched.items() if num == most] or [""]
        if not most:
            there = examples(next(iter(columns.values()), []))
            problem = f"no column has the names of the samples, such as {examples(wanted)}"
            raise self.error(f"{problem}; its first one has {there}")
        if any(columns[other] != columns[best] for other in others):
            several = examples([best, *others])
            raise self.error(f"the columns {several} name the samples equally well: {remedy}")
        return best, most

    def refuse_genes(self, name: str, names: Sequence[str]) -> None:
        """Raises DataError if the columns seem to be samples."""
        (num_rows, num_columns), sampled = self.content.numbers.shape, names[:1000]
        num_genes = sum(bool(ENSEMBL.fullmatch(each)) for each in sampled)
        is_long = num_rows > max(1000, 3 * num_columns)
        if 2 * num_genes > len(sampled) or name.strip().lower() in GENE_COLUMNS or is_long:
            raise self.error(
                f"its {num_rows:,} rows seem to be genes ({examples(sampled)}), so that its columns"
                " are samples: pass --transpose True if so, else --transpose False"
            )

    def refuse_columns(self, names: Collection[str], problem: str) -> None:
        """Raises DataError if numbers stand in columns of these names."""
        columns = self.content.numbers.columns
        found = [name for name in columns if name.strip().lower() in names]
        if found:
            raise self.error(f"{examples(found)} {problem}")

    def across(self, key: str | None, genes: list[str] | None) -> pd.DataFrame:
        """Returns the values of a table whose columns are samples."""
        if genes is None:
            raise self.error("no column names the genes: pass --id COLUMN")
        self.refuse_columns(ANNOTATIONS, "may describe the genes, not be samples: --drop them")
        self.notes.append(f"columns are samples; genes are named by the column {key!r}")
        is_gene = [SUMMARY.fullmatch(gene) is None for gene in genes]
        if num := is_gene.count(False):
            self.notes.append(f"{num} rows of totals are left out (N_unmapped and alike)")
        return self.content.numbers.set_axis(genes)[is_gene].T

    def upright(self, key: str | None, names: list[str] | None) -> pd.DataFrame:
        """Returns the values of a table whose rows are samples."""
        self.refuse_columns(SAMPLE_COLUMNS, "would be features: pass --id or --drop for each")
        if names is None:
            self.notes.append("nothing names the samples, so they are numbered")
            num_rows = len(self.content.numbers)
            names = [f"{self.path.name}-{number}" for number in range(1, num_rows + 1)]
        else:
            self.notes.append(
                f"samples are named by the column {key!r}" if key else "samples are named"
            )
        return self.content.numbers.set_axis(names)

    def named_features(self, values: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
        """Returns the values with unique names of features, and what to drop was not there.

        The versions of Ensembl's identifiers are taken off.
        """
        drop, names = self.options.drop, [str(name).strip() for name in values.columns]
        if "" in names:
            raise self.error(f"feature {names.index('') + 1} has no name: name it or remove it")
        short = [without_version(name) for name in names]
        if short != names:
            self.notes.append("the versions of Ensembl's identifiers are left out")
        not_dropped = [each for each in drop if each not in {*self.content.text, *names, *short}]
        dropped = pd.Index(names).isin(drop) | pd.Index(short).isin(drop)
        values = values.set_axis(short, axis=1).loc[:, ~dropped]
        if values.empty:
            raise self.error("it has no columns of numbers, which would be the features")
        is_again = values.columns.duplicated()
        if not is_again.any():
            return values, not_dropped
        doubled, how = values.columns[is_again].unique(), self.options.duplicates
        if how == "error":
            raise self.error(
                f"{len(doubled):,} features occur more than once, such as {examples(doubled)}: pass"
                " --duplicates mean or --duplicates first"
            )
        self.notes.append(f"{len(doubled):,} features that occur more than once: {how}")
        if how == "mean":
            return values.T.groupby(level=0, sort=False).mean().T, not_dropped
        return values.loc[:, ~is_again], not_dropped

    def about(self, ids: pd.Index[str]) -> pd.DataFrame:
        """Returns labels and groups of samples, by the column here that names the most of them."""
        options = self.options
        self.content = read_content(self.path, TextForm(header_rows=1), lambda *_: True)
        columns = self.content.text
        if options.labels_id is not None:
            columns = {options.labels_id: self.column(options.labels_id)}
        key, num = self.naming_column(columns, ids, "pass --labels_id, which does")
        names = pd.Index(columns[key])
        is_again = names.duplicated()
        for name in names[is_again & names.isin(ids)][:1]:
            raise self.error(f"there are several rows for the sample {name!r}")
        where = f"the column {key!r}" if key else "its first column"
        self.notes.append(f"{self.path.name}: {num:,} of {len(ids):,} samples found by {where}")
        cells = {what: self.column(name) for what, name in options.asked.items()}
        return pd.DataFrame(cells, names)[~is_again].reindex(ids, fill_value="")

    def labelled(self, samples: Cohort) -> Cohort:
        """Returns the samples that have a label."""
        if "label" not in samples.about:
            return samples
        is_there = samples.about["label"] != ""
        if num := int((~is_there).sum()):
            some = f"{num:,} of {len(is_there):,} samples"
            if self.options.unlabelled == "error":
                lacking = examples(is_there.index[~is_there])
                problem = f"{some} have no label, such as {lacking}: label them, or pass"
                raise self.error(f"{problem} --unlabelled drop")
            self.notes.append(f"{some} have no label and are left out")
            samples = samples.take(is_there)
        return samples

    def checked(self, samples: Cohort) -> Cohort:
        """Returns the samples, in logarithms and without gaps if asked for.

        Raises:
            DataError: Values are bad.
        """
        values = samples.frame
        self.refuse(values.abs() == np.inf, "are infinite")
        if self.options.log2:
            self.refuse(values < 0, "are negative, so that log2(x + 1) makes no sense")
            samples = replace(samples, frame=(values + 1).transform(np.log2))
        if self.options.missing == "error":
            self.refuse(values.isna(), "are missing (--missing fills them in)")
        if self.options.missing == "zero" and (num := int(values.isna().to_numpy().sum())):
            self.notes.append(f"{num:,} missing values are taken as 0")
            samples = replace(samples, frame=samples.frame.fillna(0))
        return samples

    def refuse(self, is_bad: pd.DataFrame, what: str) -> None:
        """Raises DataError if a value is bad."""
        if num := int(is_bad.to_numpy().sum()):
            row, column = np.argwhere(is_bad.to_numpy())[0]
            where = f"{is_bad.columns[column]!r} of the sample {is_bad.index[row]!r}"
            raise self.error(f"{num:,} values {what}, such as {where}")


def _from_frame(path: Path, frame: pd.DataFrame, is_text: IsText) -> Content:
    """Returns what a DataFrame holds; its index names the rows unless it only counts them."""
    above: list[Any] = frame.columns.tolist()
    names = [" ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in above]
    if "" in names:
        raise DataError("a column has no name: name it or remove it", path)
    counts = isinstance(frame.index, pd.RangeIndex) and frame.index.name is None
    text = {} if counts else {"": [*map(_text_of, frame.index)]}
    numbers = []
    for place, (name, kind) in enumerate(zip(names, frame.dtypes, strict=True)):
        is_known = is_text(place + (not counts), name)
        if not is_known and is_numeric_dtype(kind) and not is_bool_dtype(kind):
            numbers.append(place)
            continue
        if name in text:
            raise DataError(f"several columns of text are called {name!r}", path)
        cells = text[name] = [*map(_text_of, frame.iloc[:, place])]
        words = [cell for cell in cells if cell and not NUMBER.fullmatch(cell)]
        if not is_known and words and len(words) < len([*filter(None, cells)]):
            problem = f"the column {name!r} holds both numbers and text, such as {words[0]!r}"
            advice = f"correct it, or leave the column out (--drop {name})"
            raise DataError(f"{problem}: {advice}", path)
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
        columns = {name: column(about[name]).astype(object) for name in about.attrs["column-order"]}
    frame = pd.DataFrame(values.astype(np.float32), columns=names[1])
    return pd.concat([pd.DataFrame(columns), frame], axis=1).set_axis(names[0])


FRAMES: dict[str, tuple[Callable[[Path], Any], str]] = {
    ".parquet": (pd.read_parquet, "readers"),
    ".pq": (pd.read_parquet, "readers"),
    ".feather": (pd.read_feather, "readers"),
    ".h5": (pd.read_hdf, "hdf5"),
    ".hdf5": (pd.read_hdf, "hdf5"),
    ".h5ad": (_read_anndata, "hdf5"),
}
"""What reads a format as a data frame, and the extra of this package that it needs."""
