"""The parameters every benchmark has: CANDLE's, ours, and what CANDLE Supervisor adds.

Names, types, flags, choices and defaults of CANDLE's are those of candle_lib's ``parsing_utils.py``
(ECP-CANDLE/candle_lib). Where CANDLE has no default and leaves the choice to the benchmark's file,
the default is None. Two differ: ``pool`` is a list, because NT3's file gives one length for each
convolution; ``shuffle`` is about the order of training alone, and on, as in Keras.
"""

from __future__ import annotations

from dataclasses import replace

from candle_p1.parameters.parameter import Parameter

MAX_SEED = 2**32 - 1
"""The largest seed that Keras and NumPy take."""


def _group(title: str, *parameters: Parameter) -> tuple[Parameter, ...]:
    return tuple(replace(parameter, group=title) for parameter in parameters)


_GENERAL = _group(
    "general",
    Parameter(
        "config_file",
        str,
        None,
        "parameter file that takes precedence over the benchmark's own; looked up in the working"
        " directory, then beside that one. Only the flag reads it: a file or a program notes it",
        optional=True,
    ),
    Parameter(
        "data_type",
        str,
        "f32",
        "floating-point type of the training; f16 is mixed precision",
        short=("-d",),
        choices=("f16", "f32", "f64"),
    ),
    Parameter("rng_seed", int, 7102, "random seed", short=("-r",), minimum=0, maximum=MAX_SEED),
    Parameter("train_bool", bool, True, "train the model"),
    Parameter("eval_bool", bool, True, "evaluate the model on the test data"),
    Parameter(
        "timeout", int, -1, "training time after which it stops, in s; -1 or 0 is none", minimum=-1
    ),
    Parameter(
        "gpus",
        int,
        None,
        "GPUs of each node to use, by index; None is all",
        minimum=0,
        many=True,
        optional=True,
    ),
    Parameter(
        "profiling",
        bool,
        False,
        "profile the Python calls of every rank, into profile/ of the run",
        short=("-p",),
    ),
)

_FILES = _group(
    "input and output",
    Parameter(
        "save_path",
        str,
        None,
        "directory for the pictures and tables of the evaluation; None is the run's own",
        short=("-s",),
        optional=True,
    ),
    Parameter("model_name", str, None, "name of the model in file names", optional=True),
    Parameter("home_dir", str, None, "home directory", optional=True),
    Parameter("train_data", str, None, "file of training samples", optional=True),
    Parameter("val_data", str, None, "file of validation samples", optional=True),
    Parameter("test_data", str, None, "file of test samples", optional=True),
    Parameter(
        "output_dir",
        str,
        None,
        "directory for results, which go to OUTPUT_DIR/EXPERIMENT_ID/RUN_ID; '.' is taken as it is",
        optional=True,
    ),
    Parameter(
        "data_url", str, None, "where candle-p1 data fetch downloads the files from", optional=True
    ),
    Parameter("experiment_id", str, "EXP000", "name of the experiment"),
    Parameter("run_id", str, "RUN000", "name of the run within the experiment"),
    Parameter("verbose", bool, False, "say more", short=("-v",)),
    Parameter(
        "logfile", str, None, "file that gets what the screen shows", short=("-l",), optional=True
    ),
)

_PREPROCESSING = _group(
    "preprocessing",
    Parameter(
        "scaling",
        str,
        None,
        "scaling of the features",
        choices=("minabs", "minmax", "std", "none"),
        optional=True,
    ),
    Parameter(
        "shuffle", bool, True, "train in a new random order every epoch; False is the file's order"
    ),
    Parameter(
        "feature_subsample",
        int,
        0,
        "number of features used, of each kind; 0 is all",
        minimum=0,
    ),
)

_MODEL = _group(
    "model",
    Parameter("dense", int, None, "units of each dense layer", minimum=1, many=True, optional=True),
    Parameter(
        "conv",
        int,
        None,
        "filters, kernel length and stride of each convolution, one after the other",
        minimum=1,
        many=True,
        optional=True,
    ),
    Parameter("locally_connected", bool, False, "do not share kernels within a convolution"),
    Parameter(
        "activation", str, None, "activation of the inner layers", short=("-a",), optional=True
    ),
    Parameter("out_activation", str, None, "activation of the last layer", optional=True),
    Parameter(
        "dropout", float, None, "fraction of units dropped", minimum=0, below=1, optional=True
    ),
    Parameter(
        "pool",
        int,
        None,
        "pooling length after each convolution",
        minimum=1,
        many=True,
        optional=True,
    ),
    Parameter("batch_normalization", bool, False, "normalize batches between layers"),
    Parameter(
        "initialization",
        str,
        None,
        "initial weights",
        choices=(
            "constant",
            "uniform",
            "normal",
            "glorot_uniform",
            "glorot_normal",
            "lecun_uniform",
            "he_normal",
        ),
        optional=True,
    ),
)

