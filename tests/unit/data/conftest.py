"""Compressed tables, and jobs that read them, whose ranks are threads."""

import gzip
from functools import partial

import pyarrow
import pytest

from candle_p1.data.cooperative import read_together
from candle_p1.data.source import Loading
from candle_p1.data.table import CsvLayout
from candle_p1.errors import CandleError
from tools.simulated import SimulatedJob

compress_gzip = partial(gzip.compress, mtime=0)  # names of tests contain the bytes
compress_zstd = partial(pyarrow.compress, codec="zstd", asbytes=True)
PLAIN = CsvLayout()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("table") / "table.csv"


def read_by_job(path, num_ranks=3, ranks_per_node=2, layout=PLAIN, **options):
    """Returns the table that each rank reads, or the text of its error."""

    def read(comm):
        try:
            return read_together(path, layout, Loading(comm=comm, **options))
        except CandleError as error:
            return str(error)

    return SimulatedJob(num_ranks, ranks_per_node).run(read)
