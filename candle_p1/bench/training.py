"""A benchmark made ready to train within a measuring job, as far as a run does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.data.reader import Reader, loading
from candle_p1.distributed import horovod
from candle_p1.distributed.comm import Attempt, on_first_rank
from candle_p1.errors import ParameterError
from candle_p1.training.setup import build_model, locate_files, make_plan, set_up_device

if TYPE_CHECKING:
    from candle_p1.benchmark import Benchmark
    from candle_p1.data.samples import DataSet
    from candle_p1.distributed.allreduce_log import AllreduceLog
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.devices import Device
    from candle_p1.parameters.parameter_set import ParameterSet
    from candle_p1.scaling import ScalingPlan


class Training(NamedTuple):
    """What can be trained.

    Attributes:
        device: Of this rank.
        data: Loaded and scaled.
        plan: Of an epoch.
        models: As many as were asked for, each compiled and with the weights of rank 0.
        matrix_bytes: Of the matrices that the ranks of a node share.
    """

    device: Device
    data: DataSet
    plan: ScalingPlan
    models: list[Any]
    matrix_bytes: int


def one_epoch(params: ParameterSet, **changes: Any) -> ParameterSet:
    """Returns parameters of an epoch of any length, which every number of ranks can divide."""
    whole = {"epochs": 1, "epochs_scaling": "none", "train_steps": 0}
    return params.replace(whole | changes)


def prepare_training(
    benchmark: Benchmark,
    params: ParameterSet,
    comm: Communicator,
    *,
    partners: Communicator | None = None,
    num_steps: int = 1,
    logs: tuple[AllreduceLog | None, ...] = (None,),
) -> Training:
    """Sets up the device, loads the data and builds the models; collective.

    Args:
        benchmark: What to train.
        params: Its parameters.
        comm: The ranks that load.
        partners: Those that exchange gradients; None is the same.
        num_steps: The least that an epoch must have.
        logs: For each model, the log of its gradients' allreduces.

    Raises:
        CandleError: Some rank cannot train; the same on every rank.
    """
    partners = partners or comm
    device = set_up_device(params, comm)
    horovod.start_horovod(partners, deterministic=params["deterministic"])
    files = on_first_rank(lambda: locate_files(benchmark, params), comm)
    reader = Reader(files, loading(params, comm, device.threads))

    def prepare() -> tuple[DataSet, ScalingPlan, list[Any]]:
        data = benchmark.preprocess(benchmark.load_data(reader, params), params)
        plan = make_plan(params, len(data.train), comm)
        if plan.steps_per_epoch < num_steps:
            raise ParameterError(
                f"an epoch has {plan.steps_per_epoch} steps and {num_steps} are measured: ask for"
                " fewer by --steps, or take --size full"
            )
        models = [build_model(benchmark, params, data, plan, device, partners, log) for log in logs]
        return data, plan, models

    data, plan, models = Attempt(prepare).agree(comm)
    for model in models:
        horovod.broadcast_state(model, partners)
    return Training(device, data, plan, models, reader.matrix_bytes)
