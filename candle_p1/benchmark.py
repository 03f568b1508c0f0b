"""What a benchmark is (parameters, data, model), and finding one by name, path or module.

A benchmark is a folder ``<name>/`` anywhere, with a module ``<name>.py`` that defines a Benchmark
object called BENCHMARK, a parameter file ``<name>_default_model.txt`` and a script
``<name>_baseline_keras2.py``. What its author needs can be imported from here, except for functions
on tables that ranks share (`candle_p1.data.transforms`) and plots (`candle_p1.figures`).
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import reprlib
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1.checkpoints.policy import check_flags
from candle_p1.data.directory import (
    IMPORT_NAME,
    Importable,
    Quantity,
    data_directory,
    imported_facts,
)
from candle_p1.data.folds import check_fold
from candle_p1.data.inputs import Inputs
from candle_p1.data.loaders import READERS
from candle_p1.data.reader import Reader
from candle_p1.data.samples import Chained, Computed, DataSet, Samples, Selected, Several
from candle_p1.data.source import check_regular, open_together
from candle_p1.data.table import CsvLayout
from candle_p1.data.transforms import SCALINGS
from candle_p1.datasets.synthetic import SIZES, SyntheticFile, SyntheticRecipe
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import AVERAGING_CHOICES, ENGINE_CHOICES
from candle_p1.distributed.reducers.reducer import COMPRESSIONS
from candle_p1.errors import DataError, ParameterError, SetupError, did_you_mean
from candle_p1.files import shipped
from candle_p1.models import fast
from candle_p1.models.evaluation import Quality, Trained, compare_with_naive
from candle_p1.models.networks import CONV_FIELDS
from candle_p1.models.optimizers import CANDLE_CONSTANTS, DTYPE_POLICIES
from candle_p1.models.saving import ModelFile
from candle_p1.models.scores import (
    ConfusionScore,
    RegressionScore,
    as_probabilities,
    last_activation,
)
from candle_p1.parameters.catalog import ACTS_WITH, PARAMETERS
from candle_p1.parameters.declaration import Declaration
from candle_p1.parameters.parameter import Needs, Origin, Parameter, Role
from candle_p1.parameters.parameter_set import EditableParameters, ParameterSet, Settings
from candle_p1.scaling import (
    BATCH_SCALINGS,
    DATA_PARALLEL_LEVELS,
    EPOCHS_SCALINGS,
    LR_SCALINGS,
    share_epochs,
)

__all__ = [
    "SCALINGS",
    "Benchmark",
    "Chained",
    "Computed",
    "ConfusionScore",
    "CsvLayout",
    "DataError",
    "DataSet",
    "Importable",
    "JobSize",
    "ModelFile",
    "PaperRuns",
    "Parameter",
    "ParameterError",
    "ParameterSet",
    "Quality",
    "Quantity",
    "Reader",
    "RegressionScore",
    "Role",
    "Samples",
    "Selected",
    "Several",
    "SyntheticFile",
    "SyntheticRecipe",
    "Trained",
    "compare_with_naive",
    "find_benchmark",
    "list_benchmarks",
]

SCALING_MODES = ("strong", "weak")
SEARCH_PATH_VARIABLE = "CANDLE_BENCHMARKS_PATH"
CHOICES = {
    "averaging": AVERAGING_CHOICES,
    "batch_scaling": BATCH_SCALINGS,
    "compression": COMPRESSIONS,
    "data_parallel": DATA_PARALLEL_LEVELS,
    "data_type": tuple(DTYPE_POLICIES),
    "engine": ENGINE_CHOICES,
    "epochs_scaling": EPOCHS_SCALINGS,
    "kernels": fast.KERNELS,
    "loader": READERS,
    "lr_scaling": LR_SCALINGS,
    "scaling": SCALINGS,
    "size": SIZES,
}
"""The choices of shared parameters, taken from the code that implements them."""


class PublishedFiles(NamedTuple):
    """A benchmark's data files by role, as its own parameter file names them.

    The address of their directory is None if the parameter file does not set it; `directory` is
    where they are stored by default.
    """

    files: dict[str, str]
    url: str | None
    directory: Path


class NewRows(NamedTuple):
    """New samples for a trained network.

    Attributes:
        x: The inputs of the model for them.
        columns: What identifies them, by column.
        y: Their targets, in the form the loss takes; None: unknown.
    """

    x: Any
    columns: Mapping[str, Sequence[Any]]
    y: Any = None


class JobSize(NamedTuple):
    """The number of nodes and the time limit, in minutes, of a ready-made job script."""

    num_nodes: int
    minutes: int


@dataclass(frozen=True)
class PaperRuns:
    """How the paper ran a benchmark, beyond what the benchmark's own parameter file says.

    Attributes:
        sizes: The job size of each ready-made script, by machine and scaling mode.
        modes: The scaling modes that the paper reports.
        weak_epochs: The epochs of each rank under weak scaling; 8 in the paper's section 6.
        num_samples: The samples for training and validation in synthetic data of full size.
        num_inputs: The inputs of each of them.
        testing_role: The role of the file that stands beside the testing file of the paper's
            Table 1; all other files together stand beside its training file.
        notes: What rows of Table 1 stand for here, or why they differ, by their names in
            `candle_p1.reports.published`.
    """

    sizes: Mapping[tuple[str, str], JobSize] = field(default_factory=dict)
    modes: tuple[str, ...] = SCALING_MODES
    weak_epochs: int = 8
    num_samples: int | None = None
    num_inputs: int | None = None
    testing_role: str = "test"
    notes: Mapping[str, str] = field(default_factory=dict)


class Benchmark(ABC):
    """A benchmark.

    Attributes:
        name: The name of its folder and module.
        title: What it does, in a few words.
        parameters: Its own parameters, and shared ones with other defaults.
        files: The parameter that names each file, by role: {"train": "train_data", …}; see
            `needed_files` for the roles "validation" and "groups".
        layouts: The layouts of those that are tables, by role: a run first checks how they begin.
        recipe: Generates its synthetic data; None if it has none.
        importable: How a user's tables are converted into its files; None if they cannot be.
        supports: The shared parameters with `needs_support` that it reads.
        acts_with: What gives parameters an effect that do not always have one; see
            `candle_p1.parameters.parameter.Needs`.
        other_sample_names: The names of what `other_samples` returns.
        drop_remainder: Whether an epoch omits the samples that do not fill a last batch.
        paper: How the paper ran it.
        optimizer_constants: Epsilon and the like, by argument; what is missing is as in Keras 2.
            See `candle_p1.models.optimizers.make_optimizer`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    parameters: ClassVar[Sequence[Parameter]] = ()
    files: ClassVar[Mapping[str, str]] = {"train": "train_data", "test": "test_data"}
    layouts: ClassVar[Mapping[str, CsvLayout]] = {}
    recipe: ClassVar[SyntheticRecipe | None] = None
    importable: ClassVar[Importable | None] = None
    supports: ClassVar[frozenset[str]] = frozenset()
    acts_with: ClassVar[Mapping[str, Needs]] = {}
    other_sample_names: ClassVar[Sequence[str]] = ()
    drop_remainder: ClassVar[bool] = False
    paper: ClassVar[PaperRuns] = PaperRuns()
    optimizer_constants: ClassVar[Mapping[str, Any]] = CANDLE_CONSTANTS

    @abstractmethod
    def load_data(self, reader: Reader, params: ParameterSet) -> Any:
        """Reads the files with `reader` and returns their values unchanged; runs on every rank."""

    @abstractmethod
    def preprocess(self, raw: Any, params: ParameterSet) -> DataSet:
        """Turns what `load_data` returned into samples, in place if possible."""

    @abstractmethod
    def build_model(self, params: ParameterSet, data: DataSet) -> Any:
        """Returns the ``keras.Model``, not yet compiled."""

    def resolve(self, params: ParameterSet) -> ParameterSet:
        """Returns the parameters with derived values set; raises an error if they conflict."""
        return params

    def needed_files(self, params: ParameterSet) -> Sequence[str]:
        """Returns the roles of the files that a run with these parameters reads.

        By default, these are all; those of validation samples and of groups if they are named, and
        not that of test samples in cross-validation.
        """
        folds = params["folds"]
        read = {"validation": params["val_data"], "test": not folds}
        read["groups"] = folds and params["group_data"]
        return [role for role in self.files if read.get(role, True)]

    def loss(self, params: ParameterSet) -> Any:
        """Returns the loss to compile the model with: the name of a Keras loss, or a function.

        For several outputs, it may be a dictionary by output; a single loss applies to all of them.
        It is None for a model whose training step computes its loss.
        """
        return params["loss"]

    def metrics(self, params: ParameterSet) -> Any:
        """Returns the metrics to compile the model with, a list; new objects at each call.

        For several outputs, it may be a dictionary of lists by output; a single list applies to all
        of them.
        """
        return [params["metrics"]]

    def callbacks(self, params: ParameterSet) -> list[Any]:
        """Returns additional Keras callbacks; on every rank, they see metrics over all ranks."""
        return []

    def model_files(self, params: ParameterSet) -> Sequence[ModelFile]:
        """Returns the files to which rank 0 saves the model, besides that of ``--save_model``."""
        return []

    def prepared(
        self,
        params: ParameterSet,
        scaled_by: tuple[NDArray[np.float32], NDArray[np.float32]],
        **names: Any,
    ) -> Inputs:
        """Returns how the inputs were prepared, for `DataSet`.

        Args:
            params: The parameters of the run.
            scaled_by: What `scale_features` has returned for the features.
            names: The fields `features`, `classes` and `target` of `Inputs`, if known.

        Raises:
            DataError: ``import.json`` cannot be read.
        """
        facts = self._imported(params) or {"options": {}}
        offset, scale = scaled_by
        return Inputs(
            benchmark=self.name,
            offset=offset,
            scale=scale,
            scaling=params["scaling"],
            fitted_to=params["scaling_fit"],
            log2=bool(facts["options"].get("log2")),
            **names,
        )

    def imported_names(self, params: ParameterSet, num_features: int) -> dict[str, list[str]]:
        """Returns the names of features and classes that the import has saved.

        They are fields of `Inputs`; none if the files were not imported.

        Raises:
            DataError: They are those of other files.
        """
        facts = self._imported(params)
        if facts is None:
            return {}
        if len(facts.get("features", ())) != num_features or "classes" not in facts:
            problem = f"it does not have the names of {num_features:,} features: repeat the import"
            raise DataError(problem, Path(params[self.files["train"]]).parent / IMPORT_NAME)
        return {"features": facts["features"], "classes": facts["classes"]}

    def new_inputs(
        self,
        rows: NDArray[np.float32],
        labels: Sequence[str] | None,
        params: ParameterSet,
        inputs: Inputs,
    ) -> Any:
        """Returns the inputs of the model for new samples.

        Args:
            rows: Their features, scaled: float32, shape (samples, features).
            labels: Their classes; None: unknown.
            params: The parameters of the run.
            inputs: How the inputs of the run were prepared.
        """
        return rows

    def read_new(
        self,
        path: Path,
        reader: Callable[[], Reader],
        params: ParameterSet,
        inputs: Inputs,
        note: Callable[[str], None],
    ) -> Callable[[], Iterator[NewRows]] | None:
        """Returns what reads new samples in a table that is not one of features; None: it is.

        Args:
            path: The table.
            reader: Returns what reads the files of the run again.
            params: The parameters of the run.
            inputs: What the inputs went through.
            note: Tells the user something of the table, a clause.
        """
        return None

    def predictor(
        self, model: Any, params: ParameterSet, inputs: Inputs
    ) -> Callable[[Any], dict[str, Any]]:
        """Returns what predicts: it turns what the model takes into columns of a table, by name.

        By default, these are the class and the probability of each or, with a target, its value.
        It raises ParameterError for a network that returns neither.
        """
        activation = last_activation(model)

        def predict(x: Any) -> dict[str, Any]:
            y = model.predict_on_batch(x)
            if inputs.target:
                return {inputs.target.column: y[:, 0] * np.float32(inputs.target.factor)}
            p = as_probabilities(y, activation).astype(np.float32)
            names = inputs.classes or [*map(str, range(y.shape[1]))]
            chosen = np.array(names)[y.argmax(axis=1)]
            return {"class": chosen} | {f"probability_{n}": p[:, i] for i, n in enumerate(names)}

        return predict

    def naive_quality(self, params: ParameterSet, data: DataSet) -> dict[str, float]:
        """Returns the test metrics of the best constant predictor, by metric name."""
        return {}

    def other_samples(self, data: DataSet) -> Mapping[str, Samples]:
        """Returns the training samples prepared in other ways, for ``candle-p1 bench step``."""
        return {}

    def random_parameters(self, params: ParameterSet) -> Sequence[str]:
        """Returns the parameters, other than 0, that let a training step draw random numbers."""
        return [name for name in ("dropout",) if params[name]]

    def keras2_model(
        self, k: Any, params: ParameterSet, data: DataSet, learning_rate: float
    ) -> Any | None:
        """Returns the compiled model in Keras 2 for ``candle-p1 bench step``, or None.

        Its layers with weights are in the order of those of `build_model`; `k` is the module
        tf_keras (see `candle_p1.models.keras2`), and the learning rate is already scaled.
        """
        return None

    def evaluate(self, trained: Trained) -> Quality:
        """Returns the test metrics, and those of the naive predictor; collective."""
        values = trained.metrics(trained.data.test, trained.params["test_steps"])
        return compare_with_naive(values, self.naive_quality(trained.params, trained.data))

    @property
    def folder(self) -> Path:
        """The benchmark's folder."""
        return Path(inspect.getfile(type(self))).resolve().parent

    @property
    def argument(self) -> str:
        """What commands call it: its name or, if it is not found by that, its folder's path."""
        named = [(base / self.name).resolve() for base in search_path()]
        return self.name if self.folder in named else shlex.quote(str(self.folder))

    @property
    def script(self) -> Path:
        """The script that a launcher starts."""
        return self.folder / f"{self.name}_baseline_keras2.py"

    @property
    def model_file(self) -> Path:
        """The benchmark's own parameter file."""
        return self.folder / f"{self.name}_default_model.txt"

    @property
    def published(self) -> PublishedFiles:
        """The data files that its own parameter file names.

        Raises:
            ParameterError: It names none.
        """
        own = self._own_parameters
        files = {role: own[name] for role, name in self.files.items() if own[name]}
        if not files:
            raise ParameterError(f"{self.model_file} names no data files")
        return PublishedFiles(files, own["data_url"], data_directory() / self.name)

    @cached_property
    def declaration(self) -> Declaration:
        """All parameters of the benchmark, shared and its own."""
        shared = [
            replace(parameter, help=f"{parameter.help}; without effect here")
            if parameter.needs_support and parameter.name not in self.supports
            else replace(parameter, needs_support=False)
            for parameter in PARAMETERS
        ]
        return Declaration(
            shared,
            self.parameters,
            program=self.script.name,
            description=self.title,
            choices=CHOICES,
            acts_with={**ACTS_WITH, **self.acts_with},
        )

    def initialize_parameters(
        self, default_model: str | Path | None = None, argv: Sequence[str] | None = None
    ) -> EditableParameters:
        """Returns the parameters as CANDLE drivers expect them: a dictionary that they may change.

        Without a parameter file, it is ``<name>_default_model.txt``; a relative name is looked up
        in the benchmark's folder. Without `argv`, flags are those of the command line.

        Raises:
            ParameterError: A file or a flag is wrong.
        """
        model_file = self.folder / default_model if default_model else self.model_file
        argv = sys.argv[1:] if argv is None else argv
        return EditableParameters(self.declaration.parse(argv, model_file))

    def read_parameters(self, argv: Sequence[str] | None = None) -> ParameterSet:
        """Returns the frozen parameters of a run, from flags and the benchmark's own file.

        Without `argv`, flags are those of the command line.

        Raises:
            CandleError: See `initialize_parameters` and `bind`.
        """
        argv = sys.argv[1:] if argv is None else argv
        return self._resolved(self.declaration.parse(argv, self.model_file))

    def bind(self, parameters: Mapping[str, Any]) -> ParameterSet:
        """Returns the frozen parameters of a run.

        They name the data files that the run reads by absolute paths; the other files are None.

        Raises:
            ParameterError: A parameter is unknown or not supported, or a value is not allowed.
            DataError: A data file that is named does not exist or is not a regular file.
        """
        return self._resolved(self.declaration.bind(parameters))

    def _resolved(self, params: ParameterSet) -> ParameterSet:
        params = self.resolve(_without_empty_layers(params.without_vain()))
        params = params.with_settings(*self._data_files(params))
        params = params.with_settings(self._imported_settings(params))
        if params["folds"]:
            check_fold(params)
        return params.with_settings({}, check_flags(params))

    def _imported_settings(self, params: ParameterSet) -> Settings:
        """Returns the parameters that follow from imported files.

        Raises:
            DataError: Their description cannot be read.
            ParameterError: Another value was given.
        """
        facts = self._imported(params)
        if facts is None:
            return {}
        where = Path(params[self.files["train"]]).parent / IMPORT_NAME
        for name, value in facts["parameters"].items():
            if self._is_named(name, params) and params[name] != value:
                raise ParameterError(
                    f"{name} = {params[name]} ({params.origin(name)}), but {where} says {value}:"
                    " omit it"
                )
        derived = dict(facts["parameters"])
        if params["folds"] and params["group_data"] is None and facts.get("groups"):
            derived["group_data"] = str(where)
        origin = Origin("imported data", str(where))
        return {name: (value, origin) for name, value in derived.items()}

    def _imported(self, params: ParameterSet) -> dict[str, Any] | None:
        """Returns the description of imported files; None if they are others."""
        path = params[self.files["train"]] if "train" in self.files and self.importable else None
        facts = imported_facts(Path(path).parent) if path else None
        return facts if facts and facts["benchmark"] == self.name else None

    def check_tables(self, params: ParameterSet) -> None:
        """Raises DataError if a table that a run is given does not begin as its layout has it."""
        for role in self.needed_files(params):
            path, layout = params[self.files[role]], self.layouts.get(role)
            if path and layout:
                with open_together(Path(path), SerialCommunicator()) as source:
                    source.read_head(layout)

    def mode_flags(self, mode: str) -> dict[str, str]:
        """Returns the flags of strong or weak scaling, as in the paper.

        Strong scaling follows the benchmark's own parameter file. Under weak scaling, every rank
        trains the same number of epochs, and its batch size does not grow.

        Raises:
            ParameterError: There is no such mode.
        """
        if mode not in SCALING_MODES:
            raise ParameterError(f"mode {mode!r}: choose one of {', '.join(SCALING_MODES)}")
        own = self._own_parameters
        epochs, batch_scaling = own["epochs"], own["batch_scaling"]
        if mode == "strong":
            scaling, _ = share_epochs(epochs, 1, own["epochs_scaling"], own["data_parallel"])
            changed = {"batch_scaling": batch_scaling}
        else:
            epochs, scaling, changed = self.paper.weak_epochs, "weak", {"batch_scaling": "none"}
        flags = {"epochs": str(epochs), "epochs_scaling": scaling}
        return flags | (changed if batch_scaling != "none" else {})

    def _data_files(self, params: ParameterSet) -> tuple[Settings, list[str]]:
        """Returns the paths of the files that a run reads, with their origins; and warnings.

        The names in the benchmark's own parameter files are CANDLE's, even if a driver repeats
        them, and do not refer to files on this machine: unless other names or a directory are
        given, the data are synthetic. They are so, too, with a warning, if a config file has those
        names, as CANDLE's files do, and there are none of these files. A relative name is looked up
        in data_dir if that is set, then in the working directory, then in $CANDLE_DATA_DIR.

        Raises:
            DataError: A named file does not exist.
            ParameterError: Some files are named and others are not.
        """
        needed = [self.files[role] for role in self.needed_files(params)]
        named = {
            name: (params[name], params.origin(name))
            for name in needed
            if params[name] and (self._is_changed(name, params) or self._is_named(name, params))
        }
        warnings = []
        directory = params["data_dir"]
        if self.recipe and named and all(self._is_candles(name, params) for name in named):
            found = [n for n in needed if params[n] and self._existing(params[n], directory)]
            if not found and not directory:
                origin = next(iter(named.values()))[1]
                warnings.append(
                    f"{', '.join(named)} ({replace(origin, line=None)}): there are no such files,"
                    " so the data are synthetic"
                )
            named = {name: (params[name], params.origin(name)) for name in found}
        missing = [name for name in needed if name not in named]
        if directory:
            origin = params.derived_origin("data_dir")
            own, parent = self._own_parameters, Path(directory).expanduser()
            named |= {name: (str(parent / own[name]), origin) for name in missing}
        elif missing and (named or self.recipe is None):
            raise ParameterError(
                f"{self.name} also needs {', '.join(missing)}: name all files, or their directory"
                " with --data_dir"
            )
        unnamed = {
            name: (None, Origin("synthetic data" if name in needed else "not read"))
            for name in self.files.values()
        }
        files = {
            name: (str(self._find_file(path, directory)), origin)
            for name, (path, origin) in named.items()
        }
        idle = [name for name in ("size", "data_seed") if named and params.origin(name).is_explicit]
        idle += [n for n in self.files.values() if n not in needed and self._is_named(n, params)]
        warnings += [
            f"{name} = {params[name]} ({params.origin(name)}) has no effect: this run reads"
            f" {', '.join(files) or 'synthetic data'}"
            for name in idle
        ]
        return unnamed | files, warnings

    def _is_candles(self, name: str, params: ParameterSet) -> bool:
        """Returns whether a config file gives a data file the name that CANDLE gives it."""
        return params.origin(name).kind == "config file" and not self._is_changed(name, params)

    def _is_named(self, name: str, params: ParameterSet) -> bool:
        """Returns whether a flag, or a config file other than the benchmark's, sets a value."""
        origin = params.origin(name)
        path = Path(origin.file or "").resolve()
        own = path.parent == self.folder and path.match(f"{self.name}_*_model.txt")
        return origin.is_explicit and not own

    def _is_changed(self, name: str, params: ParameterSet) -> bool:
        """Returns whether a value differs from the benchmark's own file, or from the default.

        Its origin does not tell, because a run's ``final_params.txt`` and a driver's copy of the
        parameters repeat every value.
        """
        return bool(params[name] != self._own_parameters[name])

    @cached_property
    def _own_parameters(self) -> ParameterSet:
        return self.declaration.parse([], self.model_file)

    def _candidates(self, name: str, data_dir: str | None) -> list[Path]:
        path = Path(name).expanduser()
        paths = [Path(data_dir).expanduser() / path, path] if data_dir else [path]
        bases = [Path.cwd()]
        with suppress(SetupError):  # no home directory
            bases.append(data_directory() / self.name)
        return list(dict.fromkeys(base / path for path in paths for base in bases))

    def _existing(self, name: str, data_dir: str | None) -> Path | None:
        for path in self._candidates(name, data_dir):
            with suppress(OSError):  # the name is too long
                if path.exists():
                    return path
        return None

    def _find_file(self, name: str, data_dir: str | None) -> Path:
        if path := self._existing(name, data_dir):
            if not path.is_dir():  # of the files of a role
                check_regular(path)
            return path
        candidates = self._candidates(name, data_dir)
        places = " or ".join(str(path).removesuffix(name) for path in candidates)
        raise DataError(
            f"no such file{places and f' in {places}'}. Download it with"
            f" candle-p1 data fetch {self.argument}, or generate synthetic data of the published"
            f" shape with candle-p1 data make {self.argument} --size full --out DIR",
            name,
        )


