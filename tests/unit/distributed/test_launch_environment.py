import platform
from pathlib import Path

import pytest

from candle_p1.cluster.launchers import on_this_machine
from candle_p1.distributed import devices
from candle_p1.distributed.comm import SerialCommunicator
from candle_p1.distributed.engine import STALL_VARIABLE, Engine
from candle_p1.distributed.gpus import GPUS_VARIABLE, requested_gpus
from candle_p1.distributed.launch_environment import (
    LIMIT_VARIABLES,
    MPI_VARIABLES,
    launched_rank,
    launcher_variable,
    limits_from_environment,
    read_number,
    without_allocation,
)
from candle_p1.distributed.watchdog import PORT_VARIABLE, watch
from candle_p1.errors import SetupError


def variables(text):
    """Returns the environment that a text shows, NAME=VALUE for each variable."""
    return dict(word.split("=", 1) for word in text.split())


def of_open_mpi(rank, size, local_rank, local_size):
    return variables(f"""
        OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size}
        OMPI_COMM_WORLD_LOCAL_RANK={local_rank} OMPI_COMM_WORLD_LOCAL_SIZE={local_size}
        PMIX_RANK={rank}
    """)


JSRUN = of_open_mpi(7, 12, 0, 1) | variables("""
    JSM_NAMESPACE_RANK=7 JSM_NAMESPACE_SIZE=12
    JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6
""")
MPIRUN = of_open_mpi(3, 4, 1, 2)
PALS = variables("""
    PALS_RANKID=13 PALS_LOCAL_RANKID=1 PALS_LOCAL_SIZE=12
    PMI_RANK=13 PMI_SIZE=24 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=12
""")
HYDRA = variables("PMI_RANK=4 PMI_SIZE=6 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=3")
ALPS = variables("ALPS_APP_PE=5 ALPS_APP_DEPTH=64")
BATCH_SCRIPT = variables("""
    SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_CPUS_PER_TASK=7 SLURMD_NODENAME=n2
    SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASK_PID=1
""")
SRUN = BATCH_SCRIPT | variables("""
    SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=6 SLURM_STEP_TASKS_PER_NODE=4,2
    SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NODEID=1
""")
SHELL_OF_SALLOC = SRUN | variables("SLURM_STEP_ID=4294967290 SLURM_PROCID=0")
CRAY_SHASTA = variables("""
    PALS_RANKID=5 PALS_LOCAL_RANKID=1 PMI_RANK=5 PMI_SIZE=6 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2
""")
"""What src/plugins/mpi/cray_shasta of Slurm sets."""
GLOO = variables("HOROVOD_RANK=1 HOROVOD_SIZE=2")
PMI, PMIX = variables("PMI_RANK=1 PMI_SIZE=2"), variables("PMIX_RANK=1")

HOST = platform.node()
OF_SRUN, OF_MPIRUN = ("srun", 5, 6, 1, 2, 7, "n2"), ("mpirun", 3, 4, 1, 2, None, HOST)
OF_PALS = ("mpiexec_pals", 13, 24, 1, 12, None, HOST)
OF_HYDRA = ("mpiexec_mpich", 4, 6, 1, 3, None, HOST)
ALONE = ("none", 0, 1, 0, 1, None, HOST)
PLACES = {
    "no launcher": ({}, ALONE),
    "jsrun": (JSRUN, ("jsrun", 7, 12, 1, 6, None, HOST)),
    "Open MPI": (MPIRUN, OF_MPIRUN),
    "PALS": (PALS, OF_PALS),
    "Hydra": (HYDRA, OF_HYDRA),
    "horovodrun over Gloo": (GLOO, ("horovodrun", 1, 2, None, None, None, HOST)),
    "ALPS": (ALPS, ("aprun", 5, None, None, None, 64, HOST)),
    "srun": (SRUN, OF_SRUN),
    "srun --mpi=pmix": (SRUN | {"PMIX_RANK": "5"}, OF_SRUN),
    "srun --mpi=pmi2": (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "6"}, OF_SRUN),
    "srun --mpi=cray_shasta": (SRUN | CRAY_SHASTA, OF_SRUN),
    "PMI": (PMI, ("pmi", 1, 2, None, None, None, HOST)),
    "PMIx": (PMIX, ("pmix", 1, None, None, None, None, HOST)),
    "batch script": (BATCH_SCRIPT, ALONE),
    "shell of salloc": (SHELL_OF_SALLOC, ALONE),
    "mpirun in a batch job": (BATCH_SCRIPT | MPIRUN, OF_MPIRUN),
    "mpirun, daemons by srun": (SRUN | MPIRUN, OF_MPIRUN),
    "Hydra, proxies by srun": (SRUN | HYDRA, OF_HYDRA),
    "PALS in a batch job of Slurm": (BATCH_SCRIPT | PALS, OF_PALS),
    "mpirun over PALS": (PALS | MPIRUN, OF_MPIRUN),
}
"""What is in the environment; and the launcher, rank, size, local rank, local size, depth, node."""


@pytest.mark.parametrize("case", PLACES)
def test_a_rank_knows_its_place(case):
    environ, place = PLACES[case]
    found = launched_rank(environ)
    layout = (found.launcher, found.rank, found.size, found.local_rank, found.local_size)
    assert (*layout, found.depth, found.node) == place


