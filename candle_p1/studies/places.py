"""Where the results of a study and of its runs go."""

from __future__ import annotations

RESULT_PLACES = ("output_dir", "experiment_id", "run_id", "save_path", "logfile", "timeline")
"""Parameters that say where results go. They are each run's own, and make no other run of it."""
OUTPUT = "output"
"""Directory for the results of studies, unless another one is named."""
LOG_NAME = "study.log"
"""What a run has printed, beside its record."""
END_MARK = "candle-p1 study: the run has ended with code"
"""What a study adds to this, with the code, if it is there at the end."""
