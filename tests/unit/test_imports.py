import subprocess
import sys

import pytest

HEAVY = {"tensorflow", "horovod", "mpi4py", "keras", "jax"}


@pytest.mark.parametrize(
    "statement",
    [
        "from candle_p1.cli import main; import sys; sys.argv = ['x', '--help']\n"
        "try: main()\nexcept SystemExit: pass",
        "import candle_p1.parameters.parameter_set, candle_p1.scaling, candle_p1.records.record",
        "import candle_p1.train",
        "from candle_p1.benchmark import find_benchmark; find_benchmark('nt3').declaration",
        "from candle_p1.cli.study import study_command\n"
        "study_command(['show', 'strong-nt3'], standalone_mode=False)",
    ],
)
def test_neither_framework_nor_mpi_is_loaded(statement):
    program = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    argv = [sys.executable, "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "candle_p1" in loaded
    assert not loaded & HEAVY
