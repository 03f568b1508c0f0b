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
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from candle_p1.benchmark import Benchmark
from candle_p1.data.reader import Reader, describe_together, loading
from candle_p1.data.samples import DataSet
from candle_p1.distributed.allreduce_log import unknown_efficiency
from candle_p1.distributed.comm import (
    Communicator,
    agree,
    attempt,
    check_ranks,
    connect,
    on_first_rank,
)
from candle_p1.distributed.devices import Device
from candle_p1.distributed.engine import Engine, make_engine, warn_of_horovod
from candle_p1.distributed.launch_environment import launched_rank
from candle_p1.distributed.mpi_library import describe_mpi
from candle_p1.distributed.optimizer import self_test
from candle_p1.distributed.reducers.horovod import Timeline, open_timeline
from candle_p1.distributed.replicas import broadcast_state
from candle_p1.errors import EXIT_CODE, CandleError
from candle_p1.figures import training_curves
from candle_p1.instrument.logs import MLLOG_NAME, RunLog, check_tensorboard
from candle_p1.models.evaluation import Trained, find_nan
from candle_p1.models.optimizers import check_names, make_optimizer
from candle_p1.parameters.parameter_set import EditableParameters, ParameterSet
from candle_p1.records import environment
from candle_p1.records.summary import VALIDATES_ON_TEST
from candle_p1.records.types import Failure
from candle_p1.scaling import ScalingPlan, epochs_of_ranks
from candle_p1.text import count, print_error
from candle_p1.training import measured, setup
from candle_p1.training.lifecycle import Run, recorded_run
from candle_p1.training.restart import Restart, data_fingerprint, may_restart, run_fingerprint

EpochFunction = Callable[[int, Mapping[str, float]], bool]


def run(
    benchmark: Benchmark, parameters: Mapping[str, Any], after_epoch: EpochFunction | None = None
) -> Any:
    """Trains a benchmark and records the run. Every rank of the job must call it.

    Args:
        benchmark: What to train.
        parameters: A ParameterSet, or a dictionary from `Benchmark.initialize_parameters`.
        after_epoch: Called on rank 0 after every epoch and its validation, with the number of the
            epoch, from 1, and loss and metrics over all ranks by name (``val_loss``). If it returns
            True, training ends on all ranks with that epoch. Other ranks need not pass it.

    Returns:
        The ``keras.callbacks.History``, with the metrics over all ranks; the same on every rank.
        A driver that tries learning rates finds there, too, that a loss is not a number, which the
        record calls a failure unless allow_nan is set.

    Raises:
        CandleError: Something the user can fix; the same on every rank unless only one rank failed.
    """
    comm = connect()
    params = agree(comm, benchmark.bind, parameters)
    is_shown = comm.broadcast(after_epoch is not None)
    own = (after_epoch or (lambda *_: False)) if is_shown else None
    return _run(benchmark, params, comm, own)[0]