_TRAINING = _group(
    "training",
    Parameter("loss", str, None, "loss function, as Keras names it"),
    Parameter("optimizer", str, None, "optimizer, as Keras names it"),
    Parameter("metrics", str, None, "metric, as Keras names it"),
    Parameter("epochs", int, None, "epochs, before they are scaled", short=("-e",), minimum=1),
    Parameter(
        "batch_size",
        int,
        None,
        "samples of one step on one rank, before they are scaled",
        short=("-z",),
        minimum=1,
    ),
    Parameter(
        "learning_rate",
        float,
        None,
        "learning rate, before it is scaled; None is the optimizer's own",
        short=("-lr",),
        above=0,
        optional=True,
    ),
    Parameter("early_stop", bool, False, "stop when the validation loss no longer falls"),
    Parameter(
        "momentum",
        float,
        None,
        "momentum of the optimizer; None is the optimizer's own",
        minimum=0,
        maximum=1,
        optional=True,
    ),
    Parameter(
        "val_split",
        float,
        None,
        "fraction of the training samples set apart for validation",
        minimum=0,
        maximum=1,
        optional=True,
    ),
    Parameter("train_steps", int, 0, "steps of a training epoch at most; 0 is all", minimum=0),
    Parameter("val_steps", int, 0, "steps of a validation at most; 0 is all", minimum=0),
    Parameter("test_steps", int, 0, "steps of the test at most; 0 is all", minimum=0),
    Parameter("train_samples", int, 0, "training samples used; 0 is all", minimum=0),
    Parameter("val_samples", int, 0, "validation samples used; 0 is all", minimum=0),
)

_CHECKPOINTS = _group(
    "checkpoints",
    Parameter(
        "ckpt_restart_mode",
        str,
        "auto",
        "restart from a checkpoint: never, where there is one, or always",
        choices=("off", "auto", "required"),
    ),
    Parameter("ckpt_checksum", bool, False, "verify checkpoints by a checksum"),
    Parameter("ckpt_skip_epochs", int, 0, "epochs before the first checkpoint", minimum=0),
    Parameter("ckpt_directory", str, "./save", "directory for checkpoints"),
    Parameter("ckpt_save_best", bool, True, "keep the best checkpoint"),
    Parameter("ckpt_save_best_metric", str, "val_loss", "metric by which one is the best"),
    Parameter("ckpt_save_weights_only", bool, False, "leave out the optimizer's state"),
    Parameter("ckpt_save_interval", int, 0, "epochs from one checkpoint to the next", minimum=0),
    Parameter(
        "ckpt_keep_mode",
        str,
        "linear",
        "which old checkpoints are kept",
        choices=("linear", "exponential"),
    ),
    Parameter("ckpt_keep_limit", int, 1_000_000, "checkpoints kept at most", minimum=1),
)

CANDLE_PARAMETERS: tuple[Parameter, ...] = (
    _GENERAL + _FILES + _PREPROCESSING + _MODEL + _TRAINING + _CHECKPOINTS
)
"""CANDLE's shared flags."""