def _without_empty_layers(params: ParameterSet) -> ParameterSet:
    """Returns the parameters without the layers that CANDLE leaves out.

    They are dense layers of 0 units, and from the first convolution with a 0 all of them, with
    their pooling.
    """
    dense, conv, pool = (params[name] or [] for name in ("dense", "conv", "pool"))
    lists = {"dense": [units for units in dense if units]}
    if 0 in conv:
        num_layers = conv.index(0) // CONV_FIELDS
        lists["conv"] = conv[: CONV_FIELDS * num_layers]
        if len(pool) == len(conv) // CONV_FIELDS:
            lists["pool"] = pool[:num_layers]
    changed = {name: values for name, values in lists.items() if values != (params[name] or [])}
    return params.with_settings(
        {name: (values, params.origin(name)) for name, values in changed.items()}
    )


def find_benchmark(name: str) -> Benchmark:
    """Returns a benchmark by its name, the path of its folder, or the name of its module.

    A name is looked up in $CANDLE_BENCHMARKS_PATH (folders separated by ":") and among this
    project's benchmarks, but not in the working directory, which may hold anything: finding a
    benchmark executes its module. A folder there is given as a path, such as ``./blobs``.

    Raises:
        ParameterError: It is not found, or does not define a Benchmark.
    """
    try:
        folder = _folder(name)
    except (OSError, ValueError) as error:  # too long, not allowed to look, or a NUL character
        problem = getattr(error, "strerror", None) or error
        raise ParameterError(f"benchmark {reprlib.repr(name)}: {problem}") from error
    if folder:
        return _benchmark_in(folder)
    if re.fullmatch(r"\w+(\.\w+)+", name):
        try:
            return _benchmark_of(importlib.import_module(name), name)
        except ModuleNotFoundError as error:
            raise ParameterError(f"benchmark {name}: {error}") from error
    known = list_benchmarks()
    raise ParameterError(
        f"there is no benchmark {reprlib.repr(name)}{did_you_mean(name, known)}; known benchmarks:"
        f" {', '.join(known) or 'none'}. Give the path of a folder elsewhere, such as"
        f" ./{name[:40]}, or add its parent to ${SEARCH_PATH_VARIABLE}"
    )


