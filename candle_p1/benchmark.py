"""What a benchmark is (parameters, data, model), and finding one by name, path or module.

A benchmark is a folder ``<name>/`` anywhere, with a module ``<name>.py`` that defines a Benchmark
object called BENCHMARK, a parameter file ``<name>_default_model.txt`` and a script
``<name>_baseline_keras2.py``. What its author needs can be imported from here, except for functions
on tables that ranks share (`candle_p1.data.transforms`) and plots (`candle_p1.figures`).
"""

from __future__ import annotations

import inspect
import shlex
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from candle_p1 import scaling
from candle_p1.benchmark_folders import find_module, list_benchmarks, search_path
from candle_p1.checkpoints.policy import check_flags
from candle_p1.data.directory import Importable, Quantity, data_directory
from candle_p1.data.folds import check_fold
from candle_p1.data.inputs import Inputs
from candle_p1.data.loaders import READERS
from candle_p1.data.reader import Reader
from candle_p1.data.samples import Chained, Computed, DataSet, Joined, Samples, Selected, Several
from candle_p1.data.source import open_together
from candle_p1.data.table import CsvLayout
from candle_p1.data.transforms import SCALINGS
from candle_p1.datasets.synthetic import SIZES, SyntheticFile, SyntheticRecipe
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import AVERAGING_CHOICES, ENGINE_CHOICES
from candle_p1.distributed.reducers.reducer import COMPRESSIONS
from candle_p1.errors import DataError, ParameterError
from candle_p1.models import fast
from candle_p1.models.evaluation import Quality, Trained, compare_with_naive
from candle_p1.models.networks import without_empty_layers
from candle_p1.models.optimizers import CANDLE_CONSTANTS, DTYPE_POLICIES
from candle_p1.models.saving import ModelFile
from candle_p1.models.scores import (
    ConfusionScore,
    RegressionScore,
    as_probabilities,
    last_activation,
)
from candle_p1.named_files import NamedFiles, import_of
from candle_p1.parameters.catalog import ACTS_WITH, PARAMETERS
from candle_p1.parameters.declaration import Declaration
from candle_p1.parameters.parameter import Needs, Parameter, Role
from candle_p1.parameters.parameter_set import EditableParameters, ParameterSet

__all__ = [
    "SAMPLE_FILES",
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
    "Joined",
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

SAMPLE_FILES: Mapping[str, str] = MappingProxyType(
    {"train": "train_data", "validation": "val_data", "test": "test_data", "groups": "group_data"}
)
"""The files of a benchmark that can hold out folds, and be validated on a file of its own."""
SCALING_MODES = ("strong", "weak")
CHOICES = {
    "averaging": AVERAGING_CHOICES,
    "batch_scaling": scaling.BATCH_SCALINGS,
    "compression": COMPRESSIONS,
    "data_parallel": scaling.DATA_PARALLEL_LEVELS,
    "data_type": tuple(DTYPE_POLICIES),
    "engine": ENGINE_CHOICES,
    "epochs_scaling": scaling.EPOCHS_SCALINGS,
    "kernels": fast.KERNELS,
    "loader": READERS,
    "lr_scaling": scaling.LR_SCALINGS,
    "scaling": SCALINGS,
    "size": SIZES,
}
"""The choices of shared parameters, taken from the code that implements them."""


class PublishedFiles(NamedTuple):
    """A benchmark's data files by role, as its own parameter file names them."""

    files: dict[str, str]
    url: str | None  # of their directory, if the parameter file sets it
    directory: Path  # where they are stored by default


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
        facts, (offset, scale) = import_of(self, params)[0] or {"options": {}}, scaled_by
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
        facts, where = import_of(self, params)
        if facts is None:
            return {}
        if len(facts.get("features", ())) != num_features or "classes" not in facts:
            problem = f"it does not have the names of {num_features:,} features: repeat the import"
            raise DataError(problem, where)
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
        own = self.own_parameters
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
        params = self.resolve(without_empty_layers(params.without_vain()))
        params = params.with_settings(*NamedFiles(self, params).settings())
        params = params.with_settings(NamedFiles(self, params).settings_of_import())
        if params["folds"]:
            check_fold(params)
        return params.with_settings({}, check_flags(params))

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
        own = self.own_parameters
        epochs, of_epochs, of_batch = self.paper.weak_epochs, "weak", "none"
        if mode == "strong":
            epochs, of_batch, level = own["epochs"], own["batch_scaling"], own["data_parallel"]
            of_epochs, _ = scaling.share_epochs(epochs, 1, own["epochs_scaling"], level)
        flags = {"epochs": str(epochs), "epochs_scaling": of_epochs}
        return flags | ({"batch_scaling": of_batch} if own["batch_scaling"] != "none" else {})

    @cached_property
    def own_parameters(self) -> ParameterSet:
        """The values of its own parameter file, and defaults."""
        return self.declaration.parse([], self.model_file)


def find_benchmark(name: str) -> Benchmark:
    """Returns a benchmark by its name, the path of its folder, or the name of its module.

    A name is looked up in $CANDLE_BENCHMARKS_PATH (folders separated by ":") and among this
    project's benchmarks, but not in the working directory, which may hold anything: finding a
    benchmark executes its module. A folder there is given as a path, such as ``./blobs``.

    Raises:
        ParameterError: It is not found, or does not define a Benchmark.
    """
    module, where = find_module(name)
    benchmark = getattr(module, "BENCHMARK", None)
    if not isinstance(benchmark, Benchmark):
        raise ParameterError(f"{where} defines no Benchmark object called BENCHMARK")
    return benchmark
