"""What a run needs before it trains: the files, a device, the plan and the model."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from candle_p1.data.reader import FileSet
from candle_p1.datasets.synthetic import ensure
from candle_p1.distributed import devices, gpus
from candle_p1.distributed.comm import Attempt
from candle_p1.distributed.engines.engine import HOROVOD
from candle_p1.distributed.launch_environment import node_name
from candle_p1.distributed.seeds import seed_process, seed_ranks
from candle_p1.errors import ParameterError, SetupError
from candle_p1.models import fast
from candle_p1.models.optimizers import (
    DTYPE_POLICIES,
    default_learning_rate,
    make_optimizer,
)
from candle_p1.records.environment import memory_limit_bytes
from candle_p1.scaling import ScalingPlan
from candle_p1.training.restart import Start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from candle_p1.benchmark import Benchmark
    from candle_p1.data.samples import DataSet
    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.devices import Device
    from candle_p1.distributed.engines.engine import Engine
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.training.restart import Restart

FLOAT_BYTES = 4


def locate_files(
    benchmark: Benchmark,
    params: ParameterSet,
    progress: Callable[[str, int, int], None] | None = None,
) -> FileSet:
    """Returns the files of a run, generating them first if they are synthetic; for rank 0 only.

    If no file is named, the data are synthetic, of ``--size``. Files that ``candle-p1 data make``
    generated are recognised as synthetic by the manifest beside them.

    Args:
        benchmark: The benchmark.
        params: As `Benchmark.bind` returned them.
        progress: Called while synthetic data are generated.

    Raises:
        CandleError: The synthetic data cannot be generated.
    """
    named = {role: params[name] for role, name in benchmark.files.items() if params[name]}
    recipe = benchmark.recipe
    if named or recipe is None:  # a benchmark without a recipe has no files, or all are named
        return FileSet.of({role: Path(path) for role, path in named.items()})
    manifest = ensure(recipe, params["size"], params["data_seed"], progress)
    roles = benchmark.needed_files(params)
    return FileSet.of({role: manifest.directory / recipe.roles[role] for role in roles})


def set_up_device(params: ParameterSet, comm: Communicator, engine: Engine) -> Device:
    """Joins the ranks, and sets up device and kernels of each; collective.

    Raises:
        CandleError: The device is not available, or the job asked for GPUs and a rank finds none;
            the same on every rank.
    """
    device = devices.configure(
        comm, engine, gpus=params["gpus"], deterministic=params["deterministic"]
    )
    request = Attempt(partial(gpus.requested_gpus, params["gpus"])).agree(comm)
    gpus.check_gpus(comm, device.is_gpu, request, engine.backend, node_name())
    import keras

    keras.config.set_floatx("float64" if params["data_type"] == "f64" else "float32")
    fast.choose(params["kernels"], on_cpu=not device.is_gpu)
    return device


def averaging_of(params: ParameterSet) -> str:
    """Returns what averages gradients: Horovod, if it is told to or has to compress them."""
    return HOROVOD if params["compression"] != "none" else str(params["averaging"])


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
    return ScalingPlan.make(
        num_ranks=comm.size,
        epochs=params["epochs"],
        batch_size=params["batch_size"],
        learning_rate=learning_rate,
        num_samples=num_samples,
        epochs_scaling=params["epochs_scaling"],
        batch_scaling=params["batch_scaling"],
        lr_scaling=params["lr_scaling"],
        warmup_epochs=params["warmup_epochs"],
        warmup_from=params["base_lr"],
        data_parallel=params["data_parallel"],
        max_steps=params["train_steps"] or 0,
        whole_batches=benchmark.whole_batches,
        epochs_per_rank=restart.epochs_per_rank if restart else None,
    )


def check_passes(plan: ScalingPlan, params: ParameterSet, restart: Restart | None = None) -> None:
    """Raises ParameterError if the last gradients would be accumulated but never used."""
    passes, num_steps = params["backward_passes_per_step"], plan.steps_per_epoch
    start = restart.start if restart else Start()
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
) -> Any:
    """Builds and compiles the model, with the same weights on all ranks that have the same seed.

    The log, if there is one, records the gradients' allreduces.

    Raises:
        CandleError: The model does not fit into memory.
    """
    import keras

    _check_size(params, engine.comm)
    keras.backend.clear_session()
    # Only now: Keras forgets its policy with its session.
    keras.config.set_dtype_policy(DTYPE_POLICIES[params["data_type"]])
    seed_process(params["rng_seed"])
    with explained_memory_errors():
        model = benchmark.build_model(params, data)
        if not model.built:  # a subclass of keras.Model makes its weights when it is first called
            model(data.train.x[0:1])
    seed_ranks(model, params["rng_seed"], engine.comm.rank)
    optimizer = make_optimizer(params, plan.learning_rate, benchmark.optimizer_constants)
    model.compile(
        optimizer=engine.distribute_optimizer(optimizer, params["compression"], log),
        loss=benchmark.loss(params),
        metrics=_for_every_output(benchmark.metrics(params), model),
        jit_compile="auto" if engine.uses_xla(is_gpu=device.is_gpu) else False,
        auto_scale_loss=False,
    )
    engine.prepare(model)
    with explained_memory_errors():
        model.optimizer.build(model.trainable_variables)
    return model


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
