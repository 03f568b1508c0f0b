"""Writes a record like a run's, without training; see the parameter `does`."""

import sys
import time
from pathlib import Path

from toy import BENCHMARK
from toy_records import toy_record

from candle_p1.records.record import write_record

params = BENCHMARK.read_parameters()
if params["does"] == "break":
    print("error: broken on purpose")
    sys.exit(3)
directory = Path(params["output_dir"]) / params["experiment_id"] / params["run_id"]
path = directory / "run.json"
directory.mkdir(parents=True, exist_ok=True)
path.open("x").close()
write_record(path, toy_record(params, status="running"))
print("training")
time.sleep(params["toy_s"] if params["does"] != "hang" else 600)
status = "failed" if params["does"] == "fail" else "ok"
write_record(path, toy_record(params, status=status, total_s=params["toy_s"] + 1))
sys.exit(status == "failed")
