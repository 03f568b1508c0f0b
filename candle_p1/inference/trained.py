"""Opening a run: its network with the weights, and what the network's inputs went through."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from candle_p1.benchmark import Benchmark, find_benchmark
from candle_p1.checkpoints.checkpoint import BEST, Checkpoint, CheckpointRoot
from candle_p1.data.inputs import INPUTS_NAME, Inputs
from candle_p1.distributed import devices
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import make_engine
from candle_p1.errors import CheckpointError, DataError, ParameterError
from candle_p1.files import content_sha256
from candle_p1.models.saving import FINAL_NAME, LAYERS_NAME, load, network_of
from candle_p1.parameters.parameter_set import ParameterSet
from candle_p1.records.record import RECORD_NAME, read_so_far
from candle_p1.records.types import RunRecord
from candle_p1.training.restart import TrainingState, run_fingerprint
from candle_p1.training.run_directory import checkpoint_root

Which = Literal["best", "latest"]


@dataclass(frozen=True)
class TrainedRun:
    """A run whose network is ready to be applied.

    Attributes:
        benchmark: What it trained.
        params: Its parameters.
        record: Its record.
        model: The ``keras.Model``, not compiled.
        inputs: What the model's inputs went through.
        weights: The file or the checkpoint that the weights are from.
        device: What it computes on: "cpu", or the GPU's name.
    """

    benchmark: Benchmark
    params: ParameterSet
    record: RunRecord
    model: Any
    inputs: Inputs
    weights: Path
    device: str


def open_run(
    run_dir: Path,
    *,
    benchmark: str | None = None,
    checkpoint: Which | None = None,
) -> TrainedRun:
    """Opens a run, which computes with the Keras backend that a run would use here.

    Args:
        run_dir: Its directory, which has ``run.json``.
        benchmark: The benchmark that it must be a run of, by name or path; None: any that is found
            by the name in the record.
        checkpoint: The checkpoint to take the weights from, also of a run that has not finished;
            None: the model that ``--save_model`` has saved at its end.

    Raises:
        CandleError: It has not finished, has not kept its weights, or is another benchmark's.
    """
    record = read_so_far(run_dir / RECORD_NAME)
    found = find_benchmark(benchmark or record.benchmark)
    if found.name != record.benchmark:
        raise ParameterError(f"{run_dir} is a run of {record.benchmark}, not of {found.name}")
    if record.status != "ok" and checkpoint is None:
        raise ParameterError(
            f"{run_dir}: the run has not finished (its record says {record.status!r}): continue it,"
            " or choose a checkpoint with --checkpoint best or latest"
        )
    values = {name: each.value for name, each in record.parameters.items()}
    params = found.declaration.bind(values)
    described = record.data.inputs if record.data else None
    results = run_dir
    if params["save_path"]:
        kept_at = described and described.path
        results = Path(kept_at).parent if kept_at else Path(params["save_path"]).expanduser()
    if checkpoint is None and not (results / FINAL_NAME).exists():
        raise DataError(
            f"there is no {FINAL_NAME}: train with --save_model True, or, if there are checkpoints,"
            " choose one with --checkpoint best or latest",
            results,
        )
    if checkpoint is None:
        _check_file(results / FINAL_NAME, record.model.file_sha256 if record.model else None)
    _check_file(results / INPUTS_NAME, described.sha256 if described else None)
    inputs = Inputs.read(results / INPUTS_NAME)
    if inputs.benchmark != record.benchmark:
        problem = f"it belongs to {inputs.benchmark}, but the run trained {record.benchmark}"
        raise DataError(problem, results / INPUTS_NAME)
    comm = SerialCommunicator()
    device = devices.configure(comm, make_engine("auto", comm)).name
    if checkpoint is None:
        weights = results / FINAL_NAME
        model = load(weights)
        if params["save_model"] == "inference":
            model = network_of(model)
    else:
        kept = _find_checkpoint(checkpoint_root(params, run_dir), checkpoint)
        _check_run(kept, found.name, params)
        weights = kept.directory
        _check_file(results / LAYERS_NAME)
        model = _rebuilt(results / LAYERS_NAME, kept)
    return TrainedRun(found, params, record, model, inputs, weights, device)


def _check_file(path: Path, sha256: str | None = None) -> None:
    """Raises DataError if a file is missing, or not the one with this digest, if that is known."""
    if not path.exists():
        problem = (
            "it is missing: an earlier version wrote the run, or its benchmark does not describe"
            " how it scales inputs (DataSet.preparation): train again with --save_model True"
        )
        raise DataError(problem, path)
    if sha256 not in (None, content_sha256(path)):
        problem = (
            "it has changed since this run, perhaps because another run was saved here: train"
            " again, with another --save_path"
        )
        raise DataError(problem, path)


def _find_checkpoint(directory: Path, which: Which) -> Checkpoint:
    """Returns the best or the latest checkpoint, verified."""
    root = CheckpointRoot(directory)
    found = root.newest() if which != BEST else None
    if which == BEST and (directory / BEST).exists():
        found = Checkpoint(directory / BEST)
    if found is None:
        raise CheckpointError(f"{directory} has no {which} checkpoint")
    found.verify()
    return found


def _check_run(checkpoint: Checkpoint, benchmark: str, params: ParameterSet) -> None:
    """Raises CheckpointError if a checkpoint is of another run: a directory may have several."""
    state, wanted = TrainingState.of(checkpoint), run_fingerprint(benchmark, params)
    if (state.benchmark, state.parameters) != (wanted["benchmark"], wanted["parameters"]):
        raise CheckpointError(
            f"{checkpoint.directory} is of a run with other parameters ({state.run.directory}):"
            " name that run"
        )


def _rebuilt(path: Path, checkpoint: Checkpoint) -> Any:
    """Returns the model that a file describes, with the weights of a checkpoint."""
    from candle_p1.models.fast.tables import whole_arrays  # with Keras
    from candle_p1.training.state import WEIGHTS

    model = load(path)

    def short(name: str) -> str:  # Keras rebuilds the layers before the model around them
        return name.removeprefix(f"{model.name}/")

    parts = {
        short(name.removeprefix(WEIGHTS)): partial(checkpoint.read, name)
        for name in checkpoint.arrays
        if name.startswith(WEIGHTS)
    }
    arrays = whole_arrays(parts)
    variables = {short(variable.path): variable for variable in model.weights}
    problem = DataError(f"its layers do not fit the weights in {checkpoint.directory}", path)
    if variables.keys() != arrays.keys():
        raise problem
    for name, variable in variables.items():
        values = arrays[name]()
        if values.shape != tuple(variable.shape):
            raise problem
        variable.assign(values)
    return model
