"""CANDLE's parameter files and the command lines of its READMEs train as they are, but small."""

import pytest

from candle_p1.benchmark import find_benchmark
from tests.candle import FILES, LINES, benchmark_of
from tests.records import read_record

pytestmark = pytest.mark.extended

SMALL = "--epochs 1 --train_steps 1 --val_steps 1 --test_steps 1 --save_path save"
"""One step on the small data, and no results elsewhere."""
FEW_GENES = {"v0.4-nt3_noise_model": "--feature_col 5"}
"""The small data do not have the gene that this file names."""
NO_MATTER = {"config_file", "model_name", "output_dir", "timeout", "data_url"}
NO_MATTER |= {"batch_scaling", "batch_size", "learning_rate"}
"""Parameters that do not matter to whether one rank trains here."""


def test_every_file_and_every_command_line_trains(train_all):
    """Files of HEAD are config files, others are in place of the benchmark's own.

    Unit tests show that a file means the same in both ways. What has the same parameters as another
    file or line is trained once.
    """
    lines = {}
    for path in FILES:
        benchmark, name = benchmark_of(path), f"{path.parent.name}-{path.stem}"
        use = f" --config_file {path}" if path.parent.name == "HEAD" else f":{path}"
        lines[name] = f"{benchmark}{use} {SMALL} {FEW_GENES.get(name, '')}"
    for benchmark, given in LINES.items():
        for number, line in enumerate(given):
            lines[f"{benchmark}-{number}"] = f"{benchmark} {line} {SMALL}"
    runs, known = {}, []
    for name, line in lines.items():
        meant = meaning(line)
        if meant not in known:
            runs[name] = line
            known.append(meant)
    directory = train_all(1, runs, limit_s=900)
    for name in runs:
        record = read_record(directory / name / "run.json")
        assert (record["status"], record["data"]["synthetic"]) == ("ok", True), name
        assert len(record["training"]["epochs"]) == 1, name


def meaning(line):
    """Returns the benchmark and the parameters of a line as ``tests/train_all.py`` reads it."""
    first, *flags = line.split()
    name, _, model_file = first.partition(":")
    benchmark = find_benchmark(name)
    params = benchmark.bind(benchmark.initialize_parameters(model_file or None, flags))
    return name, {each: params[each] for each in params if each not in NO_MATTER}
