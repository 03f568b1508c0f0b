import pytest

from candle_p1.cluster.job import RUNTIMES
from candle_p1.cluster.launchers import COMMAND_LINES
from candle_p1.cluster.machine import Layout, list_machines, load_machine
from candle_p1.cluster.schedulers import SCHEDULERS
from candle_p1.errors import ParameterError
from candle_p1.toml_file import read_toml
from tests.conftest import ROOT

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
