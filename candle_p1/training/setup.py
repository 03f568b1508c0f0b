"""What a run needs before it trains: the files, a device, the plan and the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from candle_p1.benchmark import Benchmark
from candle_p1.checkpoints.policy import are_saved, check_metric
from candle_p1.data.directory import data_directory
from candle_p1.data.reader import FileSet, Reader
from candle_p1.data.samples import DataSet
from candle_p1.datasets.synthetic import ensure
from candle_p1.distributed import devices, gpus
from candle_p1.distributed.allreduce_log import AllreduceLog
from candle_p1.distributed.comm import Communicator, agree
from candle_p1.distributed.devices import Device
from candle_p1.distributed.engine import Engine
from candle_p1.distributed.launch_environment import node_name
from candle_p1.distributed.optimizer import distribute_optimizer
from candle_p1.distributed.programs import keep_programs
from candle_p1.distributed.replicas import seed_process, seed_ranks
from candle_p1.errors import DistributedError, ParameterError, SetupError
from candle_p1.instrument.logs import RunLog
from candle_p1.models import fast
from candle_p1.models.optimizers import DTYPE_POLICIES, default_learning_rate, make_optimizer
from candle_p1.models.saving import SavingError, describe
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.environment import memory_limit_bytes
from candle_p1.records.segments import BEGINNING
from candle_p1.records.types import Position
from candle_p1.scaling import ScalingPlan
from candle_p1.training.lifecycle import Run
from candle_p1.training.model_files import ModelFiles
from candle_p1.training.restart import Restart

FLOAT_BYTES = 4
BEST_METRIC = "ckpt_save_best_metric"


@dataclass(frozen=True)
class Training:
    """What a training works with; every rank has one."""

    run: Run
    benchmark: Benchmark
    params: ParameterSet
    data: DataSet
    plan: ScalingPlan
    model: Any  # compiled, with the arrays of the restart's checkpoint if there is one
    allreduces: AllreduceLog | None  # of gradients; None: they are not logged
    log: RunLog
    models: ModelFiles
    fingerprint: Mapping[str, Any]  # what a run that goes on must have in common with this one
    restart: Restart | None = None
    after_epoch: Callable[[int, Mapping[str, float]], bool] | None = None  # see train.run

    @property
    def start(self) -> Position:
        """Where training begins."""
        return self.restart.start if self.restart else BEGINNING


def locate_files(
    benchmark: Benchmark,
    params: ParameterSet,
    progress: Callable[[str, int, int], None] | None = None,
) -> FileSet:
    """Returns the files of a run, generating them first if they are synthetic; for rank 0 only.

    If no file is named, the data are synthetic, of ``--size``. Files that ``candle-p1 data make``
    generated are recognised as synthetic by the manifest beside them. `progress` is called while
    synthetic data are generated.
    """
    named = {role: params[name] for role, name in benchmark.files.items() if params[name]}
    recipe = benchmark.recipe
    if named or recipe is None:  # a benchmark without a recipe has no files, or all are named
        return FileSet.at({role: Path(path) for role, path in named.items()})
    manifest = ensure(recipe, params["size"], params["data_seed"], progress)
    roles = benchmark.needed_files(params)
    return FileSet.at({role: manifest.directory / recipe.roles[role] for role in roles})


def check_same_parameters(params: ParameterSet, comm: Communicator) -> None:
    """Raises DistributedError on all ranks if they have different parameters; collective."""
    first = comm.broadcast(dict(params))
    different = sorted(
        name
        for name in {*first, *params}
        if (name in first) != (name in params) or first[name] != params[name]
    )
    found = comm.first(different or None)
    if found:
        rank, names = found
        raise DistributedError(
            f"rank {rank} and rank 0 have different values of {', '.join(names)}: start all ranks"
            " with the same command and the same files"
        ).on_all_ranks()


def check_same_data(reader: Reader, comm: Communicator) -> None:
    """Raises DistributedError on all ranks if they have read different values; collective."""
    different = comm.find_different((reader.digests, reader.sizes))
    if different:
        raise DistributedError(
            f"ranks {', '.join(map(str, different))} have read values that differ from rank 0's in"
            f" {', '.join(str(path) for path in reader.files.paths.values())}: some node has a"
            " different copy"
        ).on_all_ranks()


def set_up_device(params: ParameterSet, comm: Communicator, engine: Engine) -> Device:
    """Joins the ranks, and sets up device and kernels of each; collective.

    Raises:
        CandleError: The device is not available, or the job asked for GPUs and a rank finds none;
            the same on every rank.
    """
    wanted = {"deterministic": params["deterministic"]}

    def programs(comm: Communicator) -> Any:
        default = data_directory() / "compiled"
        return keep_programs(comm, params["compiled_dir"], default, **wanted)

    device = devices.configure(comm, engine, gpus=params["gpus"], programs=programs, **wanted)
    request = agree(comm, gpus.requested_gpus, params["gpus"])
    gpus.check_gpus(comm, device.is_gpu, request, engine.backend, node_name())
    import keras

    keras.config.set_floatx("float64" if params["data_type"] == "f64" else "float32")
    fast.choose(params["kernels"], on_cpu=not device.is_gpu)
    return device


def make_plan(
    benchmark: Benchmark,
    params: ParameterSet,
    num_samples: int,
    comm: Communicator,
    restart: Restart | None = None,
) -> ScalingPlan:
    """Returns the scaling plan that the parameters give for these samples and ranks.

    A restart from a checkpoint decides how many epochs there are.
    """
    learning_rate = params["learning_rate"]
    if learning_rate is None:
        learning_rate = default_learning_rate(params["optimizer"])
    names = "epochs batch_size epochs_scaling batch_scaling lr_scaling warmup_epochs data_parallel"
    return ScalingPlan.make(
        **{name: params[name] for name in names.split()},
        num_ranks=comm.size,
        learning_rate=learning_rate,
        num_samples=num_samples,
        warmup_from=params["base_lr"],
        max_steps=params["train_steps"] or 0,
        drop_remainder=benchmark.drop_remainder,
        epochs_per_rank=restart.epochs_per_rank if restart else None,
    )


def check_passes(plan: ScalingPlan, params: ParameterSet, restart: Restart | None = None) -> None:
    """Raises ParameterError if the last gradients would be accumulated but never used."""
    passes, num_steps = params["backward_passes_per_step"], plan.steps_per_epoch
    start = restart.start if restart else BEGINNING
    total = num_steps * (plan.epochs_per_rank - start.epoch) - start.step
    if total % passes:
        raise ParameterError(
            f"backward_passes_per_step {passes} ({params.origin('backward_passes_per_step')}) does"
            f" not divide the {total} steps of a rank: the gradients of the last ones would be lost"
        )


def build_model(
    benchmark: Benchmark,
    params: ParameterSet,
    data: DataSet,
    plan: ScalingPlan,
    device: Device,
    engine: Engine,
    log: AllreduceLog | None = None,
    *,
    may_use_tables: bool = True,
) -> Any:
    """Builds and compiles the model, with the same weights on all ranks that have the same seed.

    The log, if there is one, records the gradients' allreduces. Where it can and may, the model has
    the form of `candle_p1.models.fast.tables` or `candle_p1.models.fast.sparse`, which holds the
    samples of `data` otherwise; `taken_by` of `candle_p1.models.fast.batches` returns them as it
    takes them. Raises SetupError if the model does not fit into memory.
    """
    import keras

    from candle_p1.models.fast import sparse, tables

    _check_size(params, engine.comm)
    keras.backend.clear_session()
    # Only now: Keras forgets its policy with its session.
    keras.config.set_dtype_policy(DTYPE_POLICIES[params["data_type"]])
    seed_process(params["rng_seed"])
    with explained_memory_errors():
        model = benchmark.build_model(params, data)
        if not model.built:  # a subclass of keras.Model makes its weights when it is first called
            model(data.train.x[0:1])
        optimizer = make_optimizer(params, plan.learning_rate, benchmark.optimizer_constants)
        learns = model, data, optimizer, benchmark.callbacks(params)
        if may_use_tables and tables.suits(*learns, params["compression"]):
            with suppress(SavingError):  # nobody could save it
                model = tables.with_tables(model, data.train.x, describe(model))
        elif sparse.suits(*learns, engine.reducer):
            model = sparse.with_sparse_inputs(model, data, plan.batch_size)
    seed_ranks(model, params["rng_seed"], engine.comm.rank)
    engine.compile(
        model,
        is_gpu=device.is_gpu,
        optimizer=distribute_optimizer(optimizer, engine.reducer, log),
        loss=benchmark.loss(params),
        metrics=_for_every_output(benchmark.metrics(params), model),
    )
    with explained_memory_errors():
        model.optimizer.build(model.trainable_variables)
    return model


def check_best_metric(benchmark: Benchmark, params: ParameterSet, model: Any) -> None:
    """Raises ParameterError, before training, if the metric of the best epoch will not be logged.

    For several outputs, or a training step of the model's own, names are known only after the first
    epoch, when the policy itself checks them.
    """
    import keras

    if not are_saved(params) or not params["ckpt_save_best"]:
        return
    metrics = benchmark.metrics(params)
    has_own_step = type(model).train_step is not keras.Model.train_step
    if has_own_step or len(getattr(model, "outputs", [0])) > 1 or isinstance(metrics, dict):
        return
    names = ["loss"]  # as Keras calls metrics in logs, which are given by name or as objects
    for metric in keras.tree.flatten(metrics):
        is_name = isinstance(metric, str)
        names.append(metric if is_name else getattr(metric, "name", None) or metric.__name__)
    known = [*names, *(f"val_{name}" for name in names), "learning_rate"]
    check_metric(params[BEST_METRIC], known, f"{BEST_METRIC} ({params.origin(BEST_METRIC)})")


def _for_every_output(metrics: Any, model: Any) -> Any:
    """Returns the metrics as Keras takes them; a list of names holds for every output."""
    several = len(getattr(model, "output_names", [])) > 1
    if not several or isinstance(metrics, dict) or not all(isinstance(m, str) for m in metrics):
        return metrics
    if isinstance(model.output, dict):
        return {name: list(metrics) for name in model.output}
    return [list(metrics) for _ in model.output]


@contextmanager
def explained_memory_errors() -> Iterator[None]:
    """Raises SetupError where NumPy or TensorFlow runs out of memory."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "ResourceExhaustedError":
            raise
        raise SetupError(
            f"there is not enough memory for the model and a batch: {str(error).splitlines()[0]}."
            " Use smaller layers or batches, or fewer ranks on a node"
        ) from error


def _check_size(params: ParameterSet, comm: Communicator) -> None:
    """Raises ParameterError if the weights between two dense layers exceed the node's memory."""
    limit = memory_limit_bytes()
    for inputs, units in pairwise(params["dense"] or ()):
        num_bytes = comm.local_size * inputs * units * FLOAT_BYTES
        if num_bytes > limit:
            raise ParameterError(
                f"dense {params['dense']} ({params.origin('dense')}): the weights between"
                f" {inputs:,} and {units:,} units would take {num_bytes / 2**30:,.0f} GiB on each"
                f" node, which has {limit / 2**30:,.0f}; use smaller layers"
            )
