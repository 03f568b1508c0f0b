from __future__ import annotations

import pytest

from candle_p1.cluster.launchers import COMMAND_LINES
from candle_p1.cluster.layout import Layout
from candle_p1.cluster.machine import list_machines, load_machine
from candle_p1.cluster.schedulers import SCHEDULERS
from candle_p1.errors import ParameterError
from candle_p1.toml_file import read_toml
from tests.conftest import ROOT

FILES = {path.stem: path for path in ROOT.glob("candle_p1/cluster/machines/*.toml")}


def test_the_machines_of_this_package():
    assert list_machines() == sorted(FILES)
    assert {"summit", "theta", "frontier", "perlmutter", "polaris", "aurora"} <= FILES.keys()
    assert {"slurm", "pbs", "local"} <= FILES.keys()


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_machine_is_consistent_and_every_value_has_a_source(name):
    machine = load_machine(name)
    assert machine.name == name
    assert set(read_toml(FILES[name])) - {"title", "sources"} == set(machine.sources)
    assert all(machine.sources.values())
    assert machine.scheduler in SCHEDULERS
    assert machine.launcher in COMMAND_LINES
    layout = Layout.on(machine, machine.min_nodes)
    assert layout.num_ranks == machine.min_nodes * machine.ranks_per_node
    if machine.time_limits:
        assert machine.time_limits[-1][0] == machine.num_nodes
        assert all(machine.minutes <= minutes for _, minutes in machine.time_limits)
    assert all(fewest <= most for fewest, most, _ in machine.queues.values())
    assert machine.queue not in machine.queues


@pytest.mark.parametrize(
    ("name", "repository"),
    [
        ("aurora", "argonne-lcf/user-guides"),
        ("polaris", "argonne-lcf/user-guides"),
        ("theta", "argonne-lcf/user-guides"),
        ("frontier", "olcf/olcf-user-docs"),
        ("perlmutter", "NERSC/sc23-dl-tutorial"),
        ("slurm", "SchedMD/slurm"),
        ("pbs", "openpbs/openpbs"),
    ],
)
def test_the_sources_are_pages_that_can_be_looked_up(name, repository):
    comments = [line for line in FILES[name].read_text().splitlines() if line.startswith("#")]
    assert any(repository in line for line in comments)
    words = [word.strip(",.:;") for word in " ".join(comments).split()]
    assert any(word.endswith((".md", ".rst", ".sh", ".1", ".7B")) for word in words)


def test_ranks_get_lists_of_cores_where_some_are_reserved():
    """The list for 12 ranks is that of ALCF's guide: running-jobs-aurora.md, Example 4."""
    aurora = load_machine("aurora")
    lists = ":".join(Layout.on(aurora, 1, 12).core_ranges)
    assert lists == "1-8:9-16:17-24:25-32:33-40:41-48:53-60:61-68:69-76:77-84:85-92:93-100"
    assert Layout.on(aurora, 1, 2).core_ranges == ("1-8", "53-60")
    assert Layout.on(aurora, 1, 3).core_ranges == ("1-8", "9-16", "53-60")
    assert Layout.on(aurora, 1, 1).core_ranges == ("1-8",)
    assert Layout.on(load_machine("polaris"), 1).core_ranges == ()


def test_the_layouts_of_the_paper():
    """Section 4.1 and Figure 5 (b): one GPU and 7 cores; section 2.3: a rank per node."""
    summit, theta = load_machine("summit"), load_machine("theta")
    assert [summit.limits("batch", nodes)[2] for nodes in (45, 46, 4609)] == [120, 360, None]
    assert (summit.ranks_per_node, summit.cores_per_rank, summit.gpus_per_rank) == (6, 7, 1)
    assert (theta.ranks_per_node, theta.threads_per_rank) == (1, 64)


def test_more_ranks_than_usual_get_smaller_shares():
    layout = Layout.on(load_machine("theta"), 2, 4)
    assert (layout.num_ranks, layout.cores_per_rank, layout.threads_per_rank) == (8, 16, 16)
    fewer = Layout.on(load_machine("summit"), 2, 3)
    assert (fewer.cores_per_rank, fewer.threads_per_rank) == (7, 7)


