"""A run, from parameters to record: this is where the order of the phases is defined."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from candle_p1.checkpoints.policy import are_saved
from candle_p1.data.reader import Reader, describe_together, loading
from candle_p1.distributed.allreduce_log import unknown_efficiency
from candle_p1.distributed.comm import Attempt, check_ranks, connect, on_first_rank
from candle_p1.distributed.engines import make_engine
from candle_p1.distributed.engines.engine import warn_of_horovod
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.distributed.mpi_library import describe_mpi
from candle_p1.distributed.timeline import open_timeline
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.figures import training_curves
from candle_p1.instrument import mllog, tensorboard
from candle_p1.instrument.mllog import RunLog
from candle_p1.models.evaluation import Trained, find_nan
from candle_p1.models.optimizers import check_names, make_optimizer
from candle_p1.records import environment
from candle_p1.scaling import ScalingPlan, epochs_of_ranks
from candle_p1.text import count, print_error
from candle_p1.training.agreement import check_same_data, check_same_parameters
from candle_p1.training.best_metric import check_best_metric
from candle_p1.training.identity import describe_data, describe_identity
from candle_p1.training.lifecycle import Run, recorded_run
from candle_p1.training.measured import describe_model, describe_rank, unmet_requests
from candle_p1.training.restart import Restart, may_restart
from candle_p1.training.setup import (
    averaging_of,
    build_model,
    check_passes,
    locate_files,
    make_plan,
    set_up_device,
)

CURVES_NAME = "history.png"

if TYPE_CHECKING:
    from candle_p1.benchmark import Benchmark
    from candle_p1.data.reader import FileSet
    from candle_p1.data.samples import DataSet
    from candle_p1.distributed.comm import Communicator
    from candle_p1.distributed.devices import Device
    from candle_p1.distributed.engines.engine import Engine
    from candle_p1.distributed.timeline import Timeline
    from candle_p1.parameters.parameter_set import EditableParameters, ParameterSet
    from candle_p1.records.types import Failure


def run(benchmark: Benchmark, parameters: Mapping[str, Any]) -> Any:
    """Trains a benchmark and records the run. Every rank of the job must call it.

    Args:
        benchmark: What to train.
        parameters: A ParameterSet, or a dictionary from `Benchmark.initialize_parameters`.

    Returns:
        The ``keras.callbacks.History``, with the metrics over all ranks; the same on every rank.
        A driver that tries learning rates finds there, too, that a loss is not a number, which the
        record calls a failure unless allow_nan is set.

    Raises:
        CandleError: Something the user can fix; the same on every rank unless only one rank failed.
    """
    comm = connect()
    params = Attempt(partial(benchmark.bind, parameters)).agree(comm)
    return _run(benchmark, params, comm).history


class _Outcome(NamedTuple):
    """What a run returns: the history; and if it failed although it has trained, why."""

    history: Any
    failure: Failure | None


def _run(benchmark: Benchmark, params: ParameterSet, comm: Communicator) -> _Outcome:
    """Trains a benchmark with bound parameters; see `run`."""
    check_ranks(launched_rank(), comm)
    check_same_parameters(params, comm)
    on_first_rank(partial(benchmark.check_tables, params), comm)
    if not may_restart(params):
        Attempt(partial(epochs_of_ranks, params, comm.size)).agree(comm)
    Attempt(partial(tensorboard.check_tensorboard, params)).agree(comm)
    timeline = Attempt(partial(open_timeline, params["timeline"], comm)).agree(comm)

    with recorded_run(benchmark.name, params, comm) as this, _open_log(params, this) as log:
        phases = this.phases

        with phases("startup"):
            identity = describe_identity(benchmark.name, params)
            restart = Restart.of(this.restart, comm)
            if restart is None:  # all of this before loading, which takes minutes
                Attempt(partial(epochs_of_ranks, params, comm.size)).agree(comm)
            else:
                Attempt(partial(restart.check_run, identity)).agree(comm)
                if not restart.same_ranks:
                    this.screen.say(restart.explain())
            results = this.result_directory(params["save_path"])
            this.screen.say("importing Keras and its backend, which takes some seconds")
            engine = Attempt(partial(make_engine, params["engine"], comm)).agree(comm)
            device, averaging = _start(params, timeline, engine, this)
            with phases.part("files"):
                files = _locate_files(benchmark, params, this)
            from candle_p1.training.fit import train_model  # with Keras
            from candle_p1.training.model_files import ModelFiles

            models = ModelFiles(benchmark, params, results, this)
        log.begin()
        allreduces = None
        if params["communication_log"]:
            allreduces = engine.make_log(this.communication, is_gpu=device.is_gpu)
        threads = params["load_threads"] or device.threads
        reader = Reader(files, loading(params, comm, threads, this.screen.warn))
        for warning in reader.loading.warnings:
            this.screen.warn(warning)

        def prepare() -> tuple[DataSet, list[str], ScalingPlan, Any]:
            synthetic = "synthetic data " if files.synthetic else ""
            this.screen.say(f"loading {synthetic}with the loader {params['loader']}")
            with phases("load"):
                raw = benchmark.load_data(reader, params)
            with phases("digest"):
                reader.digest()
            with phases("preprocess"):
                data = benchmark.preprocess(raw, params)
                chosen = _chosen_by_test(params, data)
                data = _limit(data, params)
            with phases("build"):
                plan = make_plan(benchmark, params, len(data.train), comm, restart)
                check_passes(plan, params, restart)
                model = build_model(benchmark, params, data, plan, device, engine, allreduces)
                check_best_metric(benchmark, params, model)
                models.check(model)
            if restart is not None:
                with phases("restore"):
                    restart.check_plan(plan)
                    restart.check_data(describe_data(reader))
                    restart.restore_arrays(model)
            return data, chosen, plan, model

        prepared = Attempt(prepare)

        with phases("broadcast"):
            with phases("wait"):
                data, chosen, plan, model = prepared.agree(comm)
                check_same_data(reader, comm)
            with phases("transfer"):
                engine.broadcast_state(model)

        this.screen.say(f"{plan.explain()}; validation in parentheses")
        warnings = [*plan.warnings, *chosen]
        warnings += unmet_requests(params, describe_model(model), reads_tables=bool(reader.table_s))
        for warning in warnings:
            this.screen.warn(warning)
        log.describe(params, plan, len(data.train), len(data.validation))
        sections: dict[str, Any] = {
            "data": {
                "synthetic": files.synthetic,
                "loader": reader.loader,
                "load_threads": threads,
                "num_copies": reader.loading.num_copies if reader.table_s else None,
                "files": reader.identify(),
                "joins": reader.joins,
                "scaling": params["scaling"],
                "scaling_fit": params["scaling_fit"],
                "num_train": len(data.train),
                "num_validation": len(data.validation),
                "num_test": len(data.test),
            },
            "plan": plan.to_dict(),
            "distributed": averaging,
        }

        def warned() -> list[str]:
            of_data = [*reader.loading.warnings, *reader.warnings]
            of_params = [*params.warnings, *params.idle(comm.size)]
            return [*this.watchdog.warnings, *of_params, *device.warnings, *of_data, *warnings]

        this.note(**sections, warnings=warned())
        with phases("train"):
            of_data = {"identity": identity, "data": describe_data(reader)}
            trained = train_model(
                benchmark,
                model,
                data,
                plan,
                params,
                allreduces,
                this,
                log,
                models.callbacks(),
                of_data,
                restart,
            )
        history = trained.history

        evaluates = params["eval_bool"] and not trained.is_interrupted
        with phases("evaluate"):
            evaluated = Trained(model, data, params, comm, results, files.synthetic)
            quality = benchmark.evaluate(evaluated) if evaluates else {}
        this.note(training=trained.facts, quality=quality)
        if models.are_final and not trained.is_interrupted:
            with phases("save"):
                models.save_final(model)
        lost = comm.broadcast(find_nan(history.history, quality))
        for problem in lost:
            this.screen.warn(problem.reason)
        failure = lost[0] if lost and not params["allow_nan"] else None
        if not trained.is_interrupted:
            log.finish(quality, is_success=failure is None)

        with phases("report"):
            checkpoints = trained.writer.close() if trained.writer else None
            files_read = describe_together(reader, comm, this.start)
            captured = environment.capture() | describe_mpi() if comm.rank == 0 else {}
        found: dict[str, Any] = unknown_efficiency(
            allreduces, comm, engine.name, is_wanted=params["communication_log"]
        )
        found |= {"timeline": timeline.describe(this.start)} if timeline else {}
        found |= {"failure": failure} if failure else {}
        this.finish(
            describe_rank(
                comm, threads=device.threads, device=device.name, num_cores=device.num_cores
            ),
            logged=params["communication_log"],
            clock_waits_for=allreduces.waits_for if allreduces else None,
            **sections | {"data": sections["data"] | {"files": files_read}},
            model=describe_model(model),
            training=trained.facts,
            quality=quality,
            begin=trained.begin,
            end=trained.end,
            checkpoints=checkpoints,
            interrupted=trained.is_interrupted,
            **found,
            environment=captured,
            warnings=[*warned(), *(problem.reason for problem in lost), *models.warnings],
        )
        if comm.rank == 0:
            this.screen.show_result(this.record, this.record_path)
            _draw_curves(this, history, files.synthetic)
    return _Outcome(history, failure)


def _draw_curves(this: Run, history: Any, synthetic: bool) -> None:
    """Writes the picture of history.csv; after the record, so that no time of the run has it."""
    if not history.history:  # train_bool is False
        return
    title = f"{this.record.benchmark} on {count(this.comm.size, 'rank')}"
    path = this.directory / CURVES_NAME
    try:
        training_curves(path, history.history, title=title + " (synthetic data)" * synthetic)
    except OSError as error:
        this.screen.warn(f"{path}: {error.strerror}")


class Script:
    """What CANDLE's drivers and launchers find in a benchmark's script.

    Args:
        benchmark: The benchmark.
    """

    def __init__(self, benchmark: Benchmark) -> None:
        self._benchmark = benchmark

    def initialize_parameters(self, default_model: str | None = None) -> EditableParameters:
        """Returns the parameters of the model file and the command line, which a driver may change.

        Args:
            default_model: A parameter file in the benchmark's folder; None means the default one.
        """
        return self._benchmark.initialize_parameters(default_model)

    def run(self, params: Mapping[str, Any]) -> Any:
        """Trains and returns the ``keras.callbacks.History``, with metrics over all ranks."""
        return run(self._benchmark, params)

    def main(self) -> None:
        """Runs from the command line."""
        main(self._benchmark)


def main(benchmark: Benchmark) -> None:
    """Runs a benchmark from the command line; the body of every benchmark script.

    Exits with 2 after an error that the user can fix, which rank 0 prints for all ranks, and if a
    loss is not a number.
    """
    # Python's own handler would wait until the main thread returns from MPI, which may be never.
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        comm = connect()
    except CandleError as error:
        print_error(error)
        sys.exit(EXIT_CODE)
    try:
        # Only one rank prints, also for --help, which ends here.
        quiet = contextlib.redirect_stdout(io.StringIO()) if comm.rank else contextlib.nullcontext()
        with quiet:
            params = Attempt(benchmark.read_parameters)
        failure = _run(benchmark, params.agree(comm), comm).failure
        if failure is not None:
            raise CandleError(
                f"{failure.reason}: lower the learning rate, check the data, or accept it by"
                " --allow_nan True"
            ).on_all_ranks()
        # At the end Python looks for garbage among all objects, which takes a second. What has to
        # be closed is closed; so there is no need to look.
        gc.freeze()
    except CandleError as error:
        if error.agreed:
            if comm.rank == 0 and not error.printed:
                print_error(error)
            comm.end(error.exit_code)
        if not error.printed:
            print_error(f"rank {comm.rank}: {error}")
        comm.abort(EXIT_CODE)
    except KeyboardInterrupt:
        comm.abort(128 + signal.SIGINT)
    except Exception:
        with contextlib.suppress(OSError):  # of a terminal that has gone with the launcher
            traceback.print_exc()
        comm.abort(1)


def _start(
    params: ParameterSet, timeline: Timeline | None, engine: Engine, this: Run
) -> tuple[Device, dict[str, Any]]:
    """Sets up device, precision and engine, and tests that gradients are averaged."""
    comm = this.comm
    with this.phases.part("devices"):
        device = set_up_device(params, comm, engine)
    if params["verbose"]:
        this.screen.say(params.to_text())
    for warning in (*params.warnings, *params.idle(comm.size), *device.warnings):
        this.screen.warn(warning)
    with this.phases.part("engine"):
        averaging = engine.start(
            stall_shutdown_s=params["stall_shutdown_s"],
            deterministic=params["deterministic"],
            timeline=timeline.path if timeline else None,
            averaging=averaging_of(params),
        )
    ignored = warn_of_horovod(averaging, os.environ)
    for warning in ignored:
        this.screen.warn(warning)
    device = replace(device, warnings=[*device.warnings, *ignored])
    plain = partial(make_optimizer, params, learning_rate=0.01)
    Attempt(plain).agree(comm)
    Attempt(partial(check_names, params)).agree(comm)
    with this.phases.part("self_test"):
        engine.self_test(plain, lambda: engine.distribute_optimizer(plain(), params["compression"]))
    return device, averaging | {"averaging_checked": comm.size > 1}


def _open_log(params: ParameterSet, this: Run) -> RunLog:
    """Returns the log in MLPerf's format; it writes only on rank 0, and only if requested."""
    writes = params["mllog"] and this.comm.rank == 0
    path = this.directory / mllog.FILE_NAME if writes else None
    first_epoch = this.restart.position.epoch if this.restart else 0
    return RunLog(path, this.record.benchmark, this.phases, this.start, first_epoch)


def _locate_files(benchmark: Benchmark, params: ParameterSet, this: Run) -> FileSet:
    def locate() -> FileSet:
        with this.screen.making_data() as progress:
            return locate_files(benchmark, params, progress)

    return on_first_rank(locate, this.comm)


def _limit(data: DataSet, params: ParameterSet) -> DataSet:
    data.train = data.train.first(params["train_samples"] or 0)
    data.validation = data.validation.first(params["val_samples"] or 0)
    return data


def _chosen_by_test(params: ParameterSet, data: DataSet) -> list[str]:
    """Returns a warning if validation decides something, and its samples are those of the test."""
    of_best = are_saved(params) and params["ckpt_save_best_metric"].startswith("val_")
    deciding = {"early_stop": params["early_stop"], "ckpt_save_best": of_best}
    chosen = [name for name, decides in deciding.items() if decides and params[name]]
    if not chosen or data.validation is not data.test:
        return []
    return [
        f"{' and '.join(chosen)}: the validation samples are the test samples, so the test metrics"
        " of the chosen model are optimistic"
    ]
