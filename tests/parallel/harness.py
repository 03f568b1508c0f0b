"""Runs checks on all ranks under mpirun: python harness.py MODULE[:CHECKS]...

CHECKS names a list of a module, which is "CHECKS" unless it is given.
"""

from __future__ import annotations

import importlib
import sys
import traceback

from engines import engine

from candle_p1.distributed.comm import connect


def run_checks(checks, *, trains=True):
    """Calls each check with the communicator; prints every rank's error, and exits 1 if any failed.

    The ranks meet after each check, so that a failure on one rank does not make the others hang in
    the next check. If it makes them hang in a collective of the check, the time limit ends them.

    Args:
        checks: By name.
        trains: Whether the checks use an engine.
    """
    comm = connect()
    if trains:
        engine()
    num_failed = 0
    for name, check in checks.items():
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
        num_failed += any(errors)
    comm.barrier()
    sys.exit(num_failed > 0)


def named(checks):
    """Returns functions by their names."""
    return {check.__name__: check for check in checks}


if __name__ == "__main__":
    chosen = {}
    for argument in sys.argv[1:]:
        module, _, name = argument.partition(":")
        chosen |= named(getattr(importlib.import_module(module), name or "CHECKS"))
    run_checks(chosen)