RUN_PARAMETERS: tuple[Parameter, ...] = _group(
    "loading, scaling and measuring",
    Parameter(
        "loader",
        str,
        "parallel",
        "how data files are read: by all ranks together; so once, and then from a binary cache; the"
        " paper's original and improved methods; or another library",
        choices=(
            "parallel",
            "cached",
            "original",
            "chunked",
            "chunked_rows",
            "dask",
            "arrow",
            "polars",
        ),
    ),
    Parameter(
        "load_threads",
        int,
        0,
        "threads of each rank that read (parallel, cached); 0: as many as compute",
        minimum=0,
    ),
    Parameter(
        "cache_dir",
        str,
        None,
        "directory of the loader cached; by default cache/ in $CANDLE_DATA_DIR",
        optional=True,
    ),
    Parameter(
        "cache_limit",
        float,
        0.0,
        "GiB that all caches there may take, those used longest ago go first; 0: no limit",
        minimum=0,
    ),
    Parameter(
        "stage_dir",
        str,
        None,
        "directory of each node's own (a burst buffer, $TMPDIR) to which caches are copied once",
        optional=True,
    ),
    Parameter(
        "data_dir",
        str,
        None,
        "directory that holds the benchmark's files under CANDLE's names",
        optional=True,
    ),
    Parameter(
        "scaling_fit",
        str,
        "all",
        "fit the scaling of features to all samples, as CANDLE does, or to those trained on",
        choices=("all", "train"),
    ),
    Parameter(
        "data_parallel",
        str,
        "epoch",
        "each rank trains on all samples (epoch) or on its share of them (batch_step)",
        choices=("epoch", "batch_step"),
    ),
    Parameter(
        "epochs_scaling",
        str,
        None,
        "ranks divide the epochs (strong; strong_ceil rounds up) or each train all of them (weak,"
        " none); None is strong where each rank trains on all samples, and none for a single"
        " epoch and where each trains on its share",
        choices=("strong", "strong_ceil", "weak", "none"),
        optional=True,
    ),
    Parameter(
        "batch_scaling",
        str,
        "none",
        "how the batch size of a rank grows with the ranks",
        choices=("none", "linear", "sqrt", "cbrt"),
    ),
    Parameter(
        "lr_scaling",
        str,
        "linear",
        "how the learning rate grows with the ranks",
        choices=("none", "linear", "sqrt"),
    ),
    Parameter(
        "warmup_epochs",
        int,
        0,
        "epochs of a rank in which the learning rate rises to its scaled value",
        minimum=0,
    ),
    Parameter(
        "base_lr",
        float,
        None,
        "learning rate at the start of the warm-up; None is the one before it is scaled",
        above=0,
        optional=True,
    ),
    Parameter(
        "patience",
        int,
        10,
        "epochs without a lower validation loss after which early_stop ends the training",
        minimum=1,
    ),
    Parameter(
        "size",
        str,
        "small",
        "which synthetic data to use when no data file is named",
        choices=("full", "small"),
    ),
    Parameter(
        "data_seed", int, 2019, "random seed of the synthetic data", minimum=0, maximum=MAX_SEED
    ),
    Parameter(
        "kernels",
        str,
        "fast",
        "fast forms of layers and optimizers where there are any, or Keras's own (plain)",
        choices=("fast", "plain"),
    ),
    Parameter(
        "compression",
        str,
        "none",
        "what gradients are sent as: none, as they are, or fp16, half of the bytes",
        choices=("none", "fp16"),
    ),
    Parameter(
        "backward_passes_per_step",
        int,
        1,
        "batches whose gradients are added up before ranks exchange them and the weights change",
        minimum=1,
    ),
    Parameter("deterministic", bool, True, "repeat runs of the same seed and ranks bit for bit"),
    Parameter(
        "check_replicas", bool, False, "compare the models of all ranks after every step; slow"
    ),
    Parameter(
        "stall_shutdown_s",
        int,
        300,
        "time after which a stalled collective ends the job, in s; 0 is never",
        minimum=0,
    ),
    Parameter(
        "power",
        str,
        "auto",
        "where power is read: auto, none, or any of nvml, rapl, cray, amd, replay:FILE with commas"
        " between them",
    ),
    Parameter("power_hz", float, 10.0, "readings of power per second", minimum=0.1, maximum=1000),
    Parameter(
        "communication_log", bool, True, "note every collective's size and time in the record"
    ),
    Parameter(
        "timeline",
        str,
        None,
        "file for Horovod's timeline; tracing slows a run down",
        optional=True,
    ),
    Parameter(
        "step_trace",
        bool,
        False,
        "trace ten steps of rank 0 with the framework's profiler, into step_trace/ of the run",
    ),
    Parameter(
        "tensorboard",
        bool,
        False,
        "write loss and metrics of every epoch for TensorBoard, into tensorboard/ of the run",
    ),
    Parameter("mllog", bool, False, "write MLPerf's log lines, into mllog.txt of the run"),
)
"""What this package adds to CANDLE's."""

SUPERVISOR_PARAMETERS: tuple[Parameter, ...] = _group(
    "accepted from CANDLE Supervisor, and unused",
    Parameter("framework", str, None, "the framework that Supervisor asks for", optional=True),
    Parameter("id", str, None, "Supervisor's name of the parameter set", optional=True),
    Parameter("instance_directory", str, None, "Supervisor's directory of the run", optional=True),
    Parameter("save", str, None, "Supervisor's directory for snapshots", optional=True),
    Parameter("pre_module", str, None, "module that Supervisor calls before", optional=True),
    Parameter("post_module", str, None, "module that Supervisor calls after", optional=True),
    Parameter("perf_top", str, None, "interval of Supervisor's top, in s", optional=True),
    Parameter("perf_nvidia", str, None, "interval of Supervisor's nvidia-smi, in s", optional=True),
    Parameter("solr_root", str, None, "database of Supervisor's monitor", optional=True),
)
"""What CANDLE Supervisor's ``model_runner.py`` puts into the parameters before it calls run()."""
