"""Runs checks on all ranks: harness.py [averaging=NAME] MODULE[:LIST]... [LAYOUT...]

LIST names the checks of a module, which are its CHECKS by default. NAME is what averages gradients
with the engine horovod. A layout names the node of each rank: with "a,a,b", the third one pretends
to be on another node. Checks are called with the communicator of each layout, and do not train.
"""

import importlib
import os
import sys
import tempfile
import traceback
from functools import partial
from pathlib import Path
from unittest.mock import patch

from candle_p1.distributed.comm import NODE_VARIABLE, MpiCommunicator, connect


def shared_directory(comm):
    """Returns a new directory, the same on all ranks."""
    return Path(comm.broadcast(tempfile.mkdtemp(dir=Path.cwd()) if comm.rank == 0 else None))


def on_nodes(layout, rank):
    """Returns the communicator of ranks on the nodes of a layout; collective."""
    with patch.dict(os.environ, {NODE_VARIABLE: layout.split(",")[rank]}):
        return MpiCommunicator()


def name_of(check):
    parts = [check.func.__name__, *check.args] if isinstance(check, partial) else [check.__name__]
    return " ".join(map(str, parts))


def passes(name, check, comm):
    """Calls a check, and prints every rank's error; returns whether there is none.

    The ranks meet after each check, so that a failure on one rank does not make the others hang in
    the next check. If it makes them hang in a collective of the check, the time limit ends them.
    """
    try:
        check(comm)
        error = None
    except Exception:
        error = traceback.format_exc()
    errors = comm.allgather(error)
    if comm.rank == 0:
        print("FAILED" if any(errors) else "ok", name, flush=True)
        for rank, text in enumerate(errors):
            if text:
                print(f"--- rank {rank}\n{text}", flush=True)
    return not any(errors)


def main(arguments):
    layouts = [each for each in arguments if "," in each]
    comm = connect()
    if not layouts:
        from engines import engine

        engine()
    checks = []
    for argument in arguments:
        if argument not in layouts and "=" not in argument:
            module, _, name = argument.partition(":")
            checks += getattr(importlib.import_module(module), name or "CHECKS")
    places = {f" on {layout}": on_nodes(layout, comm.rank) for layout in layouts} or {"": comm}
    results = [
        passes(name_of(check) + place, check, ranks)
        for place, ranks in places.items()
        for check in checks
    ]
    comm.barrier()
    sys.exit(not all(results))


if __name__ == "__main__":
    main(sys.argv[1:])
