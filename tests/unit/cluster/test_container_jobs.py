"""Jobs whose ranks run in a container."""

from __future__ import annotations

import pytest

from candle_p1.cluster.job import RUNTIMES, JobOptions, JobRequest, container_argv, find_image
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import list_machines, load_machine
from candle_p1.errors import ParameterError


def job(machine, image):
    return JobRequest(
        machine=machine,
        layout=Layout.on(machine, machine.min_nodes),
        name="nt3_weak",
        program="/checkout/benchmarks/nt3/nt3.py",
        flags=["--output_dir", "/results", "--data_dir", "tables", "--epochs", "8"],
        minutes=30,
        output="out/job",
        options=JobOptions(container=image),
    )


def own_machine(tmp_path, text):
    path = tmp_path / "ours.toml"
    path.write_text(f'base = "slurm"\n[container]\n{text}\n')
    return load_machine(str(path))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            'options = ["--nv"]',
            "apptainer exec --nv --bind $PWD --bind ${CANDLE_DATA_DIR:-$PWD} --bind"
            " /checkout/benchmarks/nt3 --bind /results image.sif",
        ),
        (
            'runtime = "singularity"',
            "singularity exec --bind $PWD --bind ${CANDLE_DATA_DIR:-$PWD} --bind"
            " /checkout/benchmarks/nt3 --bind /results image.sif",
        ),
        (
            'runtime = "shifter"\noptions = ["--module=gpu"]',
            "shifter --image=image.sif --module=gpu",
        ),
    ],
)
def test_the_command_line_of_a_runtime(text, line, tmp_path):
    assert " ".join(container_argv(job(own_machine(tmp_path, text), "image.sif"))) == line


def test_podman_gets_variables_and_directories(tmp_path):
    machine = own_machine(tmp_path, 'runtime = "podman-hpc"\noptions = ["--gpu", "--mpi"]')
    line = " ".join(container_argv(job(machine, "candle:1")))
    assert line.startswith("podman-hpc run --rm --gpu --mpi --workdir $PWD --volume $HOME:$HOME")
    assert "--volume /results:/results" in line
    assert "--env SLURM* " in line
    assert line.endswith(" candle:1")


@pytest.mark.parametrize("name", list_machines())
def test_every_machine_has_a_runtime(name):
    machine = load_machine(name)
    assert machine.container.runtime in RUNTIMES
    script = job(machine, "/images/candle.sif").script()
    assert f"\njob_container {machine.container.runtime} " in script
    assert "CANDLE_P1_VENV" not in script


def test_images_are_files_or_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = load_machine("slurm")
    (tmp_path / "a.sif").write_text("")
    assert find_image(machine, "a.sif") == f"{tmp_path}/a.sif"
    assert find_image(machine, "docker://candle:1") == "docker://candle:1"
    assert find_image(load_machine("perlmutter"), "candle:1") == "candle:1"
    with pytest.raises(ParameterError, match=r"--container b\.sif: apptainer, which slurm uses"):
        find_image(machine, "b.sif")


def test_an_unknown_runtime(tmp_path):
    machine = own_machine(tmp_path, 'runtime = "docker"')
    with pytest.raises(ParameterError, match=r"'docker': choose one of apptainer, singularity"):
        find_image(machine, "candle:1")