@pytest.mark.parametrize(
    ("name", "nodes", "ranks", "numbers"),
    [
        ("summit", 1, 7, "7 ranks .* summit.* 1 GPU.* 6"),
        ("summit", 5000, None, "5,000 nodes.* 4,608"),
        ("theta", 1, 65, "65 ranks .* theta.* 64 cores"),
        ("local", 2, None, "2 nodes.* local .* 1"),
        ("slurm", 0, None, "0 nodes"),
        ("slurm", 1, 0, "0 ranks"),
    ],
)
def test_a_layout_that_does_not_fit_the_machine(name, nodes, ranks, numbers):
    with pytest.raises(ParameterError, match=numbers):
        Layout.on(load_machine(name), nodes, ranks)


@pytest.mark.parametrize(
    ("text", "ranks", "problem"),
    [
        (
            'base = "slurm"\ncores_per_node = 8\nranks_per_node = 2\ncores_per_rank = 8\n',
            None,
            "ours: 2 ranks .* 8 cores .* 16 cores.* 8",
        ),
        (
            'base = "pbs"\nsockets = ["1-7", "9-15"]\ncores_per_rank = 4\n',
            4,
            "4 ranks .* 4 cores: a socket has 7",
        ),
    ],
)
def test_a_machine_whose_own_ranks_do_not_fit(text, ranks, problem, tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=problem):
        Layout.on(load_machine(str(path)), 1, ranks)


def test_a_users_file_is_put_over_another_machine(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(
        'base = "slurm"\nranks_per_node = 4\nlauncher_options = []\n[environment]\nA = "1"\n'
    )
    machine = load_machine(str(path))
    assert (machine.name, machine.scheduler, machine.ranks_per_node) == ("ours", "slurm", 4)
    assert machine.launcher_options == []
    assert machine.environment == {"NCCL_DEBUG": "WARN", "A": "1"}


@pytest.mark.parametrize("place", ["variable", "config"])
def test_a_users_file_takes_precedence_over_the_machine_of_its_name(place, tmp_path, monkeypatch):
    directory = tmp_path / "config/candle_p1/machines"
    if place == "variable":
        directory = tmp_path / "machines"
        monkeypatch.setenv("CANDLE_P1_MACHINES", f"{tmp_path / 'absent'}:{directory}")
    directory.mkdir(parents=True)
    (directory / "summit.toml").write_text('queue = "killable"\n')
    machine = load_machine("summit")
    assert (machine.queue, machine.cores_per_rank) == ("killable", 7)
    (directory / "ours.toml").write_text('base = "theta"\n')
    assert "ours" in list_machines()
    assert load_machine("ours").launcher == "aprun"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('base = "slurm"\nrank_per_node = 4\n', "'rank_per_node' .*'ranks_per_node'"),
        ('base = "slurm"\nranks_per_node = "4"\n', "ranks_per_node is '4': .*integer"),
        ('base = "slurm"\nranks_per_node = -4\n', "ranks_per_node is -4: "),
        ('base = "slurm"\nproject_required = 1\n', "project_required is 1: .*boolean"),
        ('base = "slurm"\nqueue = 3\n', "queue is 3: .*string"),
        ('base = "slurm"\nmodules = "gcc"\n', "modules is 'gcc': .*list"),
        ('base = "slurm"\ntime_limits = [[9, 5], [3, 2]]\n', "time_limits: .*9, 5"),
        ('base = "slurm"\ntime_limits = [[9, 5, 1]]\n', "time_limits.0 is "),
        ('base = "slurm"\n[environment]\nA = 1\n', "environment.A is 1: .*string"),
        ('base = "slurm"\nqueue = 3\nminutes = true\n', "queue is 3.*\n.*minutes is True"),
        ('base = "slrum"\n', "base is 'slrum' .*'slurm'"),
        ('title = "x"\nscheduler = "slurm"\nlauncher = "srun"\n', "ranks_per_node is missing"),
        ("title =\n", "not TOML"),
    ],
)
def test_an_error_names_the_file_and_the_key(text, problem, tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(ParameterError, match=problem) as raised:
        load_machine(str(path))
    assert str(path) in str(raised.value)


def test_unknown_machines():
    with pytest.raises(ParameterError, match=r"'sumit' .*'summit'.*theta"):
        load_machine("sumit")
    with pytest.raises(ParameterError, match=r"absent\.toml"):
        load_machine("absent.toml")
