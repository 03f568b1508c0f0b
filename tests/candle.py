"""What CANDLE's users bring: its parameter files, and the command lines of its READMEs."""

from tests.conftest import ROOT

CANDLE = ROOT / "tests/files/candle"
FILES = sorted(CANDLE.glob("*/*.txt"))
"""Files with the sections, names and values of CANDLE's for the four benchmarks, by release.

Those of v0.4 that are not here are the same as at HEAD.
"""
LINES = {
    "nt3": [
        "",
        "-e 2",
        "--conf nt3_perf_bench_model.txt",
    ],
    "p1b1": [
        "",
        "--use_landmark_genes True --train_samples 100 --epochs 5",
        "--cp TRUE --save_path p1b1 --model vae --latent_dim 100",
    ],
    "p1b2": [
        "",
        "--epochs 3",
        "--val_split 0.2 --epochs 20",
    ],
    "p1b3": [
        "",
        "--cell_features all --drug_features all --conv 10 10 1 5 5 1 -epochs 200",
        "--cell_features all --drug_features all --conv 10 10 1 5 5 1 --epochs 200",
        "--feature_subsample 500 -e 5 --train_steps 100 --val_steps 10 --test_steps 10",
        "--conv 10 10 1 --pool 100 --locally_connected --optimizer adam --batch_normalization"
        " --batch_size 64",
        "--conf p1b3_conv_model.txt -e 5 --train_steps 100 --val_steps 10 --test_steps 10",
    ],
}
"""The flags of CANDLE's command lines, by benchmark."""


def benchmark_of(path):
    """Returns the name of the benchmark that a file is for."""
    return path.name.partition("_")[0]
