"""Calls a benchmark's script as the model runner of CANDLE Supervisor does; starts it with

python supervisor.py '{"epochs": 2, ...}' DIRECTORY keras RUN_ID TIMEOUT

and MODEL_NAME, EXPID and MODEL_RETURN in the environment. With --from-mpi as the first argument, a
rank of an MPI job starts that as its child, which inherits the launcher's variables.
"""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path


def wanted(text):
    """Returns what the overlay makes of a hyperparameter: words that are numbers form a list."""
    words = str(text).split(" ")
    try:
        numbers = [float(word) if "." in word else int(word) for word in words]
    except ValueError:
        return text
    return numbers if len(words) > 1 else text


def supervise(text, directory, framework, run_id, timeout):
    overlay = json.loads(text) | {
        "framework": framework,
        "save": f"{directory}/output",
        "instance_directory": directory,
        "model_name": os.environ["MODEL_NAME"],
        "experiment_id": os.environ["EXPID"],
        "run_id": run_id,
        "timeout": float(timeout),
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    os.chdir(directory)
    sys.argv = ["null"]
    module = importlib.import_module(f"{overlay['model_name']}_baseline_keras2")
    file = {"default_model": overlay["config_file"]} if "config_file" in overlay else {}
    params = module.initialize_parameters(**file)
    for name, value in overlay.items():
        value = wanted(value)
        params[name] = [int(units) for units in value] if name == "dense" else value
    lines = [f"{name}={value!r}\n" for name, value in params.items() if name != "timeout"]
    Path("parameters.txt").write_text("[Global Params]\n" + "".join(lines))
    for name in ("perf_top", "perf_nvidia"):  # whether to monitor the performance
        assert name not in params or int(params[name]) == 0

    history = module.run(params)
    from keras import backend

    backend.clear_session()
    values = history.history[os.environ["MODEL_RETURN"]]
    if len(values) < overlay.get("epochs", 1):
        Path("stop.marker").write_text(f"{len(values)}\n")
    result = 999999999 if math.isnan(values[-1]) else values[-1]
    Path("result.txt").write_text(f"{result}\n")
    Path("history.txt").write_text(json.dumps(history.history))


if sys.argv[1] == "--from-mpi":
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.Get_rank()
    text, directory, *rest = sys.argv[2:]
    command = [sys.executable, __file__, text, f"{directory}/{rank}", *rest]
    sys.exit(subprocess.run(command, check=False).returncode)
supervise(*sys.argv[1:])