def _run(
    benchmark: Benchmark,
    params: ParameterSet,
    comm: Communicator,
    after_epoch: EpochFunction | None = None,
) -> tuple[Any, Failure | None]:
    """Returns the history; and if the run failed although it has trained, why. See `run`."""
    check_ranks(launched_rank(), comm)
    setup.check_same_parameters(params, comm)
    on_first_rank(comm, benchmark.check_tables, params)
    if not may_restart(params):
        agree(comm, epochs_of_ranks, params, comm.size)
    agree(comm, check_tensorboard, params)
    timeline = agree(comm, open_timeline, params["timeline"], comm)

    with recorded_run(benchmark.name, params, comm) as run, _open_log(params, run) as log:
        phases = run.phases

        with phases("startup"):
            fingerprint = run_fingerprint(benchmark.name, params)
            restart = Restart.of(run.restart, comm)
            if restart is None:  # all of this before loading, which takes minutes
                agree(comm, epochs_of_ranks, params, comm.size)
            else:
                agree(comm, restart.check_run, fingerprint)
                if not restart.same_ranks:
                    run.screen.say(restart.explain())
            results = run.result_directory(params["save_path"])
            run.screen.say("importing Keras and its backend, which takes some seconds")
            share = params["share_gpus"]
            engine = agree(comm, make_engine, params["engine"], comm, share_gpus=share)
            device, averaging = _start(params, timeline, engine, run)
            with phases.region("files"), run.screen.making_data() as progress:
                files = on_first_rank(comm, setup.locate_files, benchmark, params, progress)
            from candle_p1.training.loop import train_model  # with Keras
            from candle_p1.training.model_files import ModelFiles

            models = ModelFiles(benchmark, params, results, run)
        log.begin()
        allreduces = None
        if params["communication_log"]:
            allreduces = engine.make_log(run.communication, is_gpu=device.is_gpu)
        threads = params["load_threads"] or device.threads
        reader = Reader(files, loading(params, comm, threads, run.screen.warn))
        for warning in reader.loading.warnings:
            run.screen.warn(warning)

        def prepare() -> tuple[DataSet, bool, ScalingPlan, Any]:
            synthetic = "synthetic data " if files.synthetic else ""
            run.screen.say(f"loading {synthetic}with the loader {params['loader']}")
            with phases("load"), run.screen.making_data("reading") as progress:
                reader.loading = replace(reader.loading, progress=progress)
                raw = benchmark.load_data(reader, params)
            with phases("digest"):
                reader.digest()
            with phases("preprocess"):
                data = benchmark.preprocess(raw, params)
                on_test = data.validation is data.test
                data.train = data.train.first(params["train_samples"] or 0)
                data.validation = data.validation.first(params["val_samples"] or 0)
            with phases("build"):
                plan = setup.make_plan(benchmark, params, len(data.train), comm, restart)
                setup.check_passes(plan, params, restart)
                built = benchmark, params, data, plan, device, engine, allreduces
                may_use_tables = restart is None or restart.has_tables
                model = setup.build_model(*built, may_use_tables=may_use_tables)
                setup.check_best_metric(benchmark, params, model)
                models.check(model, data)
            if restart is not None:
                with phases("restore"):
                    restart.check_plan(plan)
                    restart.check_data(data_fingerprint(reader))
                    restart.restore_arrays(model)
            return data, on_test, plan, model

        prepared = attempt(prepare)

        with phases("broadcast"):
            with phases("wait"):
                data, on_test, plan, model = agree(comm, prepared)
                setup.check_same_data(reader, comm)
            with phases("transfer"):
                broadcast_state(model, engine.reducer)

        run.screen.say(f"{plan.explain()}; validation in parentheses")
        if on_test:
            run.screen.say(VALIDATES_ON_TEST)
        network, reads_tables = measured.describe_model(model), bool(reader.table_s)
        warnings = [*plan.warnings, *measured.chosen_by_test(params, on_test)]
        warnings += measured.unmet_requests(params, network, reads_tables=reads_tables)
        for warning in warnings:
            run.screen.warn(warning)
        log.describe(params, plan, len(data.train), len(data.validation))
        sections: dict[str, Any] = {
            "data": {
                "synthetic": files.synthetic,
                "loader": reader.loader,
                "load_threads": threads,
                "num_copies": reader.loading.num_copies if reads_tables else None,
                "files": reader.identify(),
                "joins": reader.joins,
                "scaling": params["scaling"],
                "scaling_fit": params["scaling_fit"],
                "inputs": models.describe_inputs(data),
                **measured.num_samples(data),
                "validates_on_test": on_test,
            },
            "plan": plan,
            "distributed": averaging,
        }

        def warned() -> list[str]:
            before = [*run.watchdog.warnings, *params.warnings, *params.idle(comm.size)]
            of_data = [*reader.loading.warnings, *reader.warnings]
            return [*before, *device.warnings, *of_data, *warnings]

        run.note(**sections, warnings=warned())
        with phases("train"):
            fingerprint |= {"data": data_fingerprint(reader)}
            built = (data, plan, model, allreduces, log, models)
            trained = train_model(
                setup.Training(run, benchmark, params, *built, fingerprint, restart, after_epoch)
            )
        history = trained.history

        evaluates = params["eval_bool"] and not trained.is_interrupted
        with phases("evaluate"):
            evaluated = Trained(model, data, params, comm, results, files.synthetic)
            quality = benchmark.evaluate(evaluated) if evaluates else {}
        run.note(training=trained.facts, quality=quality)
        if models.are_final and not trained.is_interrupted:
            with phases("save"):
                models.save_final(model)
        with phases("report"):
            lost = comm.broadcast(find_nan(history.history, quality))
            for problem in lost:
                run.screen.warn(problem.reason)
            failure = lost[0] if lost and not params["allow_nan"] else None
            if not trained.is_interrupted:
                log.finish(quality, is_success=failure is None)
            checkpoints = trained.writer.close() if trained.writer else None
            files_read = describe_together(reader, comm, run.start)
            captured = environment.capture() | describe_mpi() if comm.rank == 0 else {}
        found: dict[str, Any] = unknown_efficiency(
            allreduces, comm, engine.name, is_wanted=params["communication_log"]
        )
        found |= {"timeline": timeline.describe(run.start)} if timeline else {}
        found |= {"failure": failure} if failure else {}
        found |= {"programs": device.programs.describe()} if device.programs else {}
        run.finish(
            measured.describe_rank(comm, device.threads, device.name, device.num_cores),
            clock_waits_for=allreduces.waits_for if allreduces else None,
            **sections | {"data": sections["data"] | {"files": files_read}},
            model=measured.describe_model(model).model_copy(
                update={"file_sha256": models.final_sha256}
            ),
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
            run.screen.show_result(run.record, run.record_path)
            _draw_curves(run, history, files.synthetic)
    return history, failure


def _draw_curves(run: Run, history: Any, synthetic: bool) -> None:
    """Writes the picture of history.csv; after the record, so that no time of the run has it."""
    if max(map(len, history.history.values()), default=0) < 2:  # no curve
        return
    title = f"{run.record.benchmark} on {count(run.comm.size, 'rank')}"
    path = run.directory / "history.png"
    try:
        training_curves(path, history.history, title=title + " (synthetic data)" * synthetic)
    except OSError as error:
        run.screen.warn(f"{path}: {error.strerror}")


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

    def run(self, params: Mapping[str, Any], after_epoch: EpochFunction | None = None) -> Any:
        """Trains and returns the ``keras.callbacks.History``; see `candle_p1.train.run`."""
        return run(self._benchmark, params, after_epoch)

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
            params = agree(comm, benchmark.read_parameters)
        _, failure = _run(benchmark, params, comm)
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
    params: ParameterSet, timeline: Timeline | None, engine: Engine, run: Run
) -> tuple[Device, dict[str, Any]]:
    """Sets up device, precision and engine, and tests that gradients are averaged."""
    comm = run.comm
    with run.phases.region("devices"):
        device = setup.set_up_device(params, comm, engine)
        if device.programs:
            device.programs.restart()
    if params["verbose"]:
        run.screen.say(params.to_text())
    for warning in (*params.warnings, *params.idle(comm.size), *device.warnings):
        run.screen.warn(warning)
    with run.phases.region("engine"):
        names = ("averaging", "compression", "deterministic", "stall_shutdown_s")
        options = {name: params[name] for name in names}
        averaging = engine.start(timeline=timeline.path if timeline else None, **options)
    ignored = warn_of_horovod(averaging, os.environ)
    for warning in ignored:
        run.screen.warn(warning)
    device = replace(device, warnings=[*device.warnings, *ignored])
    plain = partial(make_optimizer, params, learning_rate=0.01)
    agree(comm, plain)
    agree(comm, check_names, params)
    with run.phases.region("self_test"):
        self_test(engine, plain)
    return device, averaging | {"averaging_checked": comm.size > 1}


def _open_log(params: ParameterSet, run: Run) -> RunLog:
    """Returns the log in MLPerf's format; it writes only on rank 0, and only if requested."""
    writes = params["mllog"] and run.comm.rank == 0
    path = run.directory / MLLOG_NAME if writes else None
    first_epoch = run.restart.position.epoch if run.restart else 0
    return RunLog(path, run.record.benchmark, run.phases, run.start, first_epoch)
