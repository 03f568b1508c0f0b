"""The parameters that every benchmark has: CANDLE's, this project's, and CANDLE Supervisor's.

Names, types, flags, choices and defaults of CANDLE's parameters are those of candle_lib's
``parsing_utils.py`` (ECP-CANDLE/candle_lib). Two differ: ``pool`` is a list, because NT3's file
gives one length per convolution; ``ckpt_keep_limit`` is not 1,000,000, with which the state of
every best epoch would be kept.

Choices that other code implements, such as the loaders, are added by `candle_p1.benchmark`. The
file is long because it is one list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from candle_p1.parameters.parameter import SEVERAL_RANKS, Needs, Parameter, Role

MAX_SEED = 2**32 - 1
"""The largest seed that Keras and NumPy accept."""
MAX_UNITS = 2**20
"""More units, filters or inputs of one layer must be a mistake."""
MAX_EPOCHS = 10**7
MAX_LEARNING_RATE = 1_000_000
INITIALIZATIONS = (
    *("constant", "uniform", "normal", "glorot_uniform", "glorot_normal", "lecun_uniform"),
    "he_normal",
)
_DECLARED: list[Parameter] = []


def _of(kind: type) -> Callable[..., dict[str, Any]]:
    def describe(default: Any, help: str, **options: Any) -> dict[str, Any]:
        return {"type": kind, "default": default, "help": help, **options}

    return describe


_bool, _int, _float, _str = map(_of, (bool, int, float, str))


def _declare(
    group: str, role: Role = Role.LEARNING, /, *, required: bool = False, **named: dict[str, Any]
) -> None:
    common: dict[str, Any] = {"group": group, "role": role, "required": required}
    _DECLARED.extend(Parameter(name, **common | options) for name, options in named.items())


_declare(
    "general",
    config_file=_str(
        None,
        "parameter file that takes precedence over the benchmark's own, looked up in the working"
        " directory and then beside that file; read only if given as a flag",
        role=Role.PLACE,
    ),
    data_type=_str("f32", "floating-point type; f16 and bf16 are mixed precision", short=("-d",)),
    rng_seed=_int(7102, "seed", role=Role.SEED, short=("-r",), minimum=0, maximum=MAX_SEED),
    train_bool=_bool(True, "train the model"),
    eval_bool=_bool(True, "evaluate the model on the test data"),
    timeout=_int(-1, "limit of the training time, in s; -1 or 0: none", minimum=-1),
    gpus=_int(
        None,
        "indices of the GPUs of each node, which must exist; None: all",
        role=Role.SPEED,
        minimum=0,
        many=True,
    ),
)

_declare(
    "input and output",
    Role.PLACE,
    model_name=_str(None, "name of the model in file names"),
    home_dir=_str(None, "home directory", needs_support=True),
    train_data=_str(None, "file of training samples", old_names=("file_train",)),
    val_data=_str(
        None, "file of validation samples, in the format of the training file", needs_support=True
    ),
    group_data=_str(
        None,
        "file with the group of each training sample, such as its patient, which is not split"
        " between folds: one line for each sample, or import.json",
        needs_support=True,
    ),
    test_data=_str(None, "file of test samples", old_names=("file_test",)),
    data_url=_str(
        None, "address from which candle-p1 data fetch downloads the files", old_names=("url_p1b1",)
    ),
)

_declare(
    "input and output",
    Role.RESULTS,
    save_path=_str(
        None,
        "directory for models, pictures and tables; None: the run's directory",
        short=("-s",),
        old_names=("save",),
    ),
    output_dir=_str(
        None, "directory that contains EXPERIMENT_ID/RUN_ID; '.': the run's directory itself"
    ),
    experiment_id=_str("EXP000", "name of the experiment"),
    run_id=_str("RUN000", "name of the run within the experiment"),
    logfile=_str(None, "file for a copy of the screen output", short=("-l",)),
    timeline=_str(None, "file for Horovod's timeline; tracing slows the run down"),
)

_declare(
    "preprocessing",
    scaling=_str(None, "scaling of the features"),
    shuffle=_bool(False, "shuffle the rows of the files before they are split", needs_support=True),
    feature_subsample=_int(0, "features of each kind; 0: all", minimum=0, needs_support=True),
)

_declare(
    "model",
    dense=_int(
        None, "units of each dense layer; 0: no layer", minimum=0, maximum=MAX_UNITS, many=True
    ),
    conv=_int(
        None,
        "filters, length and stride of each convolution; a 0 ends the convolutions",
        minimum=0,
        maximum=MAX_UNITS,
        many=True,
        needs_support=True,
    ),
    locally_connected=_bool(False, "locally connected layers for conv", needs_support=True),
    activation=_str(None, "activation of the inner layers", short=("-a",)),
    out_activation=_str(None, "activation of the last layer", old_names=("out_act",)),
    dropout=_float(None, "fraction of units to drop", minimum=0, below=1, old_names=("drop",)),
    pool=_int(
        None,
        "pooling length after each convolution",
        minimum=1,
        maximum=MAX_UNITS,
        many=True,
        needs_support=True,
    ),
    batch_normalization=_bool(False, "normalize batches between layers", needs_support=True),
    initialization=_str(None, "initial weights", choices=INITIALIZATIONS),
)

_declare(
    "training",
    required=True,
    loss=_str(None, "name of the loss function in Keras"),
    optimizer=_str(None, "name of the optimizer in Keras"),
    metrics=_str(None, "name of the metric in Keras"),
    epochs=_int(None, "epochs, before scaling", short=("-e",), minimum=1, maximum=MAX_EPOCHS),
    batch_size=_int(
        None, "samples per step and rank, unscaled", short=("-z",), minimum=1, maximum=2**24
    ),
)

_declare(
    "training",
    learning_rate=_float(
        None,
        "learning rate, before scaling; None: the optimizer's default",
        short=("-lr",),
        above=0,
        maximum=MAX_LEARNING_RATE,
    ),
    optimizer_formula=_str(
        "keras2",
        "formula and constants of the optimizer: CANDLE's, from Keras 2, or Keras 3's",
        choices=("keras2", "keras3"),
    ),
    early_stop=_bool(
        False, "stop when the validation loss no longer falls, and keep the model of the best epoch"
    ),
    patience=_int(10, "epochs that early_stop waits for a lower validation loss", minimum=1),
    momentum=_float(None, "momentum; None: the optimizer's default", minimum=0, maximum=1),
    val_split=_float(
        None,
        "fraction of the training samples used for validation",
        minimum=0,
        maximum=1,
        needs_support=True,
        old_names=("validation_split",),
    ),
    train_steps=_int(0, "maximum steps per training epoch; 0: no limit", minimum=0),
    val_steps=_int(0, "maximum steps per validation; 0: no limit", minimum=0),
    test_steps=_int(0, "maximum steps of the evaluation on the test data; 0: no limit", minimum=0),
    train_samples=_int(0, "training samples to use; 0: all", minimum=0),
    val_samples=_int(0, "validation samples to use; 0: all", minimum=0),
)

_declare(
    "checkpoints",
    Role.SPEED,
    ckpt_save_interval=_int(
        0,
        "epochs between checkpoints; 0: none, unless ckpt_every_s or ckpt_every_steps is set",
        minimum=0,
        maximum=MAX_EPOCHS,
    ),
    ckpt_every_s=_float(
        0.0, "time between checkpoints, in s; 0: none by time", minimum=0, maximum=10**9
    ),
    ckpt_every_steps=_int(
        0, "steps of a rank between checkpoints, counted over epochs; 0: none by steps", minimum=0
    ),
    ckpt_skip_epochs=_int(
        0, "no checkpoint before the end of this epoch", minimum=0, maximum=MAX_EPOCHS
    ),
    ckpt_save_best=_bool(
        True, "if checkpoints are saved, also save every epoch that is the best so far"
    ),
    ckpt_save_best_metric=_str("val_loss", "metric by which the best epoch is chosen"),
    ckpt_save_weights_only=_bool(
        False, "omit the optimizer's state, which is then reset at a restart"
    ),
    ckpt_checksum=_bool(False, "verify every checkpoint by reading it back from the disk"),
    save_model=_bool(
        False,
        "write the trained model to model.keras, which Keras loads without this package; inference:"
        " the model also scales its inputs and names the classes",
        words=("inference",),
    ),
)

_declare(
    "checkpoints",
    Role.LOGGING,
    ckpt_restart_mode=_str(
        "auto",
        "resume from a checkpoint: never (off), if there is one (auto), or else fail (required)",
        choices=("off", "auto", "required"),
    ),
    ckpt_keep_mode=_str(
        "linear",
        "checkpoints to keep: the newest (linear), or fewer the older they are (exponential)",
        choices=("linear", "exponential"),
    ),
    ckpt_keep_limit=_int(
        None,
        "maximum number of this run's checkpoints, besides the best one; None: 2, but no limit if"
        " ckpt_keep_mode is exponential",
        minimum=1,
    ),
    ckpt_required=_bool(False, "fail, instead of warning, if a checkpoint cannot be written"),
)

_declare(
    "checkpoints",
    Role.PLACE,
    ckpt_directory=_str(None, "directory of the checkpoints; None: ckpts/ in the run's directory"),
)

_declare(
    "loading and speed",
    Role.SPEED,
    loader=_str(
        "parallel",
        "how to read data files: all ranks together (parallel); the same once, then from a binary"
        " cache (cached); the paper's original and improved methods; or another library",
    ),
    load_threads=_int(
        0,
        "threads per rank that read (parallel, cached); 0: as many as compute",
        minimum=0,
        maximum=1024,
    ),
    kernels=_str("fast", "fast layers and optimizers where available, or Keras's own (plain)"),
    share_gpus=_bool(
        False,
        "let several ranks of a node share a GPU, for tests; JAX then averages through the host",
    ),
    check_replicas=_bool(False, "compare the ranks' weights after every step; slow"),
)

_declare(
    "data",
    Role.PLACE,
    cache_dir=_str(None, "directory of the caches; None: cache/ in $CANDLE_DATA_DIR"),
    cache_limit=_float(
        0.0, "maximum size of all caches together, in GiB; 0: no limit", minimum=0, maximum=2**30
    ),
    stage_dir=_str(None, "node-local directory ($TMPDIR, …) to which caches are copied"),
    compiled_dir=_str(
        None,
        "directory of the programs that JAX compiles; none: keep no programs. None:"
        " $JAX_COMPILATION_CACHE_DIR, or else compiled/ in $CANDLE_DATA_DIR",
    ),
    data_dir=_str(None, "directory that holds the benchmark's files under CANDLE's names"),
)

_declare(
    "data",
    size=_str("small", "size of the synthetic data used if no data file is named"),
    data_seed=_int(2019, "seed of the synthetic data", minimum=0, maximum=MAX_SEED),
    folds=_int(
        0,
        "cross-validation: folds of the training file, one of which is held out for validation and"
        " test; 0: none",
        minimum=0,
        maximum=1000,
        needs_support=True,
    ),
    fold=_int(1, "the fold held out, from 1", role=Role.SEED, minimum=1, needs_support=True),
    scaling_fit=_str("all", "samples that the scaling is fitted to", choices=("all", "train")),
    reshuffle=_bool(
        True,
        "draw a new order of the training samples for every epoch; False: the order of the files",
    ),
)

_declare(
    "data-parallel training",
    engine=_str(
        "auto",
        "what averages gradients: Horovod on TensorFlow, or JAX's runtime. auto: the one for"
        " Keras's backend, which KERAS_BACKEND or the installation determines",
        role=Role.SPEED,
    ),
    averaging=_str(
        "auto",
        "what averages gradients with the engine horovod: shared memory if all ranks train on the"
        " CPUs of one node (auto), or always Horovod, as with --timeline and --compression",
        role=Role.SPEED,
    ),
    device_data_mb=_int(
        None,
        "MiB of samples that JAX may keep on a rank's device; 0: the host sends each batch. None:"
        " half of a GPU's free memory, or on CPUs a quarter of the node's memory for all its ranks",
        role=Role.SPEED,
        minimum=0,
    ),
    data_parallel=_str(
        "epoch", "each rank trains on all samples (epoch), or on its share (batch_step)"
    ),
    epochs_scaling=_str(
        None,
        "ranks divide the epochs (strong; strong_ceil rounds up) or each train all of them (weak,"
        " none). None: strong, but none for a single epoch and for batch_step",
    ),
    batch_scaling=_str("none", "growth of each rank's batch size with the ranks"),
    lr_scaling=_str("linear", "growth of the learning rate with the ranks"),
    warmup_epochs=_int(
        0, "each rank's epochs of learning-rate warm-up", minimum=0, maximum=MAX_EPOCHS
    ),
    warmup_by=_str(
        "step",
        "whether the warm-up raises the learning rate at every step or at every epoch",
        choices=("step", "epoch"),
    ),
    base_lr=_float(
        None,
        "initial learning rate of the warm-up; None: learning_rate",
        above=0,
        maximum=MAX_LEARNING_RATE,
    ),
    compression=_str("none", "compression of gradients in the allreduce; fp16 halves them"),
    backward_passes_per_step=_int(
        1, "batches whose gradients are accumulated before they are averaged", minimum=1
    ),
    allow_nan=_bool(
        False,
        "only warn if a loss is not a number, which otherwise stops training and fails the run",
        role=Role.LOGGING,
    ),
    deterministic=_bool(True, "make runs with equal seed and ranks bit-identical"),
)

_declare(
    "monitoring",
    Role.LOGGING,
    verbose=_bool(False, "print more", short=("-v",)),
    profiling=_bool(False, "profile every rank's Python calls, into profile/", short=("-p",)),
    step_trace=_bool(False, "framework's trace of ten steps of rank 0, into step_trace/"),
    stall_shutdown_s=_int(
        300,
        "time after which a stalled collective of Horovod, or of the ranks of a node, ends the job,"
        " in s; 0: never",
        minimum=0,
        maximum=10**9,
    ),
    power=_str("auto", "power sources: auto, none, or any of nvml,rapl,cray,amd,replay:FILE"),
    power_hz=_float(10.0, "power readings per second", minimum=0.1, maximum=1000),
    communication_log=_bool(True, "record the size and time of every collective"),
    tensorboard=_bool(
        False, "write each epoch's loss and metrics into tensorboard/", old_names=("tb",)
    ),
    mllog=_bool(False, "write MLPerf log lines into mllog.txt"),
)

# What CANDLE Supervisor's ``model_runner.py`` adds to the parameters before calling run().
_declare(
    "accepted from CANDLE Supervisor but unused",
    Role.UNUSED,
    framework=_str(None, "the framework that Supervisor requests"),
    id=_str(None, "Supervisor's name of the parameter set"),
    instance_directory=_str(None, "Supervisor's directory of the run"),
    pre_module=_str(None, "module that Supervisor calls before the run"),
    post_module=_str(None, "module that Supervisor calls after the run"),
    perf_top=_str("0", "interval of Supervisor's top, in s; 0: it does not run"),
    perf_nvidia=_str("0", "the same for its nvidia-smi"),
    solr_root=_str(None, "database of Supervisor's monitor"),
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


REGISTERED_ONLY: dict[str, Any] = {
    "clr_flag": False,
    "clr_mode": None,
    "clr_base_lr": None,
    "clr_max_lr": None,
    "clr_gamma": None,
    "lstm_size": None,
    "recurrent_dropout": 0,
}
_OF_BENCHMARKS: tuple[tuple[Any, str], ...] = (
    (
        False,
        "add_noise alpha_dropout cp noise_cluster noise_column noise_correlated "
        "noise_gaussian reduce_lr residual scramble tsne use_landmark_genes warmup_lr",
    ),
    (
        None,
        "abs_gain acc_gain add_class alpha alpha_scale_factor base_lr category_cutoffs "
        "cell_features classes drug_features epsilon_std feature_col feature_threshold "
        "init_abs_epoch label_noise latent_dim max_abs max_logconc min_acc min_logconc model "
        "n_iters noise_type sample_ids saved_model saved_weights std_dev subsample task_list "
        "task_names test_cell_split",
    ),
    (0, "cell_noise_sigma noise_factor reg_l2"),
    (True, "one_hot_dtrep"),
    (1, "workers"),
)
"""Names by the value that asks for nothing."""
KNOWN = REGISTERED_ONLY | {name: value for value, names in _OF_BENCHMARKS for name in names.split()}
"""CANDLE's other parameters: those that it registers for all benchmarks, and those of its Pilot1
benchmarks, each with the value, besides None, that asks for nothing.

A benchmark without a parameter of that name accepts it nevertheless, and warns if it asks for
something.
"""
_GROUPS = ("general", "input and output", "preprocessing", "model", "training", "checkpoints")
_OWN = "optimizer_formula patience timeline save_model ckpt_every_s ckpt_every_steps ckpt_required"
CANDLES = {each.name for each in PARAMETERS if each.group in _GROUPS} - {*_OWN.split()}
CANDLES |= {"verbose", "profiling", *KNOWN}
"""The names of CANDLE's parameters, which alone may be abbreviated as flags."""