@pytest.mark.parametrize(
    ("text", "place", "count"),
    [("4(x3),2", 2, 4), ("4(x3),2", 3, 2), ("4(x3),2", 4, None), ("four", 0, None)],
)
def test_slurms_tasks_on_this_node_are_counted(text, place, count):
    changes = {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(place)}
    assert launched_rank(SRUN | changes).local_size == count


def test_a_variable_that_is_not_a_number_is_named():
    with pytest.raises(SetupError, match="OMPI_COMM_WORLD_SIZE='two', which mpirun sets"):
        launched_rank(MPIRUN | {"OMPI_COMM_WORLD_SIZE": "two"})


OF_THE_ALLOCATION = """
    SLURM_JOB_ID SLURM_CPU_BIND SLURM_MEM_PER_CPU SLURM_NTASKS SLURM_EXPORT_ENV SLURMD_NODENAME
    SRUN_CPUS_PER_TASK PBS_NODEFILE PBS_JOBID LSB_HOSTS LSB_MCPU_HOSTS LSB_DJOB_HOSTFILE LS_JOBPID
    COBALT_NODEFILE ALPS_APP_PE PALS_RANKID JSM_NAMESPACE_RANK PMI_RANK PMIX_RANK PMIX_SERVER_URI4
    PRTE_LAUNCHED OMPI_COMM_WORLD_SIZE OMPI_UNIVERSE_SIZE MPI_LOCALRANKID HOROVOD_RANK
    HOROVOD_SIZE
"""
OF_THE_USER = """
    SLURM_CONF SLURM_CLUSTERS SBATCH_ACCOUNT PBS_CONF_FILE PBS_DEFAULT LSB_DEFAULTPROJECT
    LSF_ENVDIR OMPI_MCA_btl PRTE_MCA_plm_ssh_agent PMIX_PREFIX OMPI_ALLOW_RUN_AS_ROOT
    HOROVOD_CYCLE_TIME PATH OMP_NUM_THREADS CANDLE_P1_NODE PMODE
"""


def test_what_describes_the_allocation_does_not_travel():
    kept, gpus = OF_THE_USER.split(), ["SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"]
    environ = dict.fromkeys([*OF_THE_ALLOCATION.split(), *kept, *gpus], "1")
    assert list(without_allocation(environ)) == kept
    assert list(without_allocation(environ, here=True)) == [*kept, *gpus]
    assert "CUDA_VISIBLE_DEVICES" in without_allocation({"CUDA_VISIBLE_DEVICES": "1"})


def read_threads():
    return devices._set_threads(SerialCommunicator(), devices.NodeCores([[0]]))


def watch_alone():
    watch(SerialCommunicator(), Path("run.json"))


def start_horovod():
    Engine("horovod", SerialCommunicator(), "tensorflow").start()


@pytest.mark.parametrize(
    ("variable", "texts", "read"),
    [
        ("OMP_NUM_THREADS", ["0", "1.5", "99999999999", "0,2"], read_threads),
        (STALL_VARIABLE, ["abc", "-5", "4,2"], start_horovod),
        (LIMIT_VARIABLES["silent_s"], ["-1", "nan", "4,2"], limits_from_environment),
        (PORT_VARIABLE, ["70000", "http", "-1"], watch_alone),
        (GPUS_VARIABLE, ["-1", "four"], requested_gpus),
    ],
)
def test_a_number_that_is_none_is_one_message(environment, monkeypatch, variable, texts, read):
    for text in texts:
        monkeypatch.setenv(variable, text)
        with pytest.raises(SetupError, match=f"^{variable}='{text}': give "):
            read()


@pytest.mark.parametrize(("text", "limit_s"), [("", 10.0), ("2.5", 2.5), ("0", float("inf"))])
def test_a_limit_from_the_environment(monkeypatch, text, limit_s):
    monkeypatch.setenv(LIMIT_VARIABLES["stopped_s"], text)
    assert limits_from_environment().stopped_s == limit_s


@pytest.mark.parametrize(("text", "number"), [(" ", 7), ("4,2", 4), (" 3 ", 3)])
def test_an_empty_variable_is_one_that_is_not_set(text, number):
    environ = {"OMP_NUM_THREADS": text}
    assert read_number("OMP_NUM_THREADS", 7, "…", least=1, is_list=True, environ=environ) == number


@pytest.mark.parametrize("environ", [JSRUN, MPIRUN, PALS, HYDRA, ALPS, SRUN | PMIX])
def test_mpi_is_expected_under_every_launcher_but_plain_srun(environ, monkeypatch):
    for name in MPI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in SRUN:
        monkeypatch.setenv(name, "0")
    assert launcher_variable() is None
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert launcher_variable() in environ


def test_a_process_can_be_told_that_it_is_no_rank(environment, monkeypatch):
    for name, value in MPIRUN.items():
        monkeypatch.setenv(name, value)
    for value, alone in (("1", True), ("yes", True), ("0", False), ("", False)):
        monkeypatch.setenv("CANDLE_P1_SINGLE_PROCESS", value)
        assert (launcher_variable() is None) == alone
        assert (launched_rank().launcher == "none") == alone
    monkeypatch.setenv("CANDLE_P1_SINGLE_PROCESS", "1")
    with pytest.raises(SetupError, match="CANDLE_P1_SINGLE_PROCESS"):
        on_this_machine(2, ["python"])
    assert on_this_machine(1, ["python"]).command == ["python"]
