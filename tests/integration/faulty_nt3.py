"""NT3's script, with a rank that fails in a phase: FAULT is "rank:phase:what".

Every rank writes the phase that it enters to a file rank<rank>.phase in the working directory.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ["NT3_FOLDER"])

from candle_p1 import train
from candle_p1.distributed.comm import connect
from candle_p1.failure.agent import RankAgent
from nt3 import BENCHMARK

rank = connect().rank
fault_rank, fault_phase, what = os.environ.get("FAULT", "-1::").split(":")
report_phase = RankAgent.report_phase


def note_phase_and_fail(self, path):
    report_phase(self, path)
    phase = "/".join(path)
    part = Path(f"rank{rank}.part")
    part.write_text(f"{os.getpid()} {phase}")
    part.rename(f"rank{rank}.phase")  # so that it is never read half-written
    if rank == int(fault_rank) and phase == fault_phase:
        if what == "sleep":
            time.sleep(120)
        elif what == "raise":
            raise ValueError("planted")
        elif what == "turn Ctrl-C into an error":  # as TensorFlow does while it traces
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException as caught:
                raise ValueError("in place of Ctrl-C") from caught


RankAgent.report_phase = note_phase_and_fail
train.main(BENCHMARK)
