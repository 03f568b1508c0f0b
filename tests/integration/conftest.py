"""Runs that several tests look at: all four networks, trained on two ranks in one job, and more."""

import csv
import math
import os
import shutil
import socket

import pytest

NARROW = "nt3 --conv 8 20 1 --pool 10 --dense 16"
"""A network that trains in a second, for what is not about learning."""
STEPS = "--epochs 4 --train_steps 5 --check_replicas True --save_model True"
VARIATIONAL = (
    "p1b1 --dense 64 32 --latent_dim 3 --epochs 12 --epochs_scaling weak --lr_scaling none"
    " --residual True --batch_normalization True --dropout 0.05 --alpha_dropout True"
    " --warmup_lr True --base_lr 0.0005 --reduce_lr True"
)
REPEATED = (
    f"{NARROW} --epochs 4 --warmup_epochs 1 --check_replicas True --val_steps 2 --test_steps 2"
)
VARIANTS = {
    "first": REPEATED,
    "again": "nt3 --config_file EXP000/first/final_params.txt",
    "other-seed": f"{REPEATED} --rng_seed 5",
    "shards": f"{NARROW} --epochs 2 --data_parallel batch_step --batch_scaling sqrt"
    " --data_type f16 --step_trace True --power none",
    "vae": f"{VARIATIONAL} --model vae --learning_rate 0.001 --tb True",
    "cvae": f"{VARIATIONAL} --model cvae",
    # At this learning rate the loss does not fall.
    "p1b2": "p1b2 --dense 8 --epochs 30 --epochs_scaling weak --learning_rate 1e-12"
    " --early_stop True --patience 2 --logfile run.log --save_path results",
    "p1b3": "p1b3 --config_file p1b3_conv_model.txt --train_samples 4050 --epochs 4"
    " --batch_normalization True --save_model True --save_best_model True",
}


@pytest.fixture(scope="session")
def git_calls(tmp_path_factory):
    """The file to which a program in place of git writes the rank that calls it."""
    return tmp_path_factory.mktemp("git") / "calls"


@pytest.fixture(scope="session")
def trained(train_all, git_calls, tmp_path_factory):
    """Trains the four networks on two ranks; returns the directory of their runs.

    That of NT3 writes all that a run can write.
    """
    git = git_calls.with_name("git")
    git.write_text(
        f'#!/bin/sh\necho "$OMPI_COMM_WORLD_RANK" >> {git_calls}\n'
        f'exec {shutil.which("git") or "false"} "$@"\n'
    )
    git.chmod(0o755)
    recording = tmp_path_factory.mktemp("power") / "recording.csv"
    write_recording(recording)
    runs = {
        "nt3": f"{NARROW} {STEPS} --mllog True --tensorboard True --profiling True"
        f" --power replay:{recording} --power_hz 20",
        "p1b1": f"p1b1 --dense 16 {STEPS} --cp True",
        "p1b2": f"p1b2 --dense 16 {STEPS}",
        "p1b3": f"p1b3 --dense 16 {STEPS} --save_best_model True --ckpt_save_interval 1",
    }
    return train_all(2, runs, settings={"PATH": f"{git.parent}{os.pathsep}{os.environ['PATH']}"})


@pytest.fixture(scope="session")
def variants(train_all):
    """Trains the networks with CANDLE's options, in another job of two ranks."""
    return train_all(2, VARIANTS)


def assert_ranks(record, launcher, places, *, threads=1):
    """Asserts that ranks have these (node, local rank), and as many threads, on this machine."""
    assert (record["launcher"], record["num_ranks"]) == (launcher, len(places))
    assert record["num_nodes"] == len({node for node, _ in places})
    keys = ("rank", "node", "local_rank", "host", "device", "threads")
    found = [tuple(rank[key] for key in keys) for rank in record["ranks"]]
    here = socket.gethostname(), "cpu", threads
    assert found == [(i, *place, *here) for i, place in enumerate(places)]


def write_recording(path, seconds=300, hz=20):
    """Writes a recording of a processor's energy counter and of its memory's power."""
    energy_j = 0.0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = "time_s,node,device,label,domain,source,reading,resolution_s,value"
        writer.writerow(columns.split(","))
        for i in range(seconds * hz):
            power_w = 80 + 30 * math.sin(i / hz)
            energy_j += power_w / hz
            writer.writerow([i / hz, 0, "package-0", "CPU", "cpu", "rapl", "energy", "", energy_j])
            writer.writerow([i / hz, 0, "dram-0", "DRAM", "memory", "rapl", "power", "", 11.5])