def _folder(name: str) -> Path | None:
    """Returns the folder of a benchmark; None if this may be the name of a module."""
    if os.sep in name:
        folder = Path(name).resolve()
        if not (folder / f"{folder.name}.py").is_file():
            raise ParameterError(f"{name} is not a benchmark: it has no {folder.name}.py")
        return folder
    found = (base / name for base in search_path() if (base / name / f"{name}.py").is_file())
    return next(found, None)


def list_benchmarks() -> list[str]:
    """Returns the names of the benchmarks on the search path."""
    folders = {
        folder.name
        for base in search_path()
        if base.is_dir()
        for folder in base.iterdir()
        if (folder / f"{folder.name}.py").is_file()
    }
    return sorted(folders)


def search_path() -> list[Path]:
    """Returns the folders in which a benchmark is looked up by its name."""
    named = os.environ.get(SEARCH_PATH_VARIABLE, "")
    return [*(Path(each) for each in named.split(os.pathsep) if each), shipped("benchmarks")]


def _benchmark_in(folder: Path) -> Benchmark:
    # The modules of a folder import each other by name, as they do when its script runs.
    sys.path.insert(0, str(folder))
    try:
        return _benchmark_of(importlib.import_module(folder.name), str(folder))
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:  # for what its functions import later
            sys.path.append(str(folder))


def _benchmark_of(module: object, name: str) -> Benchmark:
    benchmark = getattr(module, "BENCHMARK", None)
    if not isinstance(benchmark, Benchmark):
        raise ParameterError(f"{name} defines no Benchmark object called BENCHMARK")
    return benchmark
