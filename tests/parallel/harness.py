"""What the scripts of this folder share: they run under mpirun, check after check on all ranks."""

from __future__ import annotations

import sys
import traceback

from candle_p1.distributed.comm import connect


def run_checks(*checks, horovod=True):
    """Calls each check with the communicator; prints every rank's error and exits 1 if any failed.

    If the command line names checks, only these are called.
    The ranks meet after each check, so one that fails does not leave the others hanging in the
    next, unless it left them in a collective: the launcher's time limit is for that.
    """
    comm = connect()
    if horovod:
        from candle_p1.distributed import devices
        from candle_p1.distributed.horovod import start_horovod

        devices.configure(comm)
        start_horovod(comm)
    num_failed = 0
    if sys.argv[1:]:
        checks = [check for check in checks if check.__name__ in sys.argv]
    for check in checks:
        try:
            check(comm)
            error = None
        except Exception:
            error = traceback.format_exc()
        errors = comm.allgather(error)
        if comm.rank == 0:
            print("FAILED" if any(errors) else "ok", check.__name__, flush=True)
            for rank, text in enumerate(errors):
                if text:
                    print(f"--- rank {rank}\n{text}", flush=True)
        num_failed += any(errors)
    comm.barrier()
    sys.exit(num_failed > 0)
