"""The parameters that every benchmark has: CANDLE's, our own, and those of CANDLE Supervisor.

Names, types, flags, choices and defaults of CANDLE's parameters are those of candle_lib's
``parsing_utils.py`` (ECP-CANDLE/candle_lib). Two differ: ``pool`` is a list, because NT3's file
gives one length per convolution, and ``shuffle`` concerns the order of training alone and is on by
default, as in Keras.

Choices that other code implements, such as the loaders, are added by `candle_p1.benchmark`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from candle_p1.parameters.parameter import Parameter, Role

MAX_SEED = 2**32 - 1
"""The largest seed that Keras and NumPy accept."""
INITIALIZATIONS = (
    "constant",
    "uniform",
    "normal",
    "glorot_uniform",
    "glorot_normal",
    "lecun_uniform",
    "he_normal",
)


def _group(title: str, *parameters: Parameter, **common: Any) -> tuple[Parameter, ...]:
    return tuple(replace(parameter, group=title, **common) for parameter in parameters)


_GENERAL = _group(
    "general",
    Parameter(
        "config_file",
        str,
        None,
        "parameter file that takes precedence over the benchmark's own, looked up in the working"
        " directory and then beside that file; read only if given as a flag",
        role=Role.PLACE,
    ),
    Parameter(
        "data_type", str, "f32", "floating-point type; f16 is mixed precision", short=("-d",)
    ),
    Parameter(
        "rng_seed",
        int,
        7102,
        "random seed",
        role=Role.SEED,
        short=("-r",),
        minimum=0,
        maximum=MAX_SEED,
    ),
    Parameter("train_bool", bool, True, "train the model"),
    Parameter("eval_bool", bool, True, "evaluate the model on the test data"),
    Parameter("timeout", int, -1, "limit of the training time, in s; -1 or 0: none", minimum=-1),
    Parameter(
        "gpus",
        int,
        None,
        "indices of the GPUs to use on each node; None: all",
        role=Role.SPEED,
        minimum=0,
        many=True,
    ),
)

_INPUTS = _group(
    "input and output",
    Parameter("model_name", str, None, "name of the model in file names"),
    Parameter("home_dir", str, None, "home directory", needs_support=True),
    Parameter("train_data", str, None, "file of training samples"),
    Parameter("val_data", str, None, "file of validation samples", needs_support=True),
    Parameter("test_data", str, None, "file of test samples"),
    Parameter("data_url", str, None, "address from which candle-p1 data fetch downloads the files"),
    role=Role.PLACE,
)

_RESULTS = _group(
    "input and output",
    Parameter(
        "save_path",
        str,
        None,
        "directory for the evaluation's figures and tables; None: the run's own",
        short=("-s",),
    ),
    Parameter(
        "output_dir",
        str,
        None,
        "directory for results, in its subdirectory EXPERIMENT_ID/RUN_ID unless it is '.'",
    ),
    Parameter("experiment_id", str, "EXP000", "name of the experiment"),
    Parameter("run_id", str, "RUN000", "name of the run within the experiment"),
    Parameter("logfile", str, None, "file for a copy of the screen output", short=("-l",)),
    Parameter(
        "timeline",
        str,
        None,
        "file for Horovod's timeline; tracing slows the run down",
    ),
    role=Role.RESULTS,
)

_PREPROCESSING = _group(
    "preprocessing",
    Parameter("scaling", str, None, "scaling of the features"),
    Parameter(
        "shuffle", bool, True, "shuffle the training samples every epoch; False: the file's order"
    ),
    Parameter(
        "feature_subsample",
        int,
        0,
        "number of features of each kind to use; 0: all",
        minimum=0,
        needs_support=True,
    ),
)

_MODEL = _group(
    "model",
    Parameter("dense", int, None, "units of each dense layer", minimum=1, many=True),
    Parameter(
        "conv",
        int,
        None,
        "filters, kernel length and stride of each convolution in turn",
        minimum=1,
        many=True,
    ),
    Parameter(
        "locally_connected",
        bool,
        False,
        "use locally connected layers, whose positions do not share a kernel, as convolutions",
        needs_support=True,
    ),
    Parameter("activation", str, None, "activation of the inner layers", short=("-a",)),
    Parameter("out_activation", str, None, "activation of the last layer"),
    Parameter("dropout", float, None, "fraction of units to drop", minimum=0, below=1),
    Parameter("pool", int, None, "pooling length after each convolution", minimum=1, many=True),
    Parameter(
        "batch_normalization", bool, False, "normalize batches between layers", needs_support=True
    ),
    Parameter("initialization", str, None, "initial weights", choices=INITIALIZATIONS),
)

_TRAINING = _group(
    "training",
    Parameter("loss", str, None, "name of the loss function in Keras", required=True),
    Parameter("optimizer", str, None, "name of the optimizer in Keras", required=True),
    Parameter("metrics", str, None, "name of the metric in Keras", required=True),
    Parameter(
        "epochs", int, None, "epochs, before scaling", short=("-e",), minimum=1, required=True
    ),
    Parameter(
        "batch_size",
        int,
        None,
        "samples per step and rank, before scaling",
        short=("-z",),
        minimum=1,
        required=True,
    ),
    Parameter(
        "learning_rate",
        float,
        None,
        "learning rate, before scaling; None: the optimizer's default",
        short=("-lr",),
        above=0,
    ),
    Parameter("early_stop", bool, False, "stop when the validation loss no longer falls"),
    Parameter(
        "patience",
        int,
        10,
        "epochs without a lower validation loss after which early_stop ends the training",
        minimum=1,
    ),
    Parameter(
        "momentum",
        float,
        None,
        "momentum of the optimizer; None: the optimizer's default",
        minimum=0,
        maximum=1,
    ),
    Parameter(
        "val_split",
        float,
        None,
        "fraction of the training samples used for validation",
        minimum=0,
        maximum=1,
        needs_support=True,
    ),
    Parameter("train_steps", int, 0, "maximum steps per training epoch; 0: no limit", minimum=0),
    Parameter("val_steps", int, 0, "maximum steps per validation; 0: no limit", minimum=0),
    Parameter("test_steps", int, 0, "maximum steps of the test; 0: no limit", minimum=0),
    Parameter("train_samples", int, 0, "training samples to use; 0: all", minimum=0),
    Parameter("val_samples", int, 0, "validation samples to use; 0: all", minimum=0),
    Parameter(
        "kernels",
        str,
        "fast",
        "fast implementations of layers and optimizers if available, or Keras's own (plain)",
        role=Role.SPEED,
    ),
)

_CHECKPOINTS = _group(
    "checkpoints",
    Parameter(
        "ckpt_restart_mode",
        str,
        "auto",
        "restart from a checkpoint: never, if there is one, or always",
        choices=("off", "auto", "required"),
    ),
    Parameter("ckpt_checksum", bool, False, "verify checkpoints by a checksum"),
    Parameter("ckpt_skip_epochs", int, 0, "epochs before the first checkpoint", minimum=0),
    Parameter("ckpt_directory", str, "./save", "directory for checkpoints", role=Role.PLACE),
    Parameter("ckpt_save_best", bool, True, "keep the best checkpoint"),
    Parameter("ckpt_save_best_metric", str, "val_loss", "metric that selects the best checkpoint"),
    Parameter("ckpt_save_weights_only", bool, False, "leave out the optimizer's state"),
    Parameter("ckpt_save_interval", int, 0, "epochs between checkpoints", minimum=0),
    Parameter(
        "ckpt_keep_mode",
        str,
        "linear",
        "which old checkpoints to keep",
        choices=("linear", "exponential"),
    ),
    Parameter("ckpt_keep_limit", int, 1_000_000, "maximum number of checkpoints", minimum=1),
    needs_support=True,
)

_LOADING = _group(
    "loading",
    Parameter(
        "loader",
        str,
        "parallel",
        "how to read data files: all ranks together (parallel); the same once, then from a binary"
        " cache (cached); the paper's original and improved methods; or another library",
        role=Role.SPEED,
    ),
    Parameter(
        "load_threads",
        int,
        0,
        "threads per rank that read (parallel, cached); 0: as many as compute",
        role=Role.SPEED,
        minimum=0,
    ),
    Parameter(
        "cache_dir",
        str,
        None,
        "directory of the caches; None: cache/ in $CANDLE_DATA_DIR",
        role=Role.PLACE,
    ),
    Parameter(
        "cache_limit",
        float,
        0.0,
        "maximum size of all caches in GiB, beyond which the least recently used are deleted; 0:"
        " no limit",
        role=Role.PLACE,
        minimum=0,
    ),
    Parameter(
        "stage_dir",
        str,
        None,
        "node-local directory (burst buffer, $TMPDIR) to which caches are copied once",
        role=Role.PLACE,
    ),
    Parameter(
        "data_dir",
        str,
        None,
        "directory that holds the benchmark's files under CANDLE's names",
        role=Role.PLACE,
    ),
    Parameter("size", str, "small", "size of the synthetic data used if no data file is named"),
    Parameter("data_seed", int, 2019, "seed of the synthetic data", minimum=0, maximum=MAX_SEED),
    Parameter(
        "scaling_fit",
        str,
        "all",
        "samples that the scaling is fitted to: all, as in CANDLE, or those for training",
        choices=("all", "train"),
    ),
)

_DATA_PARALLEL = _group(
    "data-parallel training",
    Parameter(
        "data_parallel",
        str,
        "epoch",
        "each rank trains on all samples (epoch) or on its share of them (batch_step)",
    ),
    Parameter(
        "epochs_scaling",
        str,
        None,
        "ranks divide the epochs (strong; strong_ceil rounds up) or each train all of them (weak,"
        " none). None: strong, but none for a single epoch and for batch_step",
    ),
    Parameter("batch_scaling", str, "none", "growth of each rank's batch size with the ranks"),
    Parameter("lr_scaling", str, "linear", "growth of the learning rate with the ranks"),
    Parameter(
        "warmup_epochs",
        int,
        0,
        "epochs of each rank in which the learning rate rises to its scaled value",
        minimum=0,
    ),
    Parameter(
        "base_lr",
        float,
        None,
        "learning rate at the start of the warm-up; None: learning_rate",
        above=0,
    ),
    Parameter(
        "compression", str, "none", "compression of gradients in the allreduce; fp16 halves them"
    ),
    Parameter(
        "backward_passes_per_step",
        int,
        1,
        "batches whose gradients are summed before the allreduce and the update of the weights",
        minimum=1,
    ),
    Parameter("deterministic", bool, True, "make runs with equal seed and ranks bit-identical"),
    Parameter(
        "check_replicas",
        bool,
        False,
        "compare all ranks' models after every step; slow",
        role=Role.SPEED,
    ),
)

_MONITORING = _group(
    "monitoring",
    Parameter("verbose", bool, False, "print more", short=("-v",)),
    Parameter(
        "profiling",
        bool,
        False,
        "profile the Python calls of every rank, into profile/ of the run",
        short=("-p",),
    ),
    Parameter(
        "step_trace",
        bool,
        False,
        "trace ten steps of rank 0 with the framework's profiler, into step_trace/ of the run",
    ),
    Parameter(
        "stall_shutdown_s",
        int,
        300,
        "time after which a stalled collective ends the job, in s; 0: never",
        minimum=0,
    ),
    Parameter(
        "power",
        str,
        "auto",
        "sources of power readings: auto, none, or a comma-separated list of nvml, rapl, cray, amd"
        " and replay:FILE",
    ),
    Parameter("power_hz", float, 10.0, "power readings per second", minimum=0.1, maximum=1000),
    Parameter("communication_log", bool, True, "record the size and time of every collective"),
    Parameter(
        "tensorboard",
        bool,
        False,
        "write each epoch's loss and metrics for TensorBoard, into tensorboard/ of the run",
    ),
    Parameter("mllog", bool, False, "write MLPerf log lines, into mllog.txt of the run"),
    role=Role.LOGGING,
)

_SUPERVISOR = _group(
    "accepted from CANDLE Supervisor, and unused",
    Parameter("framework", str, None, "the framework that Supervisor requests"),
    Parameter("id", str, None, "Supervisor's name of the parameter set"),
    Parameter("instance_directory", str, None, "Supervisor's directory of the run"),
    Parameter("save", str, None, "Supervisor's directory for snapshots"),
    Parameter("pre_module", str, None, "module that Supervisor calls before the run"),
    Parameter("post_module", str, None, "module that Supervisor calls after the run"),
    Parameter("perf_top", str, None, "interval of Supervisor's top, in s"),
    Parameter("perf_nvidia", str, None, "interval of Supervisor's nvidia-smi, in s"),
    Parameter("solr_root", str, None, "database of Supervisor's monitor"),
    role=Role.UNUSED,
)
"""What CANDLE Supervisor's ``model_runner.py`` adds to the parameters before it calls run()."""

PARAMETERS: tuple[Parameter, ...] = (
    *_GENERAL,
    *_INPUTS,
    *_RESULTS,
    *_PREPROCESSING,
    *_MODEL,
    *_TRAINING,
    *_CHECKPOINTS,
    *_LOADING,
    *_DATA_PARALLEL,
    *_MONITORING,
    *_SUPERVISOR,
)
"""What every benchmark has; a benchmark adds its own parameters, or replaces some of these."""
_ROLES = {parameter.name: parameter.role for parameter in PARAMETERS}


def role_of(name: str) -> Role:
    """Returns the role of a parameter of a record or a study file, known by its name alone.

    A benchmark's own parameters named ``*_data`` are its files; its others count as LEARNING.
    """
    return _ROLES.get(name, Role.PLACE if name.endswith("_data") else Role.LEARNING)
