"""A rank of a measuring job, by itself or under a launcher."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from candle_p1.bench.job import ERROR_MARK, write_outcomes
from candle_p1.distributed.comm import connect
from candle_p1.errors import EXIT_CODE, CandleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from candle_p1.distributed.comm import Communicator


def serve(measure: Callable[[Path, Communicator], Any]) -> None:
    """Measures; rank 0 writes what all ranks have measured into the job's directory.

    Args:
        measure: Takes that directory and the ranks; returns a dataclass; collective.
    """
    directory = Path(sys.argv[1])
    try:
        comm = connect()
    except CandleError as error:
        _fail(error)
    try:
        outcomes = comm.gather(measure(directory, comm))
        if outcomes is not None:
            write_outcomes(directory, outcomes)
    except CandleError as error:  # all ranks have agreed upon it
        _fail(error)
    except Exception:
        traceback.print_exc()
        comm.abort(1)


def _fail(error: CandleError) -> NoReturn:
    print(f"{ERROR_MARK}{error}", file=sys.stderr, flush=True)
    sys.exit(EXIT_CODE)
