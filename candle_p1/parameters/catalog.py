"""The parameters that every benchmark has: CANDLE's, this project's, and CANDLE Supervisor's.

Names, types, flags, choices and defaults of CANDLE's parameters are those of candle_lib's
``parsing_utils.py`` (ECP-CANDLE/candle_lib). Two differ: ``pool`` is a list, because NT3's file
gives one length per convolution; ``ckpt_keep_limit`` is not 1,000,000, with which the state of
every best epoch would be kept.

Choices that other code implements, such as the loaders, are added by `candle_p1.benchmark`. The
file is long because it is one list.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from candle_p1.parameters.parameter import SEVERAL_RANKS, Needs, Parameter, Role

MAX_SEED = 2**32 - 1
"""The largest seed that Keras and NumPy accept."""
MAX_UNITS = 2**20
"""More units, filters or inputs of one layer must be a mistake."""
MAX_EPOCHS = 10**7
MAX_LEARNING_RATE = 1_000_000
INITIALIZATIONS = (
    "constant",
    "uniform",
    "normal",
    "glorot_uniform",
    "glorot_normal",
    "lecun_uniform",
    "he_normal",
)


_DECLARED: list[Parameter] = []


def _declare(title: str, *parameters: Parameter, **common: Any) -> None:
    _DECLARED.extend(replace(parameter, group=title, **common) for parameter in parameters)


_declare(
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
        "data_type",
        str,
        "f32",
        "floating-point type; f16 and bf16 are mixed precision",
        short=("-d",),
    ),
    Parameter(
        "rng_seed", int, 7102, "seed", role=Role.SEED, short=("-r",), minimum=0, maximum=MAX_SEED
    ),
    Parameter("train_bool", bool, True, "train the model"),
    Parameter("eval_bool", bool, True, "evaluate the model on the test data"),
    Parameter("timeout", int, -1, "limit of the training time, in s; -1 or 0: none", minimum=-1),
    Parameter(
        "gpus",
        int,
        None,
        "indices of the GPUs of each node, which must exist; None: all",
        role=Role.SPEED,
        minimum=0,
        many=True,
    ),
)

_declare(
    "input and output",
    Parameter("model_name", str, None, "name of the model in file names"),
    Parameter("home_dir", str, None, "home directory", needs_support=True),
    Parameter("train_data", str, None, "file of training samples", old_names=("file_train",)),
    Parameter(
        "val_data",
        str,
        None,
        "file of validation samples, in the format of the training file",
        needs_support=True,
    ),
    Parameter(
        "group_data",
        str,
        None,
        "file with the group of each training sample, such as its patient, which is not split"
        " between folds: one line for each sample, or import.json",
        needs_support=True,
    ),
    Parameter("test_data", str, None, "file of test samples", old_names=("file_test",)),
    Parameter(
        "data_url",
        str,
        None,
        "address from which candle-p1 data fetch downloads the files",
        old_names=("url_p1b1",),
    ),
    role=Role.PLACE,
)

_declare(
    "input and output",
    Parameter(
        "save_path",
        str,
        None,
        "directory for models, pictures and tables; None: the run's directory",
        short=("-s",),
        old_names=("save",),
    ),
    Parameter(
        "output_dir",
        str,
        None,
        "directory that contains EXPERIMENT_ID/RUN_ID; '.': the run's directory itself",
    ),
    Parameter("experiment_id", str, "EXP000", "name of the experiment"),
    Parameter("run_id", str, "RUN000", "name of the run within the experiment"),
    Parameter("logfile", str, None, "file for a copy of the screen output", short=("-l",)),
    Parameter("timeline", str, None, "file for Horovod's timeline; tracing slows the run down"),
    role=Role.RESULTS,
)

_declare(
    "preprocessing",
    Parameter("scaling", str, None, "scaling of the features"),
    Parameter(
        "shuffle",
        bool,
        False,
        "shuffle the rows of the files before they are split",
        needs_support=True,
    ),
    Parameter(
        "feature_subsample", int, 0, "features of each kind; 0: all", minimum=0, needs_support=True
    ),
)

_declare(
    "model",
    Parameter(
        "dense",
        int,
        None,
        "units of each dense layer; 0: no layer",
        minimum=0,
        maximum=MAX_UNITS,
        many=True,
    ),
    Parameter(
        "conv",
        int,
        None,
        "filters, length and stride of each convolution; a 0 ends the convolutions",
        minimum=0,
        maximum=MAX_UNITS,
        many=True,
        needs_support=True,
    ),
    Parameter(
        "locally_connected", bool, False, "locally connected layers for conv", needs_support=True
    ),
    Parameter("activation", str, None, "activation of the inner layers", short=("-a",)),
    Parameter("out_activation", str, None, "activation of the last layer", old_names=("out_act",)),
    Parameter(
        "dropout", float, None, "fraction of units to drop", minimum=0, below=1, old_names=("drop",)
    ),
    Parameter(
        "pool",
        int,
        None,
        "pooling length after each convolution",
        minimum=1,
        maximum=MAX_UNITS,
        many=True,
        needs_support=True,
    ),
    Parameter(
        "batch_normalization", bool, False, "normalize batches between layers", needs_support=True
    ),
    Parameter("initialization", str, None, "initial weights", choices=INITIALIZATIONS),
)

_declare(
    "training",
    Parameter("loss", str, None, "name of the loss function in Keras"),
    Parameter("optimizer", str, None, "name of the optimizer in Keras"),
    Parameter("metrics", str, None, "name of the metric in Keras"),
    Parameter(
        "epochs", int, None, "epochs, before scaling", short=("-e",), minimum=1, maximum=MAX_EPOCHS
    ),
    Parameter(
        "batch_size",
        int,
        None,
        "samples per step and rank, unscaled",
        short=("-z",),
        minimum=1,
        maximum=2**24,
    ),
    required=True,
)

_declare(
    "training",
    Parameter(
        "learning_rate",
        float,
        None,
        "learning rate, before scaling; None: the optimizer's default",
        short=("-lr",),
        above=0,
        maximum=MAX_LEARNING_RATE,
    ),
    Parameter(
        "optimizer_formula",
        str,
        "keras2",
        "formula and constants of the optimizer: CANDLE's, from Keras 2, or Keras 3's",
        choices=("keras2", "keras3"),
    ),
    Parameter(
        "early_stop",
        bool,
        False,
        "stop when the validation loss no longer falls, and keep the model of the best epoch",
    ),
    Parameter(
        "patience", int, 10, "epochs that early_stop waits for a lower validation loss", minimum=1
    ),
    Parameter(
        "momentum", float, None, "momentum; None: the optimizer's default", minimum=0, maximum=1
    ),
    Parameter(
        "val_split",
        float,
        None,
        "fraction of the training samples used for validation",
        minimum=0,
        maximum=1,
        needs_support=True,
        old_names=("validation_split",),
    ),
    Parameter("train_steps", int, 0, "maximum steps per training epoch; 0: no limit", minimum=0),
    Parameter("val_steps", int, 0, "maximum steps per validation; 0: no limit", minimum=0),
    Parameter(
        "test_steps",
        int,
        0,
        "maximum steps of the evaluation on the test data; 0: no limit",
        minimum=0,
    ),
    Parameter("train_samples", int, 0, "training samples to use; 0: all", minimum=0),
    Parameter("val_samples", int, 0, "validation samples to use; 0: all", minimum=0),
)

_declare(
    "checkpoints",
    Parameter(
        "ckpt_save_interval",
        int,
        0,
        "epochs between checkpoints; 0: none, unless ckpt_every_s or ckpt_every_steps is set",
        minimum=0,
        maximum=MAX_EPOCHS,
    ),
    Parameter(
        "ckpt_every_s",
        float,
        0.0,
        "time between checkpoints, in s; 0: none by time",
        minimum=0,
        maximum=10**9,
    ),
    Parameter(
        "ckpt_every_steps",
        int,
        0,
        "steps of a rank between checkpoints, counted over epochs; 0: none by steps",
        minimum=0,
    ),
    Parameter(
        "ckpt_skip_epochs",
        int,
        0,
        "no checkpoint before the end of this epoch",
        minimum=0,
        maximum=MAX_EPOCHS,
    ),
    Parameter(
        "ckpt_save_best",
        bool,
        True,
        "if checkpoints are saved, also save every epoch that is the best so far",
    ),
    Parameter("ckpt_save_best_metric", str, "val_loss", "metric by which the best epoch is chosen"),
    Parameter(
        "ckpt_save_weights_only",
        bool,
        False,
        "omit the optimizer's state, which is then reset at a restart",
    ),
    Parameter(
        "ckpt_checksum",
        bool,
        False,
        "verify every checkpoint by reading it back from the disk",
    ),
    Parameter(
        "save_model",
        bool,
        False,
        "write the trained model to model.keras, which Keras loads without this package; inference:"
        " the model also scales its inputs and names the classes",
        words=("inference",),
    ),
    role=Role.SPEED,
)

_declare(
    "checkpoints",
    Parameter(
        "ckpt_restart_mode",
        str,
        "auto",
        "resume from a checkpoint: never (off), if there is one (auto), or else fail (required)",
        choices=("off", "auto", "required"),
    ),
    Parameter(
        "ckpt_keep_mode",
        str,
        "linear",
        "checkpoints to keep: the newest (linear), or fewer the older they are (exponential)",
        choices=("linear", "exponential"),
    ),
    Parameter(
        "ckpt_keep_limit",
        int,
        None,
        "maximum number of this run's checkpoints, besides the best one; None: 2, but no limit if"
        " ckpt_keep_mode is exponential",
        minimum=1,
    ),
    Parameter(
        "ckpt_required",
        bool,
        False,
        "fail, instead of warning, if a checkpoint cannot be written",
    ),
    role=Role.LOGGING,
)

_declare(
    "checkpoints",
    Parameter(
        "ckpt_directory",
        str,
        None,
        "directory of the checkpoints; None: ckpts/ in the run's directory",
    ),
    role=Role.PLACE,
)

_declare(
    "loading and speed",
    Parameter(
        "loader",
        str,
        "parallel",
        "how to read data files: all ranks together (parallel); the same once, then from a binary"
        " cache (cached); the paper's original and improved methods; or another library",
    ),
    Parameter(
        "load_threads",
        int,
        0,
        "threads per rank that read (parallel, cached); 0: as many as compute",
        minimum=0,
        maximum=1024,
    ),
    Parameter(
        "kernels", str, "fast", "fast layers and optimizers where available, or Keras's own (plain)"
    ),
    Parameter(
        "share_gpus",
        bool,
        False,
        "let several ranks of a node share a GPU, for tests; JAX then averages through the host",
    ),
    Parameter("check_replicas", bool, False, "compare the ranks' weights after every step; slow"),
    role=Role.SPEED,
)

_declare(
    "data",
    Parameter("cache_dir", str, None, "directory of the caches; None: cache/ in $CANDLE_DATA_DIR"),
    Parameter(
        "cache_limit",
        float,
        0.0,
        "maximum size of all caches together, in GiB; 0: no limit",
        minimum=0,
        maximum=2**30,
    ),
    Parameter(
        "stage_dir", str, None, "node-local directory ($TMPDIR, …) to which caches are copied"
    ),
    Parameter(
        "compiled_dir",
        str,
        None,
        "directory of the programs that JAX compiles; none: keep no programs. None:"
        " $JAX_COMPILATION_CACHE_DIR, or else compiled/ in $CANDLE_DATA_DIR",
    ),
    Parameter(
        "data_dir", str, None, "directory that holds the benchmark's files under CANDLE's names"
    ),
    role=Role.PLACE,
)

_declare(
    "data",
    Parameter("size", str, "small", "size of the synthetic data used if no data file is named"),
    Parameter("data_seed", int, 2019, "seed of the synthetic data", minimum=0, maximum=MAX_SEED),
    Parameter(
        "folds",
        int,
        0,
        "cross-validation: folds of the training file, one of which is held out for validation and"
        " test; 0: none",
        minimum=0,
        maximum=1000,
        needs_support=True,
    ),
    Parameter(
        "fold", int, 1, "the fold held out, from 1", role=Role.SEED, minimum=1, needs_support=True
    ),
    Parameter(
        "scaling_fit", str, "all", "samples that the scaling is fitted to", choices=("all", "train")
    ),
    Parameter(
        "reshuffle",
        bool,
        True,
        "draw a new order of the training samples for every epoch; False: the order of the files",
    ),
)

_declare(
    "data-parallel training",
    Parameter(
        "engine",
        str,
        "auto",
        "what averages gradients: Horovod on TensorFlow, or JAX's runtime. auto: the one for"
        " Keras's backend, which KERAS_BACKEND or the installation determines",
        role=Role.SPEED,
    ),
    Parameter(
        "averaging",
        str,
        "auto",
        "what averages gradients with the engine horovod: shared memory if all ranks train on the"
        " CPUs of one node (auto), or always Horovod, as with --timeline and --compression",
        role=Role.SPEED,
    ),
    Parameter(
        "device_data_mb",
        int,
        None,
        "MiB of samples that JAX may keep on a rank's device; 0: the host sends each batch. None:"
        " half of a GPU's free memory, or on CPUs a quarter of the node's memory for all its ranks",
        role=Role.SPEED,
        minimum=0,
    ),
    Parameter(
        "data_parallel",
        str,
        "epoch",
        "each rank trains on all samples (epoch), or on its share (batch_step)",
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
        "each rank's epochs of learning-rate warm-up",
        minimum=0,
        maximum=MAX_EPOCHS,
    ),
    Parameter(
        "warmup_by",
        str,
        "step",
        "whether the warm-up raises the learning rate at every step or at every epoch",
        choices=("step", "epoch"),
    ),
    Parameter(
        "base_lr",
        float,
        None,
        "initial learning rate of the warm-up; None: learning_rate",
        above=0,
        maximum=MAX_LEARNING_RATE,
    ),
    Parameter(
        "compression", str, "none", "compression of gradients in the allreduce; fp16 halves them"
    ),
    Parameter(
        "backward_passes_per_step",
        int,
        1,
        "batches whose gradients are accumulated before they are averaged",
        minimum=1,
    ),
    Parameter(
        "allow_nan",
        bool,
        False,
        "only warn if a loss is not a number, which otherwise stops training and fails the run",
        role=Role.LOGGING,
    ),
    Parameter("deterministic", bool, True, "make runs with equal seed and ranks bit-identical"),
)

_declare(
    "monitoring",
    Parameter("verbose", bool, False, "print more", short=("-v",)),
    Parameter(
        "profiling", bool, False, "profile every rank's Python calls, into profile/", short=("-p",)
    ),
    Parameter(
        "step_trace", bool, False, "framework's trace of ten steps of rank 0, into step_trace/"
    ),
    Parameter(
        "stall_shutdown_s",
        int,
        300,
        "time after which a stalled collective of Horovod, or of the ranks of a node, ends the job,"
        " in s; 0: never",
        minimum=0,
        maximum=10**9,
    ),
    Parameter(
        "power", str, "auto", "power sources: auto, none, or any of nvml,rapl,cray,amd,replay:FILE"
    ),
    Parameter("power_hz", float, 10.0, "power readings per second", minimum=0.1, maximum=1000),
    Parameter("communication_log", bool, True, "record the size and time of every collective"),
    Parameter(
        "tensorboard",
        bool,
        False,
        "write each epoch's loss and metrics into tensorboard/",
        old_names=("tb",),
    ),
    Parameter("mllog", bool, False, "write MLPerf log lines into mllog.txt"),
    role=Role.LOGGING,
)

# What CANDLE Supervisor's ``model_runner.py`` adds to the parameters before calling run().
_declare(
    "accepted from CANDLE Supervisor but unused",
    Parameter("framework", str, None, "the framework that Supervisor requests"),
    Parameter("id", str, None, "Supervisor's name of the parameter set"),
    Parameter("instance_directory", str, None, "Supervisor's directory of the run"),
    Parameter("pre_module", str, None, "module that Supervisor calls before the run"),
    Parameter("post_module", str, None, "module that Supervisor calls after the run"),
    Parameter("perf_top", str, "0", "interval of Supervisor's top, in s; 0: it does not run"),
    Parameter("perf_nvidia", str, "0", "the same for its nvidia-smi"),
    Parameter("solr_root", str, None, "database of Supervisor's monitor"),
    role=Role.UNUSED,
)

PARAMETERS = tuple(_DECLARED)
"""What every benchmark has; a benchmark adds its own parameters, or replaces some of these."""
INTERVALS = ("ckpt_save_interval", "ckpt_every_s", "ckpt_every_steps")
"""The parameters of which one has to be set for checkpoints to be saved."""
_ACTS_WITH: tuple[tuple[str, Needs], ...] = (
    ("averaging check_replicas compression share_gpus stall_shutdown_s", {SEVERAL_RANKS: ()}),
    ("data_parallel epochs_scaling batch_scaling lr_scaling", {SEVERAL_RANKS: ()}),
    ("warmup_by base_lr", {"warmup_epochs": ()}),
    ("patience", {"early_stop": ()}),
    ("test_steps", {"eval_bool": ()}),
    ("fold group_data", {"folds": ()}),
    ("pool locally_connected", {"conv": ()}),
    ("load_threads", {"loader": ("parallel", "cached")}),
    ("cache_dir cache_limit stage_dir", {"loader": ("cached",)}),
    # Not ckpt_checksum, which CANDLE's files set without asking for checkpoints.
    ("ckpt_skip_epochs ckpt_save_best ckpt_save_best_metric", dict.fromkeys(INTERVALS, ())),
    ("ckpt_save_weights_only ckpt_required", dict.fromkeys(INTERVALS, ())),
    ("ckpt_keep_mode ckpt_keep_limit", dict.fromkeys(INTERVALS, ())),
)
ACTS_WITH = {name: needs for names, needs in _ACTS_WITH for name in names.split()}
"""What gives shared parameters an effect that do not always have one; see `Needs`."""
_ROLES = {parameter.name: parameter.role for parameter in PARAMETERS}
_ROLES |= {"cp": Role.SPEED, "save_best_model": Role.SPEED}  # of P1B1 and P1B3


def role_of(name: str) -> Role:
    """Returns the role of a parameter of a record or a study file, known by its name alone.

    A benchmark's own parameters named ``*_data`` are its files; its others count as LEARNING,
    unless this package's benchmarks are known to have them for something else.
    """
    return _ROLES.get(name, Role.PLACE if name.endswith("_data") else Role.LEARNING)
