"""New samples in a table: found by name, scaled as in training, and predicted block by block.

A table is read as the benchmark's own files if it begins as these do, else as by
`candle-p1 data import`.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from candle_p1.benchmark import NewRows
from candle_p1.data.loaders import read_table
from candle_p1.data.names import place_features
from candle_p1.data.reader import FileSet, Reader, file_sha256
from candle_p1.data.samples import join_batches
from candle_p1.data.source import Loading, open_together
from candle_p1.data.table import CsvLayout, Table
from candle_p1.datasets.foreign import SampleOptions, read_cohort
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.errors import DataError
from candle_p1.inference.trained import TrainedRun

Matrix = NDArray[np.float32]
ROWS_PER_BLOCK = 256
LOG2_TAKEN = "log2(x + 1) is taken, as by the import (--log2 False: the table has logarithms)"
LOG2_NOT_TAKEN = (
    "values are taken as they are, as in a file of the import (--log2 True: they are no logarithms)"
)


@dataclass(frozen=True)
class Block:
    """Some of the samples.

    Attributes:
        x: What the model takes.
        columns: What tells them apart, by column: "sample", or what the benchmark says.
        labels: The name of each one's class; None if the table has none.
        y: The targets of a regression, in the form the loss takes; None likewise.
        groups: What each one belongs to; None if no column was named.
    """

    x: Any
    columns: Mapping[str, Sequence[Any]]
    labels: list[str] | None = None
    y: Any = None
    groups: list[str] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


@dataclass(frozen=True)
class NewSamples:
    """The samples in a table.

    Attributes:
        path: The table.
        blocks: Reads it; may be called again.
        notes: What was understood, as clauses for the user.
    """

    path: Path
    blocks: Callable[[], Iterator[Block]]
    notes: list[str] = field(default_factory=list)


def read_samples(
    trained: TrainedRun, path: Path, options: SampleOptions | None = None
) -> NewSamples:
    """Returns the samples in a table, whose features are found by name.

    Args:
        trained: The run whose network is to be applied.
        path: A file in the benchmark's own format, or a table as `candle-p1 data import` reads it.
        options: How to read a table, as for the import.

    Raises:
        DataError: It cannot be read, or features are missing.
    """
    options, inputs = options or SampleOptions(), trained.inputs
    notes: list[str] = []
    rows = trained.benchmark.read_new(
        path, lambda: reader_of(trained), trained.params, inputs, notes.append
    )
    if rows is not None:
        if replace(options, group=None) != SampleOptions():
            problem = (
                "options of tables of features, such as --label or --missing, do not apply to"
                " this table: omit them"
            )
            raise DataError(problem, path)
        return NewSamples(path, partial(_by_benchmark, rows, options.group, path), notes)
    layout = trained.benchmark.layouts.get("test")
    own = _own_table(path, layout, options) if layout else None
    if layout and own:
        if replace(options, log2=None) == SampleOptions() and not options.log2:
            return _read_own(trained, path, layout, own())
        if not layout.header:
            problem = (
                "options such as --label or --missing do not apply to files in the benchmark's own"
                " format: omit them, or add a row of names"
            )
            raise DataError(problem, path)
        if inputs.log2 and options.log2 is None:
            problem = (
                "the import may have written it, with log2(x + 1): pass --log2 False if so,"
                " otherwise --log2 True"
            )
            raise DataError(problem, path)
    if inputs.features is None:
        problem = (
            "the run does not know the names of its features, so columns cannot be found by name:"
            " give a file in the benchmark's own format"
        )
        raise DataError(problem, path)
    log2 = inputs.log2 if options.log2 is None else options.log2
    cohort = read_cohort(path, replace(options, log2=log2))
    columns, notes = place_features(inputs.features, [*cohort.frame.columns], path)
    if inputs.log2:
        notes.append(LOG2_TAKEN if log2 else LOG2_NOT_TAKEN)
    labels, groups = (
        [*cohort.about[what]] if what in cohort.about else None for what in ("label", "group")
    )
    values = cohort.frame.to_numpy(np.float32)
    blocks = partial(_blocks, trained, [*cohort.frame.index], values, columns, labels, groups)
    return NewSamples(path, blocks, [*cohort.notes, *notes])


def _by_benchmark(
    rows: Callable[[], Iterator[NewRows]], group: str | None, path: Path
) -> Iterator[Block]:
    for each in rows():
        groups = None
        if group is not None:
            if group not in each.columns:
                there = ", ".join(each.columns)
                raise DataError(f"--group {group}: choose one of the columns {there}", path)
            groups = [*map(str, each.columns[group])]
        yield Block(each.x, each.columns, y=each.y, groups=groups)


def reader_of(trained: TrainedRun) -> Reader:
    """Returns what reads the files of the run again.

    Raises:
        DataError: They are no longer there, or others.
    """
    files = trained.record.data.files if trained.record.data else {}
    for facts in files.values():
        path = Path(facts.path)
        if not path.is_file() or facts.sha256 not in (None, file_sha256(path)):
            raise DataError(
                "the run was trained on this file, which has been removed or changed", path
            )
    return Reader(FileSet.at({role: Path(facts.path) for role, facts in files.items()}))


def _own_table(path: Path, layout: CsvLayout, options: SampleOptions) -> Callable[[], Table] | None:
    """Returns what reads a file that begins as the benchmark's own do; None if it does not.

    Raises:
        DataError: It cannot be opened, or begins so but is wrong later.
    """
    if options.header_rows is not None and not layout.header:
        return None
    with open_together(path, SerialCommunicator()) as source:
        try:
            source.read_head(layout)
        except DataError:
            return None
    read = cache(partial(read_table, path, Loading(), layout))
    if not layout.header:
        try:
            read()
        except DataError as error:
            if error.line == 1:  # where a table of others has the names of its columns
                return None
            raise
    return read


def _read_own(trained: TrainedRun, path: Path, layout: CsvLayout, table: Table) -> NewSamples:
    inputs, values = trained.inputs, table.values
    columns, notes = None, list[str]()
    if layout.text_columns:
        ids, labels = (table.text[name].values() for name in layout.text_columns)
    else:
        numbers, values = values[:, 0], values[:, 1:]
        ids = [f"{path.name}-{number}" for number in range(1, len(values) + 1)]
        labels = [f"{number:g}" for number in numbers]
        if inputs.classes is not None:
            names = {str(number): name for number, name in enumerate(inputs.classes)}
            for row, label in enumerate(labels, start=1):
                if label not in names:
                    problem = f"the label of row {row} of the data is {label}"
                    raise DataError(problem, path, column=1)
            labels = [names[label] for label in labels]
    if table.columns and inputs.features is not None:
        columns, notes = place_features(inputs.features, table.columns, path)
    elif values.shape[1] != len(inputs.offset):
        problem = f"it has {values.shape[1]:,} features, not {len(inputs.offset):,}"
        raise DataError(problem, path)
    notes += [LOG2_NOT_TAKEN] * inputs.log2
    return NewSamples(path, partial(_blocks, trained, ids, values, columns, labels), notes)


def _blocks(
    trained: TrainedRun,
    ids: list[str],
    values: Matrix,
    columns: list[int] | None,
    labels: list[str] | None,
    groups: list[str] | None = None,
) -> Iterator[Block]:
    for start in range(0, len(ids), ROWS_PER_BLOCK):
        part = slice(start, start + ROWS_PER_BLOCK)
        rows = values[part].copy() if columns is None else values[part, columns]
        trained.inputs.apply(rows)
        known, of = (each and each[part] for each in (labels, groups))
        x = trained.benchmark.new_inputs(rows, known, trained.params, trained.inputs)
        yield Block(x, {"sample": ids[part]}, known, groups=of)


def predict(
    trained: TrainedRun,
    samples: NewSamples,
    batch_size: int | None = None,
    by: Callable[[Any], Any] | None = None,
) -> Iterator[tuple[Block, Any]]:
    """Yields the blocks of some samples, with what the model returns for each.

    Args:
        trained: The run whose network is applied.
        samples: The samples.
        batch_size: How many are computed at a time; None: as in training.
        by: What to apply instead of the model.

    Raises:
        DataError: The table cannot be read.
    """
    import keras

    size, apply = batch_size or trained.params["batch_size"], by or trained.model.predict_on_batch
    for block in samples.blocks():
        outputs = []
        for start in range(0, len(block), size):
            rows = slice(start, start + size)
            batch = keras.tree.map_structure(lambda each, rows=rows: each[rows], block.x)
            outputs.append(keras.tree.map_structure(np.asarray, apply(batch)))
        yield block, join_batches(outputs)


def write_predictions(
    trained: TrainedRun, samples: NewSamples, path: Path, batch_size: int | None = None
) -> int:
    """Writes the table of predictions, complete or not at all; returns the number of samples.

    It has what tells the samples apart, then the columns of `Benchmark.predictor`, numbers with as
    many digits as float32 needs.

    Raises:
        DataError: The samples cannot be read.
        OSError: The file cannot be written.
    """
    predictor = trained.benchmark.predictor(trained.model, trained.params, trained.inputs)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    num_samples = 0
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            for block, columns in predict(trained, samples, batch_size, by=predictor):
                if not num_samples:
                    table.writerow([*block.columns, *columns])
                cells = [*block.columns.values(), *map(_cells, columns.values())]
                table.writerows(zip(*cells, strict=True))
                num_samples += len(block)
            file.flush()
            os.fsync(file.fileno())
        if not num_samples:
            raise DataError("the table has no samples", samples.path)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return num_samples


def _cells(values: np.ndarray[Any, Any]) -> list[str]:
    if values.dtype.kind == "f":
        return [np.format_float_positional(x, trim="-") for x in values]
    return [*map(str, values)]
